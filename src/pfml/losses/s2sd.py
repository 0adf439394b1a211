"""S2SD (Roth et al., ICML 2021): an embedding that learns from wider ones on top of the same features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfml.losses.checks import check_batch, checked_sum
from pfml.losses.perceptron import Perceptron
from pfml.losses.triplet_margin import distance_weighted_triplets, margin_loss
from pfml.sphere import unit

__all__ = ["S2SDLoss"]


class S2SDLoss(nn.Module):
    """A loss of the embedding and of wider targets, whose cosines within the batch the embedding follows.

    Targets are two layers each on top of the pooled features, used in training only. With S(x) the cosines of a batch,
    KL(p, q) the mean over rows of the divergence of softmax(q / temperature) from softmax(p / temperature), times
    temperature^2, and J the loss that is extended:

        loss = (J(embedding) + mean over targets of J(target)) / 2
             + distillation * mean over targets of KL(S(embedding), S(target))
             + feature_distillation * KL(S(embedding), S(features)), after `feature_delay` steps

    Neither targets nor features get gradients of the divergences. J is one of:

        multi-similarity  mean over anchors that have both of log(1 + sum over p of exp(-alpha (s - base))) / alpha
                          + log(1 + sum over n of exp(beta (s - base))) / beta; positives p are those with
                          s < epsilon + that of the nearest negative, negatives n those with s > that of the farthest
                          positive - epsilon
        margin            that of `pfml.losses.triplet_margin` over distance-weighted triplets, with a boundary of each
                          class that is learned, for the embedding and for each target

    Published, in the authors' code: all of the above with 512, 1024, 1536 and 2048 dimensions, temperature 1, both
    weights 50, 1,000 steps, alpha 2, beta 40, base 0.5, epsilon 0.1 and features pooled by "avg+max" (for the embedding
    by "avg") on CUB and Cars; on SOP with the margin loss, feature_distillation 5 and "avg". All that the loss learns
    has the rate of the backbone, 1e-5.

    Ours: an anchor without positives or negatives is left out; margin_beta for the code's name of the boundary.

    Args:
        num_classes: C; labels must lie in [0, C).
        embedding_dim: D.
        num_features: F of the pooled features.
        extends: J.
        target_dims: Widths of the targets.
        temperature: Of the distributions over cosines.
        distillation: Weight of the divergence from the targets.
        feature_distillation: Weight of the divergence from the features.
        feature_delay: Steps of training before that.
        feature_pooling: How features are pooled for the targets, as in `pfml.models.EmbedderConfig`; None for the same
            way as for the embedding.
        alpha, beta, base, epsilon: Of the multi-similarity loss.
        margin, margin_beta, cutoff: Of the margin loss: half its gap, the boundary at the start, and the distance
            below which all count alike where negatives are drawn.
        rho: Share of anchors of the margin loss that repel a positive instead (R-Margin, where the code has 0.2).

    Attributes:
        terms: The terms of the last value, detached, before their weights: "embedding", "targets", "distillation" and
            "features"; the last is 0 until its time has come.
    """

    needs_features = True

    steps: Tensor  # of training, so far

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        num_features: int,
        *,
        extends: Literal["multi-similarity", "margin"] = "multi-similarity",
        target_dims: Sequence[int] = (512, 1024, 1536, 2048),
        temperature: float = 1.0,
        distillation: float = 50.0,
        feature_distillation: float = 50.0,
        feature_delay: int = 1000,
        feature_pooling: str | None = None,
        alpha: float = 2.0,
        beta: float = 40.0,
        base: float = 0.5,
        epsilon: float = 0.1,
        margin: float = 0.2,
        margin_beta: float = 1.2,
        cutoff: float = 0.5,
        rho: float = 0.0,
    ) -> None:
        super().__init__()
        sizes = [("num_classes", num_classes), ("embedding_dim", embedding_dim), ("num_features", num_features)]
        for name, size in (*sizes, *(("target_dims", width) for width in target_dims)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {size!r}")
        if not target_dims:
            raise ValueError("target_dims must name at least one width, got none; without targets use the loss itself")
        if extends not in ("multi-similarity", "margin"):
            raise ValueError(f"extends must be 'multi-similarity' or 'margin', got {extends!r}")
        if not isinstance(feature_delay, int) or isinstance(feature_delay, bool) or feature_delay < 0:
            raise ValueError(f"feature_delay must be an integer >= 0, got {feature_delay!r}")
        for name, value in (
            ("distillation", distillation),
            ("feature_distillation", feature_distillation),
            ("epsilon", epsilon),
            ("margin", margin),
        ):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        for name, value in (
            ("temperature", temperature),
            ("alpha", alpha),
            ("beta", beta),
            ("margin_beta", margin_beta),
            ("cutoff", cutoff),
        ):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        if not 0 <= rho <= 1:
            raise ValueError(f"rho must lie in [0, 1], got {rho}")
        if not math.isfinite(base):
            raise ValueError(f"base must be finite, got {base}")
        self.num_classes = num_classes
        self.embedding_dim = embedding_dim
        self.num_features = num_features
        self.extends = extends
        self.target_dims = tuple(target_dims)
        self.temperature = temperature
        self.distillation = distillation
        self.feature_distillation = feature_distillation
        self.feature_delay = feature_delay
        self.feature_pooling = feature_pooling
        self.alpha = alpha
        self.beta = beta
        self.base = base
        self.epsilon = epsilon
        self.margin = margin
        self.margin_beta = margin_beta
        self.cutoff = cutoff
        self.rho = rho
        self.terms: dict[str, Tensor] = {}
        self.targets = nn.ModuleList([Perceptron(num_features, width, width) for width in self.target_dims])
        boundaries = torch.full((1 + len(self.targets), num_classes), margin_beta)  # of the embedding, then the targets
        self.boundaries = nn.Parameter(boundaries) if extends == "margin" else None
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, embeddings: Tensor, labels: Tensor, *, features: Tensor) -> Tensor:
        """The loss of a batch: embeddings (batch, D) of any floating-point type, labels (batch,) in [0, C).

        Args:
            embeddings: What is searched with later.
            labels: Of the samples.
            features: What the embedding layer gets, (batch, F).
        """
        learned = checked_sum(self, embeddings)
        labels = check_batch(embeddings, labels, learned)
        labels = labels.clamp(0, self.num_classes - 1)  # where the check is deferred, a wrong index would kill the GPU
        if features.shape != (len(labels), self.num_features):
            raise ValueError(
                f"features must be ({len(labels)}, {self.num_features}), got shape {tuple(features.shape)}"
            )
        wide = torch.promote_types(torch.promote_types(embeddings.dtype, learned.dtype), torch.float32)
        with torch.autocast(embeddings.device.type, enabled=False):
            points, features = unit(embeddings.to(wide)), features.to(wide)
            if not len(labels):
                inputs = (points * 0).sum() + (features * 0).sum()
                return inputs + checked_sum(self, embeddings, differentiable=True).sum() * 0
            targets = [unit(target(features)) for target in self.targets]
            own, *theirs = (self._extended(each, labels, number) for number, each in enumerate([points, *targets]))
            cosines = points @ points.T
            divergences = [self._divergence(cosines, target.detach()) for target in targets]
            from_features = self._divergence(cosines, unit(features.detach())) * (self.steps >= self.feature_delay)
            if self.training:
                self.steps += 1
            values = {
                "embedding": own,
                "targets": torch.stack(theirs).mean(),
                "distillation": torch.stack(divergences).mean(),
                "features": from_features,
            }
            self.terms = {name: value.detach() for name, value in values.items()}
            return (
                (values["embedding"] + values["targets"]) / 2
                + self.distillation * values["distillation"]
                + self.feature_distillation * values["features"]
            )

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """One group: the targets, and their boundaries if there are any."""
        return [{"params": list(self.parameters()), "lr": lr, "weight_decay": weight_decay}]

    def proxy_points(self) -> Tensor:
        """No proxies, (C, 0, D)."""
        return torch.empty(self.num_classes, 0, self.embedding_dim)

    def extra_repr(self) -> str:
        loss = f"alpha={self.alpha}, beta={self.beta}, base={self.base}, epsilon={self.epsilon}"
        if self.extends == "margin":
            loss = f"margin={self.margin}, margin_beta={self.margin_beta}, cutoff={self.cutoff}, rho={self.rho}"
        return (
            f"{self.num_classes}, {self.embedding_dim}, {self.num_features}, extends={self.extends!r}, "
            f"target_dims={self.target_dims}, temperature={self.temperature}, distillation={self.distillation}, "
            f"feature_distillation={self.feature_distillation}, feature_delay={self.feature_delay}, "
            f"feature_pooling={self.feature_pooling!r}, {loss}"
        )

    def _extended(self, points: Tensor, labels: Tensor, number: int) -> Tensor:
        """J of points on the unit sphere: of the embedding, number 0, or of a target."""
        if self.boundaries is None:
            return self._multi_similarity(points @ points.T, labels)
        triplets = distance_weighted_triplets(points, labels, cutoff=self.cutoff, switched=self.rho)
        return margin_loss(points, triplets, self.boundaries[number, labels].to(points.dtype), margin=self.margin)

    def _multi_similarity(self, cosines: Tensor, labels: Tensor) -> Tensor:
        same = labels[:, None] == labels  # (batch, batch)
        positives, negatives = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device), ~same
        chosen = cosines.detach()
        nearest = torch.where(negatives, chosen, -math.inf).amax(dim=1, keepdim=True)
        farthest = torch.where(positives, chosen, math.inf).amin(dim=1, keepdim=True)
        positives = positives & (chosen - self.epsilon < nearest)
        negatives = negatives & (chosen + self.epsilon > farthest)
        has_both = positives.any(dim=1) & negatives.any(dim=1)
        total = _log_one_plus_sum(-self.alpha * (cosines - self.base), positives) / self.alpha
        total = total + _log_one_plus_sum(self.beta * (cosines - self.base), negatives) / self.beta
        return torch.where(has_both, total, 0.0).sum() / has_both.sum().clamp(min=1)

    def _divergence(self, cosines: Tensor, target: Tensor) -> Tensor:
        """Of the batch's cosines (batch, batch) from those of target points (batch, any width)."""
        followed = F.log_softmax(cosines / self.temperature, dim=1)
        leading = F.log_softmax(target @ target.T / self.temperature, dim=1)
        return F.kl_div(followed, leading, reduction="batchmean", log_target=True) * self.temperature**2


def _log_one_plus_sum(exponents: Tensor, among: Tensor) -> Tensor:
    """log(1 + sum over the columns of `among` of exp(exponents)), (n,)."""
    return F.pad(torch.where(among, exponents, -math.inf), (1, 0)).logsumexp(dim=1)
