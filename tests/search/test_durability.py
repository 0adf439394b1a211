"""An index is whole at every moment: kills, full disks, damaged files, readers beside writers."""

import json
import random
import shutil
import threading
import time

import pytest

import small_index as helpers
from pfml.search import ImageIndex, LockedError
from pfml.storage.files import DamagedFileError
from processes import CONTEXT
from small_index import MODEL, unit_vectors


def require_whole(index):
    """Changes of ten vectors each, all ten or none, numbered without a gap."""
    counts = index.class_counts()
    assert set(counts.values()) <= {10}
    assert set(counts) == {f"change {number}" for number in range(len(counts))}
    checked = sorted({0, len(counts) // 2, len(counts) - 1}) if counts else []
    for number in checked:
        hit = index.search(unit_vectors(10, seed=number)[3:4], 1, model=MODEL)[0][0]
        assert (hit.path, hit.class_name) == (f"{number}/3.jpg", f"change {number}")


@pytest.fixture
def folder(tmp_path):
    ImageIndex.create(tmp_path / "index", MODEL, 8)
    return tmp_path / "index"


def test_a_kill_at_any_moment_leaves_a_whole_index_that_can_be_written_again(folder):
    delays, sizes, end = random.Random(0), [], time.monotonic() + 60
    while len(sizes) < 10 or (sizes[-1] == 0 and time.monotonic() < end):
        started = CONTEXT.Event()
        writer = CONTEXT.Process(target=helpers.add_for_ever, args=(folder, started))
        writer.start()
        assert started.wait(300)
        time.sleep(delays.uniform(0.0, 0.12))
        writer.kill()
        writer.join()
        index = ImageIndex.open(folder)
        require_whole(index)
        sizes.append(len(index))
    assert sizes == sorted(sizes)
    assert sizes[-1] > 0
    index.compact(grace_seconds=0)
    index.add(unit_vectors(1), ["last"], model=MODEL)
    manifest = json.loads((folder / "index.json").read_text())
    for kind, key in (("shard-*", "shards"), ("metadata-*", "metadata")):
        named = {described["file"] for described in manifest[key]}
        assert {path.name for path in folder.glob(kind)} == named
    assert not list(folder.glob(".*.partial"))


def test_a_reader_beside_a_writer_always_sees_a_whole_state(folder):
    started = CONTEXT.Event()
    writer = CONTEXT.Process(target=helpers.add_for_ever, args=(folder, started))
    writer.start()
    try:
        assert started.wait(300)
        kept, seen, end = ImageIndex.open(folder), [], time.monotonic() + 60
        while len(set(seen)) < 12 and time.monotonic() < end:
            kept.refresh()
            require_whole(kept)
            fresh = ImageIndex.open(folder)
            require_whole(fresh)
            assert len(kept) <= len(fresh)
            seen.append(len(fresh))
    finally:
        writer.kill()
        writer.join()
    assert seen == sorted(seen)
    assert len(set(seen)) >= 12


def test_an_opened_index_goes_on_searching_what_was_compacted_away(folder):
    writer = ImageIndex.open(folder)
    writer.add(unit_vectors(10), [f"0/{k}.jpg" for k in range(10)], ["change 0"] * 10, model=MODEL)
    reader = ImageIndex.open(folder)
    writer.compact(grace_seconds=0)
    assert reader.class_counts() == {"change 0": 10}
    require_whole(reader)


def test_a_second_writer_is_refused_with_the_process_that_is_writing(folder):
    holding, done = CONTEXT.Event(), CONTEXT.Event()
    other = CONTEXT.Process(target=helpers.hold, args=(folder, holding, done))
    other.start()
    assert holding.wait(300)
    index = ImageIndex.open(folder)
    with pytest.raises(LockedError, match=f"process {other.pid} on .* is writing it"):
        index.add(unit_vectors(1), ["x"], model=MODEL)
    done.set()
    other.join()
    index.add(unit_vectors(1), ["x"], model=MODEL)


def test_a_second_thread_is_refused_and_one_thread_may_nest(folder):
    index, errors = ImageIndex.open(folder), []

    def add():
        try:
            index.add(unit_vectors(1), ["x"], model=MODEL)
        except LockedError as error:
            errors.append(str(error))

    with index.writing():
        index.add(unit_vectors(1), ["y"], model=MODEL)
        thread = threading.Thread(target=add)
        thread.start()
        thread.join()
    assert "another thread" in errors[0]
    assert len(index) == 1


@pytest.mark.parametrize("limit", [400, 20_000])  # the first is too little for a manifest, too
def test_a_full_disk_leaves_the_index_as_it_was(folder, limit):
    ImageIndex.open(folder).add(unit_vectors(10), [f"0/{k}.jpg" for k in range(10)], ["change 0"] * 10, model=MODEL)
    before = sorted(path.name for path in folder.iterdir())
    answers = CONTEXT.Queue()
    writer = CONTEXT.Process(target=helpers.error_of_adding, args=(folder, limit, answers))
    writer.start()
    assert "shard-" in answers.get(timeout=300)
    writer.join()
    require_whole(ImageIndex.open(folder))
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_full_disk_at_the_manifest_leaves_the_index_as_it_was(folder, monkeypatch):
    index = ImageIndex.open(folder)

    def full(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pfml.storage.manifest.write_atomically", full)
        with pytest.raises(OSError, match="no space left"):
            index.add(unit_vectors(10), [f"0/{k}.jpg" for k in range(10)], ["change 0"] * 10, model=MODEL)
    assert len(index) == len(ImageIndex.open(folder)) == 0
    index.add(unit_vectors(10), [f"0/{k}.jpg" for k in range(10)], ["change 0"] * 10, model=MODEL)
    require_whole(ImageIndex.open(folder))
    assert len(list(folder.glob("shard-*"))) == 1


def flip(path, where):
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def truncate(path, where):
    path.write_bytes(path.read_bytes()[: int(where * path.stat().st_size)])


@pytest.mark.parametrize("damage", [flip, truncate])
@pytest.mark.parametrize("pattern", ["index.json", "index-*.safetensors", "shard-*.safetensors"])
def test_a_damaged_file_is_refused_by_its_name(folder, tmp_path, pattern, damage):
    index = ImageIndex.open(folder)
    index.add(unit_vectors(10), [f"{k}.jpg" for k in range(10)], model=MODEL)
    index.remove(paths=["3.jpg"])
    for where in (0.0, 0.02, 0.5, 0.99):
        copy = tmp_path / f"damaged {where}"
        shutil.copytree(folder, copy)
        [path] = copy.glob(pattern)
        damage(path, where)
        with pytest.raises(DamagedFileError, match=path.name):
            ImageIndex.open(copy)


@pytest.mark.parametrize("pattern", ["index-*.safetensors", "shard-*.safetensors"])
def test_a_missing_file_is_named(folder, pattern):
    ImageIndex.open(folder).add(unit_vectors(1), ["x"], model=MODEL)
    [path] = folder.glob(pattern)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=path.name):
        ImageIndex.open(folder)


def test_reading_needs_no_right_to_write(folder):
    ImageIndex.open(folder).add(unit_vectors(1), ["x"], model=MODEL)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())
    ImageIndex.open(folder).search(unit_vectors(1), 1, model=MODEL)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir()) == before
