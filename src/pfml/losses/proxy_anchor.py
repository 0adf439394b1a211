"""Proxy Anchor (Kim et al., CVPR 2020), the baseline that every proxy method is compared with."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfml.losses.checks import check_batch
from pfml.losses.sample_filter import FIT_LAW, check_trust, fit, trusted
from pfml.sphere import unit
from pfml.superposition import Charges

__all__ = ["ProxyAnchorLoss", "pull_and_push"]


class ProxyAnchorLoss(nn.Module):
    """One proxy per class, which pulls its positives and pushes its negatives, the harder the worse they fit.

    With s(x, p) the cosine of a sample and a proxy, P the proxies and P+ those with a sample in the batch:

        mean over P+ of log(1 + sum over x of p's class     of exp(-scale * (s(x, p) - margin)))
      + mean over P  of log(1 + sum over x of other classes of exp( scale * (s(x, p) + margin)))

    Computed in float32 at least, whatever autocast says; checked as `PotentialFieldLoss` is.

    Args:
        num_classes: C; labels must lie in [0, C).
        embedding_dim: D.
        scale, margin: As published.
        trust: Sample filtering for noisy labels; 0 uses every sample, as published. In training mode a sample takes no
            part if its label disagrees with the field of the proxies, which decays as that of the preset pfml-robust
            (see `pfml.losses.sample_filter`). `trusted` returns which samples stay.

    Example:
        >>> loss = ProxyAnchorLoss(num_classes=10, embedding_dim=16)
        >>> loss(torch.randn(4, 16, requires_grad=True), torch.arange(4)).backward()

    Attributes:
        terms: Both terms of the last value, detached: "pull" and "push".
    """

    proxies: nn.Parameter  # (C, 1, D)

    def __init__(
        self, num_classes: int, embedding_dim: int, *, scale: float = 32.0, margin: float = 0.1, trust: float = 0.0
    ) -> None:
        super().__init__()
        for name, value in (("num_classes", num_classes), ("embedding_dim", embedding_dim)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        if not scale > 0:
            raise ValueError(f"scale must be positive, got {scale}")
        self.num_classes = num_classes
        self.embedding_dim = embedding_dim
        self.scale = scale
        self.terms: dict[str, Tensor] = {}
        self.margin = margin
        check_trust(trust, 1, FIT_LAW)
        self.trust = float(trust)
        # kaiming_normal with fan_out, as published: the length of a proxy is about sqrt(2 D / C)
        self.proxies = nn.Parameter(torch.randn(num_classes, 1, embedding_dim) * math.sqrt(2 / num_classes))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch: embeddings (batch, D) of any floating-point type, labels (batch,) in [0, C)."""
        labels = check_batch(embeddings, labels, self.proxies)
        wide = torch.promote_types(torch.promote_types(embeddings.dtype, self.proxies.dtype), torch.float32)
        with torch.autocast(embeddings.device.type, enabled=False):
            return self._anchored(embeddings.to(wide), labels)

    def _anchored(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch that was checked, in the dtype of its embeddings."""
        cosines = unit(embeddings) @ unit(self.proxies[:, 0].to(embeddings.dtype)).T  # (batch, C)
        own = F.one_hot(labels, self.num_classes).bool()  # (batch, C)
        other = ~own
        if self.training and self.trust:
            keep = self._trusted(embeddings, labels)[:, None]
            own, other = own & keep, other & keep
        pulls, pushes = pull_and_push(cosines, own, other, self.scale, self.margin)
        self.terms = {"pull": pulls.detach(), "push": pushes.detach()}
        return pulls + pushes

    def trusted(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Which samples of a batch the filter of `trust` keeps, (batch,) of bool."""
        labels = check_batch(embeddings, labels, self.proxies)
        return self._trusted(embeddings, labels) if self.trust else torch.ones_like(labels, dtype=torch.bool)

    @torch.no_grad()
    def _trusted(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        samples = Charges(embeddings, labels, on_sphere=True)
        classes = torch.arange(self.num_classes, device=labels.device)
        proxies = Charges(self.proxies[:, 0], classes, on_sphere=True)
        return trusted(fit(samples, proxies, self.num_classes, FIT_LAW), self.trust)

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """The proxies as an optimizer's parameter group; published: 100 times the learning rate of the backbone."""
        return [{"params": [self.proxies], "lr": lr, "weight_decay": weight_decay}]

    def proxy_points(self) -> Tensor:
        """Where the proxies are on the unit sphere, (C, 1, D), detached."""
        return unit(self.proxies.detach())

    def extra_repr(self) -> str:
        trust = f", trust={self.trust}" if self.trust else ""
        return f"{self.num_classes}, {self.embedding_dim}, scale={self.scale}, margin={self.margin}{trust}"


def pull_and_push(cosines: Tensor, own: Tensor, other: Tensor, scale: float, margin: float) -> tuple[Tensor, Tensor]:
    """Both terms of Proxy Anchor for samples (B,) and proxies (..., C), scalars or (...).

    Args:
        cosines: (B, ..., C).
        own, other: Which proxies pull a sample, which push it, of the same shape; neither for a sample left out.
        scale, margin: As published.
    """
    pull = _log_one_plus_sum(-scale * (cosines - margin), own)
    push = _log_one_plus_sum(scale * (cosines + margin), other)
    present = own.any(dim=0).sum(dim=-1).clamp(min=1)
    return pull.sum(dim=-1) / present, push.mean(dim=-1)


def _log_one_plus_sum(exponents: Tensor, counted: Tensor) -> Tensor:
    """log(1 + sum over the counted rows of exp(exponents)), per column, without overflow."""
    exponents = exponents.masked_fill(~counted, -torch.inf)
    return torch.logsumexp(torch.cat([exponents.new_zeros(1, *exponents.shape[1:]), exponents]), dim=0)
