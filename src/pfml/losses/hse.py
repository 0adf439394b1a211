"""HSE (Yang et al., ICCV 2023): hybrid species embedding, mixed images beside the samples of a loss."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfml.losses.baselines import margin as margin_loss
from pfml.losses.proxy_anchor import ProxyAnchorLoss
from pfml.sphere import unit

__all__ = ["HSELoss", "margin_hse", "proxy_anchor_hse"]


class HSELoss(nn.Module):
    """A loss of samples, and hybrids that lie nearer to a sample of a parent class than to any of another class.

    A hybrid h is the embedding of a crop mixed of two samples. With cosines s, p(h) the nearest sample of either parent
    class and n(h) the nearest sample of any other class:

        loss = base + hybrid_weight * mean over h of -log( exp(s(h, p) / temperature)
                                                          / (exp(s(h, p) / temperature) + exp(s(h, n) / temperature)) )

    Hybrids of a batch without other classes do not count. The training loop makes a mixed crop of each sample (see
    `pfml.data.mixed_crops`), since the loss has an attribute `mixing`. Computed in float32 at least, whatever autocast
    says.

    Published, as others report it: hybrids by CutMix, MixUp and a modified GridMask; parents as weak positives, of
    which a near one is taken, against a near negative of another class; a loss like NCA. The paper's text and code were
    not at hand: hybrid_weight, the shares of the mixes and the grid are ours, and the temperature of 0.5 is that of NCA
    with squared distances on the unit sphere, 2 - 2 s.

    Args:
        base: The loss of the samples.
        hybrid_weight: Weight of the hybrids.
        temperature: What their cosines are divided by.
        mixing: How crops are mixed: "cutmix", "mixup", "grid", or "any" for one of these in each step.

    Attributes:
        terms: Those of the base loss, and "hybrids" before `hybrid_weight`; detached.
    """

    def __init__(self, base: nn.Module, *, hybrid_weight: float, temperature: float, mixing: str) -> None:
        super().__init__()
        if not 0 <= hybrid_weight < math.inf:
            raise ValueError(f"hybrid_weight must be finite and not negative, got {hybrid_weight}")
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature must be positive and finite, got {temperature}")
        if mixing not in ("cutmix", "mixup", "grid", "any"):
            raise ValueError(f"mixing must be cutmix, mixup, grid or any, got {mixing!r}")
        self.base: Any = base
        self.hybrid_weight = hybrid_weight
        self.temperature = temperature
        self.mixing = mixing
        self.terms: dict[str, Tensor] = {}

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        *,
        mixed: Tensor | None = None,
        partner_labels: Tensor | None = None,
        shares: Tensor | None = None,
    ) -> Tensor:
        """The loss of a batch: embeddings (batch, D), labels (batch,) in [0, C).

        Args:
            embeddings, labels: Of the samples.
            mixed: Embeddings of the samples' crops, each mixed with another one, (batch, D); None for the base loss.
            partner_labels: Classes of these others, (batch,).
            shares: How much of a mixed crop is of the sample, (batch,); not used.
        """
        loss = self.base(embeddings, labels)
        self.terms = {"base": loss.detach(), **self.base.terms}
        if mixed is None or partner_labels is None:
            return loss
        with torch.autocast(embeddings.device.type, enabled=False):
            points, hybrids = unit(embeddings.to(loss.dtype)), unit(mixed.to(loss.dtype))
            parents = torch.stack([labels, partner_labels], dim=1)
            hybrid = self._hybrid_loss(hybrids @ points.T, parents, labels)
            self.terms["hybrids"] = hybrid.detach()
            return loss + self.hybrid_weight * hybrid

    def _hybrid_loss(self, cosines: Tensor, parents: Tensor, labels: Tensor) -> Tensor:
        """The second term without its weight: cosines (B, B) of hybrids and samples, parents (B, 2), labels (B,)."""
        if not cosines.numel():
            return cosines.sum()
        related = (parents[:, :, None] == labels).any(dim=1)  # (B, B)
        both = ~related.all(dim=1)  # the sample itself is related
        positive = cosines.masked_fill(~related, -2.0).amax(dim=1)
        negative = cosines.masked_fill(related, -2.0).amax(dim=1)
        losses = F.softplus((negative - positive) / self.temperature)
        return (losses * both).sum() / both.sum().clamp(min=1)

    @property
    def proxies(self) -> Tensor | None:
        """Those of the base loss."""
        return getattr(self.base, "proxies", None)

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Those of the base loss."""
        return self.base.param_groups(lr, weight_decay)

    def proxy_points(self) -> Tensor:
        """Those of the base loss, (C, M, D)."""
        return self.base.proxy_points()

    def extra_repr(self) -> str:
        return f"hybrid_weight={self.hybrid_weight}, temperature={self.temperature}, mixing={self.mixing}"


def proxy_anchor_hse(
    num_classes: int,
    embedding_dim: int,
    *,
    scale: float = 32.0,
    margin: float = 0.1,
    hybrid_weight: float = 1.0,
    temperature: float = 0.5,
    mixing: str = "any",
) -> HSELoss:
    """`HSELoss` beside Proxy Anchor."""
    base = ProxyAnchorLoss(num_classes, embedding_dim, scale=scale, margin=margin)
    return HSELoss(base, hybrid_weight=hybrid_weight, temperature=temperature, mixing=mixing)


def margin_hse(
    num_classes: int,
    embedding_dim: int,
    *,
    margin: float = 0.2,
    beta: float = 1.2,
    hybrid_weight: float = 1.0,
    temperature: float = 0.5,
    mixing: str = "any",
) -> HSELoss:
    """`HSELoss` beside the margin loss with distance-weighted sampling."""
    base = margin_loss(num_classes, embedding_dim, margin=margin, beta=beta)
    return HSELoss(base, hybrid_weight=hybrid_weight, temperature=temperature, mixing=mixing)
