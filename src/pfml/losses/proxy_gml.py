"""ProxyGML (Zhu et al., NeurIPS 2020): few proxies near each sample, classified by the labels that they carry."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfml.losses.checks import check_batch
from pfml.sphere import unit

__all__ = ["ProxyGMLLoss"]


class ProxyGMLLoss(nn.Module):
    """Several proxies per class, of which each sample sees its own and the nearest others.

    With s(x, p) the cosine of a sample x of class y and a proxy p, and K(x) the proxies that x keeps: the
    ceil(kept_share * C * M) most similar of all C * M, where the M of its own class always rank first:

        S(x, c) = sum over the proxies p of class c in K(x) of s(x, p)
        loss    = mean over x of -log( exp(scale * S(x, y)) / sum over c with a proxy in K(x) of exp(scale * S(x, c)) )
                + proxy_weight * mean over proxies q of -log( exp(T(q, class of q)) / sum over all c of exp(T(q, c)) )
        T(q, c) = sum over all proxies p of class c of s(q, p), q itself among them

    Which proxies are kept is not differentiated. Computed in float32 at least, whatever autocast says; checked as
    `PotentialFieldLoss` is.

    Published, in the authors' code: all of the above with 12, 0.05, 0.3 and scale 1; on SOP 1 proxy per class and
    proxy_weight 0. Adam with eps 0.01, proxies at 300 times (SOP 3,000 times) the learning rate of the backbone.

    Ours: embeddings are normalized here too. A class is left out of the softmax if it has no proxy in K(x), where the
    code looks for sums that are exactly 0, and the softmax is computed without the code's small constants. With so few
    classes that all kept proxies would be the sample's own (1 / kept_share classes or fewer) nothing could be learned;
    then as many others are kept, 2 M in all. An empty batch has the loss of the proxies alone.

    Args:
        num_classes: C; labels must lie in [0, C).
        embedding_dim: D.
        proxies_per_class: M.
        kept_share: Share of all proxies that a sample keeps, in (0, 1].
        proxy_weight: Weight of the proxies' own classification.
        scale: Factor of the sums of cosines.

    Attributes:
        terms: Both terms of the last value, detached, before `proxy_weight`: "samples" and "proxies".
    """

    proxies: nn.Parameter  # (C, M, D)

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        proxies_per_class: int = 12,
        kept_share: float = 0.05,
        proxy_weight: float = 0.3,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        for name, value in (
            ("num_classes", num_classes),
            ("embedding_dim", embedding_dim),
            ("proxies_per_class", proxies_per_class),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        if not 0 < kept_share <= 1:
            raise ValueError(f"kept_share must lie in (0, 1], got {kept_share}")
        if not 0 <= proxy_weight < math.inf:
            raise ValueError(f"proxy_weight must be finite and not negative, got {proxy_weight}")
        if not 0 < scale < math.inf:
            raise ValueError(f"scale must be positive and finite, got {scale}")
        self.num_classes = num_classes
        self.embedding_dim = embedding_dim
        self.proxies_per_class = proxies_per_class
        self.kept_share = kept_share
        self.proxy_weight = proxy_weight
        self.scale = scale
        self.terms: dict[str, Tensor] = {}
        # as published, uniform: the length of a proxy is about sqrt(D / (3 C M))
        bound = 1 / math.sqrt(num_classes * proxies_per_class)
        shape = (num_classes, proxies_per_class, embedding_dim)
        self.proxies = nn.Parameter(torch.empty(shape).uniform_(-bound, bound))

    @property
    def proxy_labels(self) -> Tensor:
        """The class of each proxy, (C * M,)."""
        return torch.arange(self.num_classes, device=self.proxies.device).repeat_interleave(self.proxies_per_class)

    @property
    def num_kept(self) -> int:
        """How many proxies a sample keeps, its own class's among them."""
        total = self.num_classes * self.proxies_per_class
        kept = math.ceil(round(self.kept_share * total, 6))  # 0.07 * 100 is 7, not 7.000000000000001
        return kept if kept > self.proxies_per_class else min(2 * self.proxies_per_class, total)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch: embeddings (batch, D) of any floating-point type, labels (batch,) in [0, C)."""
        labels = check_batch(embeddings, labels, self.proxies)
        wide = torch.promote_types(torch.promote_types(embeddings.dtype, self.proxies.dtype), torch.float32)
        with torch.autocast(embeddings.device.type, enabled=False):
            proxies = unit(self.proxies.to(wide))  # (C, M, D)
            cosines = unit(embeddings.to(wide)) @ proxies.flatten(0, 1).T  # (batch, C * M)
            logits = self.scale * self._sums_of_kept(cosines, labels)
            loss = F.cross_entropy(logits, labels, reduction="sum") / max(len(labels), 1)
            self.terms = {"samples": loss.detach()}
            if self.proxy_weight > 0:
                class_sums = proxies.flatten(0, 1) @ proxies.sum(dim=1).T  # (C * M, C)
                classified = F.cross_entropy(class_sums, self.proxy_labels)
                self.terms["proxies"] = classified.detach()
                loss = loss + self.proxy_weight * classified
            return loss

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """The proxies as an optimizer's parameter group; published: 300 times the learning rate of the backbone."""
        return [{"params": [self.proxies], "lr": lr, "weight_decay": weight_decay}]

    def proxy_points(self) -> Tensor:
        """Where the proxies are on the unit sphere, (C, M, D), detached."""
        return unit(self.proxies.detach())

    def extra_repr(self) -> str:
        return (
            f"{self.num_classes}, {self.embedding_dim}, proxies_per_class={self.proxies_per_class}, "
            f"kept_share={self.kept_share}, proxy_weight={self.proxy_weight}, scale={self.scale}"
        )

    def _sums_of_kept(self, cosines: Tensor, labels: Tensor) -> Tensor:
        """S(x, c), (batch, C), -inf where none of the class is kept; of cosines (batch, C * M)."""
        own = labels[:, None] == self.proxy_labels  # (batch, C * M)
        nearest = cosines.detach().masked_fill(own, torch.inf).topk(self.num_kept, dim=1, sorted=False).indices
        kept = torch.zeros_like(own).scatter(1, nearest, True)
        by_class = (len(labels), self.num_classes, self.proxies_per_class)
        sums = torch.where(kept, cosines, 0).view(by_class).sum(dim=2)
        return sums.masked_fill(~kept.view(by_class).any(dim=2), -torch.inf)
