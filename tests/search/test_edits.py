"""Edits of an index: classes renamed, merged and deleted, images left out, and all of it undone."""

import random
from dataclasses import replace

import pytest
import torch

from pfml.search import Edit, Edits, ImageIndex, ModelIdentity, Threshold, list_images, update_index
from pfml.search.index_folder import read_edits
from pfml.storage.files import DamagedFileError
from pfml.storage.manifest import write_manifest
from small_data import small_embedder
from small_index import MODEL, small_index, unit_vectors, write_images
from small_threshold import made_threshold

pytestmark = pytest.mark.usefixtures("one_thread")
A, B, C, D = (f"class {k}" for k in range(4))


def name_by_oracle(edits, given):
    """One class, edit by edit."""
    name = given
    for edit in edits:
        if edit.kind in ("rename", "merge") and name == edit.class_name:
            name = edit.into
        elif edit.kind == "delete" and name == edit.class_name:
            return None
    return name


def random_edit(names, draw):
    """An edit that is possible while classes have these names."""
    kind = draw.choice(["rename", "merge", "delete"])
    class_name = draw.choice(names)
    if kind == "delete":
        return Edit("delete", class_name)
    if kind == "merge" and len(names) > 1:
        return Edit("merge", class_name, draw.choice([name for name in names if name != class_name]))
    free = [name for name in "abcdefghij" if name not in names]
    return Edit("rename", class_name, draw.choice(free))


@pytest.fixture
def index(tmp_path):
    return small_index(tmp_path / "index")  # 20 images, of four classes in turn


def state_of(index):
    """All that a reader sees."""
    entries = list(index.entries())
    return entries, index.class_counts(), index.vectors([entry.id for entry in entries]).tolist()


def test_names_are_those_of_the_edits_one_after_the_other():
    for seed in range(50):
        draw, given, edits = random.Random(seed), list("abcde"), []
        while len(edits) < 8:
            names = sorted({name for one in given if (name := name_by_oracle(edits, one))})
            if not names:
                break
            edits.append(random_edit(names, draw))
        assert Edits(tuple(edits)).names(given) == {one: name_by_oracle(edits, one) for one in given}


def test_a_renamed_class_has_its_images_ids_and_vectors(index):
    before, _, vectors = state_of(index)
    done = index.edit(Edit("rename", B, "Sparrow"))
    assert (str(done), done.images) == ("renamed class 1 to Sparrow", 5)
    for one in (index, ImageIndex.open(index.path), ImageIndex.open(index.path, backend="exact", hold_bytes=2**20)):
        after, counts, same = state_of(one)
        assert same == vectors
        assert counts == {A: 5, C: 5, D: 5, "Sparrow": 5}
        assert [replace(entry, class_name=entry.given_class) for entry in after] == before
        assert {entry.class_name for entry in after if entry.given_class == B} == {"Sparrow"}
        hits = one.search(unit_vectors(1), 20, model=MODEL, class_names=["Sparrow"])[0]
        assert [hit.class_name for hit in hits] == ["Sparrow"] * 5
        with pytest.raises(ValueError, match="'class 1' must be in the index"):
            one.search(unit_vectors(1), 1, model=MODEL, class_names=[B])
    assert index.num_shards == 1, "no vector was written again"


def test_a_merged_class_is_part_of_the_other_one(index):
    done = index.edit(Edit("merge", A, B))
    assert str(done) == "merged class 0 into class 1 (5 images)"
    assert index.class_counts() == {B: 10, C: 5, D: 5}
    hits = index.search(unit_vectors(1), 20, model=MODEL, class_names=[B])[0]
    assert {index.entry(hit.id).given_class for hit in hits} == {A, B}
    distances = torch.cdist(*[index.vectors([hit.id for hit in hits])] * 2).fill_diagonal_(2.0)
    assert index.class_spread(B) == pytest.approx(float(distances.min(dim=1).values.mean()), abs=1e-6)


