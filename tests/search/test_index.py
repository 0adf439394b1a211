import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from pfml.search import ImageIndex, OtherModelError
from pfml.search.backends import BACKENDS, ExactSearcher
from small_index import MODEL, OTHER, small_index, unit_vectors

pytestmark = pytest.mark.usefixtures("one_thread")


def oracle(query, vectors, k, allowed=None):
    """(distance, row) of the k nearest rows, by comparing one after the other."""
    rows = range(len(vectors)) if allowed is None else allowed
    distances = [(float(torch.dist(query.double(), vectors[row].double())), row) for row in rows]
    return sorted(distances)[:k]


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_search_finds_what_comparing_one_by_one_finds(tmp_path, backend):
    if backend == "faiss":
        pytest.importorskip("faiss", reason="needs the extra faiss")
    index = small_index(tmp_path / "index", entries=200, backend=backend)
    queries, gallery = unit_vectors(7, seed=1), unit_vectors(200)
    for query, hits in zip(queries, index.search(3 * queries, 9, model=MODEL), strict=True):
        expected = oracle(query, gallery, 9)
        assert [hit.id for hit in hits] == [row for _, row in expected]
        assert [hit.distance for hit in hits] == pytest.approx([distance for distance, _ in expected], abs=1e-6)
        assert [hit.path for hit in hits] == [f"{row}.jpg" for _, row in expected]
    assert index.backend == backend


def test_faiss_is_searched_though_another_library_has_changed_it(tmp_path):
    pytest.importorskip("faiss", reason="needs the extra faiss")
    import faiss.contrib.torch_utils  # as pytorch-metric-learning does  # noqa: F401

    index, exact = (small_index(tmp_path / name, entries=40, backend=name) for name in ("faiss", "exact"))
    found = [one.search(unit_vectors(3, seed=1), 5, model=MODEL, class_names=["class 1"]) for one in (index, exact)]
    assert [[hit.id for hit in hits] for hits in found[0]] == [[hit.id for hit in hits] for hits in found[1]]


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@pytest.mark.parametrize("classes", [["class 1"], ["class 0", "class 2", "class 3"]])
def test_a_filter_searches_these_classes_only_and_never_what_was_removed(tmp_path, backend, classes):
    if backend == "faiss":
        pytest.importorskip("faiss", reason="needs the extra faiss")
    index = small_index(tmp_path / "index", entries=60, backend=backend)
    index.remove(paths=["1.jpg", "2.jpg"])
    numbers = {int(name[-1]) for name in classes}
    allowed = [row for row in range(60) if row % 4 in numbers and row not in (1, 2)]
    hits = index.search(unit_vectors(1, seed=3), 5, model=MODEL, class_names=classes)[0]
    assert [hit.id for hit in hits] == [
        row for _, row in oracle(unit_vectors(1, seed=3)[0], unit_vectors(60), 5, allowed)
    ]
    assert {hit.class_name for hit in hits} <= set(classes)


@pytest.mark.parametrize(("count", "compared"), [(0, 0), (1, 1), (29, 29), (30, 60), (31, 60), (60, 60)])
def test_of_few_allowed_vectors_only_these_are_compared(count, compared):
    """From half of them on, a product with all is cheaper than a copy of those; the hits are the same."""
    vectors, queries = unit_vectors(60), unit_vectors(3, seed=3)
    allowed = torch.zeros(60, dtype=torch.bool)
    allowed[torch.randperm(60, generator=torch.Generator().manual_seed(1))[:count]] = True
    with FlopCounterMode(display=False) as counter:
        _, rows = ExactSearcher([vectors]).nearest(queries, 5, allowed)
    assert counter.get_total_flops() == 2 * len(queries) * vectors.shape[1] * compared
    for query, found in zip(queries, rows, strict=True):
        assert found.tolist() == [row for _, row in oracle(query, vectors, 5, allowed.nonzero()[:, 0].tolist())]


