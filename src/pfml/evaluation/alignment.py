"""Distance of proxies to the embeddings of their class: the paper's W2, and the Wasserstein-2 distance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.evaluation.nearest_neighbors import directions

__all__ = ["Alignment", "matched_distances", "proxy_alignment"]


@dataclass(frozen=True, eq=False)
class Alignment:
    """Distances between the proxies of a class and as many distinct embeddings of it, under the best matching.

    The paper calls the mean of first-power distances W2; that is `paper`. `wasserstein2` is the distance of that name.
    Both are means over the classes that have embeddings.

    Args:
        paper: Mean over classes of `paper_per_class`.
        wasserstein2: Mean over classes of `wasserstein2_per_class`.
        paper_per_class: (C,) float64: least mean distance of matched pairs; NaN for a class without embeddings.
        wasserstein2_per_class: (C,) float64: root of the least mean squared distance of matched pairs; NaN likewise.
        num_classes: Classes that are in the means.
    """

    paper: float
    wasserstein2: float
    paper_per_class: Tensor
    wasserstein2_per_class: Tensor
    num_classes: int


def proxy_alignment(proxies: Tensor, embeddings: Tensor, labels: Tensor) -> Alignment:
    """The alignment of proxies (C, M, D) with embeddings (N, D) whose labels lie in [0, C); all are normalized here.

    The M proxies of a class are matched one to one with M of its embeddings; a single proxy thus with the nearest one.
    Where a class has fewer embeddings than proxies, each embedding gets a proxy of its own, and the proxies that are
    left over count nothing.

    Example:
        >>> proxies = torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]]])
        >>> alignment = proxy_alignment(proxies, torch.tensor([[3.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1]))
        >>> alignment.paper_per_class
        tensor([0.0000, 1.4142], dtype=torch.float64)
    """
    if proxies.ndim != 3 or embeddings.ndim != 2 or proxies.shape[2] != embeddings.shape[1]:
        raise ValueError(
            f"proxies must be (C, M, D) and embeddings (N, D), got {tuple(proxies.shape)} and {tuple(embeddings.shape)}"
        )
    if labels.shape != embeddings.shape[:1]:
        raise ValueError(f"labels must be ({len(embeddings)},), one per embedding, got {tuple(labels.shape)}")
    if len(labels) == 0:
        raise ValueError("embeddings must not be empty: no class has any")
    if not (labels.min() >= 0 and labels.max() < len(proxies)):
        low, high = int(labels.min()), int(labels.max())
        raise ValueError(f"labels must lie in [0, {len(proxies)}), the classes of the proxies, got {low} to {high}")

    charges = directions(proxies.flatten(0, 1), "proxies").unflatten(0, proxies.shape[:2]).cpu()
    points, labels = directions(embeddings, "embeddings").cpu(), labels.cpu()
    per_class = torch.full((2, len(proxies)), torch.nan, dtype=torch.float64)
    order = labels.argsort(stable=True)
    members = order.split(torch.bincount(labels, minlength=len(proxies)).tolist())
    for number, own in enumerate(members):
        if len(own):
            per_class[:, number] = _matched(charges[number].double(), points[own].double())
    paper, wasserstein2 = per_class.nanmean(dim=1).tolist()
    return Alignment(paper, wasserstein2, per_class[0], per_class[1], int((~per_class[0].isnan()).sum()))


def matched_distances(distances: Tensor, *, power: int) -> Tensor:
    """The distances under the one-to-one matching of rows to columns with the least sum of distance^power.

    Args:
        distances: (M, n) on the CPU.
        power: 1 for the paper's W2, 2 for the Wasserstein-2 distance.

    Returns:
        (min(M, n),), in the order of the rows.

    Example:
        >>> matched_distances(torch.tensor([[1.0, 5.0], [2.0, 9.0]]), power=1)
        tensor([5., 2.])
    """
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(distances.pow(power).numpy())
    return distances[torch.from_numpy(rows), torch.from_numpy(columns)]


def _matched(proxies: Tensor, points: Tensor) -> Tensor:
    """(2,): mean distance and root of the mean squared distance, each under the matching that makes it smallest."""
    distances = torch.cdist(proxies, points, compute_mode="donot_use_mm_for_euclid_dist")
    return torch.stack([matched_distances(distances, power=power).pow(power).mean().pow(1 / power) for power in (1, 2)])
