"""Exact copies: images with the same content, and what their owner should know of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable, Iterable
from pathlib import Path

from torch import Tensor

from pfml.data.dataset_images import DatasetImages
from pfml.data.image_set import ImageSet, RetrievalData
from pfml.storage.files import sha256_of

__all__ = ["about_copies", "exact_copies"]


def exact_copies(images: ImageSet) -> list[list[int]]:
    """Positions of images with the same content, in groups of two or more, in order.

    Content is compared by SHA-256. Only files of equal size are read; those that cannot be read are left out.

    Example:
        >>> import torch
        >>> pixels = torch.zeros(3, 3, 2, 2, dtype=torch.uint8)
        >>> pixels[1] = 9
        >>> exact_copies(ImageSet.unlabeled(pixels))
        [[0, 2]]
    """
    if isinstance(images.images, Tensor):
        pixels = images.images.contiguous().numpy()
        return _groups(enumerate(hashlib.sha256(each.data).digest() for each in pixels))
    if isinstance(images.images, DatasetImages):
        return _groups(enumerate(hashlib.sha256(each.numpy().data).digest() for each in images.images))
    files = images.images
    of_size = _groups((k, _size_of(path)) for k, path in enumerate(files))
    return sorted(group for alike in of_size for group in _groups((k, _digest_of(files[k])) for k in alike))


def about_copies(data: RetrievalData) -> tuple[str, ...]:
    """Remarks on exact copies in another class, and on exact copies in training and held-out images."""
    images, roles = data.joined()
    groups = exact_copies(images)
    labels, names = images.labels.tolist(), images.short_names()
    remarks = []
    mixed = [group for group in groups if len({labels[k] for k in group}) > 1]
    if mixed:
        first = mixed[0][0]
        other = next(k for k in mixed[0] if labels[k] != labels[first])
        remarks.append(
            f"{sum(map(len, mixed)):,} images have an exact copy in another class ({names[first]} and {names[other]}): "
            f"at least one label of each is noise; pfml audit lists them"
        )
    leaked = [group for group in groups if len({roles[k] == "train" for k in group}) > 1]
    if leaked:
        held_out = [k for group in leaked for k in group if roles[k] != "train"]
        trained = next(k for k in leaked[0] if roles[k] == "train")
        are = "held-out image is an exact copy" if len(held_out) == 1 else "held-out images are exact copies"
        remarks.append(
            f"{len(held_out):,} {are} of training images ({names[held_out[0]]} of {names[trained]}): "
            f"results on them are too good; leave them out"
        )
    return tuple(remarks)


def _groups(keys: Iterable[tuple[int, Hashable | None]]) -> list[list[int]]:
    """The positions that share a key, in groups of two or more; None is no key."""
    found: dict[Hashable, list[int]] = {}
    for k, key in keys:
        if key is not None:
            found.setdefault(key, []).append(k)
    return [group for group in found.values() if len(group) > 1]


def _size_of(path: Path) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def _digest_of(path: Path) -> str | None:
    try:
        return sha256_of(path)
    except OSError:
        return None