def test_results_depend_neither_on_shards_nor_on_tiles(tmp_path, monkeypatch):
    one = small_index(tmp_path / "one", entries=90)
    many = ImageIndex.create(tmp_path / "many", MODEL, 8)
    for part in torch.arange(90).split(11):
        many.add(unit_vectors(90)[part], [f"{k}.jpg" for k in part.tolist()], model=MODEL)
    queries = unit_vectors(50, seed=5)
    expected = [[hit.id for hit in hits] for hits in one.search(queries, 20, model=MODEL)]
    monkeypatch.setattr("pfml.search.backends.MEMORY", 300)
    monkeypatch.setattr("pfml.search.backends.QUERIES_AT_ONCE", 7)
    assert [[hit.id for hit in hits] for hits in many.search(queries, 20, model=MODEL)] == expected
    assert many.num_shards == 9


def test_the_distance_of_an_image_to_its_copy_is_zero_and_copies_are_listed_by_id(tmp_path):
    index = ImageIndex.create(tmp_path / "index", MODEL, 8)
    index.add(unit_vectors(1).repeat(5, 1), list("edcba"), model=MODEL)
    hits = index.search(unit_vectors(1), 5, model=MODEL)[0]
    assert [hit.distance for hit in hits] == [0.0] * 5
    assert [hit.id for hit in hits] == [0, 1, 2, 3, 4]


def test_an_index_opened_again_is_the_same(tmp_path):
    index = small_index(tmp_path / "index")
    index.remove(class_names=["class 3"])
    again = ImageIndex.open(tmp_path / "index")
    assert list(again.entries()) == list(index.entries())
    assert again.class_counts() == index.class_counts() == {"class 0": 5, "class 1": 5, "class 2": 5}
    queries = unit_vectors(3, seed=2)
    assert again.search(queries, 4, model=MODEL) == index.search(queries, 4, model=MODEL)


def test_adding_a_path_again_replaces_its_entry_under_a_new_id(tmp_path):
    index = small_index(tmp_path / "index")
    ids = index.add(unit_vectors(2, seed=8), ["3.jpg", "new.jpg"], ["other", ""], model=MODEL)
    assert ids == (20, 21)
    assert len(index) == 21
    assert index.find("3.jpg").class_name == "other"
    with pytest.raises(KeyError, match="no entry 3"):
        index.entry(3)
    assert index.search(unit_vectors(2, seed=8), 1, model=MODEL)[0][0].id == 20


def test_adding_writes_a_new_shard_and_leaves_the_old_ones_alone(tmp_path):
    index = small_index(tmp_path / "index")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "index").glob("shard-*")}
    index.add(unit_vectors(1, seed=4), ["new.jpg"], model=MODEL)
    index.remove(paths=["0.jpg"])
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "index").glob("shard-*")}
    assert before.items() <= after.items()
    assert len(after) == 2


def test_compacting_keeps_entries_and_ids_and_clears_what_was_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("pfml.search.index.COMPACTED_ENTRIES", 6)
    index = small_index(tmp_path / "index")
    index.add(unit_vectors(2, seed=4), ["3.jpg", "new.jpg"], model=MODEL)
    index.remove(class_names=["class 1"])
    before, hits = list(index.entries()), index.search(unit_vectors(2, seed=5), 8, model=MODEL)
    index.compact()
    assert (index.num_shards, index.num_removed) == (3, 0)
    assert list(index.entries()) == before == list(ImageIndex.open(tmp_path / "index").entries())
    assert index.search(unit_vectors(2, seed=5), 8, model=MODEL) == hits
    assert index.add(unit_vectors(1), ["last.jpg"], model=MODEL) == (22,)


def test_compacted_shards_stay_for_the_grace_period_and_no_longer(tmp_path):
    folder = tmp_path / "index"
    index = small_index(folder)
    old = set(folder.glob("shard-*"))
    index.compact()
    assert old < set(folder.glob("shard-*"))
    index.compact(grace_seconds=0)
    assert len(set(folder.glob("shard-*"))) == 1


