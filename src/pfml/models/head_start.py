"""Where a head starts: a linear layer that keeps what a pretrained network knows.

A random layer from F features to D dimensions throws away what the other F - D dimensions know before the first step.
The layers here are computed instead, from the features of the training images:

- "principal": the D directions in which the features differ most.
- "whitened": the same after the directions in which images of one class differ were weakened. With S the covariance
  within classes and s its mean variance, features are first multiplied by (S + s I)^(-1/4), half of a whitening.

Both are centred, and scaled to the size that a random layer has, so that learning rates mean the same.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pfml.models.head import Head

__all__ = ["HEAD_STARTS", "start_head"]

HEAD_STARTS = ("random", "principal", "whitened")


@torch.no_grad()
def start_head(head: Head, start: str, features: Tensor, labels: Tensor) -> None:
    """Put the linear layer of `head` where `start` says.

    Args:
        head: Changed in place.
        start: "principal" or "whitened"; "random" leaves the layer as it is.
        features: What the layer gets for the training images, (N, F).
        labels: Their classes, (N,); "principal" does not look at them.
    """
    if start == "random":
        return
    if start not in HEAD_STARTS:
        raise ValueError(f"head_start must be one of {', '.join(HEAD_STARTS)}, got {start!r}")
    layer = require_layer(head, start)
    centre = features.double().mean(0)
    centred = features.double() - centre
    weaken = _half_whitening(centred, labels) if start == "whitened" else None
    seen = centred if weaken is None else centred @ weaken
    directions = torch.linalg.eigh(seen.T @ seen).eigenvectors.flip(1)[:, : layer.out_features].T
    weight = directions if weaken is None else directions @ weaken
    weight *= math.sqrt(2 * head.num_features) / weight.norm()  # as He's initialisation has it on average
    layer.weight.copy_(weight)
    if layer.bias is not None:
        layer.bias.copy_(-weight @ centre)


def require_layer(head: Head, start: str) -> torch.nn.Linear:
    """The head's linear layer, which must have one to start, with no more dimensions than there are features."""
    if head.linear is None:
        raise ValueError(f"head_start={start!r} needs a head with a linear layer: set model.embedding_dim")
    if head.linear.out_features > head.num_features:
        raise ValueError(
            f"head_start={start!r} needs at most as many dimensions as features: model.embedding_dim must be "
            f"<= {head.num_features}, got {head.linear.out_features}"
        )
    return head.linear


def _half_whitening(centred: Tensor, labels: Tensor) -> Tensor:
    """(S + s I)^(-1/4), symmetric, (F, F)."""
    counts = torch.bincount(labels).clamp_min(1).to(centred)
    sums = torch.zeros(len(counts), centred.shape[1]).to(centred).index_add_(0, labels, centred)
    within = centred - (sums / counts[:, None])[labels]
    variances, axes = torch.linalg.eigh(within.T @ within / len(within))
    shrunk = (variances.clamp_min(0) + variances.clamp_min(0).mean()).clamp_min(1e-30)
    return (axes * shrunk**-0.25) @ axes.T
