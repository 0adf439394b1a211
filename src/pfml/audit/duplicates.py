"""Duplicates: images that are copies of each other, exact or nearly so, within a class and across classes and parts.

Exact copies have the same content. Near copies (recompressed, resized, slightly cropped, mirrored) are found in two
steps: pairs whose embeddings are nearer than nearest neighbors usually are, and of these the pairs whose gray
thumbnails correlate. The nearer the embeddings, the less the thumbnails must, since a crop moves all pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.data import ImageSet
from pfml.data.copies import exact_copies
from pfml.evaluation import nearest

__all__ = ["LIMITS", "DuplicateGroup", "find_duplicates", "near_pairs"]

#: Distance up to which a pair may be copies, as a fraction of the median distance to the nearest neighbor, and the
#: correlation of the two thumbnails from which on it is.
LIMITS = ((0.85, 0.95), (0.6, 0.8))
#: Neighbors of an image that are compared.
NEIGHBORS = 10
#: Standard deviation of luminance below which an image is plain, and difference of two plain ones that are the same.
PLAIN, SAME = 0.01, 0.004


@dataclass(frozen=True)
class DuplicateGroup:
    """Images that are copies of each other.

    Args:
        indices: Their positions, in order.
        is_exact: Whether all have the same content.
        is_across_classes: Whether their labels differ: at least one is noise.
        is_across_parts: Whether training images and held-out ones are among them.
    """

    indices: tuple[int, ...]
    is_exact: bool
    is_across_classes: bool
    is_across_parts: bool


def find_duplicates(
    images: ImageSet, points: Tensor, thumbnails: Tensor, roles: Sequence[str] = ()
) -> list[DuplicateGroup]:
    """All groups of copies: those across classes first, then those across parts, then by size.

    Args:
        images: With their given labels.
        points: (n, D) their embeddings.
        thumbnails: (n, side, side) of `pfml.audit.measures.image_measures`.
        roles: The part of the data that each image is in; () if there are none.
    """
    exact = exact_copies(images)
    content = {k: number for number, group in enumerate(exact) for k in group}
    linked = [(group[0], k) for group in exact for k in group[1:]]
    labels = images.labels.tolist()
    groups = [
        DuplicateGroup(
            tuple(group),
            content.get(group[0]) is not None and len({content.get(k) for k in group}) == 1,
            len({labels[k] for k in group}) > 1,
            bool(roles) and len({roles[k] == "train" for k in group}) > 1,
        )
        for group in _components(len(images), [*linked, *near_pairs(points, thumbnails)])
    ]
    return sorted(groups, key=lambda one: (not one.is_across_classes, not one.is_across_parts, -len(one.indices)))


def near_pairs(points: Tensor, thumbnails: Tensor) -> list[tuple[int, int]]:
    """Pairs of positions of images that are nearly the same, by their embeddings and by their thumbnails."""
    if len(points) < 2:
        return []
    similarities, found = nearest(points, None, min(NEIGHBORS, len(points) - 1))
    distances = (2 - 2 * similarities.double()).clamp(min=0).sqrt().cpu()
    distances = distances / distances[:, 0].median().clamp(min=1e-6)
    first, column = (distances < max(limit for limit, _ in LIMITS)).nonzero().unbind(dim=1)
    second, apart = found.cpu()[first, column], distances[first, column]
    needed = torch.ones(len(first))
    for limit, correlation in LIMITS:
        needed[apart < limit] = needed[apart < limit].clamp(max=correlation)
    flat, mirrored = thumbnails.flatten(1), thumbnails.flip(2).flatten(1)
    same = torch.zeros(len(first), dtype=torch.bool)
    for rows in torch.arange(len(first)).split(2**14):
        one, other, turned = flat[first[rows]], flat[second[rows]], mirrored[second[rows]]
        same[rows] = _same(one, other, needed[rows]) | _same(one, turned, needed[rows])
    pairs = zip(first[same].tolist(), second[same].tolist(), strict=True)
    return sorted({(min(pair), max(pair)) for pair in pairs})


def _same(first: Tensor, second: Tensor, needed: Tensor) -> Tensor:
    """Whether thumbnails, (m, pixels), correlate as `needed`, or are plain and equally bright, (m,)."""
    spread = torch.stack([first.std(dim=1), second.std(dim=1)])
    means = torch.stack([first.mean(dim=1), second.mean(dim=1)])
    product = ((first - means[0][:, None]) * (second - means[1][:, None])).mean(dim=1)
    correlated = product > needed * spread[0] * spread[1]
    is_plain = spread < PLAIN
    return torch.where(is_plain.any(dim=0), is_plain.all(dim=0) & ((means[0] - means[1]).abs() < SAME), correlated)


def _components(count: int, pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The connected components of two or more, each in order."""
    parent = list(range(count))

    def root(k: int) -> int:
        while parent[k] != k:
            parent[k] = parent[parent[k]]
            k = parent[k]
        return k

    for one, other in pairs:
        low, high = sorted((root(one), root(other)))
        parent[high] = low
    found: dict[int, list[int]] = {}
    for k in range(count):
        found.setdefault(root(k), []).append(k)
    return [group for group in found.values() if len(group) > 1]