def test_an_emptied_index_is_searched_without_a_result(tmp_path):
    index = small_index(tmp_path / "index")
    index.remove(class_names=list(index.class_counts()))
    assert len(index) == 0
    assert index.search(unit_vectors(2), 3, model=MODEL) == [[], []]
    index.compact()
    assert len(ImageIndex.open(tmp_path / "index")) == 0


def test_fewer_images_than_asked_for_are_all_found(tmp_path):
    assert len(small_index(tmp_path / "index").search(unit_vectors(1), 100, model=MODEL)[0]) == 20


def test_another_model_is_refused_by_name(tmp_path):
    index = small_index(tmp_path / "index")
    for refused in (
        lambda: index.search(unit_vectors(1), 1, model=OTHER),
        lambda: index.add(unit_vectors(1), ["x"], model=OTHER),
    ):
        with pytest.raises(
            OtherModelError, match=r"the model of these tests \(aaaa.* got vectors of another model \(bbb"
        ):
            refused()


def test_what_two_objects_write_one_after_the_other_is_all_there(tmp_path):
    one = small_index(tmp_path / "index")
    two = ImageIndex.open(tmp_path / "index")
    two.add(unit_vectors(1), ["two"], model=MODEL)
    one.add(unit_vectors(1), ["one"], model=MODEL)
    assert not one.refresh()
    assert two.refresh()
    assert {entry.path for entry in two.entries()} >= {"one", "two"}
    assert [entry.id for entry in two.entries()] == list(range(22))


def test_lookups_that_are_carried_on_equal_those_that_are_made_again(tmp_path):
    generator = torch.Generator().manual_seed(0)
    index = small_index(tmp_path / "index")
    for step in range(12):
        known = [entry.path for entry in index.entries()]
        some = [known[k] for k in torch.randperm(len(known), generator=generator)[:3]]
        index.remove(paths=some[:2])
        index.add(unit_vectors(2, seed=step), [some[2], f"step {step}"], [f"class {step}", "class 0"], model=MODEL)
    again = ImageIndex.open(tmp_path / "index")
    assert list(again.entries()) == list(index.entries())
    assert again.class_counts() == index.class_counts()
    for entry in again.entries():
        assert index.find(entry.path) == entry == index.entry(entry.id)
        assert torch.equal(index.vectors([entry.id]), again.vectors([entry.id]))


def test_vectors_are_stored_with_unit_length(tmp_path):
    index = ImageIndex.create(tmp_path / "index", MODEL, 8)
    index.add(1e6 * unit_vectors(3), list("abc"), model=MODEL)
    torch.testing.assert_close(index.vectors([0, 1, 2]), unit_vectors(3))


def test_names_of_files_that_are_no_unicode_come_back(tmp_path):
    name = b"caf\xe9.jpg".decode("utf-8", "surrogateescape")
    index = ImageIndex.create(tmp_path / "index", MODEL, 8)
    index.add(unit_vectors(1), [name], ["\u00fc [bold]"], model=MODEL)
    [entry] = ImageIndex.open(tmp_path / "index").entries()
    assert (entry.path, entry.class_name) == (name, "\u00fc [bold]")


