"""Contextual similarity (Liao et al., ICML 2023): samples are alike if their neighbors are the same."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfml.losses.checks import check_batch
from pfml.sphere import unit

__all__ = ["ContextualLoss"]


class ContextualLoss(nn.Module):
    """Contextual similarities near 1 for positives and 0 for negatives, a contrastive term, and a mean cosine.

    With s(i, j) the cosines of a batch of n samples and N(i, k) the samples whose squared distance to i is at most that
    of the k-th nearest + eps, the sample itself among them:

        M(i, j) = (|N(i, k) and N(j, k)| / |N(i, k)| + |neither| / |not N(i, k)|) / 2  if j in N(i, k), else 0
        Q(i, j) = mean over the reciprocal neighbors h of i in N(., k / 2) of M(h, j)
        w(i, j) = (Q(i, j) + Q(j, i)) / 2

        context  = (sum over positive pairs of (1 - w)^2 + sum over negative pairs of w^2) / n^2
        contrast = mean of [positive_margin - s]+ + mean of [s - negative_margin]+, each over the pairs that act
        loss     = context_weight * context + contrast_weight * contrast + mean_weight * (mean of s - mean_cosine)^2

    Membership in N is a step, whose gradient by the distance is taken as the constant `step_slope`; the distance of the
    k-th nearest and the sizes in M's denominators are constants. Computed in float32 at least, whatever autocast says;
    checked as `PotentialFieldLoss` is.

    Published, in the authors' code: all of the above with k 4 (the samples per class), step_slope 10, margins 0.75 and
    0.6. At 224 pixels, the setting of Proxy Anchor: contrast_weight lam and context_weight 1 - lam, lam 0.05 on CUB,
    else 0.2; eps 0.04 on CUB, else 0.05; mean_weight 0.1, mean_cosine 0.3; on CUB and Cars the loss sees a linear
    projection of the unit embedding to 2048 dimensions, which learns twice as fast and is left out at the test. The
    defaults are those of CUB.

    Ours: a batch of fewer than k samples has as many neighbors as there are. An empty batch has loss 0.

    Args:
        num_classes: C; labels must lie in [0, C).
        embedding_dim: D.
        context_weight, contrast_weight, mean_weight: Weights of the terms.
        neighbors: k, at least 2.
        eps: How much farther than the k-th nearest a neighbor may be, as a squared distance.
        step_slope: The gradient of a step.
        positive_margin, negative_margin: Cosines that positives should exceed and negatives should not.
        mean_cosine: Where the mean of all cosines should be.
        projection_dim: Dimensions of a linear layer of the loss, without bias; 0 for none.

    Attributes:
        terms: The last terms before their weights, detached: "context", "contrast" and "mean".
    """

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        context_weight: float = 0.95,
        contrast_weight: float = 0.05,
        mean_weight: float = 0.1,
        neighbors: int = 4,
        eps: float = 0.04,
        step_slope: float = 10.0,
        positive_margin: float = 0.75,
        negative_margin: float = 0.6,
        mean_cosine: float = 0.3,
        projection_dim: int = 2048,
    ) -> None:
        super().__init__()
        least = {"num_classes": 1, "embedding_dim": 1, "neighbors": 2, "projection_dim": 0}
        sizes = dict(zip(least, (num_classes, embedding_dim, neighbors, projection_dim), strict=True))
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < least[name]:
                raise ValueError(f"{name} must be an integer >= {least[name]}, got {size!r}")
        weights = {"context_weight": context_weight, "contrast_weight": contrast_weight, "mean_weight": mean_weight}
        for name, value in {**weights, "eps": eps, "step_slope": step_slope}.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        cosines = {"positive_margin": positive_margin, "negative_margin": negative_margin, "mean_cosine": mean_cosine}
        for name, value in cosines.items():
            if not -1 <= value <= 1:
                raise ValueError(f"{name} is a cosine and must lie in [-1, 1], got {value}")
        self.num_classes = num_classes
        self.embedding_dim = embedding_dim
        self.context_weight = context_weight
        self.contrast_weight = contrast_weight
        self.mean_weight = mean_weight
        self.neighbors = neighbors
        self.eps = eps
        self.step_slope = step_slope
        self.positive_margin = positive_margin
        self.negative_margin = negative_margin
        self.mean_cosine = mean_cosine
        self.projection_dim = projection_dim
        self.terms: dict[str, Tensor] = {}
        self.projection = nn.Linear(embedding_dim, projection_dim, bias=False) if projection_dim else None

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch: embeddings (batch, D) of any floating-point type, labels (batch,) in [0, C)."""
        labels = check_batch(embeddings, labels, self._learned(embeddings))
        wide = torch.promote_types(embeddings.dtype, torch.float32)
        if self.projection is not None:
            wide = torch.promote_types(wide, self.projection.weight.dtype)
        with torch.autocast(embeddings.device.type, enabled=False):
            points = unit(embeddings.to(wide))
            if self.projection is not None:
                points = unit(F.linear(points, self.projection.weight.to(wide)))
            if len(points) == 0:
                return points.sum()
            cosines = points @ points.T  # (batch, batch)
            same = labels[:, None] == labels
            terms = {
                "context": self._context(cosines, same),
                "contrast": _mean_of_active(torch.relu(self.positive_margin - cosines), same)
                + _mean_of_active(torch.relu(cosines - self.negative_margin), ~same),
                "mean": (cosines.mean() - self.mean_cosine).square(),
            }
            self.terms = {name: value.detach() for name, value in terms.items()}
            return (
                self.context_weight * terms["context"]
                + self.contrast_weight * terms["contrast"]
                + self.mean_weight * terms["mean"]
            )

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """The projection as a parameter group; an empty list without one."""
        if self.projection is None:
            return []
        return [{"params": [self.projection.weight], "lr": lr, "weight_decay": weight_decay}]

    def proxy_points(self) -> Tensor:
        """(C, 0, D): the loss has no proxies."""
        return torch.empty(self.num_classes, 0, self.embedding_dim)

    def contextual_similarities(self, cosines: Tensor) -> Tensor:
        """w, (n, n), of cosines (n, n)."""
        distances = (2 - 2 * cosines).clamp(min=0)  # squared
        k = min(self.neighbors, len(cosines))
        nearest = distances.detach().topk(k, largest=False).values  # (n, k), ascending
        members = self._within(distances, nearest[:, -1:])
        outside = 1 - members
        overlap = members @ members.T / _count(members.detach())
        overlap = overlap + outside @ outside.T / _count(outside.detach())
        close = self._within(distances, nearest[:, max(k // 2, 1) - 1, None])
        reciprocal = close * close.T
        expanded = reciprocal @ (overlap / 2 * members) / _count(reciprocal)
        return (expanded + expanded.T) / 2

    def extra_repr(self) -> str:
        return (
            f"{self.num_classes}, {self.embedding_dim}, context_weight={self.context_weight}, "
            f"contrast_weight={self.contrast_weight}, mean_weight={self.mean_weight}, neighbors={self.neighbors}, "
            f"eps={self.eps}, step_slope={self.step_slope}, positive_margin={self.positive_margin}, "
            f"negative_margin={self.negative_margin}, mean_cosine={self.mean_cosine}, "
            f"projection_dim={self.projection_dim}"
        )

    def _context(self, cosines: Tensor, same: Tensor) -> Tensor:
        similarities = self.contextual_similarities(cosines)
        itself = torch.eye(len(same), dtype=torch.bool, device=same.device)
        squares = torch.where(same, 1 - similarities, similarities).square()
        return squares.masked_fill(itself, 0.0).mean()

    def _within(self, distances: Tensor, limits: Tensor) -> Tensor:
        """1 where a distance (n, n) is at most its row's limit (n, 1) + eps, else 0, falling with `step_slope`."""
        is_within = (distances.detach() <= limits + self.eps).to(distances)
        return is_within + self.step_slope * (distances.detach() - distances)

    def _learned(self, embeddings: Tensor) -> Tensor:
        """What `check_batch` looks at in place of proxies, (C, M, D)."""
        if self.projection is None:
            device = embeddings.device if isinstance(embeddings, Tensor) else None
            return torch.empty(self.num_classes, 0, self.embedding_dim, device=device)
        return self.projection.weight.detach().sum().expand(self.num_classes, 1, self.embedding_dim)


def _count(members: Tensor) -> Tensor:
    """The sums of the rows, (n, 1); 1 where there is nothing."""
    sums = members.sum(dim=1, keepdim=True)
    return torch.where(sums > 0, sums, 1.0)


def _mean_of_active(hinges: Tensor, pairs: Tensor) -> Tensor:
    """The mean of the hinges > 0 among these pairs; 0 if there are none."""
    hinges = torch.where(pairs, hinges, 0.0)
    return hinges.sum() / (hinges > 0).sum().clamp(min=1)
