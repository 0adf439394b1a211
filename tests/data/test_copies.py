"""Exact copies, against the contents themselves, and the remarks on them before training."""

import pytest
import torch

from pfml.data import ImageSet, RetrievalData, load_data
from pfml.data.copies import about_copies, exact_copies
from pfml.data.own_images import own_images
from small_photos import draw


@pytest.fixture
def photos(tmp_path):
    """Three classes of three images, of which none is a copy."""
    return draw(tmp_path / "photos", {"a": 3, "b": 3, "c": 3})


def grouped(folder, **options):
    images, _ = load_data(str(folder), **options).joined()
    return [{"/".join(images.images[k].parts[-2:]) for k in group} for group in exact_copies(images)]


def test_files_of_equal_content_are_found_whatever_their_names(photos):
    assert grouped(photos, split="none") == []
    (photos / "b" / "copy.png").write_bytes((photos / "a" / "0.png").read_bytes())
    (photos / "a" / "again.png").write_bytes((photos / "a" / "0.png").read_bytes())
    (photos / "c" / "copy.png").write_bytes((photos / "c" / "1.png").read_bytes())
    assert grouped(photos, split="none") == [{"a/0.png", "a/again.png", "b/copy.png"}, {"c/1.png", "c/copy.png"}]


def test_only_files_of_equal_size_are_read(photos, monkeypatch):
    for number, path in enumerate(sorted(photos.rglob("*.png"))):
        path.write_bytes(path.read_bytes() + bytes(number))  # all of different sizes
    monkeypatch.setattr("pfml.data.copies.sha256_of", None)
    assert grouped(photos, split="none") == []


def test_a_file_that_is_gone_is_no_copy(photos):
    (photos / "b" / "copy.png").write_bytes((photos / "a" / "0.png").read_bytes())
    images, _ = load_data(str(photos), split="none").joined()
    (photos / "b" / "copy.png").unlink()
    assert exact_copies(images) == []


def test_pixels_are_compared_too():
    pixels = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels[3], pixels[4] = pixels[0], pixels[1]
    assert exact_copies(ImageSet.unlabeled(pixels)) == [[0, 3], [1, 4]]


def test_copies_in_other_classes_and_of_training_images_are_said_before_training(photos):
    data = own_images(str(photos), load_data(str(photos), split="images"))
    assert not any("copy" in remark or "copies" in remark for remark in data.remarks)
    held_out = data.test.images[0]
    trained = next(path for path in data.train.images if path.parent != held_out.parent)
    held_out.write_bytes(trained.read_bytes())
    remarks = own_images(str(photos), load_data(str(photos), split="images")).remarks
    assert [remark for remark in remarks if remark.startswith("2 images have an exact copy in another class")]
    said = [remark for remark in remarks if remark.startswith("1 held-out image is an exact copy of training images")]
    assert "/".join(held_out.parts[-2:]) in said[0]
    assert "/".join(trained.parts[-2:]) in said[0]


def test_a_copy_in_its_own_class_and_part_is_not_said():
    pixels = torch.arange(4)[:, None, None, None].expand(4, 3, 2, 2).byte().clone()
    pixels[1] = pixels[0]
    train = ImageSet(pixels[:3], torch.tensor([0, 0, 1]), ("a", "b"))
    assert about_copies(RetrievalData("few", train, ImageSet(pixels[3:], torch.tensor([0]), ("c",)))) == ()