def test_bad_input_is_refused_before_anything_is_written(tmp_path):
    index = small_index(tmp_path / "index")
    manifest = (tmp_path / "index" / "index.json").read_bytes()
    bad = unit_vectors(2)
    bad[1, 1] = torch.nan
    with pytest.raises(ValueError, match="NaN or Inf in row 1"):
        index.add(bad, ["x", "y"], model=MODEL)
    with pytest.raises(ValueError, match="8 dimensions, got 3"):
        index.add(torch.ones(1, 3), ["x"], model=MODEL)
    with pytest.raises(ValueError, match="8 dimensions, got 3"):
        index.search(torch.ones(1, 3), model=MODEL)
    with pytest.raises(ValueError, match="got x twice"):
        index.add(unit_vectors(2), ["x", "x"], model=MODEL)
    with pytest.raises(ValueError, match="paths must be 2, one per vector, got 1"):
        index.add(unit_vectors(2), ["x"], model=MODEL)
    with pytest.raises(ValueError, match="k must be at least 1"):
        index.search(unit_vectors(1), 0, model=MODEL)
    with pytest.raises(ValueError, match="'class 9' must be in the index.*did you mean"):
        index.search(unit_vectors(1), model=MODEL, class_names=["class 9"])
    with pytest.raises(ValueError, match="elsewhere/3.jpg must be in the index.*did you mean '3.jpg'"):
        index.remove(paths=["0.jpg", "elsewhere/3.jpg"])
    with pytest.raises(FileExistsError, match="already holds an index"):
        ImageIndex.create(tmp_path / "index", MODEL, 8)
    with pytest.raises(FileNotFoundError, match="pfml index"):
        ImageIndex.open(tmp_path)
    assert (tmp_path / "index" / "index.json").read_bytes() == manifest
    assert len(index) == 20


def test_faiss_asked_for_but_missing_is_an_error_that_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"needs the package faiss: pip install 'pfml\[faiss\]'"):
        small_index(tmp_path / "index", backend="faiss")
    with pytest.raises(ValueError, match="exact, faiss, ivf, auto, got 'annoy'"):
        small_index(tmp_path / "index", backend="annoy")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_shard_with_a_number_that_is_none_is_refused_by_its_name(tmp_path, bad):
    from pfml.storage.file_state import UNKNOWN_FILE, packed
    from pfml.storage.files import DamagedFileError
    from pfml.storage.shard import VectorShard, read_shard, write_shard

    vectors = unit_vectors(5)
    vectors[3, 2] = bad
    columns = (("",) * 5,) * 3
    shard = VectorShard(vectors, torch.arange(5), *columns, *packed([UNKNOWN_FILE] * 5))
    entry = write_shard(tmp_path / "shard-1.safetensors", shard, model_digest=MODEL.digest)
    with pytest.raises(DamagedFileError, match=r"1 NaN or Inf of 40 numbers in 'vectors' of .*shard-1\.safetensors"):
        read_shard(tmp_path / entry.file, dimension=8, entry=entry)


def test_a_look_at_the_state_before_finds_nothing_of_the_state_after(tmp_path):
    index = small_index(tmp_path / "index", entries=20)
    before = index._state
    index.add(unit_vectors(1, seed=5), ["new.jpg"], model=MODEL)
    index._state = before  # as a thread has it that came before the one which takes up the new state
    assert index.find("new.jpg") is None
    assert index.find("3.jpg").id == 3
    with pytest.raises(KeyError, match="has no entry 20"):
        index.vectors([3, 20])


def test_points_for_other_programs_are_all_entries_with_ids_that_stay(tmp_path):
    index = small_index(tmp_path / "index")
    index.add(unit_vectors(1, seed=9), ["caf\udce9.jpg"], model=MODEL)
    index.remove(paths=["3.jpg"])
    batches = list(index.points(batch_size=6))
    assert [len(batch.ids) for batch in batches] == [6, 6, 6, 2]
    entries = list(index.entries())
    assert [payload["path"] for batch in batches for payload in batch.payloads][:2] == ["0.jpg", "1.jpg"]
    assert batches[-1].payloads[-1] == {
        "path": "caf\\udce9.jpg",
        "class_name": None,
        "model": MODEL.digest,
        "metadata": {},
    }
    vectors = torch.cat([batch.vectors for batch in batches])
    assert torch.equal(vectors, index.vectors([entry.id for entry in entries]))
    again = small_index(tmp_path / "again")
    assert next(again.points()).ids[:3] == batches[0].ids[:3]
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        next(index.points(0))
