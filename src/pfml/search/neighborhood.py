"""The nearest images of queries as tensors, and what their classes say: votes, attraction, spread.

Attraction is that of `pfml.evaluation.class_attraction`, of the nearest images alone: what is farther adds little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.evaluation.class_attraction import strength
from pfml.field import DecayLaw
from pfml.precision import full_precision
from pfml.search.backends import distances_between

__all__ = [
    "NEIGHBORS",
    "ClassAttraction",
    "Neighborhood",
    "class_spreads",
    "mean_nearest_distance",
    "nearest_neighborhood",
]

#: Images that vote on the class of a query.
NEIGHBORS = 24
#: Bytes of similarities, and of vectors, that are held at once.
MEMORY = 2**26


@dataclass(frozen=True, eq=False)
class ClassAttraction:
    """The most attractive class of each query, (n,) each.

    Args:
        labels: The class; -1 if no neighbor has one.
        votes: Neighbors of this class.
        voters: Neighbors that have a class.
        potential: Its attraction.
        second: The attraction of the next class; 0 if there is none.
        weakest: The attraction of the last neighbor: an image that is no neighbor attracts no more.
        total: The attraction of all neighbors that have a class.
    """

    labels: Tensor
    votes: Tensor
    voters: Tensor
    potential: Tensor
    second: Tensor
    weakest: Tensor
    total: Tensor


@dataclass(frozen=True, eq=False)
class Neighborhood:
    """The K nearest images of each query, nearest first.

    Args:
        distances: (n, K) float64; infinite where a gallery has fewer than K images.
        labels: (n, K) classes; -1 for an image without a class, and where there is no image.
        spread: (n,) the spread of the class of the nearest image (`class_spreads`); NaN where it has none.
    """

    distances: Tensor
    labels: Tensor
    spread: Tensor

    def attraction(self, law: DecayLaw) -> ClassAttraction:
        """How strongly the classes of the neighbors attract each query, in bounded memory.

        Args:
            law: Must decay.
        """
        k = self.distances.shape[1]
        tiles = zip(
            *(each.split(max(MEMORY // (16 * k * k), 1)) for each in (self.distances, self.labels)), strict=True
        )
        found = [_attraction(distances, labels, law) for distances, labels in tiles]
        return ClassAttraction(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _attraction(distances: Tensor, labels: Tensor, law: DecayLaw) -> tuple[Tensor, ...]:
    """The fields of `ClassAttraction` for some queries."""
    pull = strength(distances.clamp(max=2.0), law).masked_fill(distances.isinf(), 0.0)  # (n, K)
    has_class = labels >= 0
    is_same = (labels[:, :, None] == labels[:, None, :]) & has_class[:, None, :]  # (n, K, K)
    of_class = (is_same * pull[:, None, :]).sum(dim=2)  # (n, K): of the class of each neighbor
    first = of_class.argmax(dim=1, keepdim=True)  # of equal ones the nearest
    top = labels.gather(1, first)
    is_top = (labels == top) & (top >= 0)
    return (
        top[:, 0],
        is_top.sum(dim=1),
        has_class.sum(dim=1),
        of_class.gather(1, first)[:, 0],
        of_class.masked_fill(is_top, 0.0).max(dim=1).values,
        pull.masked_fill(pull == 0, torch.inf).min(dim=1).values.nan_to_num(posinf=0.0),
        (pull * has_class).sum(dim=1),
    )


def class_spreads(points: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """The mean distance of an image to the nearest other image of its class.

    Args:
        points: (N, D) unit vectors.
        labels: (N,) in [0, C).
        num_classes: C.

    Returns:
        The spread of each class, (C,) float64, and for each image that of its class without this image, (N,). NaN for
        less than two images.
    """
    spreads = torch.full((num_classes,), torch.nan, dtype=torch.float64)
    without = torch.full((len(points),), torch.nan, dtype=torch.float64)
    for label in labels.unique().tolist():
        own = (labels == label).nonzero()[:, 0]
        if len(own) < 2:
            continue
        distances, positions = _two_nearest(points[own], torch.arange(len(own)))
        nearest, second = distances.unbind(1)
        spreads[label] = nearest.mean()
        if len(own) > 2:
            # without an image, those that are nearest to it have their second as their nearest
            longer = torch.zeros_like(nearest).index_add_(0, positions[:, 0], second - nearest)
            without[own] = (nearest.sum() - nearest + longer) / (len(own) - 1)
    return spreads, without


def mean_nearest_distance(points: Tensor, *, most: int) -> float:
    """The mean distance of a point to the nearest other one, of `most` points, evenly spaced; NaN for less than two.

    Args:
        points: (n, D) unit vectors.
        most: Points at most whose nearest is looked for, among all.
    """
    if len(points) < 2:
        return math.nan
    rows = torch.linspace(0, len(points) - 1, min(most, len(points))).round().long()
    return float(_two_nearest(points, rows)[0][:, 0].mean())


def _two_nearest(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Distances and positions (n, 2) of the two points nearest to those of `rows`; of two points one is both."""
    found = []
    for some in rows.split(max(MEMORY // (4 * len(points)), 1)):
        with full_precision(points.device):
            similarities = points[some] @ points.T
        similarities[torch.arange(len(some)), some] = -torch.inf
        found.append(similarities.topk(min(2, len(points) - 1), dim=1).indices)
    positions = torch.cat(found)
    if positions.shape[1] == 1:
        positions = positions.expand(-1, 2)
    columns = [distances_between(points[rows], points[column]) for column in positions.unbind(1)]
    return torch.stack(columns, 1), positions


def nearest_neighborhood(
    points: Tensor,
    labels: Tensor,
    gallery: Tensor | None,
    gallery_labels: Tensor,
    *,
    num_classes: int,
    without_own_class: bool,
    k: int = NEIGHBORS,
) -> Neighborhood:
    """The neighborhood of each point in a gallery, in bounded memory.

    Args:
        points: Queries, (N, D) unit vectors.
        labels: Their classes, (N,).
        gallery: (G, D) unit vectors; None to search the queries among each other, each without itself.
        gallery_labels: (G,) in [0, C); the labels themselves if there is no gallery.
        num_classes: C.
        without_own_class: Whether a query's own class is taken out of the gallery.
        k: Neighbors at most.
    """
    items = points if gallery is None else gallery
    k = min(k, len(items))
    spreads, without = class_spreads(items, gallery_labels, num_classes)
    at_once = max(MEMORY // max(4 * len(items), 12 * k * items.shape[1]), 1)
    distances, found = [], []
    for rows in torch.arange(len(points)).split(at_once):
        with full_precision(points.device):
            similarities = points[rows] @ items.T
        if without_own_class:
            similarities.masked_fill_(labels[rows, None] == gallery_labels[None, :], -torch.inf)
        elif gallery is None:
            similarities[torch.arange(len(rows)), rows] = -torch.inf
        values, positions = similarities.topk(k, dim=1)
        pairs = distances_between(points[rows].repeat_interleave(k, 0), items[positions.flatten()]).view(-1, k)
        pairs, order = pairs.masked_fill(values == -torch.inf, torch.inf).sort(dim=1, stable=True)
        distances.append(pairs)
        found.append(positions.gather(1, order))
    r, neighbors = torch.cat(distances), torch.cat(found)
    classes = gallery_labels[neighbors].masked_fill(r.isinf(), -1)
    nearest = classes[:, 0]
    spread = spreads[nearest].masked_fill(nearest < 0, torch.nan)
    if gallery is None and not without_own_class:
        # an image is no part of the class that it is compared with
        spread = torch.where(nearest == labels, without, spread)
    return Neighborhood(r, classes, spread)
