"""Splits by class against their definitions in the literature."""

from pathlib import Path

import pytest
import torch

from pfml.data import ImageSet, RetrievalData, with_validation, zero_shot
from pfml.data.splits import class_order


def images_of(classes, per_class=2):
    labels = torch.arange(classes).repeat(per_class)
    names = tuple(f"class {c:05}" for c in range(classes))
    return ImageSet(tuple(Path(f"{k}.jpg") for k in range(len(labels))), labels, names)


def data_with(train_classes):
    return zero_shot(images_of(2 * train_classes), "mine")


def numbers(images):
    return [int(name.split()[1]) for name in images.class_names]


@pytest.mark.parametrize(("classes", "training"), [(200, 100), (196, 98), (7, 3), (2, 1)])
def test_zero_shot_trains_on_the_first_half_of_the_classes(classes, training):
    data = zero_shot(images_of(classes), "mine", recall_at=(1, 5), remarks=("hello",))
    assert numbers(data.train) == list(range(training))
    assert numbers(data.test) == list(range(training, classes))
    assert len(data.train) == 2 * training
    assert (data.name, data.recall_at, data.remarks) == ("mine", (1, 5), ("hello",))


def test_zero_shot_takes_each_image_to_the_side_of_its_class():
    data = zero_shot(images_of(4), "mine")
    assert data.test.images == (Path("2.jpg"), Path("3.jpg"), Path("6.jpg"), Path("7.jpg"))
    assert data.test.labels.tolist() == [0, 1, 0, 1]


def test_zero_shot_refuses_a_single_class():
    with pytest.raises(ValueError, match="mine must have at least 2 classes.*got 1"):
        zero_shot(images_of(1), "mine")


@pytest.mark.parametrize(("classes", "training"), [(100, 50), (98, 49), (1_318, 659), (5, 2)])
def test_half_trains_on_the_first_half_of_the_training_classes(classes, training):
    data = data_with(classes)
    divided = with_validation(data, "half")
    assert numbers(divided.train) == list(range(training))
    assert numbers(divided.validation) == list(range(training, classes))
    assert divided.test is data.test


def test_the_folds_of_100_classes_are_blocks_of_25():
    for fold in range(4):
        divided = with_validation(data_with(100), f"fold-{fold}")
        block = range(25 * fold, 25 * (fold + 1))
        assert numbers(divided.validation) == list(block)
        assert numbers(divided.train) == [c for c in range(100) if c not in block]
        assert len(divided.train) == 150


@pytest.mark.parametrize("classes", [4, 5, 6, 7, 98, 141])
def test_each_class_validates_in_exactly_one_fold_of_nearly_equal_size(classes):
    parts = [with_validation(data_with(classes), f"fold-{fold}") for fold in range(4)]
    assert [c for part in parts for c in numbers(part.validation)] == list(range(classes))
    sizes = [part.validation.num_classes for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert all(part.train.num_classes + part.validation.num_classes == classes for part in parts)


def test_none_leaves_the_data_as_it_is():
    data = data_with(4)
    assert with_validation(data, "none") is data


def test_a_gallery_stays_with_the_test_images():
    data = data_with(4)
    with_gallery = RetrievalData("mine", data.train, data.test, gallery=data.test, recall_at=(1, 10))
    divided = with_validation(with_gallery, "half")
    assert divided.gallery is data.test
    assert divided.recall_at == (1, 10)


@pytest.mark.parametrize(
    ("classes", "split", "message"),
    [
        (4, "fold-4", "must be one of none, half, fold-0, .*got 'fold-4'"),
        (3, "fold-0", "'fold-0' must have at least 4 training classes to divide, got 3"),
        (1, "half", "'half' must have at least 2 training classes to divide, got 1"),
    ],
)
def test_a_split_that_does_not_exist_is_refused(classes, split, message):
    with pytest.raises(ValueError, match=message):
        with_validation(data_with(classes), split)


def test_validation_is_set_apart_only_once():
    with pytest.raises(ValueError, match="validation images of its own"):
        with_validation(with_validation(data_with(8), "half"), "fold-0")


def test_classes_are_ordered_by_number_if_all_are_numbers():
    assert class_order(["10", "9", "-1", "9"]) == ["-1", "9", "10"]
    assert class_order(["10", "9", "a"]) == ["10", "9", "a"]
    assert class_order(["07", "7"]) == ["07", "7"]
