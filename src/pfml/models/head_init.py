"""Where a head starts: a linear layer that keeps what a pretrained backbone knows.

A random layer from F features to D dimensions throws away what the other F - D dimensions know before the first step.
The layers here are computed instead, from the features of the training images:

- "principal": the D directions in which the features differ most.
- "whitened": the same after the directions in which images of one class differ were weakened. With S the covariance
  within classes and s its mean variance, features are first multiplied by (S + s I)^(-1/4), half of a whitening.

Both are centered, and scaled to the size that a random layer has, so that learning rates mean the same.

Two starts are random: "random", He's normal distribution with fan-out and no bias, as Proxy Anchor's, HIST's and
Multi-Similarity's code has it; and "uniform", torch's own of a linear layer, as SoftTriple's, ProxyGML's and
ProxyNCA++'s has it. The second is shorter, so that a step turns it further.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pfml.models.head import Head

__all__ = ["FEATURE_STARTS", "HEAD_STARTS", "initialize_head"]

HEAD_STARTS = ("random", "uniform", "principal", "whitened")
#: ... that look at the features of the training images.
FEATURE_STARTS = ("principal", "whitened")


@torch.no_grad()
def initialize_head(head: Head, start: str, features: Tensor, labels: Tensor) -> None:
    """Put the linear layer of `head` where `start` says.

    Args:
        head: Changed in place.
        start: One of `FEATURE_STARTS`; "random" and "uniform" leave the layer as it is.
        features: What the layer gets for the training images, (N, F).
        labels: Their classes, (N,); "principal" does not look at them.
    """
    if start not in HEAD_STARTS:
        raise ValueError(f"head_start must be one of {', '.join(HEAD_STARTS)}, got {start!r}")
    if start not in FEATURE_STARTS:
        return
    layer = require_layer(head, start)
    center = features.double().mean(0)
    centered = features.double() - center
    weaken = _half_whitening(centered, labels) if start == "whitened" else None
    seen = centered if weaken is None else centered @ weaken
    directions = torch.linalg.eigh(seen.T @ seen).eigenvectors.flip(1)[:, : layer.out_features].T
    weight = directions if weaken is None else directions @ weaken
    weight *= math.sqrt(2 * head.num_features) / weight.norm()  # as He's initialization has it on average
    layer.weight.copy_(weight)
    if layer.bias is not None:
        layer.bias.copy_(-weight @ center)


@torch.no_grad()
def initialize_uniformly(head: Head, *, generator: torch.Generator) -> None:
    """Draw weight and bias of the linear layer between -1 / sqrt(F) and 1 / sqrt(F), as torch does."""
    if head.linear is None:
        raise ValueError("head_start='uniform' needs a head with a linear layer: set model.embedding_dim")
    bound = 1 / math.sqrt(head.num_features)
    for parameter in head.linear.parameters():
        parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))


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


def _half_whitening(centered: Tensor, labels: Tensor) -> Tensor:
    """(S + s I)^(-1/4), symmetric, (F, F)."""
    counts = torch.bincount(labels).clamp_min(1).to(centered)
    sums = torch.zeros(len(counts), centered.shape[1]).to(centered).index_add_(0, labels, centered)
    within = centered - (sums / counts[:, None])[labels]
    variances, axes = torch.linalg.eigh(within.T @ within / len(within))
    shrunk = (variances.clamp_min(0) + variances.clamp_min(0).mean()).clamp_min(1e-30)
    return (axes * shrunk**-0.25) @ axes.T
