"""HIER (Kim et al., CVPR 2023): Proxy Anchor, and proxies of a hierarchy above samples and proxies."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfml.hyperbolic import clip_lengths, exponential_map, riemannian_gradient, tangent_distances
from pfml.losses.checks import check_batch
from pfml.losses.hyp import check_ball
from pfml.losses.proxy_anchor import ProxyAnchorLoss

__all__ = ["HIERLoss"]


class HIERLoss(ProxyAnchorLoss):
    """Proxy Anchor + hierarchy_weight * (hierarchy of the batch + hierarchy of the hierarchical proxies themselves).

    Hierarchical proxies belong to no class. They and the embeddings are clipped to length `clip_radius` and mapped into
    the Poincare ball of curvature -c; d is the distance there. Triplets (i, j, k) of samples: j is drawn from the
    reciprocal nearest neighbors of i, k from the rest. The lowest common ancestor of a set is a hierarchical proxy,
    drawn by a Gumbel softmax of -max over the set of d(., proxy) / temperature, with the gradient of the soft one. With
    p the ancestor of {i, j}, q that of {i, j, k}, and [x]+ = max(x, 0):

        hierarchy = mean over triplets of [d(i, p) - d(i, q) + m]+ + [d(j, p) - d(j, q) + m]+ + [d(k, q) - d(k, p) + m]+

    where triplets with p = q count as 0. The same holds for triplets of hierarchical proxies. Neighbors are nearest by
    d; samples of the own class come first, and each sample is its own neighbor. A sample with fewer than two reciprocal
    neighbors is no i.

    Computed in float32 at least, whatever autocast says; checked as `PotentialFieldLoss` is. Drawn with torch's global
    generator.

    Published, in the authors' code: all of the above with 512 hierarchical proxies, weight 0.5, margin m 0.1,
    temperature 0.1, 20 neighbors, 50 triplets per i, curvature 0.1, clip radius 2.3; gradients at points of the ball
    are those of its metric. AdamW, eps 1e-4; proxies of classes with 1e4 and hierarchical proxies with 50 times the
    rate of the backbone. Embeddings are ranked by hyperbolic distance (`pfml.evaluation.hyperbolic_recall_at_1`), which
    is the order of cosines if all are clipped.

    Ours: i is never its own k, as it is once in a while in the code. Four triplets per i by default: a mean of fewer
    draws of the same distribution, at a tenth of the cost; published recipes have 50. The default of hierarchy_lr is
    ResNet-50's on CUB.

    Args:
        num_classes: C; labels must lie in [0, C).
        embedding_dim: D.
        scale, margin: Of Proxy Anchor.
        num_hierarchical_proxies: How many there are.
        hierarchy_weight: Weight of both hierarchies; at 0 the loss is Proxy Anchor.
        hierarchy_margin: m.
        hierarchy_lr: Learning rate of the hierarchical proxies; a schedule lowers it with the others.
        temperature: What distances are divided by in the draw of ancestors.
        neighbors: Nearest neighbors that must be mutual, the sample itself among them.
        triplets: Triplets for each i.
        curvature: c.
        clip_radius: Largest length of a tangent vector.

    Attributes:
        terms: The last terms, detached, before `hierarchy_weight`: "pull", "push", "sample_hierarchy" and
            "proxy_hierarchy".
    """

    needs_length = True
    hierarchical_proxies: nn.Parameter  # (H, D), tangent vectors before clipping

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        scale: float = 32.0,
        margin: float = 0.1,
        num_hierarchical_proxies: int = 512,
        hierarchy_weight: float = 0.5,
        hierarchy_margin: float = 0.1,
        hierarchy_lr: float = 5e-3,
        temperature: float = 0.1,
        neighbors: int = 20,
        triplets: int = 4,
        curvature: float = 0.1,
        clip_radius: float = 2.3,
    ) -> None:
        super().__init__(num_classes, embedding_dim, scale=scale, margin=margin)
        sizes = {"num_hierarchical_proxies": num_hierarchical_proxies, "neighbors": neighbors, "triplets": triplets}
        for name, size in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {size!r}")
        for name, value in (("hierarchy_lr", hierarchy_lr), ("temperature", temperature)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        for name, value in (("hierarchy_weight", hierarchy_weight), ("hierarchy_margin", hierarchy_margin)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        check_ball(curvature, clip_radius)
        self.hierarchy_weight = hierarchy_weight
        self.hierarchy_margin = hierarchy_margin
        self.hierarchy_lr = hierarchy_lr
        self.temperature = temperature
        self.neighbors = neighbors
        self.triplets = triplets
        self.curvature = curvature
        self.clip_radius = clip_radius
        # as published: lengths of about nine tenths of the clip radius
        spread = 0.9 * clip_radius / math.sqrt(embedding_dim)
        self.hierarchical_proxies = nn.Parameter(torch.randn(num_hierarchical_proxies, embedding_dim) * spread)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch: embeddings (batch, D) of any length and floating-point type, labels (batch,)."""
        labels = check_batch(embeddings, labels, self.proxies)
        wide = torch.promote_types(torch.promote_types(embeddings.dtype, self.proxies.dtype), torch.float32)
        with torch.autocast(embeddings.device.type, enabled=False):
            vectors = self._in_ball(embeddings.to(wide))
            loss = self._anchored(vectors, labels)
            if self.hierarchy_weight == 0:
                return loss
            proxies = self._in_ball(self.hierarchical_proxies.to(wide))
            distances = tangent_distances(torch.cat([vectors, proxies]), proxies, curvature=self.curvature)
            near = torch.exp(-tangent_distances(vectors.detach(), vectors.detach(), curvature=self.curvature))
            of_samples = self._hierarchy(distances[: len(labels)], near + (labels[:, None] == labels))
            of_proxies = self._hierarchy(distances[len(labels) :], -distances[len(labels) :].detach())
            self.terms |= {"sample_hierarchy": of_samples.detach(), "proxy_hierarchy": of_proxies.detach()}
            return loss + self.hierarchy_weight * (of_samples + of_proxies)

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Two groups: the proxies of the classes with `lr`, and the hierarchical proxies with `hierarchy_lr`."""
        groups = super().param_groups(lr, weight_decay)
        if self.hierarchy_weight == 0:
            return groups
        return [*groups, {"params": [self.hierarchical_proxies], "lr": self.hierarchy_lr, "weight_decay": weight_decay}]

    def ball_points(self) -> Tensor:
        """Where the hierarchical proxies are in the Poincare ball, (H, D), detached: ancestors lie near 0."""
        vectors = clip_lengths(self.hierarchical_proxies.detach(), self.clip_radius)
        return exponential_map(vectors, curvature=self.curvature)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, num_hierarchical_proxies={len(self.hierarchical_proxies)}, "
            f"hierarchy_weight={self.hierarchy_weight}, hierarchy_margin={self.hierarchy_margin}, "
            f"hierarchy_lr={self.hierarchy_lr}, temperature={self.temperature}, neighbors={self.neighbors}, "
            f"triplets={self.triplets}, curvature={self.curvature}, clip_radius={self.clip_radius}"
        )

    def _in_ball(self, vectors: Tensor) -> Tensor:
        """Tangent vectors that are clipped, with gradients of the ball's metric."""
        return riemannian_gradient(clip_lengths(vectors, self.clip_radius), curvature=self.curvature)

    def _hierarchy(self, distances: Tensor, similarities: Tensor) -> Tensor:
        """The hierarchy of n nodes: distances (n, H) to the hierarchical proxies, similarities (n, n) among them."""
        if len(distances) < 2:
            return distances.sum() * 0
        positives, negatives, counted = self._drawn(similarities)  # (n, T), (n, T), (n,)
        # `embedding` takes rows, and adds their gradients in one order: the same bits with any number of threads
        to_i, to_j, to_k = distances[:, None], F.embedding(positives, distances), F.embedding(negatives, distances)
        to_both = torch.maximum(to_i, to_j)
        of_two, two = _drawn_ancestors(-to_both / self.temperature)  # (n, T, H), (n, T)
        of_three, three = _drawn_ancestors(-torch.maximum(to_both, to_k) / self.temperature)
        difference = of_two - of_three
        margin = self.hierarchy_margin
        losses = torch.relu((to_i * difference).sum(dim=2) + margin)
        losses = losses + torch.relu((to_j * difference).sum(dim=2) + margin)
        losses = losses + torch.relu(margin - (to_k * difference).sum(dim=2))  # (n, T)
        is_counted = counted[:, None] & (two != three)
        return torch.where(is_counted, losses, 0.0).sum() / (counted.sum() * self.triplets).clamp(min=1)

    @torch.no_grad()
    def _drawn(self, similarities: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """j and k of the triplets of each i, (n, T) each, and which i have any, (n,)."""
        near = torch.zeros_like(similarities, dtype=torch.bool)
        near.scatter_(1, similarities.topk(min(self.neighbors, len(near))).indices, True)
        itself = torch.eye(len(near), dtype=torch.bool, device=near.device)
        mutual = near & near.T & ~itself
        rest = ~mutual & ~itself
        counted = (mutual.sum(dim=1) > 1) & rest.any(dim=1)
        # those without triplets draw from everything and are not counted: the sizes are known without looking
        draws = (torch.where(counted[:, None], chosen, True).float() for chosen in (mutual, rest))
        j, k = (torch.multinomial(weights, self.triplets, replacement=True) for weights in draws)
        return j, k, counted


def _drawn_ancestors(logits: Tensor) -> tuple[Tensor, Tensor]:
    """One of H by a Gumbel softmax: one-hot (..., H) with the gradient of the soft one, and its index (...,).

    As `torch.nn.functional.gumbel_softmax`, from uniform numbers, which a CPU draws ten times as fast.
    """
    with torch.no_grad():
        noise = torch.rand_like(logits).log_().neg_().log_()
    soft = (logits - noise).softmax(dim=-1)
    chosen = soft.detach().argmax(dim=-1)
    hard = torch.zeros_like(soft).scatter_(-1, chosen[..., None], 1.0)
    return hard + (soft - soft.detach()), chosen
