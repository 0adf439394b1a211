"""How well a ranking finds the labels that are known to be wrong."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.audit.scores import LabelScores

__all__ = ["Detection", "detection", "precision_recall"]


@dataclass(frozen=True)
class Detection:
    """A ranking against the truth; all are shares.

    Args:
        precision_at_wrong: Of the first K of the ranking, K the number of wrong labels, those that are wrong.
        average_precision: Mean over the wrong labels of the precision at their rank.
        recall_at_90: The wrong labels found by the longest list of which at least 90 % are wrong.
        suggestion_accuracy: The wrong labels whose suggested class is the true one.
    """

    precision_at_wrong: float
    average_precision: float
    recall_at_90: float
    suggestion_accuracy: float


def precision_recall(score: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor]:
    """Precision and recall of the first 1, 2, ..., n of the ranking, each (n,); equal scores in the order given."""
    found = wrong[score.argsort(descending=True, stable=True)].double().cumsum(0)
    return found / torch.arange(1, len(score) + 1), found / max(int(wrong.sum()), 1)


def detection(scores: LabelScores, labels: Tensor, true_labels: Tensor) -> Detection:
    """The quality of `scores` for images with these given and true labels; some must be wrong."""
    wrong = labels != true_labels
    count = int(wrong.sum())
    if count == 0:
        raise ValueError("a ranking can be judged only if some labels are known to be wrong, got none")
    precision, recall = precision_recall(scores.score, wrong)
    is_hit = torch.diff(recall, prepend=torch.zeros(1, dtype=torch.float64)) > 0
    enough = recall[precision >= 0.9]
    return Detection(
        precision_at_wrong=float(precision[count - 1]),
        average_precision=float(precision[is_hit].sum() / count),
        recall_at_90=float(enough.max()) if len(enough) else 0.0,
        suggestion_accuracy=float((scores.suggested == true_labels)[wrong].double().mean()),
    )
