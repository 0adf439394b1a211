import numpy
import pytest
import torch

from pfml.evaluation import read_embeddings, write_embeddings


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
