"""Scores that rank images by how likely they are mislabeled; high is suspicious.

Ours compares how strongly the classes attract an image: Eq. 4 without its sign, with the image left out of its own
field. The field is that of the proxies and of all other images. Attraction is a sum of positive terms that decay with
the distance, so the classes' shares of it are like probabilities. k-NN and cleanlab are there to compare with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.energy import DISTANCES_AT_ONCE
from pfml.evaluation import nearest
from pfml.field import DecayLaw, PowerLaw, attraction

__all__ = [
    "ALPHAS",
    "SCORES",
    "LabelScores",
    "class_attractions",
    "cleanlab_scores",
    "field_scores",
    "fitted_law",
    "knn_scores",
    "knn_votes",
    "strength",
    "unjudged",
]

#: Rates of decay that `fitted_law` chooses from.
ALPHAS = (3.0, 6.0, 12.0, 24.0, 48.0)
#: Images that `fitted_law` compares the labels of.
SAMPLE = 1024
CLEANLAB = "cleanlab on k-NN"
#: Neighbors of the k-NN scores.
K = 20


@dataclass(frozen=True, eq=False)
class LabelScores:
    """A score and a suggestion for each image.

    Args:
        score: (n,) float64; -inf for an image that cannot be judged; it is in no ranking.
        suggested: (n,) the best class other than the given one.
    """

    score: Tensor
    suggested: Tensor


def strength(r: Tensor, law: DecayLaw) -> Tensor:
    """-psi_att(r): how strongly a charge attracts its own class at distance r."""
    return -attraction(law, shifted=False).potential(r)


def class_attractions(
    points: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    law: DecayLaw,
    proxies: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """-Psi_j,att (Eq. 4) of every class j at each image, (n, C) in float64, in bounded memory.

    Args:
        points: The images, (n, D) unit vectors; none of them acts on itself.
        labels: (n,) in [0, C).
        num_classes: C.
        law: Must decay: its attraction is negative everywhere.
        proxies: (C, M, D); None for a field of images alone.
        rows: Positions of the images to compute it at; None for all.
    """
    if not law.decays:
        raise ValueError(f"the law of an audit must decay with the distance, got {law}: use the fitted one")
    charges, classes = points.double(), labels.long()
    if proxies is not None and proxies.numel():
        own = torch.arange(num_classes, device=labels.device).repeat_interleave(proxies.shape[1])
        charges = torch.cat([charges, proxies.to(points.device).flatten(0, 1).double()])
        classes = torch.cat([classes, own])
    rows = torch.arange(len(points)) if rows is None else rows
    result = torch.empty(len(rows), num_classes, dtype=torch.float64, device=points.device)
    at_once = max(DISTANCES_AT_ONCE // max(len(charges), 1), 1)
    for out, part in zip(result.split(at_once), rows.split(at_once), strict=True):
        pull = strength(torch.cdist(charges, charges[part]), law)  # (m, k)
        pull[part, torch.arange(len(part))] = 0.0  # none acts on itself
        out.copy_(pull.new_zeros(num_classes, len(part)).index_add_(0, classes, pull).T)
    return result


def fitted_law(points: Tensor, labels: Tensor, num_classes: int, *, proxies: Tensor | None = None) -> PowerLaw:
    """The power law whose field overrules the fewest given labels.

    delta is the median distance to the nearest neighbor: nearer than that, all are equally near. alpha is the one of
    `ALPHAS` for which the fewest images are attracted more strongly by another class than by their own, counted on a
    fixed subsample of at most 1,024 images. No true label is needed for that. The law that trained the run is made
    to move points, and may be much too flat to tell classes apart where all points are close.
    """
    similarities, _ = nearest(points, None, 1)
    distances = (2 - 2 * similarities[:, 0].double()).clamp(min=0).sqrt()
    positive = distances[distances > 0]
    delta = float(positive.median()) if len(positive) else 1.0
    rows = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:SAMPLE].sort().values
    best, fewest = ALPHAS[0], math.inf
    for alpha in ALPHAS:
        law = PowerLaw(delta=delta, alpha=alpha)
        pull = class_attractions(points, labels, num_classes, law=law, proxies=proxies, rows=rows)
        overruled = int((pull.argmax(dim=1) != labels[rows]).sum())
        if overruled < fewest:
            best, fewest = alpha, overruled
    return PowerLaw(delta=delta, alpha=best)


def field_scores(attractions: Tensor, labels: Tensor) -> LabelScores:
    """log of the attraction of the best other class over that of the own class."""
    own, best, suggested = _own_and_best(attractions, labels)
    tiny = torch.finfo(attractions.dtype).tiny
    score = best.clamp(min=tiny).log() - own.clamp(min=tiny).log()
    return LabelScores(torch.where(own > 0, score, -torch.inf), suggested)


def knn_votes(points: Tensor, labels: Tensor, num_classes: int, k: int = K) -> Tensor:
    """The share of each class among the k nearest other images, (n, C)."""
    k = min(k, len(points) - 1)
    neighbors = nearest(points, None, k)[1].cpu()
    votes = torch.zeros(len(points), num_classes, dtype=torch.float64)
    return votes.scatter_add_(1, labels[neighbors], torch.full(neighbors.shape, 1.0 / k, dtype=torch.float64))


def knn_scores(votes: Tensor, labels: Tensor) -> LabelScores:
    """The share of the k nearest neighbors with another label; ties by how much they agree on one."""
    own, best, suggested = _own_and_best(votes, labels)
    return LabelScores(1 - own + 1e-3 * best, suggested)


def cleanlab_scores(votes: Tensor, labels: Tensor) -> LabelScores:
    """One minus cleanlab's label quality (self-confidence) of the k-NN probabilities."""
    try:
        from cleanlab.rank import get_label_quality_scores  # type: ignore[import-untyped]
    except ImportError:
        raise ImportError("the comparison with cleanlab needs it: pip install 'pfml[audit]'") from None
    smooth = votes + 1e-3
    probabilities = smooth / smooth.sum(dim=1, keepdim=True)
    quality = get_label_quality_scores(labels.numpy(), probabilities.numpy(), method="self_confidence")
    return LabelScores(1 - torch.as_tensor(quality, dtype=torch.float64), _own_and_best(votes, labels)[2])


#: Scores to compare with, by the name that tables show: functions of k-NN votes and labels.
SCORES: dict[str, Callable[[Tensor, Tensor], LabelScores]] = {
    "k-NN disagreement": knn_scores,
    CLEANLAB: cleanlab_scores,
}


def unjudged(scores: LabelScores, rows: Tensor) -> LabelScores:
    """`scores` with the images of the mask `rows`, (n,) bool, not judged."""
    return LabelScores(scores.score.masked_fill(rows, -torch.inf), scores.suggested)


def _own_and_best(values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The value of the own class, the greatest other one, and which that is; each (n,)."""
    rows = torch.arange(len(labels))
    others = values.clone()
    others[rows, labels] = -torch.inf
    best = others.max(dim=1)
    return values[rows, labels], best.values, best.indices