def test_what_is_deleted_is_found_no_more(index):
    index.edit(Edit("delete", A))
    done = index.edit(Edit("leave_out", paths=("1.jpg", "2.jpg")))
    assert (str(done), done.classes) == ("deleted 2 images", frozenset())
    for one in (index, ImageIndex.open(index.path)):
        assert (len(one), one.num_removed) == (13, 7)
        assert one.class_counts() == {B: 4, C: 4, D: 5}
        found = one.search(unit_vectors(20), 20, model=MODEL)[0]
        assert {hit.path for hit in found} == {f"{k}.jpg" for k in range(20) if k % 4} - {"1.jpg", "2.jpg"}
        assert one.find("1.jpg") is one.find("0.jpg") is None
        with pytest.raises(KeyError):
            one.entry(1)
        with pytest.raises(KeyError):
            one.vectors([0])
        with pytest.raises(ValueError, match=r"0\.jpg must be in the index .*, and is not$"):
            one.remove(paths=["0.jpg"])


def test_undoing_gives_back_every_state_before(index):
    draw, states = random.Random(1), [state_of(index)]
    paths = tuple(f"{k}.jpg" for k in range(3, 20, 5))
    for edit in (Edit("leave_out", paths=paths), *[None] * 6):
        names = [name for name in index.class_counts() if name]
        index.edit(edit or random_edit(names, draw))
        states.append(state_of(index))
        assert state_of(ImageIndex.open(index.path)) == states[-1]
    numbers = [edit.number for edit in index.edits.steps]
    assert numbers == sorted(set(numbers))
    while len(index.edits):
        states.pop()
        undone = index.undo()
        assert undone.number == numbers[len(index.edits)]
        assert state_of(index) == state_of(ImageIndex.open(index.path)) == states[-1]
    with pytest.raises(ValueError, match="there is none, or it was undone already"):
        index.undo()


def test_an_edit_is_undone_by_its_number_unless_a_later_one_needs_it(index):
    first = index.edit(Edit("rename", A, "gull"))
    left = index.edit(Edit("leave_out", paths=("2.jpg",)))
    last = index.edit(Edit("merge", B, "gull"))
    with pytest.raises(ValueError, match="must be undone first: merged class 1 into gull"):
        index.undo(first.number)
    assert index.undo(left.number) == left
    assert index.find("2.jpg") is not None
    index.undo(last.number)
    index.undo(first.number)
    again = index.edit(Edit("rename", A, "auk"))
    assert again.number > last.number, "a number is given once"
    with pytest.raises(ValueError, match="undone already"):
        index.undo(first.number)
    assert index.class_counts() == {B: 5, C: 5, D: 5, "auk": 5}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda: Edit("rename", "class 9", "x"), "did you mean"),
        (lambda: Edit("rename", A, B), "merge 'class 0' into it"),
        (lambda: Edit("rename", A, A), "must be new"),
        (lambda: Edit("rename", A, " x"), "without spaces around them"),
        (lambda: Edit("rename", A, "x\ny"), "printable"),
        (lambda: Edit("rename", A, 201 * "x"), "at most 200"),
        (lambda: Edit("merge", A, "nothing"), "'nothing' must be in the index"),
        (lambda: Edit("merge", A, A), "into another one"),
        (lambda: Edit("delete", "x"), "must be in the index"),
        (lambda: Edit("leave_out", paths=("none.jpg",)), "none.jpg must be in the index"),
        (lambda: Edit("rename", A), "must be given class_name and into alone"),
        (lambda: Edit("delete", A, B), "must be given class_name alone"),
        (lambda: Edit("leave_out"), "must be given paths alone"),
        (lambda: Edit("drop", A), "must be one of rename, merge, delete, leave_out"),
    ],
)
def test_an_edit_that_is_not_possible_changes_nothing(index, edit, message):
    before = (index.path / "index.json").read_bytes()
    with pytest.raises(ValueError, match=message):
        index.edit(edit())
    assert (index.path / "index.json").read_bytes() == before


