import numpy
import pytest
import torch

from pfml.storage.embeddings import read_embeddings, write_embeddings
from pfml.storage.files import DamagedFileError


def test_names_and_embeddings_come_back(tmp_path):
    points = torch.randn(3, 4)
    write_embeddings(tmp_path / "deep" / "points.npz", ["a b.png", tmp_path / "é.png", "c"], points)
    names, found = read_embeddings(tmp_path / "deep" / "points.npz")
    assert names == ["a b.png", str(tmp_path / "é.png"), "c"]
    assert torch.equal(found, points)


def test_other_programs_need_no_pickle(tmp_path):
    write_embeddings(tmp_path / "points.npz", ["a"], torch.ones(1, 2, dtype=torch.float16))
    with numpy.load(tmp_path / "points.npz", allow_pickle=False) as archive:
        assert archive["embeddings"].dtype == numpy.float32
        assert archive["paths"].tolist() == ["a"]


def test_a_name_is_needed_for_each_embedding(tmp_path):
    with pytest.raises(ValueError, match="a name for each of 2 embeddings, got 1"):
        write_embeddings(tmp_path / "points.npz", ["a"], torch.ones(2, 2))


def test_another_ending_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must end in .npz"):
        write_embeddings(tmp_path / "points.csv", ["a"], torch.ones(1, 2))


def test_a_small_archive_of_very_many_zeros_is_refused_before_it_takes_memory(tmp_path):
    path = tmp_path / "bomb.npz"
    numpy.savez_compressed(path, paths=numpy.zeros(1_000, "U1"), embeddings=numpy.zeros((1_000, 10_000), numpy.float32))
    assert path.stat().st_size < 100_000
    with pytest.raises(DamagedFileError, match=r"bomb\.npz must unpack to at most 100 times its .* got 40,"):
        read_embeddings(path)


def test_an_archive_that_another_program_has_compressed_is_read(tmp_path):
    points = numpy.random.default_rng(0).normal(size=(50, 16)).astype(numpy.float32)
    names = numpy.array([f"/a/long/path/of/an/image/{k}.jpg" for k in range(50)])
    numpy.savez_compressed(tmp_path / "points.npz", paths=names, embeddings=points)
    assert torch.equal(read_embeddings(tmp_path / "points.npz")[1], torch.from_numpy(points))
