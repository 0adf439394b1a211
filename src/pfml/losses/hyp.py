"""Hyp (Ermolov et al., CVPR 2022): a contrastive cross entropy over hyperbolic distances."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfml.hyperbolic import clip_lengths, riemannian_gradient, tangent_distances
from pfml.losses.checks import check_batch

__all__ = ["HypLoss", "check_ball"]


class HypLoss(nn.Module):
    """Each positive pair against the negatives at both of its places, by distance in the Poincare ball.

    Embeddings are clipped to length `clip_radius` and mapped into the ball of curvature -c; d is the distance there.
    A sample's place is how many samples of its class come before it in the batch. For a positive pair (x, y), with N
    the samples of other classes at the place of x or of y:

        l(x, y) = -log(exp(-d(x, y) / temperature) / sum over z in {y} and N of exp(-d(x, z) / temperature))
        loss    = sum over pairs of places of the mean of l over the positive pairs at these places

    `reduction="mean"` divides it by the square of the number of places. `riemannian` gives gradients at points of the
    ball those of its metric, times (1 - c |x|^2)^2 / 4. Both change lengths of gradients only, which Adam feels by its
    eps.

    Computed in float32 at least, sums over negatives in float64; autocast is off; checked as `PotentialFieldLoss` is.

    Published, in the authors' code: all of the above with curvature 0.1, clip radius 2.3, temperature 0.2. A linear
    layer of 128 dimensions precedes the ball, orthogonal and without bias at the start. The numbers of 384 dimensions
    are those of the backbone's features, ranked by cosines, without that layer: set `head_dim` to 128 and let the
    embedder have no layer. Those of 128 dimensions are ranked by hyperbolic distance
    (`pfml.evaluation.hyperbolic_recall_at_1`), in the order of cosines if all embeddings are clipped. HIER's code
    trains ResNet-50 with it, with reduction "mean" and riemannian gradients.

    Ours: distances are those of `tangent_distances`, without the code's 1e-5 in denominators. Classes may have
    different numbers of samples.

    Args:
        num_classes: C; labels must lie in [0, C).
        embedding_dim: D.
        curvature: c.
        clip_radius: Largest length of a tangent vector.
        temperature: What distances are divided by.
        head_dim: Dimensions of a linear layer of the loss between embeddings and ball; 0 for none.
        reduction: "sum" over pairs of places, or "mean" over the square of their number.
        riemannian: Whether gradients at points of the ball are those of its metric.
    """

    needs_length = True

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        curvature: float = 0.1,
        clip_radius: float = 2.3,
        temperature: float = 0.2,
        head_dim: int = 0,
        reduction: Literal["sum", "mean"] = "sum",
        riemannian: bool = False,
    ) -> None:
        super().__init__()
        for name, size in (("num_classes", num_classes), ("embedding_dim", embedding_dim)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {size!r}")
        if not isinstance(head_dim, int) or isinstance(head_dim, bool) or head_dim < 0:
            raise ValueError(f"head_dim must be an integer >= 0, got {head_dim!r}")
        check_ball(curvature, clip_radius)
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be positive and finite, got {temperature}")
        if reduction not in ("sum", "mean"):
            raise ValueError(f"reduction must be 'sum' or 'mean', got {reduction!r}")
        self.num_classes = num_classes
        self.embedding_dim = embedding_dim
        self.curvature = curvature
        self.clip_radius = clip_radius
        self.temperature = temperature
        self.head_dim = head_dim
        self.reduction = reduction
        self.riemannian = bool(riemannian)
        self.head: nn.Linear | None = None
        if head_dim:
            self.head = nn.Linear(embedding_dim, head_dim)
            nn.init.orthogonal_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch: embeddings (batch, D) of any length and floating-point type, labels (batch,) in [0, C).

        A batch without positives or without negatives has loss 0.
        """
        labels = check_batch(embeddings, labels, self._learned(embeddings))
        wide = torch.promote_types(embeddings.dtype, torch.float32)
        if self.head is not None:
            wide = torch.promote_types(wide, self.head.weight.dtype)
        with torch.autocast(embeddings.device.type, enabled=False):
            points = embeddings.to(wide)
            if self.head is not None:
                points = F.linear(points, self.head.weight.to(wide), self.head.bias.to(wide))
            vectors = clip_lengths(points, self.clip_radius)
            if self.riemannian:
                vectors = riemannian_gradient(vectors, curvature=self.curvature)
            distances = tangent_distances(vectors, vectors, curvature=self.curvature)
            total, pairs_of_places = _contrast(-distances.double() / self.temperature, labels)
            return (total if self.reduction == "sum" else total / pairs_of_places).to(wide)

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """The layer of the loss as a parameter group; an empty list without one."""
        if self.head is None:
            return []
        return [{"params": list(self.head.parameters()), "lr": lr, "weight_decay": weight_decay}]

    def proxy_points(self) -> Tensor:
        """(C, 0, D): the loss has no proxies."""
        return torch.empty(self.num_classes, 0, self.embedding_dim)

    def extra_repr(self) -> str:
        return (
            f"{self.num_classes}, {self.embedding_dim}, curvature={self.curvature}, clip_radius={self.clip_radius}, "
            f"temperature={self.temperature}, head_dim={self.head_dim}, reduction={self.reduction!r}, "
            f"riemannian={self.riemannian}"
        )

    def _learned(self, embeddings: Tensor) -> Tensor:
        """What `check_batch` looks at in place of proxies, (C, M, D)."""
        if self.head is None:
            device = embeddings.device if isinstance(embeddings, Tensor) else None
            return torch.empty(self.num_classes, 0, self.embedding_dim, device=device)
        total = self.head.weight.detach().sum() + self.head.bias.detach().sum()
        return total.expand(self.num_classes, 1, self.embedding_dim)


def check_ball(curvature: float, clip_radius: float) -> None:
    """Raise ValueError unless a ball of this curvature can hold tangent vectors of this length."""
    for name, value in (("curvature", curvature), ("clip_radius", clip_radius)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if clip_radius * math.sqrt(curvature) > 20:
        raise ValueError(
            "clip_radius * sqrt(curvature) must be 20 at most, where float32 has long resolved nothing but directions, "
            f"got {clip_radius} * sqrt({curvature})"
        )


def _contrast(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over pairs of places of the mean cross entropies, and the number of pairs, a place with itself included.

    Args:
        logits: (batch, batch) in float64.
        labels: (batch,).
    """
    if len(labels) < 2:
        return logits.sum(), logits.new_ones(())  # the sum of no or one zero
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    same = labels[:, None] == labels
    places = same.tril(-1).sum(dim=1)
    together = (places[:, None] == places).to(logits)
    counts = together.sum(dim=1)  # of the classes with a sample at this place
    logits = logits - logits.detach().masked_fill(itself, -math.inf).amax(dim=1, keepdim=True)
    weights = torch.where(same, 0.0, logits.masked_fill(itself, -math.inf).exp())
    at_place = weights @ together  # (batch, batch): of the negatives of x at the place of y
    negatives = at_place + at_place.diagonal()[:, None]
    some = negatives > 0
    losses = F.softplus(torch.where(some, negatives, 1.0).log() - logits)
    is_counted = same & ~itself & some
    total = torch.where(is_counted, losses / torch.minimum(counts[:, None], counts), 0.0).sum()
    return total, (places.amax() + 1).square()
