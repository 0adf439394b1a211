"""Images of one's own: files that cannot be read are left out, counted and named; lone images are named."""

import shutil

import pytest
import torch

from pfml.data import LabelNoise, load_data, open_images, without_unreadable
from pfml.data.corrections import Corrections
from pfml.data.decoding import UnreadableImagesError, decode_files
from pfml.data.own_images import about_lone_images, about_single_class, is_own
from pfml.runs.data import prepare_data
from pfml.training import DataConfig
from small_index import write_images

CLASSES = ("a", "b", "c", "d")


@pytest.fixture
def photos(tmp_path):
    """Four classes of three images; without a seed, a and b train."""
    return write_images(tmp_path / "photos", [f"{name}/{k}.png" for name in CLASSES for k in range(3)], size=12)


def spoil(photos, *names):
    for name in names:
        (photos / name).write_bytes(b"no image")


def test_files_that_cannot_be_read_are_left_out_counted_and_named(photos):
    spoil(photos, "a/0.png", "d/2.png")
    data = without_unreadable(load_data(str(photos), seed=None))
    assert (len(data.train), len(data.test)) == (5, 5)
    assert all(path.name != "0.png" for path in data.train.images if path.parent.name == "a")
    [remark] = [remark for remark in data.remarks if "cannot be read" in remark]
    assert remark.startswith("2 of 12 images cannot be read and are left out: ")
    assert str(photos / "a/0.png") in remark
    assert str(photos / "d/2.png") in remark
    assert "is not an image of a known format" in remark


def test_readable_images_are_left_as_they_are(photos):
    data = load_data(str(photos), seed=None)
    found = without_unreadable(data)
    assert (found.train.images, found.test.images, found.remarks) == (data.train.images, data.test.images, ())


def test_the_pixels_of_a_small_set_are_kept_so_that_no_file_is_opened_again(photos, monkeypatch):
    data = load_data(str(photos), seed=None)
    expected = open_images(data.train).pixels
    checked = without_unreadable(data)
    kept = checked.train
    monkeypatch.setattr("pfml.data.decoding.opened_image", None)
    for images in (kept, kept.subset([1, 3]), kept.joined(checked.test)):
        assert len(open_images(images)) == len(images)
    assert torch.equal(open_images(kept).pixels.data, expected.data)
    assert torch.equal(open_images(kept, storage="files").sizes, expected.sizes)
    smaller = open_images(kept, short_side=6)
    assert int(smaller.sizes.amin()) == 6


def test_the_pixels_of_a_large_set_are_not_kept_and_its_files_are_checked(photos):
    spoil(photos, "c/0.png")
    files = sorted(photos.rglob("*.png"))
    sizes = sum(image.numel() for image in decode_files(files)[0].values())
    for limit, kept in ((sizes, 11), (sizes - 1, 0), (0, 0)):
        pixels, failures = decode_files(files, limit=limit)
        assert (len(pixels), len(failures)) == (kept, 1)


def test_a_class_without_a_readable_image_is_no_class(photos):
    spoil(photos, *(f"a/{k}.png" for k in range(3)), "c/0.png")
    data = without_unreadable(load_data(str(photos), seed=None))
    assert data.train.class_names == ("b",)
    assert data.test.class_names == ("c", "d"), "the halves stay those of all classes"
    assert data.train.labels.tolist() == [0, 0, 0]
    assert any("no image of the class a can be read" in remark for remark in data.remarks)


def test_queries_and_their_gallery_keep_the_same_classes(photos, tmp_path):
    splits = {"a": "train", "b": "train", "c": "query", "d": "query"}
    rows = [
        f"photos/{name}/{k}.png,{name},{split if k or split == 'train' else 'gallery'}"
        for name, split in splits.items()
        for k in range(3)
    ]
    (tmp_path / "list.csv").write_text("\n".join(["path,label,split", *rows]))
    spoil(photos, "c/0.png")
    data = without_unreadable(load_data(str(tmp_path / "list.csv")))
    assert data.gallery.class_names == data.test.class_names == ("c", "d")
    assert len(data.gallery) == 1


def test_where_most_files_cannot_be_read_the_folder_is_the_mistake(photos):
    spoil(photos, *(f"{name}/{k}.png" for name in "abc" for k in (0, 1)), "d/0.png")
    with pytest.raises(UnreadableImagesError, match="7 of 12 images cannot be read"):
        without_unreadable(load_data(str(photos), seed=None))


def test_pixels_are_in_memory_once_however_often_the_images_are_opened(photos):
    data = without_unreadable(load_data(str(photos), seed=None))
    expected = {path: pixels.clone() for path, pixels in data.train.pixels.items()}
    some, train, test = (open_images(images) for images in (data.train.subset([0, 4]), data.train, data.test))
    del some
    for source, images in ((train, data.train), (test, data.test)):
        held = source.pixels.data.untyped_storage().data_ptr()
        assert {images.pixels[path].untyped_storage().data_ptr() for path in images.images} == {held}
    open_images(data.train, short_side=6)
    assert all(torch.equal(data.train.pixels[path], pixels) for path, pixels in expected.items())


