"""A collection embedded to a folder: streamed, by several processes, resumable."""

import json
import random
import shutil
import time

import numpy
import pytest
import torch
from safetensors.numpy import load_file

import small_collection as helpers
from pfml.data.image_set import ImageSet
from pfml.evaluation import embed
from pfml.models import load_embedder
from pfml.search import ImageShard, LockedError, OtherModelError, embed_collection
from pfml.storage.embeddings import open_embeddings, read_embeddings, shard_files
from pfml.storage.files import DamagedFileError
from pfml.storage.lock import WriterLock
from processes import CONTEXT
from small_collection import NAMES, SMALL, files_of, vectors_by_path, write_collection
from small_data import small_embedder
from small_index import write_images

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def images(tmp_path):
    return write_collection(tmp_path / "images")


@pytest.fixture
def embedder():
    return small_embedder().eval()


def oracle(embedder, images):
    files = sorted(images.rglob("*.png"))
    return [str(file) for file in files], embed(embedder, ImageSet.unlabeled(files))


def test_a_folder_of_shards_holds_what_evaluation_computes(tmp_path, embedder, images, embedded):
    update = embed_collection(tmp_path / "out", embedder, [images], **SMALL)
    assert str(update) == "23 added"
    assert embedded == [4, 4, 4, 4, 4, 3]
    names, vectors = oracle(embedder, images)
    found_names, found = read_embeddings(tmp_path / "out")
    assert found_names == names
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, vectors, atol=1e-6, rtol=0)


def paths_of(file):
    """The paths of a shard, as any program with safetensors reads them."""
    return json.loads(load_file(file)["columns"].tobytes())["paths"]


def test_anyone_with_safetensors_and_json_can_read_the_shards(tmp_path, embedder, images):
    embed_collection(tmp_path / "out", embedder, [images], **SMALL)
    names, vectors = oracle(embedder, images)
    expected = dict(zip(names, vectors.numpy(), strict=True))
    seen = 0
    for file in (tmp_path / "out").glob("shard-*.safetensors"):
        paths = paths_of(file)
        numpy.testing.assert_allclose(load_file(file)["vectors"], [expected[path] for path in paths], atol=1e-6)
        seen += len(paths)
    assert seen == 23


def test_reading_in_shards_in_memory_and_by_path_is_the_same(tmp_path, embedder, images):
    embed_collection(tmp_path / "out", embedder, [images], **SMALL)
    names, vectors = read_embeddings(tmp_path / "out")
    collection = open_embeddings(tmp_path / "out")
    assert (len(collection), collection.paths) == (23, names)
    by_shard = {path: row for paths, rows in collection.shards() for path, row in zip(paths, rows, strict=True)}
    assert all(torch.equal(by_shard[name], row) for name, row in zip(names, vectors, strict=True))
    assert torch.equal(collection.vectors(names[::-3]), vectors.flip(0)[::3])
    assert collection.file(names[5]).is_of(names[5])


def test_float16_is_stored_as_such_and_may_not_change(tmp_path, embedder, images):
    embed_collection(tmp_path / "out", embedder, [images], dtype="float16", **SMALL)
    _, found = read_embeddings(tmp_path / "out")
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), oracle(embedder, images)[1], atol=1e-3, rtol=0)
    assert embed_collection(tmp_path / "out", embedder, [images]).unchanged == 23
    with pytest.raises(ValueError, match=r"dtype of the embeddings .* must stay float16, got float32"):
        embed_collection(tmp_path / "out", embedder, [images], dtype="float32")
    with pytest.raises(ValueError, match=r"shard_images of the embeddings .* must stay 4, got 5"):
        embed_collection(tmp_path / "out", embedder, [images], shard_images=5)
    with pytest.raises(ValueError, match="dtype must be one of float32, float16"):
        embed_collection(tmp_path / "other", embedder, [images], dtype="int8")


@pytest.mark.parametrize(("first", "second"), [("float16", "float32"), ("float32", "float16"), ("float16", None)])
def test_of_two_first_processes_at_the_same_moment_one_decides_the_type(
    tmp_path, embedder, images, monkeypatch, first, second
):
    from pfml.storage.embeddings import write_settings

    def embed_shard(number, dtype):
        return embed_collection(tmp_path / "out", embedder, [images], shard=ImageShard(number, 2), dtype=dtype, **SMALL)

    def beaten(folder, settings):
        """The other process comes between the look for settings and writing them."""
        monkeypatch.setattr("pfml.search.collection.write_settings", write_settings)
        embed_shard(1, first)
        write_settings(folder, settings)

    monkeypatch.setattr("pfml.search.collection.write_settings", beaten)
    if second is None:
        embed_shard(2, second)  # it takes what is there
    else:
        with pytest.raises(ValueError, match=f"dtype of the embeddings .* must stay {first}, got {second}: leave it"):
            embed_shard(2, second)
    collection = open_embeddings(tmp_path / "out")
    assert collection.settings.dtype == first
    assert {vectors.dtype for _, vectors in collection.shards()} == {getattr(torch, first)}
    assert (len(collection) == len(NAMES)) == (second is None)


