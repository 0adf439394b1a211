"""NIR (Roth et al., CVPR 2022): non-isotropy regularization, a normalizing flow beside Proxy Anchor."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfml.losses.proxy_anchor import ProxyAnchorLoss
from pfml.sphere import unit

__all__ = ["ConditionalFlow", "ProxyAnchorNIRLoss"]


class ProxyAnchorNIRLoss(ProxyAnchorLoss):
    """Proxy Anchor, and a flow that tells the samples around a proxy apart: they do not spread alike in all directions.

    With x and the proxies p on the unit sphere, z(x | p) what the flow makes of x and J its Jacobian:

        e(x)  = |z(x | p)|^2 / 2 - log |det J|, the negative log-likelihood of x given its own proxy, without a constant
        loss  = mean over x of exp(e(x)) + alignment * Proxy Anchor

    Gradients flow through it all, to samples, proxies and flow. Computed in float32 at least, whatever autocast says;
    checked as `PotentialFieldLoss` is.

    Published, in the authors' code: all of the above with alignment 0.0075 on CUB, 0.01 on Cars, 0.3 on SOP; 5 blocks
    of networks with 8 layers of 128 units, clamp 2; proxies are normal numbers over 8 at the start. Adam, weight decay
    on the backbone only; backbone 1e-5, proxies 0.04, flow 5e-4. The paper writes the log-likelihood, without the
    exponential (`exponential=False`). With it the term is bounded, and what the flow explains well ceases to count:
    e falls by far more than 1 as soon as the flow widens the sphere, so that `terms["flow"]` is soon near 0.

    Ours: Proxy Anchor's mean is over the classes of the batch, where the code's is over its samples. Exponents above
    20 grow linearly, so that a flow that is far off does not overflow.

    Args:
        num_classes: C; labels must lie in [0, C).
        embedding_dim: D, at least 2.
        scale, margin: Of Proxy Anchor.
        alignment: Weight of Proxy Anchor.
        exponential: Whether exp(e) counts, as in the code, or e, as in the paper.
        num_blocks, depth, width, clamp: Of the flow; see `ConditionalFlow`.
        flow_lr: Learning rate of the flow, whatever that of the proxies is; a schedule lowers both alike.

    Attributes:
        terms: The parts of the last value, detached: "pull" and "push" of Proxy Anchor before `alignment`, "flow".
    """

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        scale: float = 32.0,
        margin: float = 0.1,
        alignment: float = 0.0075,
        exponential: bool = True,
        num_blocks: int = 5,
        depth: int = 8,
        width: int = 128,
        clamp: float = 2.0,
        flow_lr: float = 5e-4,
    ) -> None:
        super().__init__(num_classes, embedding_dim, scale=scale, margin=margin)
        for name, value in (("alignment", alignment), ("flow_lr", flow_lr)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        self.alignment = alignment
        self.exponential = bool(exponential)
        self.flow_lr = flow_lr
        self.proxies = nn.Parameter(torch.randn(num_classes, 1, embedding_dim) / 8)
        self.flow = ConditionalFlow(embedding_dim, num_blocks=num_blocks, depth=depth, width=width, clamp=clamp)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch: embeddings (batch, D) of any floating-point type, labels (batch,) in [0, C)."""
        aligned = super().forward(embeddings, labels)
        wide = aligned.dtype
        labels = labels.to(embeddings.device, torch.int64).clamp(0, self.num_classes - 1)
        with torch.autocast(embeddings.device.type, enabled=False):
            points, proxies = unit(embeddings.to(wide)), unit(self.proxies[:, 0].to(wide))
            latent, log_determinant = self.flow(points, F.embedding(labels, proxies))
            costs = latent.square().sum(dim=1) / 2 - log_determinant  # e
            costs = _bounded_exp(costs) if self.exponential else costs
            flow = costs.sum() / max(len(labels), 1)
            self.terms["flow"] = flow.detach()
            return flow + self.alignment * aligned

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Two groups: the proxies with `lr`, and the flow with `flow_lr`."""
        flow = {"params": list(self.flow.parameters()), "lr": self.flow_lr, "weight_decay": weight_decay}
        return [*super().param_groups(lr, weight_decay), flow]

    def extra_repr(self) -> str:
        rates = f"alignment={self.alignment}, exponential={self.exponential}, flow_lr={self.flow_lr}"
        return f"{super().extra_repr()}, {rates}"


class ConditionalFlow(nn.Module):
    """An invertible function of points given conditions: blocks of affine couplings.

    As in Glow (Kingma and Dhariwal, NeurIPS 2018), but with fixed permutations, a block permutes the features, splits
    them in halves x1 and x2, and gives, with c the condition:

        y1 = x1 * exp(s(x2, c)) + t(x2, c)
        y2 = x2 * exp(s'(y1, c)) + t'(y1, c)

    One network of `depth` linear layers with ReLU gives s and t, another one s' and t'. s is 0.636 * clamp * atan of
    what its network says, between -clamp and clamp. Permutations are drawn once and are buffers.

    Args:
        dim: D of points and conditions, at least 2.
        num_blocks: Blocks.
        depth: Linear layers of a network, at least 2.
        width: Their hidden units.
        clamp: Largest logarithm of a factor.
    """

    permutations: Tensor  # (num_blocks, D) of int64

    def __init__(self, dim: int, *, num_blocks: int = 5, depth: int = 8, width: int = 128, clamp: float = 2.0) -> None:
        super().__init__()
        for name, size, least in (("embedding_dim", dim, 2), ("num_blocks", num_blocks, 1), ("depth", depth, 2),
                                  ("width", width, 1)):  # fmt: skip
            if not isinstance(size, int) or isinstance(size, bool) or size < least:
                raise ValueError(f"{name} must be an integer >= {least}, got {size!r}")
        if not 0 < clamp < math.inf:
            raise ValueError(f"clamp must be positive and finite, got {clamp}")
        self.clamp = clamp
        self.first = dim // 2
        rest = dim - self.first
        self.register_buffer("permutations", torch.stack([torch.randperm(dim) for _ in range(num_blocks)]))
        self.of_second = nn.ModuleList(_network(rest + dim, 2 * self.first, depth, width) for _ in range(num_blocks))
        self.of_first = nn.ModuleList(_network(self.first + dim, 2 * rest, depth, width) for _ in range(num_blocks))

    def forward(self, points: Tensor, conditions: Tensor) -> tuple[Tensor, Tensor]:
        """What the points (B, D) become, (B, D), and log |det J|, (B,), given conditions (B, D)."""
        log_determinant = points.new_zeros(len(points))
        for permutation, of_second, of_first in zip(self.permutations, self.of_second, self.of_first, strict=True):
            halves = points[:, permutation].split([self.first, points.shape[1] - self.first], dim=1)
            first, grown = self._coupled(halves[0], of_second, halves[1], conditions)
            second, grown_too = self._coupled(halves[1], of_first, first, conditions)
            points = torch.cat([first, second], dim=1)
            log_determinant = log_determinant + grown + grown_too
        return points, log_determinant

    def _coupled(self, half: Tensor, network: nn.Module, other: Tensor, conditions: Tensor) -> tuple[Tensor, Tensor]:
        """`half`, scaled and shifted by what the network makes of the other half, and the logarithm of the volume."""
        hidden = torch.cat([other, conditions], dim=1)
        for layer in network.children():
            if isinstance(layer, nn.Linear):
                hidden = F.linear(hidden, layer.weight.to(hidden.dtype), layer.bias.to(hidden.dtype))
            else:
                hidden = layer(hidden)
        logarithms, shifts = hidden.chunk(2, dim=1)
        logarithms = 0.636 * self.clamp * torch.atan(logarithms)
        return half * torch.exp(logarithms) + shifts, logarithms.sum(dim=1)


def _network(num_inputs: int, num_outputs: int, depth: int, width: int) -> nn.Sequential:
    sizes = [num_inputs, *[width] * (depth - 1), num_outputs]
    layers: list[nn.Module] = []
    for ins, outs in pairwise(sizes):
        layers += [nn.Linear(ins, outs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _bounded_exp(exponents: Tensor, limit: float = 20.0) -> Tensor:
    """exp(exponents), continued above `limit` as its tangent."""
    return torch.exp(exponents.clamp(max=limit)) * (1 + (exponents - limit).clamp(min=0))
