"""Deep Factorized Metric Learning (Wang et al., CVPR 2023) with Proxy Anchor: a network, and its routed stream."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfml.losses.checks import check_batch
from pfml.losses.proxy_anchor import pull_and_push
from pfml.sphere import unit

__all__ = ["FactorizedProxyAnchorLoss"]


class FactorizedProxyAnchorLoss(nn.Module):
    """Proxy Anchor on the embedding of the whole network and on that of one sub-block per block, which resemble it.

    The backbone must be factorized (`pfml.models.factorized`, model.sub_blocks). With z(x) the embedding of a sample x
    by the whole network, z~ the same without a gradient, y(x) that of the routed stream, and d(x) how far the blocks of
    the routed stream are from whole ones, whose gradient routers receive only:

        loss = ProxyAnchor(z) + routed_weight * ProxyAnchor(y)
             + sum over samples of ( alignment_weight * |y(x) - z~(x)| + routing_weight * d(x) )

    Both Proxy Anchors share their proxies. Computed in float32 at least, whatever autocast says; checked as
    `PotentialFieldLoss` is.

    Published, in the authors' code: all of the above with scale 32, margin 0.1 and these weights.

    Ours: at MLPs of a transformer their code lets d move the MLPs too.

    Args:
        num_classes: C; labels must lie in [0, C).
        embedding_dim: D.
        scale, margin: Of Proxy Anchor.
        routed_weight, alignment_weight, routing_weight: Of three terms.

    Attributes:
        terms: "whole", "routed", "alignment" and "routing", detached, before their weights.
    """

    needs_routed = True
    proxies: nn.Parameter  # (C, 1, D)

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        scale: float = 32.0,
        margin: float = 0.1,
        routed_weight: float = 0.5,
        alignment_weight: float = 0.05,
        routing_weight: float = 5e-6,
    ) -> None:
        super().__init__()
        for name, size in (("num_classes", num_classes), ("embedding_dim", embedding_dim)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {size!r}")
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be positive and finite, got {scale}")
        weights = {"routed_weight": routed_weight, "alignment_weight": alignment_weight}
        for name, value in {**weights, "routing_weight": routing_weight}.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        self.num_classes = num_classes
        self.embedding_dim = embedding_dim
        self.scale = scale
        self.margin = margin
        self.routed_weight = routed_weight
        self.alignment_weight = alignment_weight
        self.routing_weight = routing_weight
        self.terms: dict[str, Tensor] = {}
        # kaiming_normal with fan_out, as published
        self.proxies = nn.Parameter(torch.randn(num_classes, 1, embedding_dim) * math.sqrt(2 / num_classes))

    def forward(self, embeddings: Tensor, labels: Tensor, *, routed: Tensor, distance: Tensor) -> Tensor:
        """The loss of a batch.

        Args:
            embeddings: (batch, D) of any floating-point type.
            labels: (batch,) in [0, C).
            routed: (batch, D), the embeddings of the routed stream.
            distance: (batch,), d.
        """
        labels = check_batch(embeddings, labels, self.proxies)
        wide = torch.promote_types(torch.promote_types(embeddings.dtype, self.proxies.dtype), torch.float32)
        with torch.autocast(embeddings.device.type, enabled=False):
            own = F.one_hot(labels, self.num_classes).bool()[:, None].expand(-1, 2, -1)  # (batch, 2, C)
            points = unit(torch.stack([embeddings.to(wide), routed.to(wide)], dim=1))  # (batch, 2, D)
            cosines = points @ unit(self.proxies[:, 0].to(wide)).T
            pulls, pushes = pull_and_push(cosines, own, ~own, self.scale, self.margin)  # (2,) each
            whole, by_route = (pulls + pushes).unbind()
            aligned = torch.linalg.vector_norm(points[:, 1] - points[:, 0].detach(), dim=1).sum()
            routing = distance.to(wide).sum()
            parts = {"whole": whole, "routed": by_route, "alignment": aligned, "routing": routing}
            self.terms = {name: value.detach() for name, value in parts.items()}
            side = self.alignment_weight * aligned + self.routing_weight * routing
            return whole + self.routed_weight * by_route + side

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """The proxies as an optimizer's parameter group; published: 100 times the learning rate of the backbone."""
        return [{"params": [self.proxies], "lr": lr, "weight_decay": weight_decay}]

    def proxy_points(self) -> Tensor:
        """Where the proxies are on the unit sphere, (C, 1, D), detached."""
        return unit(self.proxies.detach())

    def extra_repr(self) -> str:
        return (
            f"{self.num_classes}, {self.embedding_dim}, scale={self.scale}, margin={self.margin}, "
            f"routed_weight={self.routed_weight}, alignment_weight={self.alignment_weight}, "
            f"routing_weight={self.routing_weight}"
        )