def test_a_run_leaves_them_out_unless_it_is_to_refuse_them(photos):
    spoil(photos, "a/0.png")
    data, _ = prepare_data(DataConfig(str(photos), split_seed=None))
    assert len(data.train) == 5
    data, _ = prepare_data(DataConfig(str(photos), split_seed=None, unreadable="refuse"))
    assert len(data.train) == 6, "the run that opens them lists them, and stops"
    data, _ = prepare_data(DataConfig("folder", root=photos, split_seed=None))
    assert len(data.train) == 5
    with pytest.raises(ValueError, match="unreadable must be one of auto, skip, refuse, got 'drop'"):
        DataConfig("photos", unreadable="drop")


def test_published_data_sets_are_never_ones_own():
    assert is_own("photos")
    assert is_own("folder")
    assert is_own("csv")
    assert not any(map(is_own, ("glyphs", "cub", "cars", "sop", "in-shop")))


def test_a_class_with_a_single_image_is_named(photos):
    for name in ("a/0.png", "a/1.png", "c/0.png", "c/1.png"):
        (photos / name).unlink()
    trained, unseen = about_lone_images(load_data(str(photos), seed=None))
    assert trained.startswith("1 of 2 training classes has a single image (a): ")
    assert unseen.startswith("1 of 2 unseen classes has a single image (c): ")
    assert "not counted" in unseen
    assert trained in prepare_data(DataConfig(str(photos), split_seed=None))[0].remarks
    spoil(photos, "b/0.png", "b/1.png")
    remarks = prepare_data(DataConfig(str(photos), split_seed=None))[0].remarks
    assert any(remark.startswith("2 of 2 training classes have a single image (a, b): ") for remark in remarks)


def test_a_single_unseen_class_is_named_since_any_model_is_right_on_it(photos):
    assert about_single_class(load_data(str(photos), seed=None)) == ()
    for name in ("c", "d"):
        shutil.rmtree(photos / name)
    (remark,) = about_single_class(load_data(str(photos), seed=None))
    assert remark.startswith("a single class is unseen (b), so that R@1 is 100 % for any model")
    assert remark in prepare_data(DataConfig(str(photos), split_seed=None))[0].remarks
    assert about_single_class(load_data(str(photos), split="images")) == ()


def test_classes_with_two_images_are_not_mentioned(photos):
    assert about_lone_images(load_data(str(photos), seed=None)) == ()


# ------------------------------------------------------------------------- held-out images of known classes


def known(photos, **options):
    return load_data(str(photos), split="images", **options)


def test_files_of_known_classes_that_cannot_be_read_leave_the_gallery_the_training_images(photos):
    data = known(photos)
    held, *others = (sorted(str(path.relative_to(photos)) for path in part.images) for part in (data.test, data.train))
    assert len(held) == 4
    trained = next(name for name in others[0] if name.startswith("b/"))
    spoil(photos, trained, held[0])
    left = without_unreadable(known(photos))
    assert left.gallery is left.train
    assert left.protocol == "images"
    assert left.train.class_names == left.test.class_names == CLASSES, "a trains, though nothing tests it"
    assert (len(left.train), len(left.test)) == (7, 3)
    for part in (left.train, left.test):
        assert [path.parent.name for path in part.images] == [part.class_names[label] for label in part.labels]


def test_a_known_class_whose_training_images_cannot_be_read_is_left_out_with_those_held_out(photos):
    spoil(photos, *(str(path.relative_to(photos)) for path in known(photos).train.images if path.parent.name == "b"))
    left = without_unreadable(known(photos))
    assert left.gallery is left.train
    assert left.train.class_names == left.test.class_names == ("a", "c", "d")
    assert len(left.test) == 3, "no query of a class that has nothing to be found"
    assert any("no training image of the class b can be read" in remark for remark in left.remarks)


@pytest.mark.parametrize("split", ["images", "none"])
def test_where_all_classes_train_noise_and_corrections_change_the_gallery_with_the_training_labels(photos, split):
    clean = prepare_data(DataConfig(str(photos), split=split)).data
    noisy, corruption = prepare_data(DataConfig(str(photos), split=split, noise=LabelNoise(0.5)))
    assert corruption.wrong == len(clean.train) // 2
    listed = photos.parent / "corrections.csv"
    Corrections({0: 3, 2: None}).write(listed, clean.train)
    corrected = prepare_data(DataConfig(str(photos), split=split, corrections=listed)).data
    assert int(corrected.train.labels[0]) == 3
    assert len(corrected.train) == len(clean.train) - 1
    for data in (clean, noisy, corrected):
        assert (data.gallery is data.train) == (split == "images")
        assert data.protocol == split
        assert data.test.labels.tolist() == clean.test.labels.tolist(), "what is tested stays"
        assert list(data.parts) == ["train", "test"], "a gallery that is the training images is no part of its own"


def test_lone_images_of_known_classes_are_named_once(photos):
    for name in ("a/0.png", "a/1.png"):
        (photos / name).unlink()
    remarks = prepare_data(DataConfig(str(photos), split="images")).data.remarks
    assert [remark for remark in remarks if "single image" in remark] == [
        "1 of 4 classes has a single image (a), which trains: nothing tests this class"
    ]
    [remark] = prepare_data(DataConfig(str(photos), split="none")).data.remarks
    assert remark.startswith("1 of 4 training classes has a single image (a): ")
