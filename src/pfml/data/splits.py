"""Which classes one trains on, makes choices on, and tests on: always different ones."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from pfml.data.image_set import ImageSet, RetrievalData

__all__ = ["VALIDATION_SPLITS", "class_order", "wholly_unseen", "with_validation", "zero_shot"]

FOLDS = 4
VALIDATION_SPLITS = ("none", "half", *(f"fold-{fold}" for fold in range(FOLDS)))


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


def with_validation(data: RetrievalData, split: str) -> RetrievalData:
    """`data` with some of its training classes set apart for choices; the test images stay as they are.

    Args:
        data: With training classes in their order.
        split: "half" as in ProxyNCA++: the first half of the C training classes trains (C // 2 of them), the second
            validates. "fold-0" to "fold-3" as in A Metric Learning Reality Check: of four contiguous blocks of
            classes, this one validates and the other three train. Block k has the classes from k C // 4 up to
            (k + 1) C // 4, so that each class validates once even if C is not a multiple of 4 (the original code
            rounds each length down: with 98 classes it never validates on 2 of them). "none": `data` itself.
    """
    if split not in VALIDATION_SPLITS:
        raise ValueError(f"validation split must be one of {', '.join(VALIDATION_SPLITS)}, got {split!r}")
    if split == "none":
        return data
    if data.validation is not None:
        raise ValueError(f"{data.name} has validation images of its own, so that the split must be none, got {split!r}")
    classes = data.train.num_classes
    parts = 2 if split == "half" else FOLDS
    if classes < parts:
        raise ValueError(f"{split!r} must have at least {parts} training classes to divide, got {classes}")
    block = 1 if split == "half" else int(split.removeprefix("fold-"))
    held_out = range(block * classes // parts, (block + 1) * classes // parts)
    kept = [c for c in range(classes) if c not in held_out]
    return replace(data, train=data.train.of_classes(kept), validation=data.train.of_classes(held_out))


def class_order(names: Iterable[str]) -> list[str]:
    """The different names in order: by number if all are whole numbers, else by text."""
    different = set(names)
    if all(re.fullmatch(r"[+-]?\d+", name) for name in different):
        return sorted(different, key=lambda name: (int(name), name))
    return sorted(different)
