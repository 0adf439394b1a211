"""k-means in bounded memory, and the normalized mutual information of two partitions."""

from __future__ import annotations

import torch
from torch import Tensor

from pfml.precision import full_precision

__all__ = ["kmeans", "normalized_mutual_information"]

#: Distances that are held at once.
AT_ONCE = {"cpu": 2**22, "cuda": 2**26}
#: Centers are seeded in at most about this many rounds.
ROUNDS = 256


def kmeans(points: Tensor, num_clusters: int, *, seed: int = 0, iterations: int = 20) -> Tensor:
    """The cluster of each point, (N,) int64 in [0, num_clusters): Lloyd's algorithm from k-means++ seeds.

    Seeds are sampled one at a time, each with probability proportional to the squared distance from those before it.
    Beyond 256 clusters several are sampled per round, since every round reads all points: 45 for 11,316 clusters.
    A cluster that loses all its points is moved to the point that is farthest from its own center.

    Args:
        points: (N, D).
        num_clusters: At most N.
        seed: The result depends on nothing else, but for the rounding of sums on a GPU.
        iterations: At most; it stops when no point changes its cluster.
    """
    if not 1 <= num_clusters <= len(points):
        raise ValueError(f"num_clusters must lie in [1, {len(points)}], the number of points, got {num_clusters}")
    generator = torch.Generator().manual_seed(seed)
    with full_precision(points.device):
        centers = _seeds(points, num_clusters, generator)
        clusters, squares = _assign(points, centers)
        for _ in range(iterations):
            centers = _means(points, clusters, squares, num_clusters)
            moved, squares = _assign(points, centers)
            if torch.equal(moved, clusters):
                break
            clusters = moved
    return clusters


def _seeds(points: Tensor, num_clusters: int, generator: torch.Generator) -> Tensor:
    """k-means++: (num_clusters, D)."""
    chosen = torch.randint(len(points), (1,), generator=generator)
    squares = _assign(points, points[chosen])[1]
    per_round = -(-num_clusters // ROUNDS)
    while len(chosen) < num_clusters:
        count = min(per_round, num_clusters - len(chosen))
        weights = squares.double().cpu()
        weights[chosen] = 0
        more = _sample(weights, chosen, count, generator)
        chosen = torch.cat([chosen, more])
        squares = torch.minimum(squares, _assign(points, points[more])[1])
    return points[chosen]


def _sample(weights: Tensor, chosen: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` distinct points with probabilities proportional to `weights`; any others if too few have a weight.

    The smallest of exponential variables divided by the weights: torch.multinomial refuses more than 2^24 points.
    """
    keys = torch.empty_like(weights).exponential_(generator=generator) / weights
    spare = weights == 0
    keys[spare] = torch.finfo(torch.float64).max
    keys[chosen] = torch.inf
    return keys.topk(count, largest=False).indices


def _assign(points: Tensor, centers: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest center of each point and the squared distance to it, (N,) each."""
    nearest = torch.empty(len(points), dtype=torch.int64, device=points.device)
    squares = points.new_empty(len(points))
    half = centers.square().sum(dim=1) / 2
    rows = max(AT_ONCE[points.device.type] // len(centers), 1)
    for start in range(0, len(points), rows):
        some = points[start : start + rows]
        score, nearest[start : start + rows] = torch.addmm(half, some, centers.T, alpha=-1).min(dim=1)
        squares[start : start + rows] = (some.square().sum(dim=1) + 2 * score).clamp_min_(0)
    return nearest, squares


def _means(points: Tensor, clusters: Tensor, squares: Tensor, num_clusters: int) -> Tensor:
    """The mean of each cluster; a far point for one without members."""
    counts = torch.bincount(clusters, minlength=num_clusters)
    sums = torch.zeros(num_clusters, points.shape[1], dtype=torch.float64, device=points.device)
    for some in torch.arange(len(points), device=points.device).split(4096):
        sums.index_add_(0, clusters[some], points[some].double())
    centers = (sums / counts.clamp_min(1)[:, None]).to(points.dtype)
    empty = (counts == 0).nonzero()[:, 0]
    if len(empty):
        centers[empty] = points[squares.topk(len(empty)).indices]
    return centers


def normalized_mutual_information(first: Tensor, second: Tensor) -> float:
    """I(first; second) divided by the arithmetic mean of their entropies; 1 if both are one single cluster.

    Args:
        first: (N,) integers.
        second: (N,) integers.
    """
    if first.ndim != 1 or first.shape != second.shape or len(first) == 0:
        raise ValueError(
            f"both partitions must be (N,) of the same points, got {tuple(first.shape)} and {tuple(second.shape)}"
        )
    first_names, first = first.unique(return_inverse=True)
    second_names, second = second.to(first.device).unique(return_inverse=True)
    if len(first_names) == len(second_names) == 1:
        return 1.0
    pairs, counts = (first * len(second_names) + second).unique(return_counts=True)
    joint = counts.double() / len(first)
    rows = torch.bincount(first).double() / len(first)
    columns = torch.bincount(second).double() / len(first)
    expected = rows[pairs // len(second_names)] * columns[pairs % len(second_names)]
    information = (joint * (joint / expected).log()).sum()
    entropies = _entropy(rows) + _entropy(columns)
    return float((2 * information / entropies).clamp(0, 1))


def _entropy(probabilities: Tensor) -> Tensor:
    return -(probabilities * probabilities.log()).sum()
