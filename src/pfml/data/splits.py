"""What one trains on, makes choices on, and tests on: different classes, or different images of the same classes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce

import torch

from pfml.data.image_set import PROTOCOLS, ImageSet, Protocol, RetrievalData, SeenClassError

__all__ = [
    "VALIDATION_SPLITS",
    "as_divided",
    "class_order",
    "described_test",
    "divided",
    "for_choices",
    "held_out_images",
    "wholly_unseen",
    "with_validation",
    "zero_shot",
]

FOLDS = 4
VALIDATION_SPLITS = ("none", "half", *(f"fold-{fold}" for fold in range(FOLDS)))
#: Share of the images of a known class that is held out.
HELD_OUT = 0.2
#: Training classes that `for_choices` can divide.
FEWEST_TUNED = 4
#: Names that a sentence lists.
LISTED = 3


def zero_shot(
    images: ImageSet,
    name: str,
    *,
    recall_at: tuple[int, ...] = (1, 2, 4, 8),
    remarks: tuple[str, ...] = (),
) -> RetrievalData:
    """Training on the first half of the classes of `images`, testing on the second; of C classes C // 2 train.

    Example:
        >>> images = ImageSet.unlabeled(torch.zeros(6, 3, 8, 8, dtype=torch.uint8))
        >>> images = ImageSet(images.images, torch.tensor([0, 0, 1, 1, 2, 3]), ("a", "b", "c", "d"))
        >>> zero_shot(images, "six").test
        ImageSet(2 images of 2 classes)
    """
    classes = images.num_classes
    if classes < 2:
        raise ValueError(f"{name} must have at least 2 classes, one to train on and one unseen, got {classes}")
    train = images.of_classes(range(classes // 2))
    test = images.of_classes(range(classes // 2, classes))
    return RetrievalData(name, train, test, recall_at=recall_at, remarks=remarks, is_halved=True)


def divided(
    images: ImageSet,
    name: str,
    split: Protocol = "classes",
    *,
    seed: int | None = 0,
    remarks: tuple[str, ...] = (),
) -> RetrievalData:
    """Images of one's own, divided at random by `split`: unseen classes, held-out images of known classes, or nothing.

    - "classes": half of the classes train, the rest is unseen. Classes with a single image, which cannot be found, are
      divided by themselves.
    - "images": a fifth of the images of every class is held out, one at least, and searched among the others. The image
      of a class that has only one trains.
    - "none": all images train.

    The position of a class or image follows from its name and the seed. So the rest of the division hardly changes when
    classes or images are added.

    Args:
        images: All of them.
        name: Of the data.
        split: See above.
        seed: Another seed is another division. None, for "classes", is the division of runs that are older than
            seeds: the first half of the classes trains.
        remarks: Sentences about the data.

    Example:
        >>> labels = torch.arange(4).repeat_interleave(5)
        >>> images = ImageSet(torch.zeros(20, 3, 8, 8, dtype=torch.uint8), labels, ("a", "b", "c", "d"))
        >>> divided(images, "mine", "images").test
        ImageSet(4 images of 4 classes)
    """
    if split not in PROTOCOLS:
        raise ValueError(f"split must be one of {', '.join(PROTOCOLS)}, got {split!r}")
    if split == "none":
        return RetrievalData(name, images, images.of_classes([]), remarks=remarks, protocol="none")
    if images.num_classes < 2:
        raise ValueError(f"{name} must have at least 2 classes, got {images.num_classes}")
    if split == "images":
        return _held_out(images, name, seed or 0, remarks)
    if seed is None:
        return zero_shot(images, name, remarks=remarks)
    counts = torch.bincount(images.labels, minlength=images.num_classes).tolist()
    order = sorted(range(images.num_classes), key=lambda c: _position(seed, images.class_names[c]))
    several, lone = ([c for c in order if (counts[c] > 1) == is_several] for is_several in (True, False))
    first = len(several) // 2
    trained = {*several[:first], *lone[: images.num_classes // 2 - first]}
    train, test = ([c for c in range(images.num_classes) if (c in trained) == is_train] for is_train in (True, False))
    return RetrievalData(
        name, images.of_classes(train), images.of_classes(test), remarks=remarks, is_halved=True, seed=seed
    )


def as_divided(
    name: str,
    parts: dict[str, ImageSet],
    split: Protocol = "classes",
    *,
    where: str,
    seed: int | None = 0,
    remarks: tuple[str, ...] = (),
) -> RetrievalData:
    """Images of one's own whose division is given: folders train and test, or the column split of a table.

    Args:
        name: Of the data.
        parts: Role -> images: train and test, and perhaps gallery and validation.
        split: "classes" if the test classes are unseen, "images" if they are those that train; "none" takes all images
            for training.
        where: What divides them, for messages.
        seed: By which `with_validation` will take classes out.
        remarks: Sentences about the data.
    """
    train, test, gallery, validation = (parts.get(role) for role in ("train", "test", "gallery", "validation"))
    assert train is not None
    assert test is not None
    if split == "none":
        return divided(reduce(ImageSet.joined, parts.values()), name, "none", remarks=remarks)
    if split == "images":
        if validation is not None:
            raise ValueError(f"data.split images has no use for validation images, got some in {where}: let them train")
        test, *searched = (_among_trained(each, train, where) for each in (test, gallery) if each is not None)
        gallery = [*searched, train][0]
        return RetrievalData(name, train, test, gallery=gallery, remarks=remarks, protocol="images", seed=seed)
    try:
        return RetrievalData(name, train, test, gallery=gallery, validation=validation, remarks=remarks, seed=seed)
    except SeenClassError as error:
        raise SeenClassError(f"{error}; to test on other images of classes that train, set data.split images") from None


def _among_trained(images: ImageSet, train: ImageSet, where: str) -> ImageSet:
    """`images` with labels by the classes that train, which must include theirs."""
    others = sorted({*images.class_names} - {*train.class_names})
    if others:
        are = "does" if len(others) == 1 else "do"
        raise ValueError(
            f"with data.split images, all test classes of {where} must train, but {_listed(others)} {are} not: "
            f"set data.split classes if none of them does"
        )
    return images.in_classes(train.class_names)


def _held_out(images: ImageSet, name: str, seed: int, remarks: tuple[str, ...]) -> RetrievalData:
    """Some images of every class as queries, searched among the others, which train."""
    held = held_out_images(images, seed)
    counts = torch.bincount(images.labels, minlength=images.num_classes)
    lone = [images.class_names[label] for label in (counts == 1).nonzero()[:, 0].tolist()]
    if not held:
        raise ValueError(
            f"{name} must have a class with two images or more to hold one out, got one image of each class: "
            f"add images, or set data.split none"
        )
    if lone:
        have = "has" if len(lone) == 1 else "have"
        about = f"{len(lone):,} of {images.num_classes:,} classes {have} a single image ({_listed(lone)})"
        remarks = (
            *remarks,
            f"{about}, which trains: nothing tests {'this class' if len(lone) == 1 else 'these classes'}",
        )
    is_held = torch.zeros(len(images), dtype=torch.bool)
    is_held[held] = True
    train, test = (images.subset(some.nonzero()[:, 0]) for some in (~is_held, is_held))
    return RetrievalData(name, train, test, gallery=train, remarks=remarks, protocol="images", seed=seed)


def held_out_images(images: ImageSet, seed: int) -> list[int]:
    """The positions of a fifth of the images of every class, at random by their names; of a lone image none."""
    positions = [_position(seed, name) for name in images.short_names()]
    of_class: list[list[int]] = [[] for _ in images.class_names]
    for k, label in enumerate(images.labels.tolist()):
        of_class[label].append(k)
    held: list[int] = []
    for own in of_class:
        if len(own) > 1:
            own.sort(key=positions.__getitem__)
            held += own[: max(1, round(HELD_OUT * len(own)))]
    return held


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED:,} more" if len(names) > LISTED else "")


def _position(seed: int | None, name: str) -> str:
    """Where a name stands in the random order of a seed."""
    return hashlib.sha256(f"{seed}/{name}".encode(errors="surrogatepass")).hexdigest()


def wholly_unseen(data: RetrievalData, seen: Iterable[str]) -> RetrievalData:
    """`data` with all classes to test on if none of them is among `seen` and nothing said how to divide them.

    Images of one's own are divided into halves so that one can train on them. A model that knows none of their
    classes can be tested on all.
    """
    known = set(seen)
    if not data.is_halved or known & {*data.train.class_names, *data.test.class_names}:
        return data
    nothing = data.train.of_classes([])
    return replace(data, train=nothing, test=data.train.joined(data.test), is_halved=False)


def described_test(data: RetrievalData, *, held_out: str = "held-out") -> str:
    """What is tested, with its counts, for a title; `held_out` is what images of known classes are called.

    Example:
        >>> described_test(divided(ImageSet.unlabeled(torch.zeros(2, 3, 8, 8, dtype=torch.uint8)), "two", "none"))
        'nothing held out'
    """
    if data.protocol == "none":
        return PROTOCOLS["none"]
    kind, classes = (
        ("unseen", data.test.num_classes) if data.protocol == "classes" else ("known", len(data.test.labels.unique()))
    )
    held = f"{held_out} " if data.protocol == "images" else ""
    return f"{len(data.test):,} {held}images of {classes:,} {kind} classes"


def with_validation(data: RetrievalData, split: str) -> RetrievalData:
    """`data` with some of its training classes set apart for choices; the test images stay as they are.

    Args:
        data: With training classes in their order; those of one's own images are first shuffled by their seed.
        split: "half" as in ProxyNCA++: the first half of the C training classes trains (C // 2 of them), the second
            validates. "fold-0" to "fold-3" as in A Metric Learning Reality Check: of four contiguous blocks of
            classes, this one validates and the other three train. Block k has the classes from k C // 4 up to
            (k + 1) C // 4, so that each class validates once even if C is not a multiple of 4 (the original code
            rounds each length down: with 98 classes it never validates on 2 of them). "none": `data` itself.
            Classes that came later are divided by themselves, and all train where they are too few to divide.
    """
    if split not in VALIDATION_SPLITS:
        raise ValueError(f"validation split must be one of {', '.join(VALIDATION_SPLITS)}, got {split!r}")
    if split == "none":
        return data
    if data.protocol != "classes":
        raise ValueError(
            f"data.validation sets classes apart, and data.split {data.protocol} trains on all of them: "
            f"leave data.validation none, got {split!r}"
        )
    if data.validation is not None:
        raise ValueError(f"{data.name} has validation images of its own, so that the split must be none, got {split!r}")
    names = data.train.class_names
    parts = 2 if split == "half" else FOLDS
    added = [[c for c, name in enumerate(names) if name in group] for group in map(set, data.added_classes)]
    first = sorted({*range(len(names))}.difference(*added))
    if len(first) < parts:
        raise ValueError(f"{split!r} must have at least {parts} training classes to divide, got {len(first)}")
    block = 1 if split == "half" else int(split.removeprefix("fold-"))
    validating: set[int] = set()
    for group in (first, *(each for each in added if len(each) >= parts)):
        if data.seed is not None:
            group.sort(key=lambda c: _position(data.seed, f"validation/{names[c]}"))
        validating |= {*group[block * len(group) // parts : (block + 1) * len(group) // parts]}
    kept, held_out = ([c for c in range(len(names)) if (c in validating) == is_held] for is_held in (False, True))
    return replace(data, train=data.train.of_classes(kept), validation=data.train.of_classes(held_out))


def for_choices(data: RetrievalData, split: str) -> RetrievalData:
    """`data` to choose settings by: the test images are left out, and others that would train are tested on.

    Those are the validation classes of the data, or classes taken out by `split` as `with_validation` does. With the
    protocol "images" they are a fifth of the training images of every class, whatever the split.

    Args:
        data: As it would train; labels and all.
        split: One of `VALIDATION_SPLITS`.
    """
    if data.protocol == "none":
        raise ValueError(
            "tuning needs images to judge by, and data.split none holds nothing out: set data.split classes or images"
        )
    if data.protocol == "images":
        most = int(data.train.labels.bincount(minlength=1).max())
        if most < 2:
            raise ValueError(
                f"tuning holds out another image of every class, and must have one with 2 training images or more, "
                f"got {most}: add images"
            )
        return divided(data.train, data.name, "images", seed=data.seed)
    if data.validation is None and split == "none":
        raise ValueError("tuning needs classes to judge by: split must be half or fold-0 to fold-3, got 'none'")
    if data.validation is None and data.train.num_classes < FEWEST_TUNED:
        more = f" until there are {2 * FEWEST_TUNED}, of which half train" if data.is_halved else ""
        raise ValueError(
            f"tuning divides the training classes once more, 2 to train on and 2 to evaluate on, and must have "
            f"{FEWEST_TUNED} of them, got {data.train.num_classes}: add class folders{more}, or hold out images "
            f"in place of classes (--data.split images)"
        )
    whole, data = data.train.num_classes, data if data.validation is not None else with_validation(data, split)
    train, judges = data.train, data.validation
    assert judges is not None
    # of one class, every neighbor is right
    if min(train.num_classes, judges.num_classes) < 2 or int(judges.labels.bincount().max()) < 2:
        raise ValueError(
            f"tuning divides the training classes once more, and must keep 2 to train on and 2 to evaluate on, one of "
            f"them with two images; of {whole} training classes, split {split} leaves {train.num_classes} and "
            f"{judges.num_classes}: add class folders, take another split (half, fold-0 to fold-3), or hold out images "
            f"in place of classes (--data.split images)"
        )
    return replace(data, test=judges, validation=None, gallery=None)


def class_order(names: Iterable[str]) -> list[str]:
    """The different names in order: by number if all are whole numbers, else by text."""
    different = set(names)
    if all(re.fullmatch(r"[+-]?\d+", name) for name in different):
        return sorted(different, key=lambda name: (int(name), name))
    return sorted(different)
