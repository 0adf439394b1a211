"""Images that come later.

The oracle: every image that was there keeps its role, and every added one is in exactly one role, by its class.
"""

import csv

import pytest
import torch
from PIL import Image

from pfml.data import load_data, with_validation
from pfml.data.splits import divided

OLD = [f"old {k}" for k in range(12)]
NEW = [f"new {k}" for k in range(6)]


def draw(folder, names, images=5):
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(images):
            Image.new("RGB", (4, 4)).save(folder / name / f"{number}.png")
    return folder


def roles(data):
    """File -> the roles that it has, and file -> its class."""
    role_of, class_of = {}, {}
    for role, images in data.parts.items():
        for k, label in enumerate(images.labels.tolist()):
            role_of.setdefault(images.name_of(k), set()).add(role)
            class_of[images.name_of(k)] = images.class_names[label]
    return role_of, class_of


@pytest.fixture
def folders(tmp_path):
    return draw(tmp_path / "photos", OLD), draw(tmp_path / "more", [*NEW, "old 0", "old 1"])


@pytest.mark.parametrize("split", ["classes", "images", "none"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_division_of_what_was_there_stays(folders, split, seed):
    photos, more = folders
    before, after = (roles(load_data(str(photos), split=split, seed=seed, added=added))[0] for added in ((), (more,)))
    assert {file: after[file] for file in before} == before
    assert len(after) == len(before) + 8 * 5
    assert all(len(each) == 1 for each in after.values())


@pytest.mark.parametrize("split", ["classes", "images", "none"])
def test_added_images_have_the_class_of_their_folder(folders, split):
    photos, more = folders
    data = load_data(str(photos), split=split, added=[more])
    assert all(file.split("/")[-2] == name for file, name in roles(data)[1].items())
    assert f"{more} adds 30 images of 6 new classes, 10 of known ones" in data.remarks


def test_images_of_known_classes_join_them_and_new_classes_are_divided_among_themselves(folders):
    photos, more = folders
    base, data = load_data(str(photos)), load_data(str(photos), added=[more])
    assert data.train.class_names[:6] == base.train.class_names
    fresh = divided(load_data(str(more), split="none").train.of_classes(range(6)), "more")
    assert set(data.train.class_names[6:]) == set(fresh.train.class_names)
    assert set(data.test.class_names) == {*base.test.class_names, *fresh.test.class_names}
    for name in ("old 0", "old 1"):
        images = data.train if name in base.train.class_names else data.test
        assert int((images.labels == images.class_names.index(name)).sum()) == 10


def test_of_every_class_a_fifth_of_the_added_images_is_held_out(folders):
    photos, more = folders
    base, data = (load_data(str(photos), split="images", added=added) for added in ((), [more]))
    assert data.gallery is data.train
    assert data.train.class_names == data.test.class_names == (*base.train.class_names, *NEW)
    counts = torch.bincount(data.test.labels).tolist()
    assert [counts[data.test.class_names.index(name)] for name in ("old 0", "old 1", "old 2", *NEW)] == [2, 2, *[1] * 7]


def test_validation_classes_stay_and_come_from_new_classes_as_well(folders):
    photos, more = folders
    before, after = (with_validation(load_data(str(photos), added=added), "half") for added in ((), [more]))
    assert set(after.train.class_names) >= set(before.train.class_names)
    assert set(after.validation.class_names) >= set(before.validation.class_names)
    assert len(after.validation.class_names) == 3 + 2  # of 3 new training classes
    assert not set(after.train.class_names) & set(after.validation.class_names)


def test_new_classes_that_are_too_few_to_divide_train(tmp_path):
    photos = draw(tmp_path / "photos", OLD)
    one = load_data(str(photos), added=[draw(tmp_path / "one", ["new"])])
    assert "new" in one.train.class_names
    two = with_validation(load_data(str(photos), added=[draw(tmp_path / "two", ["a", "b"])]), "fold-3")
    assert len({"a", "b"} & {*two.train.class_names}) == 1


def test_additions_follow_one_another(tmp_path):
    photos, first, second = draw(tmp_path / "a", OLD), draw(tmp_path / "b", NEW), draw(tmp_path / "c", ["x", "y"])
    once, twice = (roles(load_data(str(photos), added=added))[0] for added in ((first,), (first, second)))
    assert {file: twice[file] for file in once} == once
    assert len(twice) == len(once) + 10


def test_a_table_is_added_like_a_folder(tmp_path):
    photos, more = draw(tmp_path / "photos", OLD), draw(tmp_path / "more", NEW)
    with (tmp_path / "more.csv").open("w", newline="") as file:
        rows = [(f"more/{name}/{k}.png", name) for name in NEW for k in range(5)]
        csv.writer(file).writerows([("path", "label"), *rows])
    assert (
        roles(load_data(str(photos), added=[tmp_path / "more.csv"]))[1]
        == roles(load_data(str(photos), added=[more]))[1]
    )


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda path: path / "missing", "must be a folder of class folders or a .csv file, got .*missing"),
        (
            lambda path: (path / "none").mkdir() or path / "none",
            "must have a folder with images per class, got none",
        ),
        (lambda path: path / "photos", "all images of .*photos are there already, the first is"),
        (
            lambda path: draw(path / "halves" / "train", ["a"]) and draw(path / "halves" / "test", ["b"]).parent,
            "is divided into train and test already",
        ),
    ],
)
def test_what_cannot_be_added_is_named_in_a_sentence(tmp_path, prepare, message):
    photos = draw(tmp_path / "photos", OLD)
    with pytest.raises(ValueError, match=message):
        load_data(str(photos), added=[prepare(tmp_path)])


def test_a_table_with_a_split_and_data_with_a_gallery_are_refused(tmp_path):
    photos = draw(tmp_path / "photos", OLD)
    (tmp_path / "split.csv").write_text("path,label,split\nphotos/old 0/0.png,a,train\n")
    with pytest.raises(ValueError, match="leave the column split out of"):
        load_data(str(photos), added=[tmp_path / "split.csv"])
    split_of = {name: "train" if k < 6 else "query" for k, name in enumerate(OLD)}
    rows = [f"photos/{name}/{k}.png,{name},{split}" for name, split in split_of.items() for k in (0, 1)]
    rows += [f"photos/{name}/2.png,{name},gallery" for name in OLD[6:]]
    (tmp_path / "gallery.csv").write_text("\n".join(["path,label,split", *rows]))
    with pytest.raises(ValueError, match="with a gallery of its own"):
        load_data(str(tmp_path / "gallery.csv"), added=[draw(tmp_path / "more", NEW)])