def test_another_model_is_refused(tmp_path, embedder, images):
    embed_collection(tmp_path / "out", embedder, [images], **SMALL)
    before = files_of(tmp_path / "out")
    with torch.no_grad():
        next(embedder.parameters()).mul_(1.001)
    with pytest.raises(OtherModelError, match=r"the embeddings .*out belongs to convnet, untrained"):
        embed_collection(tmp_path / "out", embedder, [images], **SMALL)
    assert files_of(tmp_path / "out") == before


def test_a_kill_at_any_moment_loses_no_more_than_the_shard_under_way(tmp_path, embedder, images):
    """Kills after 0 to 6 shards, at random moments; the shards in the end are, byte by byte, those of a whole run."""

    def writing(folder):
        started = CONTEXT.Event()
        process = CONTEXT.Process(target=helpers.embed_in_process, args=(folder, tmp_path / "model", images, started))
        process.start()
        assert started.wait(300)
        return process

    embedder.save(tmp_path / "model")
    (images / "b" / "bad.png").write_bytes(b"no image")
    writing(tmp_path / "whole").join()
    expected, delays, cut_short = files_of(tmp_path / "whole"), random.Random(0), 0
    for trial in range(10):
        folder = tmp_path / f"killed {trial}"
        writer = writing(folder)
        while len(list(folder.glob("shard-*"))) < trial % 7 and writer.is_alive():
            time.sleep(0.001)
        time.sleep(delays.uniform(0.0, 0.01))
        writer.kill()
        writer.join()
        left = files_of(folder) if folder.exists() else {}
        finished = {name for name in left if name.startswith("shard-")}
        assert all(expected[name] == left[name] for name in finished)
        cut_short += len(left) < len(expected)
        held = sum(len(paths_of(folder / name)) for name in finished)
        update = embed_collection(folder, load_embedder(tmp_path / "model"), [images], **SMALL)
        assert update.unchanged == held
        assert update.added + update.unchanged == 23
        assert update.damaged == []
        assert files_of(folder) == expected
    assert cut_short >= 2


def test_shards_together_are_the_whole_and_a_last_run_adds_nothing(tmp_path, embedder, images, embedded):
    shards = [ImageShard(number, 4) for number in range(1, 5)]
    counts = [embed_collection(tmp_path / "out", embedder, [images], shard=shard, **SMALL).added for shard in shards]
    assert sum(counts) == sum(embedded) == 23
    assert all(count < 23 for count in counts)
    embed_collection(tmp_path / "whole", embedder, [images], **SMALL)
    whole, found = vectors_by_path(tmp_path / "whole"), vectors_by_path(tmp_path / "out")
    assert found.keys() == whole.keys()
    torch.testing.assert_close(torch.stack(list(found.values())), torch.stack(list(whole.values())), atol=1e-6, rtol=0)
    before = files_of(tmp_path / "out")
    assert str(embed_collection(tmp_path / "out", embedder, [images])) == "0 added, 23 unchanged"
    assert files_of(tmp_path / "out") == before


def test_the_whole_completes_what_a_missing_shard_left(tmp_path, embedder, images):
    done = embed_collection(tmp_path / "out", embedder, [images], shard=ImageShard(2, 3), **SMALL).added
    update = embed_collection(tmp_path / "out", embedder, [images])
    assert (update.unchanged, update.added) == (done, 23 - done)
    assert len(open_embeddings(tmp_path / "out")) == 23


def test_an_image_keeps_its_shard_when_others_come(tmp_path, embedder, images):
    before = {
        name: [ImageShard(k, 3).holds(name) for k in (1, 2, 3)] for name in map(str, sorted(images.rglob("*.png")))
    }
    assert all(sum(holds) == 1 for holds in before.values())
    for number in (1, 2, 3):
        embed_collection(tmp_path / "out", embedder, [images], shard=ImageShard(number, 3), **SMALL)
    write_images(images, ["a/0000.png", "new/1.png", "zz.png"], size=24)
    updates = [embed_collection(tmp_path / "out", embedder, [images], shard=ImageShard(k, 3)) for k in (1, 2, 3)]
    assert sum(update.added for update in updates) == 3
    assert sum(update.unchanged for update in updates) == 23


