"""Deep Relational Metric Learning (Zheng et al., ICCV 2021) with Proxy Anchor: an ensemble that specializes itself."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfml.losses.checks import check_batch
from pfml.losses.proxy_anchor import pull_and_push
from pfml.sphere import unit

__all__ = ["RelationalProxyAnchorLoss"]


class RelationalProxyAnchorLoss(nn.Module):
    """Proxy Anchor on the embedding, and on each sub-embedding with the samples that it describes best.

    The embedding layer must be relational (`pfml.models.relational`, model.relations K): the features of a sample x
    come in K groups x_k, with a sub-embedding n_k each. A decoder R_k describes the group by its sub-embedding:

        e_k(x) = mean over the group's features of (R_k n_k - x_k)^2,   k(x) = argmin over k of e_k(x)
        loss   = whole_weight * ProxyAnchor(embeddings)
               + sum over k of ProxyAnchor(n_k of the samples with k(x) = k)
               + reconstruction_weight * mean over samples and k of e_k(x)

    Each Proxy Anchor has proxies of its own. Decoders see n_k and x_k without a gradient, so that reconstruction trains
    decoders only. Computed in float32 at least, whatever autocast says; checked as `PotentialFieldLoss` is.

    Published, in the authors' code for CUB with BN-Inception: K 4, scale 64, margin 0.2, whole_weight 10,
    reconstruction_weight 1, decoders at the learning rate of the embedding layer, 1e-3.

    Ours: an empty batch has the loss 0.

    Args:
        num_classes: C; labels must lie in [0, C).
        embedding_dim: D, a multiple of `groups`.
        num_features: F, a multiple of `groups`.
        groups: K, that of the embedding layer.
        scale, margin: Of all Proxy Anchors.
        whole_weight, reconstruction_weight: Of two terms.
        decoder_lr: Learning rate of the decoders, whatever that of the proxies is; a schedule lowers both alike.

    Attributes:
        terms: "whole", "groups" and "reconstruction", detached, before their weights.
    """

    needs_features = True
    needs_nodes = True
    proxies: nn.Parameter  # (C, 1, D)
    group_proxies: nn.Parameter  # (K, C, D / K)
    decoder_weights: nn.Parameter  # (K, F / K, D / K)
    decoder_biases: nn.Parameter  # (K, F / K)

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        num_features: int,
        *,
        groups: int = 4,
        scale: float = 64.0,
        margin: float = 0.2,
        whole_weight: float = 10.0,
        reconstruction_weight: float = 1.0,
        decoder_lr: float = 1e-3,
    ) -> None:
        super().__init__()
        sizes = {"num_classes": num_classes, "embedding_dim": embedding_dim, "num_features": num_features}
        for name, size in {**sizes, "groups": groups}.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {size!r}")
        for name in ("embedding_dim", "num_features"):
            if sizes[name] % groups:
                raise ValueError(f"groups must divide {name}, got {groups} and {sizes[name]}")
        for name, value in (("scale", scale), ("decoder_lr", decoder_lr)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        for name, value in (("whole_weight", whole_weight), ("reconstruction_weight", reconstruction_weight)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {value}")
        self.num_classes = num_classes
        self.embedding_dim = embedding_dim
        self.groups = groups
        self.scale = scale
        self.margin = margin
        self.whole_weight = whole_weight
        self.reconstruction_weight = reconstruction_weight
        self.decoder_lr = decoder_lr
        self.terms: dict[str, Tensor] = {}
        # as published, of variance 1 / (3 D): a proxy is about 0.6 long
        part = embedding_dim // groups
        bound = 1 / math.sqrt(embedding_dim)
        self.proxies = nn.Parameter(torch.empty(num_classes, 1, embedding_dim).uniform_(-bound, bound))
        self.group_proxies = nn.Parameter(torch.randn(groups, num_classes, part) / math.sqrt(3 * part))
        width = num_features // groups
        self.decoder_weights = nn.Parameter(torch.randn(groups, width, part) * math.sqrt(2 / width))
        self.decoder_biases = nn.Parameter(torch.zeros(groups, width))

    def forward(self, embeddings: Tensor, labels: Tensor, *, features: Tensor, nodes: Tensor) -> Tensor:
        """The loss of a batch.

        Args:
            embeddings: (batch, D) of any floating-point type.
            labels: (batch,) in [0, C).
            features: (batch, F) of the backbone.
            nodes: (batch, K, D / K), the sub-embeddings.
        """
        labels = check_batch(embeddings, labels, self.proxies)
        part = self.embedding_dim // self.groups
        if nodes.shape != (len(labels), self.groups, part):
            raise ValueError(
                f"nodes must be ({len(labels)}, {self.groups}, {part}), got shape {tuple(nodes.shape)}: "
                f"loss.options groups and model.relations must be equal"
            )
        wide = torch.promote_types(torch.promote_types(embeddings.dtype, self.proxies.dtype), torch.float32)
        with torch.autocast(embeddings.device.type, enabled=False):
            own = F.one_hot(labels, self.num_classes).bool()  # (batch, C)
            cosines = unit(embeddings.to(wide)) @ unit(self.proxies[:, 0].to(wide)).T
            pull, push = pull_and_push(cosines, own, ~own, self.scale, self.margin)
            errors = self._errors(nodes.detach().to(wide), features.detach().to(wide))  # (batch, K)
            mine = F.one_hot(errors.argmin(dim=1), self.groups).bool()[:, :, None]  # (batch, K, 1)
            by_group = torch.einsum("bkd,kcd->bkc", unit(nodes.to(wide)), unit(self.group_proxies.to(wide)))
            other = ~own[:, None] & mine
            pulls, pushes = pull_and_push(by_group, own[:, None] & mine, other, self.scale, self.margin)  # (K,) each
            whole, groups = pull + push, (pulls + pushes).sum()
            reconstruction = errors.sum() / max(errors.numel(), 1)
            parts = {"whole": whole, "groups": groups, "reconstruction": reconstruction}
            self.terms = {name: value.detach() for name, value in parts.items()}
            return self.whole_weight * whole + groups + self.reconstruction_weight * reconstruction

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Two groups: all proxies with `lr`, and the decoders with `decoder_lr`."""
        proxies = {"params": [self.proxies, self.group_proxies], "lr": lr, "weight_decay": weight_decay}
        described = [self.decoder_weights, self.decoder_biases]
        decoders = {"params": described, "lr": self.decoder_lr, "weight_decay": weight_decay}
        return [proxies, decoders]

    def proxy_points(self) -> Tensor:
        """Where the proxies of the embedding are on the unit sphere, (C, 1, D), detached."""
        return unit(self.proxies.detach())

    def extra_repr(self) -> str:
        return (
            f"{self.num_classes}, {self.embedding_dim}, groups={self.groups}, scale={self.scale}, "
            f"margin={self.margin}, whole_weight={self.whole_weight}, "
            f"reconstruction_weight={self.reconstruction_weight}, decoder_lr={self.decoder_lr}"
        )

    def _errors(self, nodes: Tensor, features: Tensor) -> Tensor:
        """e_k of every sample, (batch, K)."""
        described = torch.einsum("bkd,kfd->bkf", nodes, self.decoder_weights.to(nodes.dtype))
        apart = described + self.decoder_biases.to(nodes.dtype) - features.unflatten(1, (self.groups, -1))
        return apart.square().mean(dim=2)
