"""DCML (Zheng et al., CVPR 2021): losses of composites of sub-embeddings, in place of the sub-embeddings."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pfml.losses.checks import check_batch, checked_sum
from pfml.losses.perceptron import linear
from pfml.losses.triplet_margin import distance_weighted_triplets, margin_loss
from pfml.sphere import unit

__all__ = ["DCMLLoss"]


class DCMLLoss(nn.Module):
    """The margin loss of composites: sums of the sub-embeddings by weights that compositors choose for each sample.

    The embedding consists of sub-embeddings x_k side by side. With x all of them, J the margin loss of
    `pfml.losses.triplet_margin` over distance-weighted triplets, and a boundary of each class that is learned:

        p_l  = softmax over k of (W_l x + b_l), no gradient to x
        y_l  = sum over k of p_lk x_k
        loss = sum over l of J(unit(y_l)) + reinforcement * sum over l of mean over samples of -log(max over k of p_lk)
             + ensemble * J(all unit(x_k) side by side, which is what is searched with later)

    The second term, self-reinforcement, makes each compositor choose one sub-embedding for a sample.

    Published: 4 sub-embeddings of 128 dimensions, 4 compositors, reinforcement 1, margin 0.2, beta 1.2 at its start.
    Boundaries learn with 5e-4, compositors as the backbone with 1e-5.

    Not settled: the authors' code for the margin loss alone normalizes a list of composites, which fails. What it does
    for other numbers of losses suggests one loss of the composites side by side, `of="all"`. Their paper applies losses
    to different composites, `of="each"`, the default. Its figure has a loss of the ensemble, the last term, which the
    code has not; its weight here is ours.

    Ours: compositors see sqrt(D) times the point on the sphere, where the code has the embedding as it is, and
    sub-embeddings keep their lengths relative to each other. An anchor without positives or negatives is left out.

    Args:
        num_classes: C; labels must lie in [0, C).
        embedding_dim: D, a multiple of `num_parts`.
        num_parts: Sub-embeddings.
        num_composites: Compositors.
        of: "each" composite has a loss of its own, or "all" side by side one.
        reinforcement: Weight of the self-reinforcement.
        ensemble: Weight of the loss of the sub-embeddings side by side; the code has 0.
        margin: Half the width of the gap between positives and negatives.
        beta: Boundary between positives and negatives at the start; each class learns its own.
        cutoff: Distances below it count as this one where negatives are drawn.
        compositor_lr: Learning rate of the compositors, whatever that of the boundaries is.

    Attributes:
        terms: The terms of the last value, detached, before their weights: "composites", "reinforcement" and
            "ensemble", the last unless its weight is 0.
    """

    needs_length = True

    boundaries: nn.Parameter  # (num_composites or 1, C), and one row more for the ensemble

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        num_parts: int = 4,
        num_composites: int = 4,
        of: Literal["each", "all"] = "each",
        reinforcement: float = 1.0,
        ensemble: float = 1.0,
        margin: float = 0.2,
        beta: float = 1.2,
        cutoff: float = 0.5,
        compositor_lr: float = 1e-5,
    ) -> None:
        super().__init__()
        for name, size in (
            ("num_classes", num_classes),
            ("embedding_dim", embedding_dim),
            ("num_parts", num_parts),
            ("num_composites", num_composites),
        ):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {size!r}")
        if embedding_dim % num_parts:
            raise ValueError(f"embedding_dim must be a multiple of the {num_parts} num_parts, got {embedding_dim}")
        if of not in ("each", "all"):
            raise ValueError(f"of must be 'each' or 'all', got {of!r}")
        for name, value in (("reinforcement", reinforcement), ("ensemble", ensemble), ("margin", margin)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        for name, value in (("beta", beta), ("cutoff", cutoff), ("compositor_lr", compositor_lr)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        self.num_classes = num_classes
        self.embedding_dim = embedding_dim
        self.num_parts = num_parts
        self.num_composites = num_composites
        self.of = of
        self.reinforcement = reinforcement
        self.ensemble = ensemble
        self.margin = margin
        self.beta = beta
        self.cutoff = cutoff
        self.compositor_lr = compositor_lr
        self.terms: dict[str, Tensor] = {}
        num_losses = (num_composites if of == "each" else 1) + int(ensemble > 0)
        self.boundaries = nn.Parameter(torch.full((num_losses, num_classes), beta))
        self.compositors = nn.Linear(embedding_dim, num_composites * num_parts)  # of all, side by side

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch: embeddings (batch, D) of any floating-point type, labels (batch,) in [0, C)."""
        labels = check_batch(embeddings, labels, checked_sum(self, embeddings))
        labels = labels.clamp(0, self.num_classes - 1)  # where the check is deferred, a wrong index would kill the GPU
        wide = torch.promote_types(torch.promote_types(embeddings.dtype, self.boundaries.dtype), torch.float32)
        with torch.autocast(embeddings.device.type, enabled=False):
            points = math.sqrt(self.embedding_dim) * unit(embeddings.to(wide))
            if not len(labels):
                return (points * 0).sum() + checked_sum(self, embeddings, differentiable=True).sum() * 0
            parts = points.unflatten(1, (self.num_parts, -1))  # (batch, parts, D / parts)
            shares = self._log_shares(points.detach())  # (batch, composites, parts)
            composites = shares.exp() @ parts  # (batch, composites, D / parts)
            searched = unit(unit(parts).flatten(1))
            spaces = [unit(composites.flatten(1))] if self.of == "all" else [*unit(composites).unbind(1)]
            values = [
                self._margin_loss(space, labels, boundaries)
                for space, boundaries in zip([*spaces, searched], self.boundaries.to(wide), strict=False)
            ]
            value = torch.stack(values[: len(spaces)]).sum()
            reinforcement = -shares.amax(dim=2).mean(dim=0).sum()
            self.terms = {"composites": value.detach(), "reinforcement": reinforcement.detach()}
            if self.ensemble > 0:
                self.terms["ensemble"] = values[-1].detach()
                value = value + self.ensemble * values[-1]
            return value + self.reinforcement * reinforcement

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Two groups: the boundaries with `lr`, and the compositors with `compositor_lr`."""
        boundaries = {"params": [self.boundaries], "lr": lr, "weight_decay": weight_decay}
        compositors = list(self.compositors.parameters())
        return [boundaries, {"params": compositors, "lr": self.compositor_lr, "weight_decay": weight_decay}]

    def proxy_points(self) -> Tensor:
        """No proxies, (C, 0, D)."""
        return torch.empty(self.num_classes, 0, self.embedding_dim)

    def extra_repr(self) -> str:
        return (
            f"{self.num_classes}, {self.embedding_dim}, num_parts={self.num_parts}, "
            f"num_composites={self.num_composites}, of={self.of!r}, reinforcement={self.reinforcement}, "
            f"ensemble={self.ensemble}, margin={self.margin}, beta={self.beta}, cutoff={self.cutoff}, "
            f"compositor_lr={self.compositor_lr}"
        )

    def _log_shares(self, points: Tensor) -> Tensor:
        """log p, (batch, composites, parts)."""
        scores = linear(self.compositors, points)
        return scores.unflatten(1, (self.num_composites, self.num_parts)).log_softmax(dim=2)

    def _margin_loss(self, points: Tensor, labels: Tensor, boundaries: Tensor) -> Tensor:
        triplets = distance_weighted_triplets(points, labels, cutoff=self.cutoff)
        return margin_loss(points, triplets, boundaries[labels], margin=self.margin)
