"""Detection quality: how well a ranking finds images that are known to be mislabeled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.audit.scores import LabelScores

__all__ = ["DETECTION_LABELS", "Detection", "detection", "precision_recall"]

#: Field of `Detection` -> its heading in tables.
DETECTION_LABELS = {
    "precision_at_noisy": "P@noisy",
    "average_precision": "average precision",
    "recall_at_90": "recall at 90 % precision",
    "suggestion_accuracy": "suggestions",
}


@dataclass(frozen=True)
class Detection:
    """The quality of a ranking against the true labels; all are shares.

    Args:
        precision_at_noisy: Precision of the first K of the ranking, K being the number of mislabeled images.
        average_precision: Mean over the mislabeled images of the precision at their rank.
        recall_at_90: Recall of the longest list with a precision of at least 90 %.
        suggestion_accuracy: Share of the mislabeled images whose suggested class is the true one.
    """

    precision_at_noisy: float
    average_precision: float
    recall_at_90: float
    suggestion_accuracy: float


def precision_recall(score: Tensor, mislabeled: Tensor) -> tuple[Tensor, Tensor]:
    """Precision and recall of the first 1, 2, ..., n of the ranking, each (n,); equal scores in the order given."""
    found = mislabeled[score.argsort(descending=True, stable=True)].double().cumsum(0)
    return found / torch.arange(1, len(score) + 1), found / max(int(mislabeled.sum()), 1)


def detection(scores: LabelScores, labels: Tensor, true_labels: Tensor) -> Detection:
    """The quality of `scores` for images with these given and true labels; some must differ."""
    mislabeled = labels != true_labels
    count = int(mislabeled.sum())
    if count == 0:
        raise ValueError("some images must be known to be mislabeled to measure detection, got none")
    precision, recall = precision_recall(scores.score, mislabeled)
    is_hit = torch.diff(recall, prepend=torch.zeros(1, dtype=torch.float64)) > 0
    enough = recall[precision >= 0.9]
    return Detection(
        precision_at_noisy=float(precision[count - 1]),
        average_precision=float(precision[is_hit].sum() / count),
        recall_at_90=float(enough.max()) if len(enough) else 0.0,
        suggestion_accuracy=float((scores.suggested == true_labels)[mislabeled].double().mean()),
    )
