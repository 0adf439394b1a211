"""The embedding layer of Deep Relational Metric Learning (Zheng et al., ICCV 2021)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfml.sphere import unit

__all__ = ["RelationalLayer"]


class RelationalLayer(nn.Module):
    """Sub-embeddings of groups of features, each corrected by the others to which it is related.

    With features in K groups x_1 ... x_K, and x~ the same without a gradient:

        node_k  = unit(N_k x_k)
        s_kl    = relu(score(A_k x~_k - B_l x~_l)),    w_kl = s_kl / sum over k of s_kl
        out_l   = integrate(node_l, sum over k of w_kl node_k)

    N, A, B, score and integrate are linear layers with a bias. `integrate` starts as the node itself, the others start
    as He's normal numbers with fan-out; so the layer starts as K unit vectors side by side.

    Args:
        num_features: F, a multiple of `groups`.
        embedding_dim: D, a multiple of `groups`.
        groups: K.
    """

    def __init__(self, num_features: int, embedding_dim: int, groups: int) -> None:
        super().__init__()
        for name, size in (("features", num_features), ("dimensions of the embedding", embedding_dim)):
            if size % groups:
                raise ValueError(f"relations must divide the {size} {name}, got {groups}")
        self.groups = groups
        sizes = num_features // groups, embedding_dim // groups
        self.nodes_of = nn.ModuleList(_linear(*sizes) for _ in range(groups))
        self.sources = nn.ModuleList(_linear(*sizes) for _ in range(groups))
        self.targets = nn.ModuleList(_linear(*sizes) for _ in range(groups))
        self.score = _linear(sizes[1], 1)
        self.integrate = nn.Linear(2 * sizes[1], sizes[1])
        with torch.no_grad():
            self.integrate.weight.copy_(torch.eye(sizes[1], 2 * sizes[1]))
            self.integrate.bias.zero_()

    def nodes(self, features: Tensor) -> Tensor:
        """The sub-embeddings, unit vectors (B, K, D / K), of features (B, F)."""
        return unit(_each(self.nodes_of, features))

    def forward(self, features: Tensor) -> Tensor:
        """(B, D), not of unit length, of features (B, F)."""
        nodes = self.nodes(features)
        fixed = features.detach()
        apart = _each(self.sources, fixed)[:, :, None] - _each(self.targets, fixed)[:, None]  # (B, K, K, D / K)
        weights = F.normalize(F.relu(self.score(apart)[..., 0]), p=1, dim=1)
        related = weights.mT @ nodes
        return self.integrate(torch.cat([nodes, related], dim=2)).flatten(1)


def _linear(before: int, after: int) -> nn.Linear:
    layer = nn.Linear(before, after)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out")
    nn.init.zeros_(layer.bias)
    return layer


def _each(layers: nn.ModuleList, features: Tensor) -> Tensor:
    """Each layer on its group of features, (B, K, ...)."""
    groups = features.chunk(len(layers), dim=1)
    return torch.stack([layer(group) for layer, group in zip(layers, groups, strict=True)], dim=1)
