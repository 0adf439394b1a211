"""Ways to rank training images by how wrong their labels look; high is suspicious."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.energy import class_potentials
from pfml.evaluation import nearest
from pfml.field import DecayLaw, attraction, repulsion

__all__ = ["SCORES", "LabelScores", "cleanlab_scores", "field_scores", "knn_scores", "potential_scores", "unjudged"]

CLEANLAB = "cleanlab on k-NN"
#: Neighbors that are asked by the ways that ask neighbors.
K = 20


@dataclass(frozen=True, eq=False)
class LabelScores:
    """A score and a suggestion for each image.

    Args:
        score: (n,) float64; -inf where nothing can be said: such an image is not judged, and in no ranking.
        suggested: (n,) the best class other than the given one.
    """

    score: Tensor
    suggested: Tensor


def field_scores(attractions: Tensor, labels: Tensor) -> LabelScores:
    """log of the attraction of the best other class over that of the own class."""
    own, best, suggested = _own_and_best(attractions, labels)
    tiny = torch.finfo(attractions.dtype).tiny
    score = best.clamp(min=tiny).log() - own.clamp(min=tiny).log()
    return LabelScores(torch.where(own > 0, score, -torch.inf), suggested)


def potential_scores(points: Tensor, labels: Tensor, proxies: Tensor, law: DecayLaw) -> LabelScores:
    """Psi_own - min over the other classes of Psi_j (Eq. 3), each image left out of its field."""
    num_classes = len(proxies)
    proxy_labels = torch.arange(num_classes).repeat_interleave(proxies.shape[1])
    charges, classes = torch.cat([points, proxies.flatten(0, 1)]), torch.cat([labels, proxy_labels])
    potentials = class_potentials(points, charges, classes, num_classes, law=law)
    itself = torch.zeros(1, dtype=torch.float64)
    potentials -= repulsion(law, shifted=False).potential(itself)
    mates = repulsion(law, shifted=False).potential(itself) - attraction(law, shifted=False).potential(itself)
    potentials[torch.arange(len(labels)), labels] += mates
    own, best, suggested = _own_and_best(-potentials, labels)
    return LabelScores(best - own, suggested)


def knn_votes(points: Tensor, labels: Tensor, num_classes: int, k: int = K) -> Tensor:
    """The share of each class among the k nearest other images, (n, C)."""
    k = min(k, len(points) - 1)
    neighbors = nearest(points, None, k)[1].cpu()
    votes = torch.zeros(len(points), num_classes, dtype=torch.float64)
    return votes.scatter_add_(1, labels[neighbors], torch.full(neighbors.shape, 1.0 / k, dtype=torch.float64))


def knn_scores(votes: Tensor, labels: Tensor) -> LabelScores:
    """The share of the k nearest others that have another label; among equals the more agreed on goes first."""
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


#: What compares with the field, by the name that tables show: functions of k-NN votes and labels.
SCORES: dict[str, Callable[[Tensor, Tensor], LabelScores]] = {
    "k-NN disagreement": knn_scores,
    CLEANLAB: cleanlab_scores,
}


def unjudged(scores: LabelScores, rows: Tensor) -> LabelScores:
    """`scores` in which nothing is said about the images at `rows`, (n,) of bool."""
    return LabelScores(scores.score.masked_fill(rows, -torch.inf), scores.suggested)


def _own_and_best(values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The value of the own class, the greatest other one, and which that is; each (n,)."""
    everyone = torch.arange(len(labels))
    others = values.clone()
    others[everyone, labels] = -torch.inf
    best = others.max(dim=1)
    return values[everyone, labels], best.values, best.indices