def test_a_name_that_is_free_again_may_be_given(index):
    index.edit(Edit("delete", A))
    index.edit(Edit("rename", B, A))
    assert index.class_counts() == {A: 5, C: 5, D: 5}
    assert {entry.given_class for entry in index.entries() if entry.class_name == A} == {B}
    with pytest.raises(ValueError, match="renamed class 1 to class 0"):
        index.undo(index.edits.steps[0].number)


def test_compacting_keeps_edits_and_clears_away_what_was_deleted(index):
    index.edit(Edit("rename", B, "gull"))
    index.edit(Edit("delete", A))
    index.edit(Edit("leave_out", paths=("2.jpg",)))
    before = state_of(index)
    index.compact(grace_seconds=0)
    for one in (index, ImageIndex.open(index.path)):
        assert state_of(one) == before
        assert one.num_removed == 0
    assert [index.missing(index.undo()) for _ in range(2)] == [1, 5]
    assert state_of(index) == before, "vectors that are gone do not return by undoing"
    assert index.missing(index.undo()) == 0
    assert index.class_counts() == {B: 5, C: 4, D: 5}


def test_what_was_left_out_is_not_added_without_undoing(index):
    index.edit(Edit("delete", A))
    index.edit(Edit("leave_out", paths=("2.jpg",)))
    for path, name in (("2.jpg", C), ("new.jpg", A)):
        with pytest.raises(ValueError, match="was left out of the index .*: undo that first"):
            index.add(unit_vectors(1), [path], [name], model=MODEL)
    index.undo()
    index.add(unit_vectors(1, seed=1), ["2.jpg"], [C], model=MODEL)
    assert index.class_counts() == {B: 5, C: 5, D: 5}


def test_a_reader_takes_up_edits_of_another_process(index):
    reader = ImageIndex.open(index.path)
    index.edit(Edit("merge", A, B))
    index.add(unit_vectors(1, seed=2), ["new.jpg"], [A], model=MODEL)
    assert reader.class_counts() == {A: 5, B: 5, C: 5, D: 5}
    assert reader.refresh()
    assert state_of(reader) == state_of(index)
    assert reader.class_counts() == {B: 11, C: 5, D: 5}
    index.undo()
    reader.refresh()
    assert reader.class_counts() == {A: 6, B: 5, C: 5, D: 5}


def test_a_full_disk_leaves_the_edits_as_they_were(index, monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    before = state_of(index)
    with monkeypatch.context() as patch:
        patch.setattr("pfml.storage.manifest.write_atomically", full)
        with pytest.raises(OSError, match="no space left"):
            index.edit(Edit("rename", A, "x"))
    assert state_of(index) == state_of(ImageIndex.open(index.path)) == before
    index.edit(Edit("rename", A, "x"))


def test_edits_are_read_without_the_shards_and_nonsense_is_refused(index, tmp_path):
    assert read_edits(tmp_path / "nothing") == Edits()
    index.edit(Edit("rename", A, "x\N{SNOWMAN}"))
    for shard in index.path.glob("shard-*"):
        shard.unlink()
    assert [str(edit) for edit in read_edits(index.path).steps] == ["renamed class 0 to x\N{SNOWMAN}"]
    from pfml.search.index_folder import INDEX
    from pfml.storage.manifest import read_manifest

    content = read_manifest(index.path / "index.json", INDEX)
    for nonsense in ([{"kind": "explode"}], [{**content["edits"][0], "into": 3}], [7], 5):
        write_manifest(index.path / "index.json", {**content, "edits": nonsense}, INDEX)
        with pytest.raises(DamagedFileError, match=r"index\.json must describe an index"):
            read_edits(index.path)


# with images of a folder


@pytest.fixture
def embedder():
    return small_embedder()


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "images")  # a/1 a/2 b/3 b/4 b/deep/5


@pytest.fixture
def of_folder(tmp_path, embedder, images):
    found = ImageIndex.create(tmp_path / "of folder", ModelIdentity.of(embedder), 8)
    update_index(found, embedder, list_images(images))
    return found


