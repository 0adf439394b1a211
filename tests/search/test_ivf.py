"""Approximate search: what exact search finds, from a file that is derived, checked, and built again at will."""

import json
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import small_index as helpers
from pfml.search import ImageIndex, LockedError
from pfml.search.backends import ExactSearcher
from pfml.search.ivf import IvfSearcher, open_ivf, read_ivf_settings
from pfml.storage.files import DamagedFileError
from pfml.storage.lock import claim
from processes import CONTEXT
from small_index import MODEL, clustered_index, clustered_vectors

pytest.importorskip("faiss", reason="needs the extra faiss")
pytestmark = pytest.mark.usefixtures("one_thread")

ENTRIES, CLASSES = 4000, 20


@pytest.fixture(scope="module", params=["pq4", "int8"])
def built(request, tmp_path_factory):
    """The folder of an index with its file; for tests that only read."""
    folder = tmp_path_factory.mktemp("ivf") / "index"
    clustered_index(folder, ENTRIES, CLASSES).build_ivf(precision=request.param)
    return folder


@pytest.fixture
def index(tmp_path):
    found = clustered_index(tmp_path / "index", 800, CLASSES)
    found.build_ivf()
    return found


def ids(index, queries, k=10, **options):
    return [[hit.id for hit in hits] for hits in index.search(queries, k, model=MODEL, **options)]


def recall(found, expected):
    pairs = list(zip(found, expected, strict=True))
    return sum(len(set(one) & set(other)) for one, other in pairs) / sum(len(other) for _, other in pairs)


def test_what_exact_search_finds_is_found_at_the_same_distances(built):
    queries = clustered_vectors(200, CLASSES, seed=2)
    exact, approximate = (ImageIndex.open(built, backend=name) for name in ("exact", "ivf"))
    assert approximate.backend == "ivf"
    found, expected = (one.search(queries, 10, model=MODEL) for one in (approximate, exact))
    assert recall(ids(approximate, queries), ids(exact, queries)) >= 0.98
    distances = [{hit.id: hit.distance for hit in hits} for hits in expected]
    pairs = [(hit, known) for hits, known in zip(found, distances, strict=True) for hit in hits]
    assert all(hit.distance == known[hit.id] for hit, known in pairs if hit.id in known)


def test_the_remark_tells_how_many_lists_are_compared_and_the_measured_recall(built):
    made = read_ivf_settings(built)
    assert made.recall >= 0.99
    assert made.probes < made.lists  # else it is no approximation
    remark = ImageIndex.open(built, backend="ivf").backend_remark
    assert (
        f"4,000 images: {made.probes} of {made.lists} lists in {made.precision}, recall@10 {made.recall:.3f}" in remark
    )


