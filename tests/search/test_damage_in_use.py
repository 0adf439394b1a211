"""Files of an index that are damaged while it is open: a right answer or an error in words, never a signal."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from pfml.search import ImageIndex
from pfml.storage.files import DamagedFileError
from processes import CONTEXT
from small_index import MODEL, unit_vectors
from small_threshold import made_threshold

#: Enough vectors that a shard stays in its file.
ROWS, DIMENSION = 9000, 32


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "index"
    index = ImageIndex.create(folder, MODEL, DIMENSION)
    index.add(unit_vectors(ROWS, DIMENSION), [f"{k}.jpg" for k in range(ROWS)], model=MODEL)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "index")


def shard_of(folder):
    [path] = folder.glob("shard-*.safetensors")
    return path


def overwrite(path, content=b"\xff", portion=0.9):
    """Overwrite the middle of a file in place: four bytes of 255 are a NaN."""
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(size // 20)
        file.write(content * int(portion * size / len(content)))


def search_what_is_cut_short(folder, shard, said):
    index = ImageIndex.open(folder)
    os.truncate(shard, 4096)
    try:
        index.search(torch.eye(DIMENSION)[:1], 3, model=index.model)
    except ValueError as error:
        said.write_text(str(error))


def test_a_file_that_is_cut_short_in_use_is_an_error_and_no_signal(folder, tmp_path):
    arguments = folder, shard_of(folder), tmp_path / "said"
    process = CONTEXT.Process(target=search_what_is_cut_short, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0, "a signal would be negative"
    assert "cut short" in (tmp_path / "said").read_text()
    assert shard_of(folder).name in (tmp_path / "said").read_text()


@pytest.mark.parametrize("content", [b"\xff", b"\x00\x00\x80\x3f"], ids=["NaN", "ones"])
def test_a_file_that_is_overwritten_in_use_is_an_error_and_no_other_hits(folder, content):
    index, query = ImageIndex.open(folder), unit_vectors(1, DIMENSION)
    assert index.search(query, 1, model=MODEL)[0][0].path == "0.jpg"
    overwrite(shard_of(folder), content)
    for _ in range(2):
        with pytest.raises(DamagedFileError, match="shard-"):
            index.search(query, 1, model=MODEL)
        with pytest.raises(DamagedFileError, match="shard-"):
            index.vectors([1, 5000])


def test_a_file_that_is_put_right_again_is_searched_again(folder):
    index, query, path = ImageIndex.open(folder), unit_vectors(1, DIMENSION), shard_of(folder)
    before = path.read_bytes()
    overwrite(path)
    with pytest.raises(DamagedFileError):
        index.search(query, 1, model=MODEL)
    with open(path, "r+b") as file:
        file.write(before)
    assert index.search(query, 1, model=MODEL)[0][0].path == "0.jpg"


def test_other_rights_or_another_link_are_no_damage(folder, tmp_path):
    index, path = ImageIndex.open(folder), shard_of(folder)
    path.chmod(0o600)
    os.link(path, tmp_path / "copy")
    os.utime(path)
    assert index.search(unit_vectors(1, DIMENSION), 1, model=MODEL)[0][0].path == "0.jpg"


def test_a_held_index_outlives_its_files(folder):
    index = ImageIndex.open(folder, hold_bytes=2**28)
    overwrite(shard_of(folder))
    os.truncate(shard_of(folder), 100)
    hits = index.search(unit_vectors(ROWS, DIMENSION)[4000:4001], 1, model=MODEL)[0]
    assert hits[0].path == "4000.jpg"
    assert index.damaged_files() == [shard_of(folder).name]


def test_a_whole_index_has_no_damaged_files(folder, tmp_path):
    for options in ({}, {"hold_bytes": 2**28}):
        index = ImageIndex.open(folder, **options)
        shard_of(folder).chmod(0o600)
        assert index.damaged_files() == []
    name = shard_of(folder).name
    shard_of(folder).unlink()
    assert index.damaged_files() == [name]


def test_vectors_that_are_not_finite_are_refused_where_they_are_found(folder, monkeypatch):
    index = ImageIndex.open(folder, hold_bytes=2**28)
    index._state.snapshot.shards[0].vectors[7] = float("nan")  # as a fault of the memory would
    with pytest.raises(DamagedFileError, match="finite"):
        index.search(unit_vectors(1, DIMENSION), 3, model=MODEL)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_an_open_index_maps_none_of_its_files(folder):
    index = ImageIndex.open(folder)
    index.search(unit_vectors(1, DIMENSION), 3, model=MODEL)
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    assert mapped == []


def test_more_shards_than_a_process_may_open_are_opened(tmp_path):
    resource = pytest.importorskip("resource", reason="Windows has no such limits")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 100
    index = ImageIndex.create(tmp_path / "index", MODEL, 1024)
    for part in range(6):
        index.add(unit_vectors(80, 1024, seed=part), [f"{part}/{k}" for k in range(80)], model=MODEL)
    del index
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, hard))
    try:
        again = ImageIndex.open(tmp_path / "index")
        assert again.search(unit_vectors(1, 1024, seed=5), 1, model=MODEL)[0][0].path == "5/0"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("distance", [float("nan"), float("inf"), 0.51, torch.tensor(float("nan"))])
def test_a_distance_that_is_no_number_is_unknown(distance):
    threshold = made_threshold(value=-0.5, distance=0.5)
    for class_name in ("a", None):
        assert threshold.is_known(-distance, class_name) is False
        assert threshold.is_known(float("nan"), class_name) is False
        assert threshold.is_known(-0.5, class_name) is True