def test_the_next_update_from_the_folder_keeps_new_names(of_folder, embedder, images, embedded):
    of_folder.edit(Edit("rename", "a", "gull"))
    assert str(update_index(of_folder, embedder, list_images(images))) == "0 added, 5 unchanged"
    write_images(images, ["a/new.png"])
    assert str(update_index(of_folder, embedder, list_images(images))) == "1 added, 5 unchanged"
    assert of_folder.class_counts() == {"b": 3, "gull": 3}
    assert embedded == [1]
    (images / "a/new.png").rename(images / "b/new.png")
    update_index(of_folder, embedder, list_images(images))
    assert of_folder.class_counts() == {"b": 4, "gull": 2}


def test_the_next_update_keeps_out_what_was_deleted_until_that_is_undone(of_folder, embedder, images, embedded):
    of_folder.edit(Edit("delete", "a"))
    of_folder.edit(Edit("leave_out", paths=(str(images / "b/3.png"),)))
    write_images(images, ["a/new.png", "b/new.png"])
    update = update_index(of_folder, embedder, list_images(images))
    assert str(update) == "1 added, 2 unchanged, 4 kept out"
    assert embedded == [1], "what is kept out is not embedded"
    of_folder.compact(grace_seconds=0)
    of_folder.undo()
    of_folder.undo()
    assert str(update_index(of_folder, embedder, list_images(images))) == "4 added, 3 unchanged"
    assert of_folder.class_counts() == {"a": 3, "b": 4}


# the threshold of "unknown"


def test_the_threshold_of_a_class_follows_its_name_and_a_merged_one_is_the_strictest():
    found = made_threshold(value=-0.5, class_values={"a": -0.3, "b": -0.6}, class_names=("a", "b", "c", "d"))
    renamed = Edits((Edit("rename", "a", "x", number=1),))
    assert found.following(renamed).class_values == {"x": -0.3, "b": -0.6}
    assert found.measures(renamed)
    merged = Edits((*renamed.steps, Edit("merge", "b", "c", number=2)))
    assert found.following(merged).class_values == {"x": -0.3, "c": -0.5}, "c had the common one"
    assert not found.measures(merged)
    both = Edits((Edit("merge", "b", "a", number=1),))
    assert found.following(both).class_values == {"a": -0.3}
    deleted = Edits((Edit("delete", "a", number=1),))
    assert found.following(deleted).class_values == {"b": -0.6}
    assert found.measures(deleted)


def test_a_threshold_that_was_measured_after_edits_has_their_names(tmp_path):
    edits = Edits((Edit("merge", "b", "a", number=1), Edit("rename", "c", "b", number=2)))
    found = made_threshold(class_values={"b": -0.3}, class_names=("a", "b"), edits=edits)
    found.save(tmp_path)
    found = Threshold.load(tmp_path)
    assert (found.class_names, found.edits) == (("a", "b"), edits)
    assert found.measures(edits)
    assert found.following(edits).class_values == {"b": -0.3}, "not merged into a once more"
    later = edits.added(Edit("rename", "b", "z", number=3))
    assert found.following(later).class_values == {"z": -0.3}
    assert not found.measures(Edits(edits.steps[1:])), "what it was measured with was undone"


def test_a_threshold_that_does_not_tell_its_classes_is_not_of_merged_ones():
    found = made_threshold(class_values={"a": -0.3})
    assert found.measures(Edits((Edit("rename", "a", "b"),)))
    assert not found.measures(Edits((Edit("merge", "x", "y"),)))


def test_calibration_names_the_classes_that_it_measured():
    from pfml.search import calibrate_points

    labels = torch.arange(5).repeat_interleave(8)
    points = torch.nn.functional.one_hot(labels, 8).float() + 0.1 * unit_vectors(40)
    names = ("a", "b", "c", "d", "e", "not there")
    found = calibrate_points(points, labels, model=MODEL, class_names=names, false_accept_rate=0.2)
    assert found.class_names == names[:5]


