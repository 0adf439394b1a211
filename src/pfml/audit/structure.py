"""The structure of a set by its embeddings: images far from all others, classes that are one, a class that is two."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.audit.measures import robust_deviation
from pfml.data import ImageSet
from pfml.evaluation import nearest

__all__ = ["ClassFault", "Outlier", "find_merges", "find_outliers", "find_splits", "outlier_distances"]

#: Robust standard deviations of `outlier_distances` from which on an image is an outlier.
FAR = 3.5
#: The neighbor, and the share of the own class, that these are distances to.
FARTHER, OWN = 30, 0.1
#: Nearest images whose classes are compared, and the fewest images of a class or of a part of one.
NEIGHBORS, FEWEST = 5, 5
#: Fraction of the mixing by chance from which on two classes are one.
MIXED = 0.8
#: Fraction of the nearest images in the other part of a class up to which it is two.
APART = 0.05
#: Quantile of the distances of class means that the parts of such a class must exceed.
DIFFERENT = 0.25


@dataclass(frozen=True)
class Outlier:
    """An image that is far from all others.

    Args:
        index: Its position.
        distance: To others, on the unit sphere, by `outlier_distances`.
        usual: The median of these distances.
    """

    index: int
    distance: float
    usual: float


@dataclass(frozen=True)
class ClassFault:
    """Classes that should be merged, or a class that should be split.

    Args:
        kind: "merge" or "split".
        classes: The two labels, or the one.
        share: For "merge" the mixing of nearest neighbors, as a fraction of that of one class divided at random; for
            "split" the fraction of nearest neighbors within the class that are in the other part.
        examples: An image of each class, or of each part: that nearest to its mean.
        sizes: Images of each.
    """

    kind: str
    classes: tuple[int, ...]
    share: float
    examples: tuple[int, int]
    sizes: tuple[int, int]


def outlier_distances(points: Tensor, labels: Tensor) -> Tensor:
    """How far each image is from the others, (n,): the smaller of two distances.

    One is to the 30th nearest image, so that a few outliers of one kind do not vouch for each other. The other is to
    the nearest tenth of its own class, which a small class that is unlike all others vouches for by itself.

    Args:
        points: (n, D) unit vectors.
        labels: (n,).
    """
    found = _distance_to(points, min(FARTHER, (len(points) - 1) // 2))
    for label in labels.unique().tolist():
        rows = (labels == label).nonzero()[:, 0]
        if len(rows) > 1:
            within = _distance_to(points[rows], math.ceil(OWN * (len(rows) - 1)))
            found[rows] = torch.minimum(found[rows], within)
    return found


def _distance_to(points: Tensor, k: int) -> Tensor:
    """The distance of each point to its k-th nearest."""
    return (2 - 2 * nearest(points, None, k)[0][:, -1].double().cpu()).clamp(min=0).sqrt()


def find_outliers(points: Tensor, images: ImageSet) -> list[Outlier]:
    """The images that are unusually far from others, the farthest first; points are (n, D) unit vectors."""
    if len(points) < FEWEST:
        return []
    distances = outlier_distances(points, images.labels)
    unusual = robust_deviation(distances)
    usual = float(distances.median())
    order = unusual.argsort(descending=True).tolist()
    return [Outlier(k, float(distances[k]), usual) for k in order if unusual[k] > FAR]


def find_merges(points: Tensor, images: ImageSet) -> list[ClassFault]:
    """Pairs of classes whose images are mixed as those of one class would be, the most mixed first."""
    labels, classes = images.labels, images.num_classes
    sizes: list[int] = torch.bincount(labels, minlength=classes).tolist()
    if len(points) <= NEIGHBORS:
        return []
    neighbors = labels[nearest(points, None, NEIGHBORS)[1].cpu()]  # (n, k)
    codes, counts = (labels[:, None] * classes + neighbors).unique(return_counts=True)  # few of all pairs of classes
    votes = {divmod(code, classes): count for code, count in zip(codes.tolist(), counts.tolist(), strict=True)}
    found = []
    for one, other in sorted({(min(pair), max(pair)) for pair in votes if pair[0] != pair[1]}):
        if min(sizes[one], sizes[other]) < FEWEST:
            continue
        across = votes.get((one, other), 0) + votes.get((other, one), 0)
        within = votes.get((one, one), 0) + votes.get((other, other), 0)
        size, more = sizes[one], sizes[other]
        total = size + more
        chance = 2 * size * more / (total * (total - 1))  # an image is not its own neighbor
        share = across / max(across + within, 1.0) / chance
        if share >= MIXED:
            pair = (_central(points, labels == one), _central(points, labels == other))
            found.append(ClassFault("merge", (one, other), share, pair, (size, more)))
    return sorted(found, key=lambda fault: -fault.share)


def find_splits(points: Tensor, images: ImageSet) -> list[ClassFault]:
    """Classes that fall into two parts which are not each other's neighbors, the most separate first.

    The parts are by 2-means. They must be as far apart as different classes are, by the distances of class means.
    """
    labels, counts = images.labels, torch.bincount(images.labels, minlength=images.num_classes)
    present = (counts >= FEWEST).nonzero()[:, 0].tolist()
    if len(present) < 3:
        return []
    means = torch.stack([points[labels == c].mean(dim=0) for c in present])
    apart = torch.pdist(means)
    usual = float(apart.kthvalue(1 + int(DIFFERENT * (len(apart) - 1))).values)  # torch's quantile takes 2^24 at most
    found = []
    for label in (counts >= 2 * FEWEST).nonzero()[:, 0].tolist():
        rows = (labels == label).nonzero()[:, 0]
        own = points[rows]
        part = _two_means(own)
        sizes = int((~part).sum()), int(part.sum())
        if min(sizes) < FEWEST or float((own[part].mean(dim=0) - own[~part].mean(dim=0)).norm()) < usual:
            continue
        near = part[nearest(own, None, min(NEIGHBORS, len(own) - 1))[1].cpu()]
        crossing = float((near != part[:, None]).double().mean())
        if crossing <= APART:
            first, second = (rows[some] for some in (~part, part))
            pair = tuple(int(some[_closest(points[some])]) for some in (first, second))
            found.append(ClassFault("split", (label,), crossing, (pair[0], pair[1]), sizes))
    return sorted(found, key=lambda fault: fault.share)


def _two_means(points: Tensor, steps: int = 20) -> Tensor:
    """Which points are of the second of two clusters, (n,); it starts from the farthest points."""
    first = int((points - points.mean(dim=0)).norm(dim=1).argmax())
    second = int((points - points[first]).norm(dim=1).argmax())
    centers = points[[first, second]]
    part = torch.zeros(len(points), dtype=torch.bool)
    for _ in range(steps):
        part = torch.cdist(points, centers).argmin(dim=1) == 1
        if not part.any() or part.all():
            break
        centers = torch.stack([points[~part].mean(dim=0), points[part].mean(dim=0)])
    return part


def _central(points: Tensor, rows: Tensor) -> int:
    """The position of the image of the mask `rows` that is nearest to their mean."""
    own = rows.nonzero()[:, 0]
    return int(own[_closest(points[own])])


def _closest(points: Tensor) -> int:
    return int((points - points.mean(dim=0)).norm(dim=1).argmin())
