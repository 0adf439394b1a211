"""Scores that rank images by how likely they are mislabeled; high is suspicious.

Ours compares how strongly the classes attract an image: Eq. 4 without its sign, with the image left out of its own
field (`pfml.evaluation.class_attraction`). k-NN and cleanlab are there to compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.evaluation import nearest
from pfml.packages import pip_install

__all__ = [
    "SCORES",
    "LabelScores",
    "cleanlab_scores",
    "field_scores",
    "knn_scores",
    "knn_votes",
    "unjudged",
]

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

    def of(self, rows: Tensor) -> LabelScores:
        """The scores of the images of the mask `rows`, (n,) bool."""
        return LabelScores(self.score[rows], self.suggested[rows])


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
        from cleanlab.rank import get_label_quality_scores
    except ImportError:
        raise ImportError(f"the comparison with cleanlab needs it: {pip_install('audit')}") from None
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