def test_relabeled_images_have_their_class_until_that_is_undone(index):
    before = state_of(index)
    first, second = (entry.path for entry in list(index.entries())[:2])  # of the classes A and B
    done = index.edit(Edit("relabel", into="new", paths=(first, second)))
    assert (str(done), done.images) == ("relabeled 2 images as new", 2)
    for one in (index, ImageIndex.open(index.path)):
        assert [one.find(path).class_name for path in (first, second)] == ["new", "new"]
        assert [one.find(path).given_class for path in (first, second)] == [A, B]
        assert one.class_counts() == {A: 4, B: 4, C: 5, D: 5, "new": 2}
        hits = one.search(one.vectors([one.find(first).id]), 5, model=MODEL, class_names=["new"])[0]
        assert {hit.path for hit in hits} == {first, second}
        hits = one.search(one.vectors([one.find(first).id]), 20, model=MODEL, where="class = new")[0]
        assert {hit.path for hit in hits} == {first, second}
    index.edit(Edit("rename", "new", "newer"))
    index.edit(Edit("delete", A))
    assert index.find(first).class_name == "newer", "it is no longer of the deleted class"
    index.edit(Edit("delete", "newer"))
    assert index.find(first) is None
    for _ in range(4):
        index.undo()
    assert state_of(index) == before


def test_an_image_that_is_added_again_stays_relabeled(index):
    path = next(index.entries()).path
    index.edit(Edit("relabel", into=C, paths=(path,)))
    index.edit(Edit("delete", A))
    index.add(unit_vectors(1), [path], [A], model=MODEL)
    assert index.find(path).class_name == C
    index.compact()
    assert ImageIndex.open(index.path).find(path).class_name == C


def test_tags_are_a_column_that_a_filter_can_name(index):
    first, second = (entry.path for entry in list(index.entries())[:2])
    index.edit(Edit("tag", paths=(first, second), tag="to check"))
    index.edit(Edit("tag", paths=(second,), tag="dark"))
    assert index.columns["tags"] == "list"
    assert index.find(second).metadata["tags"] == ("to check", "dark")
    query = index.vectors([index.find(first).id])
    found = {
        word: index.search(query, 20, model=MODEL, where=f"tags contains '{word}'")[0] for word in ("to check", "dark")
    }
    assert {word: {hit.path for hit in hits} for word, hits in found.items()} == {
        "to check": {first, second},
        "dark": {second},
    }
    ids = torch.tensor([index.find(path).id for path in (first, second)])
    assert index.column("tags", ids) == [("to check",), ("to check", "dark")]
    assert index.column("class", torch.cat([ids, torch.tensor([999])])) == [A, B, None]
    assert str(index.edit(Edit("untag", paths=(second,), tag="to check"))) == "took the tag to check from 1 image"
    assert index.find(second).metadata["tags"] == ("dark",)
    for _ in range(3):
        index.undo()
    assert "tags" not in index.columns


def test_tags_join_the_column_of_a_table(index):
    path, other = (entry.path for entry in list(index.entries())[:2])
    index.add(unit_vectors(1), [path], [A], model=MODEL, metadata=[{"tags": ("old",)}])
    index.edit(Edit("tag", paths=(path, other), tag="new"))
    assert index.find(path).metadata["tags"] == ("old", "new")
    hits = index.search(index.vectors([index.find(path).id]), 20, model=MODEL, where="tags contains old")[0]
    assert [hit.path for hit in hits] == [path]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"kind": "relabel", "paths": ("x.jpg",)}, "relabel must be given into and paths alone"),
        ({"kind": "tag", "paths": ("x.jpg",)}, "tag must be given paths and tag alone"),
        ({"kind": "tag", "tag": "dark"}, "tag must be given paths and tag alone"),
    ],
)
def test_edits_of_images_that_lack_something_are_refused(edit, message):
    with pytest.raises(ValueError, match=message):
        Edit(**edit)


def test_a_tag_must_be_readable_and_images_must_be_there(index):
    path = next(index.entries()).path
    with pytest.raises(ValueError, match="a tag must be at most 200 printable characters"):
        index.edit(Edit("tag", paths=(path,), tag="two\nlines"))
    with pytest.raises(ValueError, match="must be in the index"):
        index.edit(Edit("relabel", into=A, paths=("elsewhere.jpg",)))