@settings(max_examples=40, deadline=None)
@given(
    fraction=st.sampled_from([0.001, 0.01, 0.05, 0.15, 0.2, 0.3, 0.6, 0.95, 1.0]),
    by_class=st.booleans(),
    k=st.integers(1, 30),
    seed=st.integers(0, 1000),
)
def test_filters_give_k_allowed_rows_and_those_of_exact_search(built, fraction, by_class, k, seed):
    shards = [shard.vectors for shard in ImageIndex.open(built)._state.snapshot.shards]
    searcher = IvfSearcher(open_ivf(built, read_ivf_settings(built).shards), shards)
    drawn = torch.rand(CLASSES if by_class else ENTRIES, generator=torch.Generator().manual_seed(seed))
    allowed = drawn <= drawn.quantile(fraction)
    # an image of number n is of class n % CLASSES: filters of whole classes leave whole lists empty
    allowed = allowed.repeat(ENTRIES // CLASSES) if by_class else allowed
    queries = clustered_vectors(20, CLASSES, seed=seed)
    k = min(k, int(allowed.sum()))
    values, rows = searcher.nearest(queries, k, allowed)
    expected, wanted = ExactSearcher(shards).nearest(queries, k, allowed)
    assert rows.shape == (20, k)
    assert bool(allowed[rows].all())
    assert all(len(set(row)) == k for row in rows.tolist())
    if allowed.float().mean() < 0.25 and searcher.file.settings.precision == "int8":
        torch.testing.assert_close(values, expected)
    else:
        missed = round((1 - recall(rows.tolist(), wanted.tolist())) * 20 * k)
        assert missed <= max(1, 0.02 * 20 * k)


def test_probed_lists_that_hold_too_few_allowed_rows_are_searched_for_more(built):
    shards = [shard.vectors for shard in ImageIndex.open(built)._state.snapshot.shards]
    searcher = IvfSearcher(open_ivf(built, read_ivf_settings(built).shards), shards)
    query = clustered_vectors(1, CLASSES, seed=5)
    near = ExactSearcher(shards).nearest(query, ENTRIES // 2, torch.ones(ENTRIES, dtype=torch.bool))[1][0]
    allowed = torch.ones(ENTRIES, dtype=torch.bool)
    allowed[near] = False  # all that lies around the query
    rows = searcher.nearest(query, 10, allowed)[1]
    assert rows.tolist() == ExactSearcher(shards).nearest(query, 10, allowed)[1].tolist()


def test_newer_images_are_searched_beside_the_file_and_removed_ones_left_out(index):
    opened = ImageIndex.open(index.path, backend="ivf")
    queries = clustered_vectors(40, CLASSES, seed=2)
    index.add(queries[:20], [f"new/{k}.jpg" for k in range(20)], model=MODEL)
    first = [hits[0] for hits in ids(index, queries[20:]) if hits[0] < 800]
    index.remove(paths=[index.entry(each).path for each in set(first)])
    assert opened.refresh()
    assert opened.backend == "ivf"
    assert "; 20 newer images are searched exactly" in opened.backend_remark
    found = ids(opened, queries)
    assert [hits[0] for hits in found[:20]] == list(range(800, 820))
    assert not {each for hits in found for each in hits} & set(first)
    assert recall(found, ids(index, queries)) >= 0.98


def test_the_file_is_built_again_from_a_share_of_newer_images_on(index):
    assert index.build_ivf(if_due=True) is None
    index.add(clustered_vectors(30, CLASSES, seed=3), [f"new/{k}" for k in range(30)], model=MODEL)
    assert index.build_ivf(if_due=True) is None
    index.add(clustered_vectors(30, CLASSES, seed=4), [f"newer/{k}" for k in range(30)], model=MODEL)
    assert index.build_ivf(if_due=True).rows == 860
    assert "newer images" not in ImageIndex.open(index.path, backend="ivf").backend_remark


@pytest.mark.parametrize("precision", ["float32", "float16", "int8", "pq4"])
def test_every_precision_finds_the_same_and_takes_its_bytes(index, precision):
    made = index.build_ivf(precision=precision)
    assert made.precision == precision
    per_vector = {"float32": 128, "float16": 64, "int8": 32, "pq4": 8}[precision]
    assert made.bytes > 800 * (per_vector + 8)
    assert made.bytes < 800 * (per_vector + 8) + 128 * made.lists + 8000
    queries = clustered_vectors(40, CLASSES, seed=2)
    assert recall(ids(ImageIndex.open(index.path, backend="ivf"), queries), ids(index, queries)) >= 0.98
    assert index.build_ivf().precision == precision  # as before, unless something else is asked for
    assert len(list(index.path.glob("ivf-*"))) == 1


def test_an_unknown_precision_and_an_empty_index_are_refused(tmp_path, index):
    with pytest.raises(ValueError, match="precision must be one of float32, float16, int8, pq4, got 'int4'"):
        index.build_ivf(precision="int4")
    with pytest.raises(ValueError, match="must have images to build an approximate search file of"):
        ImageIndex.create(tmp_path / "empty", MODEL, 8).build_ivf()


def test_the_file_of_another_index_is_refused_searched_around_and_replaced(tmp_path, index, monkeypatch):
    monkeypatch.setattr("pfml.search.ivf.IVF_FROM", 100)
    other = clustered_index(tmp_path / "other", 300, CLASSES, seed=7)
    for file in index.path.glob("ivf*"):
        (other.path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ValueError, match="was made of another index, .*: build it again with pfml index"):
        ImageIndex.open(other.path, backend="ivf")
    opened, queries = ImageIndex.open(other.path, backend="auto"), clustered_vectors(5, CLASSES, seed=2)
    assert opened.backend == "exact"
    assert "exact search of 300 images, since " in opened.backend_remark
    assert ids(opened, queries) == ids(other, queries)
    assert other.build_ivf(if_due=True) is not None
    assert opened.refresh()  # though the images are the same
    assert opened.backend == "ivf"
    assert not opened.refresh()


def test_compacting_makes_another_index_of_it(index):
    index.remove(paths=["3.jpg"])
    index.compact()
    with pytest.raises(ValueError, match="before it was compacted"):
        ImageIndex.open(index.path, backend="ivf")
    assert index.build_ivf(if_due=True).rows == 799


def damage(path, kind):
    content = bytearray(path.read_bytes())
    if kind == "gone":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(content[:-10])
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize("kind", ["gone", "cut", "changed"])
@pytest.mark.parametrize("pattern", ["ivf-*.faiss", "ivf.json"])
def test_damage_is_refused_in_one_sentence_and_the_file_built_again(index, pattern, kind):
    [path] = index.path.glob(pattern)
    damage(path, kind)
    with pytest.raises(ValueError, match=r"backend 'ivf' cannot be used: exact search of 800 images") as refused:
        ImageIndex.open(index.path, backend="ivf")
    assert "\n" not in str(refused.value)
    assert index.build_ivf().rows == 800
    assert ImageIndex.open(index.path, backend="ivf").backend == "ivf"


def test_a_file_that_changes_while_it_is_open_is_no_longer_searched(index, caplog):
    opened, queries = ImageIndex.open(index.path, backend="ivf"), clustered_vectors(5, CLASSES, seed=2)
    [path] = index.path.glob("ivf-*.faiss")
    damage(path, "cut")
    assert ids(opened, queries) == ids(index, queries)
    assert "searched exactly" in caplog.text


def test_a_file_that_is_replaced_while_it_is_open_is_searched_until_the_next_refresh(index):
    opened, queries = ImageIndex.open(index.path, backend="ivf"), clustered_vectors(20, CLASSES, seed=2)
    index.build_ivf(precision="float32")
    assert recall(ids(opened, queries), ids(index, queries)) >= 0.98
    assert "pq4" in opened.backend_remark
    assert opened.refresh()
    assert "float32" in opened.backend_remark


def test_a_kill_at_any_moment_of_a_build_leaves_the_file_before(index):
    before = read_ivf_settings(index.path)
    for delay in (0.0, 0.02, 0.05, 0.1, 0.15):
        started = CONTEXT.Event()
        builder = CONTEXT.Process(target=helpers.build_for_ever, args=(index.path, started))
        builder.start()
        assert started.wait(300)
        time.sleep(delay)
        builder.kill()
        builder.join()
        assert ImageIndex.open(index.path, backend="ivf").backend == "ivf"
    assert read_ivf_settings(index.path).shards == before.shards
    index.build_ivf()
    assert not list(index.path.glob(".*.partial"))
    assert len(list(index.path.glob("ivf-*.faiss"))) == 1


def test_a_full_disk_leaves_the_file_before(index, monkeypatch):
    before = (index.path / "ivf.json").read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pfml.storage.files.os.fsync", full)
    with pytest.raises(OSError, match=r"ivf-.*\.faiss could not be written: No space left on device"):
        index.build_ivf()
    assert (index.path / "ivf.json").read_bytes() == before
    assert not list(index.path.glob(".*.partial"))
    assert ImageIndex.open(index.path, backend="ivf").backend == "ivf"


def test_two_processes_do_not_build_at_once_and_writers_do_not_wait(index):
    with claim(index.path / "ivf.lock") as ours:
        assert ours
        with pytest.raises(LockedError, match="built by another process"):
            index.build_ivf()
        index.add(clustered_vectors(1, CLASSES, seed=9), ["while it is built"], model=MODEL)
    assert index.build_ivf().rows == 801


def test_auto_switches_by_size_and_says_so(index, monkeypatch):
    assert ImageIndex.open(index.path, backend="auto").backend == "exact"
    assert ImageIndex.open(index.path, backend="auto").backend_remark == ""
    monkeypatch.setattr("pfml.search.ivf.IVF_FROM", 800)
    opened = ImageIndex.open(index.path, backend="auto")
    assert opened.backend == "ivf"
    assert opened.backend_remark.startswith("approximate search of 800 images")
    index.remove(paths=["0.jpg"])
    opened.refresh()
    assert opened.backend == "exact"
    (index.path / "ivf.json").unlink()
    monkeypatch.setattr("pfml.search.ivf.IVF_FROM", 100)
    opened.refresh()
    assert opened.backend_remark.startswith("exact search of 799 images: pfml index --approximate pq4 builds")
    monkeypatch.setattr("pfml.search.ivf.find_spec", lambda _: None)
    opened = ImageIndex.open(index.path, backend="auto")
    assert opened.backend == "exact"
    assert "pip install 'pfml[faiss]'" in opened.backend_remark


def test_without_faiss_the_backend_and_the_build_name_the_package(index, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    for refused in (lambda: ImageIndex.open(index.path, backend="ivf"), index.build_ivf):
        with pytest.raises(ImportError, match=r"needs the package faiss: pip install 'pfml\[faiss\]'"):
            refused()


def test_several_threads_search_at_once(built):
    opened, exact = ImageIndex.open(built, backend="ivf"), ImageIndex.open(built)
    queries = clustered_vectors(16, CLASSES, seed=2)
    alone, found = ids(opened, queries), {}

    def search(number):
        found[number] = ids(opened, queries[number : number + 1])[0]

    threads = [threading.Thread(target=search, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(16)] == alone
    assert recall(alone, ids(exact, queries)) >= 0.98


def test_a_manifest_that_is_whole_but_says_nonsense_is_refused(index):
    from pfml.search.ivf import IVF
    from pfml.storage.manifest import read_manifest, write_manifest

    content = read_manifest(index.path / "ivf.json", IVF)
    for change in ({"probes": 0}, {"precision": "int4"}, {"shards": 5}, {"unknown": 1}):
        write_manifest(index.path / "ivf.json", {**content, **change}, IVF)
        with pytest.raises(DamagedFileError, match="must describe an approximate search file"):
            read_ivf_settings(index.path)
    assert json.loads((index.path / "ivf.json").read_text())["kind"] == "approximate search file"


@pytest.fixture
def mapped(index, monkeypatch):
    """The folder of the index, whose vectors stay in their files however few they are."""
    monkeypatch.setattr("pfml.storage.shard.SMALL_BYTES", 0)
    return index.path


def test_candidates_are_read_through_a_mapping_as_they_are_in_memory(mapped, index):
    queries = clustered_vectors(40, CLASSES, seed=5)
    stored = ImageIndex.open(mapped, backend="ivf")
    expected = index.search(queries, 10, model=MODEL)
    assert stored.search(queries, 10, model=MODEL) == expected
    assert [stored.search(one[None], 10, model=MODEL)[0] for one in queries] == expected


@pytest.mark.parametrize("damage", ["cut", "overwritten"])
def test_a_shard_that_changes_under_the_mapping_is_refused(mapped, damage):
    stored = ImageIndex.open(mapped, backend="ivf")
    query = clustered_vectors(1, CLASSES, seed=5)
    stored.search(query, 10, model=MODEL)
    for shard in mapped.glob("shard-*.safetensors"):
        with shard.open("r+b") as file:
            if damage == "cut":
                file.truncate(shard.stat().st_size // 2)
            else:
                file.seek(shard.stat().st_size // 3)
                file.write(bytes(64))
    with pytest.raises(DamagedFileError):
        stored.search(query, 10, model=MODEL)


def test_a_filter_by_metadata_finds_what_exact_search_finds(mapped, index):
    paths = [entry.path for entry in index.entries()]
    index.set_metadata(paths, [{"price": float(k % 10)} for k in range(len(paths))])
    queries = clustered_vectors(20, CLASSES, seed=6)
    exact, approximate = (ImageIndex.open(mapped, backend=name) for name in ("exact", "ivf"))
    for where in ("price < 8", "price < 1", "price >= 3 and not price = 5"):
        found, expected = (ids(one, queries, where=where) for one in (approximate, exact))
        assert all(len(one) == 10 for one in found)
        assert recall(found, expected) >= 0.98
