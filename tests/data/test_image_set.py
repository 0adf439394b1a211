"""The shared types refuse what would go wrong later."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pfml.data import ImageSet, RetrievalData, SeenClassError


def files(labels, names):
    return ImageSet(tuple(Path(f"{k}.jpg") for k in range(len(labels))), torch.tensor(labels), tuple(names))


def pixels(count):
    images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
    return ImageSet(images, torch.arange(count) % 2, ("even", "odd"), tuple(f"number {k}" for k in range(count)))


def test_of_classes_keeps_their_images_and_numbers_them_in_the_order_asked_for():
    chosen = files([0, 1, 2, 1, 0], "abc").of_classes([2, 0])
    assert chosen.class_names == ("c", "a")
    assert chosen.labels.tolist() == [1, 0, 1]
    assert chosen.images == (Path("0.jpg"), Path("2.jpg"), Path("4.jpg"))


def test_a_subset_of_pixels_takes_its_sources_along():
    chosen = pixels(4).subset([3, 1])
    assert chosen.images[:, 0, 0, 0].tolist() == [3, 1]
    assert chosen.sources == ("number 3", "number 1")
    assert chosen.labels.tolist() == [1, 1]
    assert chosen.class_names == ("even", "odd")


def test_an_image_is_named_by_its_source_else_its_file_else_its_position():
    assert pixels(2).name_of(1) == "number 1"
    assert files([0, 1], "ab").name_of(1) == "1.jpg"
    assert replace(pixels(2), sources=None).name_of(1) == "image 1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.tensor([0, 1, 2])}, r"labels must lie in \[0, 2\).*got 0 to 2"),
        ({"labels": torch.tensor([0, 1])}, r"labels must be int64 of shape \(3,\)"),
        ({"labels": torch.tensor([0, 1, 1], dtype=torch.int32)}, "got torch.int32"),
        ({"class_names": ("a", "a")}, "got 'a' twice"),
        ({"sources": ("one",)}, "sources must name 3 images, got 1"),
        ({"images": torch.zeros(3, 3, 2, 2)}, "pixels must be uint8.*got torch.float32"),
        ({"images": torch.zeros(3, 1, 2, 2, dtype=torch.uint8)}, r"got torch.uint8 of shape \(3, 1, 2, 2\)"),
    ],
)
def test_an_image_set_that_contradicts_itself_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(files([0, 1, 1], "ab"), **change)


def test_a_class_cannot_be_both_trained_on_and_tested():
    with pytest.raises(SeenClassError, match="test classes must be unseen, but b is also trained on"):
        RetrievalData("mine", files([0, 1], "ab"), files([0, 1], "bc"))


@pytest.mark.parametrize("seen", ["a", "c"])
def test_validation_classes_are_neither_trained_on_nor_tested(seen):
    with pytest.raises(SeenClassError, match="validation classes must be unseen"):
        RetrievalData("mine", files([0, 1], "ab"), files([0], "c"), validation=files([0], seen))


def test_a_gallery_has_the_classes_of_the_queries():
    with pytest.raises(ValueError, match="gallery and test"):
        RetrievalData("mine", files([0], "a"), files([0, 1], "bc"), gallery=files([0], "b"))
