"""Exact forces on a few charges, in float64 and from explicit differences, for sets too large for the dense backend."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from charge_sets import ChargeSet
from pfml.field import Interaction
from pfml.superposition import Field

__all__ = ["exact_gradient_rows", "gradient_rows"]

#: Differences that are held at once, and anchors whose distances are.
DIFFERENCES_AT_ONCE = 2**20
ANCHORS_AT_ONCE = 64


def gradient_rows(charges: ChargeSet, rows: Tensor) -> Tensor:
    """What backward() left in `points.grad` of the given charges (samples first, then proxies), float64 (k, D)."""
    gradients = [group.points.grad for group in (charges.samples, charges.proxies)]
    return torch.cat([gradient for gradient in gradients if gradient is not None])[rows].double()


@torch.no_grad()
def exact_gradient_rows(charges: ChargeSet, field: Field, rows: Tensor) -> Tensor:
    """d energy / d points of the given charges (samples first, then proxies), with all pair weights 1, float64 (k, D).

    A pair acts through both of its ends: the force on charge i from charge j is (s_i + s_j) slope(r), where s is
    d energy / d sum of each anchor. Where s is not constant, the sums it needs come from float64 products.
    """
    points = torch.cat([charges.samples.points, charges.proxies.points]).double()  # (n, D)
    labels = torch.cat([charges.samples.labels, charges.proxies.labels])
    lengths = torch.linalg.vector_norm(points, dim=1, keepdim=True)
    lengths[: len(charges.samples.points)] = 1.0
    positions = points / lengths  # (n, D)
    slopes = _anchor_slopes(positions, labels, field, len(charges.samples.points))  # (2, n)

    gradient = torch.zeros(len(rows), points.shape[1], dtype=torch.float64)
    for columns in torch.arange(len(points)).split(max(DIFFERENCES_AT_ONCE // gradient.numel(), 1)):
        difference = positions[rows, None] - positions[None, columns]  # (k, chunk, D)
        r = torch.linalg.vector_norm(difference, dim=2)  # (k, chunk)
        same_class = labels[rows, None] == labels[None, columns]
        other_charge = rows[:, None] != columns[None, :]
        force = torch.zeros_like(r)
        relations = ((field.own_pair, same_class), (field.other_pair, ~same_class))
        for (pair, relation), slope in zip(relations, slopes, strict=True):
            acts = relation & other_charge & (r >= pair.start) & (r < pair.stop) & (r > 0)
            force += torch.where(acts, pair.slope(r) / r, 0.0) * (slope[rows, None] + slope[None, columns])
        gradient += torch.einsum("kc,kcd->kd", force, difference)

    on_proxies = rows >= len(charges.samples.points)  # these move on the sphere: no radial part
    radial = (gradient * positions[rows]).sum(dim=1, keepdim=True) * positions[rows]
    return torch.where(on_proxies[:, None], (gradient - radial) / lengths[rows], gradient)


def _anchor_slopes(positions: Tensor, labels: Tensor, field: Field, num_samples: int) -> Tensor:
    """d energy / d own and d energy / d other of every charge, (2, n); zero for charges that are no anchors."""
    num_anchors = len(positions) if field.rule.proxies_are_anchors else num_samples
    slopes = torch.zeros(2, len(positions), dtype=torch.float64)
    if field.rule.linear:
        slopes[:, :num_anchors] = 1.0
        return slopes
    for anchors in torch.arange(num_anchors).split(ANCHORS_AT_ONCE):
        r = torch.cdist(positions[anchors], positions, compute_mode="use_mm_for_euclid_dist")  # (anchors, n)
        r[torch.arange(len(anchors)), anchors] = math.nan  # no pair, whatever it is compared with
        same_class = labels[anchors, None] == labels[None, :]
        own = _pair_sums(field.own_pair, r, same_class)
        other = _pair_sums(field.other_pair, r, ~same_class)
        slopes[:, anchors] = torch.stack(field.anchor_slopes(own, other))
    return slopes


def _pair_sums(pair: Interaction, r: Tensor, relation: Tensor) -> Tensor:
    """The potential of each row's pairs, summed, (rows,); most pairs are out of reach, and not even looked up."""
    row, column = (relation & (r >= pair.start) & (r < pair.stop)).nonzero(as_tuple=True)
    return r.new_zeros(len(r)).index_add_(0, row, pair.potential(r[row, column]))
