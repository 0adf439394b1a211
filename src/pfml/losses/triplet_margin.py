"""The margin loss over triplets of a batch, drawn without a synchronization (Wu et al., ICCV 2017).

DiVA, DCML and S2SD are made of it. Their public code shares one implementation, and this is that one: each sample is an
anchor once, and the sum over triplets is divided by the number of those that act. `pfml.losses.baselines.margin` takes
all positives of an anchor instead and divides by the number of pairs that act.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Triplets", "distance_weighted_triplets", "log_inverse_density", "margin_loss", "within_class_triplets"]


@dataclass(frozen=True, eq=False)
class Triplets:
    """Rows of a batch, one triplet for each sample.

    Attributes:
        anchors, positives, negatives: (batch,), indices of samples.
        exist: (batch,), False where a sample has no positive or no negative; what stands there is no triplet.
    """

    anchors: Tensor
    positives: Tensor
    negatives: Tensor
    exist: Tensor


def log_inverse_density(r: Tensor, dim: int) -> Tensor:
    """-log of the density of distances r on the unit sphere in `dim` dimensions, up to a constant.

    (2 - dim) log r - (dim - 3) / 2 log(1 - r^2 / 4), where 1 - r^2 / 4 below 1e-8 counts as 1e-8.
    """
    return (2.0 - dim) * r.log() - (dim - 3.0) / 2 * (1 - r.square() / 4).clamp(min=1e-8).log()


@torch.no_grad()
def distance_weighted_triplets(
    points: Tensor, labels: Tensor, *, cutoff: float = 0.5, switched: float = 0.0
) -> Triplets:
    """Each sample with any positive, and a negative drawn against the density of distances.

    Args:
        points: (batch, D) on the unit sphere, at least one.
        labels: (batch,).
        cutoff: Distances below it count as this one.
        switched: Share of anchors whose positive is the anchor itself and whose negative is a positive: the
            regularization of Roth et al., ICML 2020, which keeps classes from collapsing.
    """
    same = labels[:, None] == labels  # (batch, batch)
    own = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    r = (2 - 2 * points @ points.T).clamp(min=0).sqrt().clamp(min=cutoff)
    positives, negatives = same & ~own, ~same
    anchors = torch.arange(len(labels), device=labels.device)
    nearer = _drawn(torch.zeros_like(r), positives)
    farther = _drawn(log_inverse_density(r, points.shape[1]), negatives)
    if switched > 0:
        is_switched = torch.rand(len(labels), device=labels.device) < switched
        nearer, farther = torch.where(is_switched, anchors, nearer), torch.where(is_switched, nearer, farther)
    return Triplets(anchors, nearer, farther, positives.any(dim=1) & negatives.any(dim=1))


@torch.no_grad()
def within_class_triplets(labels: Tensor) -> Triplets:
    """As many triplets as labels: of a class drawn from those of the batch, three samples drawn with replacement."""
    same = labels[:, None] == labels  # (batch, batch)
    equal = torch.zeros(same.shape, device=labels.device)
    per_class = -same.sum(dim=1).float().log()  # each class alike, and each sample of it
    anchors = _drawn(per_class.expand(len(labels), -1), torch.ones_like(same))
    alike = same[anchors]
    return Triplets(anchors, _drawn(equal, alike), _drawn(equal, alike), alike.any(dim=1))


def margin_loss(points: Tensor, triplets: Triplets, boundaries: Tensor, *, margin: float) -> Tensor:
    """([r_ap - beta + margin]+ + [beta - r_an + margin]+) over triplets, divided by the number of those that are > 0.

    Args:
        points: (batch, D) on the unit sphere.
        triplets: Of these points.
        boundaries: (batch,), beta of each sample's class.
        margin: Half the width of the gap between positives and negatives.
    """
    # gradients of rows that `embedding` takes are added in one order, whatever the number of threads
    anchors, positives, negatives = (
        F.embedding(rows, points) for rows in (triplets.anchors, triplets.positives, triplets.negatives)
    )
    beta = boundaries[triplets.anchors]
    too_far = (_distances(anchors, positives) - beta + margin).relu()
    too_near = (beta - _distances(anchors, negatives) + margin).relu()
    total = torch.where(triplets.exist, too_far + too_near, 0.0)
    return total.sum() / (total > 0).sum().clamp(min=1)


def _distances(points: Tensor, others: Tensor) -> Tensor:
    """sqrt(|x - y|^2 + 1e-8) of rows, whose slope is bounded where they coincide."""
    return ((points - others).square().sum(dim=1) + 1e-8).sqrt()


def _drawn(log_weights: Tensor, among: Tensor) -> Tensor:
    """One column for each row, (n,), drawn with these weights from those of `among`; any if there is none.

    The largest of weights with Gumbel noise, in float32 whatever the weights are, so that draws do not depend on dtype.
    """
    noise = torch.empty(log_weights.shape, device=log_weights.device).exponential_().log()
    return torch.where(among, log_weights.float() - noise, -math.inf).argmax(dim=1)
