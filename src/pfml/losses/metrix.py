"""Metrix (Venkataramanan et al., ICLR 2022): mixup of embeddings and of what they are to an anchor.

A loss of an anchor a is a function of two sums, over positives p of rho+(s(a, p)) and over negatives n of
rho-(s(a, n)), with cosines s. Mixed embeddings v = unit(m p + (1 - m) n) of all its positives and negatives are
positive to the degree m, and give the same function of

    sum over v of m * rho+(s(a, v))   and   sum over v of (1 - m) * rho-(s(a, v))

The loss is that of the samples plus `mix_weight` times the mixed one. m is drawn once a step from Beta(concentration,
concentration), with torch's global generator of the CPU. In evaluation mode nothing is mixed.

Published: mix_weight 0.4, concentration 2. The authors' code is whole for the contrastive loss only. There positives
and negatives are mixed in half of the steps, in the others an anchor and its negatives (weight 0.3); of the positives
it takes the first. Its multi-similarity loss adds up the sums of samples and of mixed ones within the logarithm. Here
it is as in the paper: a loss of its own, over all pairs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfml.losses.checks import check_batch
from pfml.losses.multi_similarity import log_one_plus_sum, mined_pairs
from pfml.losses.proxy_anchor import ProxyAnchorLoss
from pfml.sphere import unit

__all__ = ["MultiSimilarityMetrixLoss", "ProxyAnchorMetrixLoss"]


class ProxyAnchorMetrixLoss(ProxyAnchorLoss):
    """Proxy Anchor with mixed embeddings: anchors are the proxies of the classes in the batch.

    For the proxy p_c of class c, samples x of c and y of other classes, and v = unit(m x + (1 - m) y):

        pull(c) = log(1 + sum over x, y of m * exp(-scale (s(v, p_c) - margin)))
        push(c) = log(1 + sum over x, y of (1 - m) * exp(scale (s(v, p_c) + margin)))
        mixed   = (sum over c of pull(c)) / number of classes in the batch + (sum over c of push(c)) / C

    Computed in float32 at least, whatever autocast says; checked as `PotentialFieldLoss` is.

    Args:
        num_classes: C; labels must lie in [0, C).
        embedding_dim: D.
        scale, margin: Of Proxy Anchor.
        mix_weight: Of the mixed loss; at 0 nothing is mixed.
        concentration: Of the Beta distribution of m.

    Attributes:
        terms: "pull" and "push" of Proxy Anchor, and "mixed", before `mix_weight`; detached.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        scale: float = 32.0,
        margin: float = 0.1,
        mix_weight: float = 0.4,
        concentration: float = 2.0,
    ) -> None:
        super().__init__(num_classes, embedding_dim, scale=scale, margin=margin)
        _check_mixing(mix_weight, concentration)
        self.mix_weight = mix_weight
        self.concentration = concentration

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch: embeddings (batch, D) of any floating-point type, labels (batch,) in [0, C)."""
        clean = super().forward(embeddings, labels)
        if not self.training or self.mix_weight == 0:
            return clean
        labels = labels.to(embeddings.device, torch.int64).clamp(0, self.num_classes - 1)
        with torch.autocast(embeddings.device.type, enabled=False):
            mixed = self._mixed(unit(embeddings.to(clean.dtype)), labels, drawn_share(self.concentration))
            self.terms["mixed"] = mixed.detach()
            return clean + self.mix_weight * mixed

    def _mixed(self, points: Tensor, labels: Tensor, share: float) -> Tensor:
        to_proxies = points @ unit(self.proxies[:, 0].to(points.dtype)).T  # (B, C)
        # entry (i, j): the mix of sample i with sample j of another class, as the proxy of i's class sees it
        ours, theirs = to_proxies.gather(1, labels[:, None]), to_proxies[:, labels].T
        cosines = mixed_cosines(ours, theirs, points @ points.T, share)  # (B, B)
        others = labels[:, None] != labels
        own = F.one_hot(labels, self.num_classes).bool()  # (B, C)
        pull = self._of_classes(math.log(share) - self.scale * (cosines - self.margin), others, own)
        push = self._of_classes(math.log(1 - share) + self.scale * (cosines + self.margin), others, own)
        return pull.sum() / own.any(dim=0).sum().clamp(min=1) + push.sum() / self.num_classes

    @staticmethod
    def _of_classes(exponents: Tensor, counted: Tensor, own: Tensor) -> Tensor:
        """log(1 + sum over samples i of a class and over counted j of exp(exponents)), (C,)."""
        lowest = torch.finfo(exponents.dtype).min / 2  # finite, so that a row without any has a gradient
        rows = exponents.masked_fill(~counted, lowest).logsumexp(dim=1)  # (B,)
        return log_one_plus_sum(rows.expand(own.shape[1], -1), own.T & counted.any(dim=1))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mix_weight={self.mix_weight}, concentration={self.concentration}"


class MultiSimilarityMetrixLoss(nn.Module):
    """The multi-similarity loss with mixed embeddings, both over the pairs that its miner keeps.

    For an anchor a, its kept positives p and negatives n, and v = unit(m p + (1 - m) n):

        mixed = mean over anchors of log(1 + sum over p, n of m * exp(-alpha (s(a, v) - base))) / alpha
                                   + log(1 + sum over p, n of (1 - m) * exp(beta (s(a, v) - base))) / beta

    Computed in float32 at least, whatever autocast says; checked as `PotentialFieldLoss` is. It takes memory for
    (batch)^3 numbers.

    Args:
        num_classes: C; labels must lie in [0, C).
        embedding_dim: D.
        alpha, beta, base: Sharpness for positives, for negatives, and the cosine between them.
        epsilon: Tolerance of the miner.
        mix_weight: Of the mixed loss; at 0 nothing is mixed.
        concentration: Of the Beta distribution of m.

    Attributes:
        terms: "pull" and "push" of the samples, and "mixed", before `mix_weight`; detached.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        alpha: float = 2.0,
        beta: float = 50.0,
        base: float = 0.5,
        epsilon: float = 0.1,
        mix_weight: float = 0.4,
        concentration: float = 2.0,
    ) -> None:
        super().__init__()
        for name, size in (("num_classes", num_classes), ("embedding_dim", embedding_dim)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {size!r}")
        for name, value in (("alpha", alpha), ("beta", beta)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")
        _check_mixing(mix_weight, concentration)
        self.num_classes = num_classes
        self.embedding_dim = embedding_dim
        self.alpha, self.beta, self.base, self.epsilon = alpha, beta, base, epsilon
        self.mix_weight = mix_weight
        self.concentration = concentration
        self.terms: dict[str, Tensor] = {}

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch: embeddings (batch, D) of any floating-point type, labels (batch,) in [0, C)."""
        device = embeddings.device if isinstance(embeddings, Tensor) else None
        labels = check_batch(embeddings, labels, torch.empty(self.num_classes, 0, self.embedding_dim, device=device))
        wide = torch.promote_types(embeddings.dtype, torch.float32)
        with torch.autocast(embeddings.device.type, enabled=False):
            points = unit(embeddings.to(wide))
            cosines = points @ points.T
            positives, negatives = mined_pairs(cosines, labels, self.epsilon)
            pull, push = self._pull_and_push(cosines, positives, negatives)
            self.terms = {"pull": pull.detach(), "push": push.detach()}
            loss = pull + push
            if self.training and self.mix_weight > 0:
                share = drawn_share(self.concentration)
                of_anchor = mixed_cosines(cosines[:, :, None], cosines[:, None, :], cosines, share).flatten(1)
                pairs = (positives[:, :, None] & negatives[:, None, :]).flatten(1)  # (B, B * B)
                pull, push = self._pull_and_push(of_anchor, pairs, pairs, share)
                mixed = pull + push
                self.terms["mixed"] = mixed.detach()
                loss = loss + self.mix_weight * mixed
            return loss

    def _pull_and_push(
        self, cosines: Tensor, positives: Tensor, negatives: Tensor, share: float | None = None
    ) -> tuple[Tensor, Tensor]:
        """Both terms over cosines (B, n); `share` weighs what is positive and negative at once."""
        near, far = (0.0, 0.0) if share is None else (math.log(share), math.log(1 - share))
        pull = log_one_plus_sum(near - self.alpha * (cosines - self.base), positives) / self.alpha
        push = log_one_plus_sum(far + self.beta * (cosines - self.base), negatives) / self.beta
        count = max(len(cosines), 1)
        return pull.sum() / count, push.sum() / count

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """None: the loss learns nothing."""
        return []

    def proxy_points(self) -> Tensor:
        """No proxies, (C, 0, D)."""
        return torch.empty(self.num_classes, 0, self.embedding_dim)

    def extra_repr(self) -> str:
        return (
            f"{self.num_classes}, {self.embedding_dim}, alpha={self.alpha}, beta={self.beta}, base={self.base}, "
            f"epsilon={self.epsilon}, mix_weight={self.mix_weight}, concentration={self.concentration}"
        )


def mixed_cosines(to_first: Tensor, to_second: Tensor, between: Tensor, share: float) -> Tensor:
    """Cosines of anchors to unit(share * x + (1 - share) * y), out of those to x, those to y and those of x and y.

    Two points that mix to zero have cosine 0, without a gradient.
    """
    squares = share**2 + (1 - share) ** 2 + 2 * share * (1 - share) * between
    mixes = squares > 1e-6
    norms = torch.where(mixes, squares, 1.0).sqrt()
    return torch.where(mixes, (share * to_first + (1 - share) * to_second) / norms, 0.0)


def drawn_share(concentration: float) -> float:
    """A number of Beta(concentration, concentration), strictly between 0 and 1, of the CPU's generator."""
    drawn = torch.distributions.Beta(concentration, concentration).sample()
    return float(drawn.clamp(1e-6, 1 - 1e-6))


def _check_mixing(mix_weight: float, concentration: float) -> None:
    if not 0 <= mix_weight < math.inf:
        raise ValueError(f"mix_weight must be finite and not negative, got {mix_weight}")
    if not 0 < concentration < math.inf:
        raise ValueError(f"concentration must be positive and finite, got {concentration}")
