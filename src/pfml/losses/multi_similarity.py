"""The multi-similarity loss (Wang et al., CVPR 2019) as functions of masks: what its extensions are made of."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["log_one_plus_sum", "mined_pairs", "pair_masks"]


def pair_masks(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Which samples are positives and which are negatives of each anchor, (B, B) of bool each."""
    same = labels[:, None] == labels
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    return same & ~itself, ~same


def mined_pairs(cosines: Tensor, labels: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The positives and negatives that the miner keeps, (B, B) of bool each.

    A positive is kept if its cosine is below that of the nearest negative + epsilon, a negative if its cosine is above
    that of the farthest positive - epsilon. An anchor that lacks one kind keeps none of the other.
    """
    positives, negatives = pair_masks(labels)
    if not len(labels):
        return positives, negatives
    cosines = cosines.detach()
    farthest = cosines.masked_fill(~positives, torch.inf).amin(dim=1, keepdim=True)
    nearest = cosines.masked_fill(~negatives, -torch.inf).amax(dim=1, keepdim=True)
    return positives & (cosines - epsilon < nearest), negatives & (cosines + epsilon > farthest)


def log_one_plus_sum(exponents: Tensor, counted: Tensor) -> Tensor:
    """log(1 + sum of exp(exponents) over what is counted in the last dimension), without overflow; 0 for none."""
    exponents = exponents.masked_fill(~counted, -torch.inf)
    one = exponents.new_zeros(*exponents.shape[:-1], 1)
    return torch.logsumexp(torch.cat([one, exponents], dim=-1), dim=-1)
