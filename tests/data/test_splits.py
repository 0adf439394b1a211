"""Splits by class against their definitions in the literature, and divisions by a seed against loops."""

import hashlib
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfml.data import ImageSet, RetrievalData, SeenClassError, load_data, with_validation, zero_shot
from pfml.data.splits import as_divided, class_order, described_test, divided, for_choices, wholly_unseen

SEEDS = st.integers(0, 2**63 - 1)
#: How many images each class has; the names of classes follow from their positions.
COUNTS = st.lists(st.integers(1, 12), min_size=2, max_size=12)


def position(seed, name):
    return hashlib.sha256(f"{seed}/{name}".encode()).hexdigest()


def trained_by_loops(counts, seed):
    """The names of the classes that train, of a dict from name to number of images."""
    several = sorted((name for name in counts if counts[name] > 1), key=lambda name: position(seed, name))
    lone = sorted((name for name in counts if counts[name] == 1), key=lambda name: position(seed, name))
    chosen = several[: len(several) // 2]
    return {*chosen, *lone[: len(counts) // 2 - len(chosen)]}


def held_out_by_loops(files, seed):
    """The files that are held out, of a dict from class to its files below the root."""
    held = set()
    for names in files.values():
        if len(names) > 1:
            count = max(1, round(len(names) / 5))
            held |= set(sorted(names, key=lambda name: position(seed, name))[:count])
    return held


def files_of(counts):
    return {f"class {c}": [f"class {c}/{k}.png" for k in range(count)] for c, count in enumerate(counts)}


def images_in(files, root="/photos", order=None):
    """An image set of such files, listed in another order by a generator of random numbers."""
    names = [(name, file) for name, own in files.items() for file in own]
    classes = list(files)
    if order is not None:
        order.shuffle(names)
        order.shuffle(classes)
    labels = torch.tensor([classes.index(name) for name, _ in names])
    return ImageSet(tuple(Path(root, file) for _, file in names), labels, tuple(classes))


def below(images, root="/photos"):
    return {path.relative_to(root).as_posix() for path in images.images}


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


# ------------------------------------------------------------------------------------- divided by a seed


@settings(deadline=None)
@given(COUNTS, SEEDS, st.randoms(use_true_random=False))
def test_classes_are_divided_by_the_hash_of_seed_and_name_whatever_the_order_and_the_place(counts, seed, order):
    files = files_of(counts)
    expected = trained_by_loops({name: len(own) for name, own in files.items()}, seed)
    for images in (images_in(files), images_in(files, "/elsewhere/deep", order)):
        data = divided(images, "mine", seed=seed)
        assert {*data.train.class_names} == expected
        assert {*data.test.class_names} == {*files} - expected
        assert len(data.train) + len(data.test) == sum(counts)
        assert list(data.train.class_names) == [name for name in images.class_names if name in expected], "in order"
        assert (data.protocol, data.seed, data.is_halved) == ("classes", seed, True)


@settings(deadline=None)
@given(COUNTS, SEEDS)
def test_half_of_the_classes_train_and_there_is_something_to_find(counts, seed):
    data = divided(images_in(files_of(counts)), "mine", seed=seed)
    assert data.train.num_classes == len(counts) // 2
    several = sum(count > 1 for count in counts)
    assert sum(torch.bincount(data.test.labels) > 1) == several - several // 2, "at least one if there is any"
    assert sum(torch.bincount(data.train.labels) > 1) == several // 2, "at least one if there are two"


@settings(deadline=None)
@given(COUNTS, SEEDS, st.integers(1, 9))
def test_another_class_moves_at_most_one_class_of_several_images(counts, seed, images):
    files = files_of(counts)
    before = {*divided(images_in(files), "mine", seed=seed).train.class_names}
    files["one more"] = [f"one more/{k}.png" for k in range(images)]
    after = {*divided(images_in(files), "mine", seed=seed).train.class_names} - {"one more"}
    moved = before ^ after
    assert sum(len(files[name]) > 1 for name in moved) <= 1
    assert sum(len(files[name]) == 1 for name in moved) <= 1


def test_classes_are_never_divided_by_the_alphabet():
    images = images_of(20)
    divisions = [frozenset(numbers(divided(images, "mine", seed=seed).train)) for seed in range(20)]
    assert len(set(divisions)) == 20, "another seed is another division"
    assert all(len(trained) == 10 for trained in divisions)
    for c in (0, 19):
        assert 4 <= sum(c in trained for trained in divisions) <= 16, "each class trains in about half of them"
    assert frozenset(range(10)) not in divisions


def test_without_a_seed_the_division_is_that_of_older_runs():
    data = divided(images_of(6), "mine", seed=None)
    assert (numbers(data.train), data.seed) == ([0, 1, 2], None)
    assert numbers(with_validation(divided(images_of(16), "mine", seed=None), "half").validation) == [4, 5, 6, 7]


@settings(deadline=None)
@given(st.integers(4, 40), SEEDS)
def test_validation_classes_of_ones_own_are_taken_by_the_hash_too(classes, seed):
    data = divided(images_of(2 * classes), "mine", seed=seed)
    order = sorted(data.train.class_names, key=lambda name: position(seed, f"validation/{name}"))
    validated = []
    for fold in range(4):
        parts = with_validation(data, f"fold-{fold}")
        assert {*parts.validation.class_names} == {*order[fold * classes // 4 : (fold + 1) * classes // 4]}
        assert {*parts.train.class_names} == {*order} - {*parts.validation.class_names}
        validated += parts.validation.class_names
    assert sorted(validated) == sorted(order), "each once"
    assert {*with_validation(data, "half").validation.class_names} == {*order[classes // 2 :]}


def test_validation_classes_are_not_the_last_of_the_alphabet():
    data = zero_shot(images_of(40), "mine")
    found = {tuple(numbers(with_validation(replace(data, seed=seed), "half").validation)) for seed in range(10)}
    assert len(found) == 10
    assert tuple(range(10, 20)) not in found


# ---------------------------------------------------------------------------- held-out images of known classes


@settings(deadline=None)
@given(COUNTS, SEEDS, st.randoms(use_true_random=False))
def test_images_are_held_out_by_the_hash_of_seed_and_file_whatever_the_order_and_the_place(counts, seed, order):
    files = files_of(counts)
    expected = held_out_by_loops(files, seed)
    if not expected:
        with pytest.raises(ValueError, match="a class with two images or more to hold one out, got one image of each"):
            divided(images_in(files), "mine", "images", seed=seed)
        return
    for root, images in (("/photos", images_in(files)), ("/a/b", images_in(files, "/a/b", order))):
        data = divided(images, "mine", "images", seed=seed)
        assert below(data.test, root) == expected
        assert below(data.train, root) == {file for own in files.values() for file in own} - expected
        assert data.gallery is data.train
        assert data.train.class_names == data.test.class_names == images.class_names
        label_of = dict(zip(images.images, images.labels.tolist(), strict=True))
        for part in (data.train, data.test):
            assert [label_of[path] for path in part.images] == part.labels.tolist()


@settings(deadline=None)
@given(COUNTS.filter(lambda counts: max(counts) > 1), SEEDS)
def test_every_class_of_two_images_has_one_that_is_held_out_and_one_that_trains(counts, seed):
    data = divided(images_in(files_of(counts)), "mine", "images", seed=seed)
    trained, held = (torch.bincount(part.labels, minlength=len(counts)).tolist() for part in (data.train, data.test))
    assert all(trained)
    assert [bool(count) for count in held] == [count > 1 for count in counts]
    assert [a + b for a, b in zip(trained, held, strict=True)] == counts
    lone = [f"class {c}" for c, count in enumerate(counts) if count == 1]
    assert len(data.remarks) == bool(lone)
    assert all(name in data.remarks[0] for name in lone[:3])


def test_a_fifth_of_the_images_is_held_out():
    data = divided(images_in(files_of([20, 50, 10])), "mine", "images")
    assert torch.bincount(data.test.labels).tolist() == [4, 10, 2]
    other = divided(images_in(files_of([20, 50, 10])), "mine", "images", seed=1)
    assert below(data.test) != below(other.test)


def test_an_image_that_is_added_moves_at_most_one_image_of_its_class_and_none_of_others():
    files = files_of([9, 9, 30])
    before = below(divided(images_in(files), "mine", "images").test)
    for number in range(10):
        files["class 0"] = [*files_of([9])["class 0"], f"class 0/new {number}.png"]
        moved = before ^ below(divided(images_in(files), "mine", "images").test)
        assert len(moved) <= 2, "one that joins, and one that makes room for it"
        assert all(file.startswith("class 0/") for file in moved)


def test_nothing_is_held_out_where_that_is_asked_for():
    data = divided(images_of(5), "mine", "none", remarks=("hello",))
    assert (len(data.train), len(data.test), data.gallery, data.validation) == (10, 0, None, None)
    assert (data.protocol, data.remarks, data.test.num_classes) == ("none", ("hello",), 0)
    assert described_test(data) == "nothing held out"


def test_what_is_tested_has_a_title():
    assert described_test(divided(images_of(6), "mine")) == "6 images of 3 unseen classes"
    assert described_test(divided(images_in(files_of([5, 1, 9])), "mine", "images")) == (
        "3 held-out images of 2 known classes"
    )


@pytest.mark.parametrize("split", ["images", "none"])
def test_no_validation_classes_are_set_apart_where_all_classes_train(split):
    data = divided(images_of(8), "mine", split)
    assert with_validation(data, "none") is data
    with pytest.raises(ValueError, match=f"data.split {split} trains on all of them: leave data.validation none"):
        with_validation(data, "half")
    assert wholly_unseen(data, ()) is data, "what was trained on is never tested on"


def test_a_split_that_is_none_of_the_three_is_refused():
    with pytest.raises(ValueError, match="split must be one of classes, images, none, got 'half'"):
        divided(images_of(4), "mine", "half")
    with pytest.raises(ValueError, match="mine must have at least 2 classes, got 1"):
        divided(images_of(1), "mine", "images")


@pytest.mark.parametrize("split", ["images", "none"])
@pytest.mark.parametrize("name", ["glyphs", "cub", "cars", "sop", "in-shop"])
def test_published_sets_have_their_published_test_classes(name, split, tmp_path):
    with pytest.raises(ValueError, match=f"{name} is published with test classes.*data.split must be classes, got"):
        load_data(name, None if name == "glyphs" else tmp_path, split=split)


def seconds_to_divide(classes):
    """CPU time to divide so many classes of two images in every way."""
    labels = torch.arange(classes).repeat_interleave(2)
    files = tuple(Path(f"/photos/{k // 2}/{k}.png") for k in range(2 * classes))
    images = ImageSet(files, labels, tuple(map(str, range(classes))))
    started = time.process_time()
    for split in ("classes", "images", "none"):
        data = divided(images, "mine", split)
        assert len(data.train) == {"classes": classes, "images": classes, "none": 2 * classes}[split]
    with_validation(divided(images, "mine"), "half")
    return time.process_time() - started


def test_the_time_to_divide_classes_grows_with_their_number_not_with_its_square():
    few, many = (min(seconds_to_divide(classes) for _ in range(3)) for classes in (1_000, 8_000))
    assert many < 24 * few, "8 times the classes take 8 times as long; where each looks at all, 64 times"


# ------------------------------------------------------------------------------------- a division that is given


def parts_of(**classes):
    """Role -> images of these classes, two of each."""
    return {
        role: images_in({name: [f"{role}/{name}/{k}.png" for k in range(2)] for name in names.split()})
        for role, names in classes.items()
    }


def test_a_given_division_of_classes_stays():
    parts = parts_of(train="a b c", test="d e")
    data = as_divided("mine", parts, where="list.csv", seed=3)
    assert (data.train, data.test, data.gallery) == (parts["train"], parts["test"], None)
    assert (data.protocol, data.is_halved, data.seed) == ("classes", False, 3)
    with pytest.raises(SeenClassError, match="but a is also trained on; to test on other images.*data.split images$"):
        as_divided("mine", parts_of(train="a b", test="a c"), where="list.csv")


def test_a_given_division_of_images_is_searched_among_those_that_train_or_in_its_gallery():
    parts = parts_of(train="b a c", test="a b")
    data = as_divided("mine", parts, "images", where="list.csv")
    assert data.gallery is data.train is parts["train"]
    assert data.test.class_names == ("b", "a", "c")
    assert [data.test.class_names[label] for label in data.test.labels] == ["a", "a", "b", "b"]
    own = as_divided("mine", parts_of(train="b a c", test="a b", gallery="a b"), "images", where="list.csv")
    assert {path.parts[2] for path in own.gallery.images} == {"gallery"}
    assert [own.gallery.class_names[label] for label in own.gallery.labels] == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ({"test": "a d"}, "all test classes of list.csv must train, but d does not: set data.split classes"),
        ({"test": "d e f g"}, "but d, e, f and 1 more do not"),
        ({"test": "a", "gallery": "a x"}, "but x does not"),
        ({"test": "a", "validation": "v"}, "has no use for validation images, got some in list.csv"),
    ],
)
def test_known_classes_that_do_not_train_are_named(classes, message):
    with pytest.raises(ValueError, match=message):
        as_divided("mine", parts_of(train="a b c", **classes), "images", where="list.csv")


def test_all_parts_of_a_given_division_train_where_nothing_is_held_out():
    parts = parts_of(train="b a", test="a c", validation="d")
    data = as_divided("mine", parts, "none", where="list.csv")
    assert (data.protocol, len(data.train), len(data.test)) == ("none", 10, 0)
    assert data.train.class_names == ("b", "a", "c", "d")
    assert all(
        data.train.class_names[label] == path.parent.name
        for label, path in zip(data.train.labels.tolist(), data.train.images, strict=True)
    )


# --------------------------------------------------------------------------------------------------- choices


def test_choices_are_made_on_other_classes_or_other_images_and_never_on_the_test():
    data = divided(images_of(16, per_class=5), "mine", seed=1)
    chosen, expected = for_choices(data, "fold-1"), with_validation(data, "fold-1")
    assert (chosen.train.images, chosen.test.images) == (expected.train.images, expected.validation.images)
    assert (chosen.validation, chosen.gallery) == (None, None)
    known = divided(images_in(files_of([10] * 3)), "mine", "images", seed=4)
    chosen = for_choices(known, "half")
    assert chosen.gallery is chosen.train
    assert below(chosen.train) | below(chosen.test) == below(known.train)
    assert torch.bincount(chosen.test.labels).tolist() == [2, 2, 2]
    assert below(for_choices(replace(known, seed=5), "half").test) != below(chosen.test)


def test_choices_are_made_on_the_validation_images_that_the_data_brings():
    parts = parts_of(train="a b", test="c d", validation="e f")
    for split in ("none", "half"):
        chosen = for_choices(as_divided("mine", parts, where="list.csv"), split)
        assert (chosen.train, chosen.test) == (parts["train"], parts["validation"])


@pytest.mark.parametrize(
    ("data", "split", "message"),
    [
        (divided(images_of(8), "mine", "none"), "half", "data.split none holds nothing out: set data.split classes or"),
        (divided(images_of(8), "mine"), "none", "split must be half or fold-0 to fold-3, got 'none'"),
        (divided(images_of(8), "mine", "images"), "half", "one with 2 training images or more, got 1: add images"),
        (divided(images_of(4), "mine"), "half", "must have 4 of them, got 2: add class folders until there are 8"),
        (divided(images_of(8), "mine"), "fold-0", "of 4 training classes, split fold-0 leaves 3 and 1: "),
        (zero_shot(images_of(16, per_class=1), "mine"), "half", "one of them with two images"),
    ],
)
def test_choices_with_nothing_to_judge_by_are_refused(data, split, message):
    with pytest.raises(ValueError, match=message):
        for_choices(data, split)
