"""A random subsample of proxies that estimates all of them: `PotentialFieldLoss(proxy_sample=...)`."""

from __future__ import annotations

import torch
from torch import Tensor

from pfml.superposition import Anchors

__all__ = ["subsample_anchors"]


def subsample_anchors(labels: Tensor, num_classes: int, per_class: int, block: int) -> Anchors:
    """All proxies of the batch's classes, each once, and a random subsample of `block` proxies of other classes.

    The sum of weights * values at the rows is an unbiased estimate of the sum of the values of all C * M proxies.
    Uses the default generator of the labels' device, as one operator of fixed shapes: k = B * M + block.

    Args:
        labels: (B,), int64, the classes of the batch.
        num_classes: C.
        per_class: M; the proxies of class c are the rows c * M to (c + 1) * M - 1.
        block: Size of the subsample, less than C * M; all proxies of other classes if there are fewer.
    """
    return Anchors(*torch.ops.pfml.subsample_anchors(labels, num_classes, per_class, block))


@torch.library.custom_op("pfml::subsample_anchors", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _subsample_anchors(labels: Tensor, num_classes: int, per_class: int, block: int) -> tuple[Tensor, Tensor]:
    labels = labels.clamp(0, num_classes - 1).sort().values  # `check_batch` reports labels out of range
    is_first = torch.ones_like(labels, dtype=torch.bool)
    is_first[1:] = labels[1:] != labels[:-1]
    of_batch = (labels[:, None] * per_class + torch.arange(per_class, device=labels.device)).flatten()  # (B * M,)

    in_batch = torch.zeros(num_classes, dtype=torch.bool, device=labels.device).index_fill_(0, labels, True)
    num_others = (num_classes - in_batch.sum()) * per_class
    # At most B * M of the first B * M + block of a random order are of the batch's classes: enough are left.
    shuffled = torch.randperm(num_classes * per_class, device=labels.device)[: len(of_batch) + block]
    is_other = ~in_batch[shuffled // per_class]
    others_first = (~is_other).to(torch.uint8).argsort(stable=True)[:block]
    share = num_others.double() / num_others.clamp(1, block)

    rows = torch.cat([of_batch, shuffled[others_first]])
    weights = torch.cat([is_first.double().repeat_interleave(per_class), is_other[others_first] * share])
    return rows, weights


@_subsample_anchors.register_fake
def _(labels: Tensor, num_classes: int, per_class: int, block: int) -> tuple[Tensor, Tensor]:
    size = labels.shape[0] * per_class + block
    return labels.new_empty(size), labels.new_empty(size, dtype=torch.float64)
