"""Images of one's own: files that cannot be read are left out, counted and named; lone images are named."""

import pytest
import torch

from pfml.data import load_data, open_images, without_unreadable
from pfml.data.decoding import UnreadableImagesError, decode_files
from pfml.data.own_images import about_lone_images, is_own
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


def test_classes_with_two_images_are_not_mentioned(photos):
    assert about_lone_images(load_data(str(photos), seed=None)) == ()