def test_a_damaged_shard_is_named_by_a_reader_and_embedded_again_by_the_next_run(tmp_path, embedder, images, embedded):
    embed_collection(tmp_path / "out", embedder, [images], **SMALL)
    expected = files_of(tmp_path / "out")
    for number, portion in enumerate((0.99, 0.3, 0.0)):
        victim = sorted((tmp_path / "out").glob("shard-*"))[number]
        content = bytearray(victim.read_bytes())
        content[int(portion * len(content))] ^= 1
        victim.write_bytes(content)
        with pytest.raises(DamagedFileError, match=victim.name):
            read_embeddings(tmp_path / "out")
        embedded.clear()
        update = embed_collection(tmp_path / "out", embedder, [images], **SMALL)
        assert embedded == [update.added]
        assert update.added in (3, 4)
        assert [victim.name in damage for damage in update.damaged] == [True]
        assert files_of(tmp_path / "out") == expected


def test_a_process_continues_when_another_one_has_just_removed_a_damaged_shard(tmp_path, embedder, images, monkeypatch):
    embed_collection(tmp_path / "out", embedder, [images], **SMALL)
    expected = files_of(tmp_path / "out")
    victim = min((tmp_path / "out").glob("shard-*"))

    def listed(folder):
        files = shard_files(folder)
        victim.unlink()
        return files

    monkeypatch.setattr("pfml.search.collection.shard_files", listed)
    gone = paths_of(victim)
    added = embed_collection(tmp_path / "out", embedder, [images], shard=ImageShard(1, 2)).added
    assert added == sum(ImageShard(1, 2).holds(path) for path in gone)
    monkeypatch.undo()
    embed_collection(tmp_path / "out", embedder, [images])
    assert len(open_embeddings(tmp_path / "out")) == 23
    assert len(files_of(tmp_path / "out")) >= len(expected)


def test_a_reader_beside_a_writer_finds_one_whole_state(tmp_path, embedder, images, monkeypatch):
    embed_collection(tmp_path / "out", embedder, [images], **SMALL)
    gone, calls = min(images.rglob("*.png")), []

    def listed(folder):
        files = shard_files(folder)
        calls.append(folder)
        if len(calls) == 2:  # of the reader; the first call asks for the state before
            gone.unlink()
            embed_collection(tmp_path / "out", embedder, [images])
        return files

    monkeypatch.setattr("pfml.storage.embeddings.shard_files", listed)
    assert len(read_embeddings(tmp_path / "out")[0]) == 22
    assert len(calls) > 4


def test_embeddings_that_were_replaced_since_they_were_opened_say_so(tmp_path, embedder, images):
    embed_collection(tmp_path / "out", embedder, [images], **SMALL)
    before = open_embeddings(tmp_path / "out")
    min(images.rglob("*.png")).unlink()
    embed_collection(tmp_path / "out", embedder, [images])
    with pytest.raises(FileNotFoundError, match=r"shard-000-.*\.safetensors .* is gone: pfml embed has replaced it"):
        before.vectors(before.paths)


def test_a_shard_must_hold_an_image(tmp_path, embedder, images):
    with pytest.raises(ValueError, match="shard_images must be an integer of at least 1, got 0"):
        embed_collection(tmp_path / "out", embedder, [images], shard_images=0)


def test_a_process_checks_its_own_shards(tmp_path, embedder, images):
    for number in (1, 2):
        embed_collection(tmp_path / "out", embedder, [images], shard=ImageShard(number, 2), **SMALL)
    first = {path for path in map(str, images.rglob("*.png")) if ImageShard(1, 2).holds(path)}
    for file in (tmp_path / "out").glob("shard-*"):
        if set(paths_of(file)) <= first:
            content = bytearray(file.read_bytes())
            length = int.from_bytes(content[:8], "little")
            begin = json.loads(content[8 : 8 + length])["vectors"]["data_offsets"][0]
            content[8 + length + begin] ^= 1
            file.write_bytes(content)
    assert embed_collection(tmp_path / "out", embedder, [images], shard=ImageShard(2, 2)).damaged == []
    update = embed_collection(tmp_path / "out", embedder, [images], shard=ImageShard(1, 2))
    assert update.added == len(first)
    assert len(update.damaged) >= 2


def test_unreadable_images_are_listed_each_time_and_taken_once_they_can_be_read(tmp_path, embedder, images, embedded):
    good = (images / "b/01.png").read_bytes()
    (images / "b/01.png").write_bytes(good[:200])  # a good header, no end
    (images / "a/empty.png").touch()
    for _ in range(2):
        update = embed_collection(tmp_path / "out", embedder, [images], **SMALL)
        assert {str(each.path).rpartition("/")[2] for each in update.failures} == {"01.png", "empty.png"}
    assert str(update) == "0 added, 22 unchanged, 2 unreadable"
    before = files_of(tmp_path / "out")
    collection = open_embeddings(tmp_path / "out")
    assert len(collection) == 22
    assert collection.unreadable[str(images / "a/empty.png")] == "is empty"
    (images / "b/01.png").write_bytes(good)
    update = embed_collection(tmp_path / "out", embedder, [images], **SMALL)
    assert (update.added, update.replaced, update.unchanged) == (1, 0, 22)
    assert before.items() <= files_of(tmp_path / "out").items()
    assert str(images / "b/01.png") in open_embeddings(tmp_path / "out")


@pytest.mark.parametrize("shard", [ImageShard(1, 1), ImageShard(1, 2)], ids=str)
def test_changed_files_are_embedded_again_and_their_old_vectors_do_not_count(tmp_path, embedder, images, shard):
    embed_collection(tmp_path / "out", embedder, [images], shard=shard, **SMALL)
    count = len(open_embeddings(tmp_path / "out"))
    changed, spoilt = [path for path in map(str, sorted(images.rglob("*.png"))) if shard.holds(path)][1:3]
    shutil.copy(images / NAMES[0], changed)
    open(spoilt, "wb").close()
    update = embed_collection(tmp_path / "out", embedder, [images], shard=shard, **SMALL)
    assert (update.replaced, update.unchanged, len(update.failures)) == (1, count - 2, 1)
    found = vectors_by_path(tmp_path / "out")
    assert len(found) == count - 1
    assert spoilt not in found
    torch.testing.assert_close(found[changed], embedder.encode([changed])[0], atol=1e-5, rtol=0)
    by_shard = {
        path: row
        for paths, rows in open_embeddings(tmp_path / "out").shards()
        for path, row in zip(paths, rows, strict=True)
    }
    assert by_shard.keys() == found.keys()
    assert torch.equal(by_shard[changed], found[changed])


def test_the_run_for_all_images_removes_what_is_gone_and_leaves_other_sources_alone(tmp_path, embedder, images):
    other = write_images(tmp_path / "other", ["x.png"], size=24)
    embed_collection(tmp_path / "out", embedder, [images], **SMALL)
    embed_collection(tmp_path / "out", embedder, [other], **SMALL)
    (images / NAMES[3]).unlink()
    assert embed_collection(tmp_path / "out", embedder, [images], shard=ImageShard(1, 2)).removed == 0
    update = embed_collection(tmp_path / "out", embedder, [images], **SMALL)
    assert str(update) == "0 added, 22 unchanged, 1 removed"
    found = vectors_by_path(tmp_path / "out")
    assert len(found) == 23
    assert str(images / NAMES[3]) not in found
    assert str(other / "x.png") in found


def test_shards_may_write_together_and_the_whole_waits_for_them(tmp_path, embedder, images):
    (tmp_path / "out").mkdir()
    with WriterLock(tmp_path / "out", shared=True).held():
        embed_collection(tmp_path / "out", embedder, [images], shard=ImageShard(1, 2), **SMALL)
        with pytest.raises(LockedError, match="one writer at a time"):
            embed_collection(tmp_path / "out", embedder, [images], **SMALL)
    with WriterLock(tmp_path / "out").held(), pytest.raises(LockedError, match="one writer at a time"):
        embed_collection(tmp_path / "out", embedder, [images], shard=ImageShard(1, 2), **SMALL)


def test_what_killed_writers_left_is_cleared_away(tmp_path, embedder, images):
    embed_collection(tmp_path / "out", embedder, [images], **SMALL)
    expected = files_of(tmp_path / "out")
    for name in (".shard-000-0123.safetensors.abc.partial", ".embeddings.json.abc.partial"):
        (tmp_path / "out" / name).write_bytes(b"half")
    embed_collection(tmp_path / "out", embedder, [images], **SMALL)
    assert files_of(tmp_path / "out") == expected


def test_a_model_that_computes_no_numbers_is_refused_with_the_image(tmp_path, embedder, images):
    with torch.no_grad():
        for parameter in embedder.parameters():
            parameter.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"must be finite, got NaN or Inf for .*a/00.png"):
        embed_collection(tmp_path / "out", embedder, [images], **SMALL)
    assert not list((tmp_path / "out").glob("shard-*"))
    with pytest.raises(FileNotFoundError, match="there is no embeddings.json"):
        read_embeddings(tmp_path)


def test_a_file_where_the_folder_should_be_is_named(tmp_path, embedder, images):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(NotADirectoryError, match="out must be a folder for the shards, and there is a file"):
        embed_collection(tmp_path / "out", embedder, [images])
    assert (tmp_path / "out").read_text() == "mine"
