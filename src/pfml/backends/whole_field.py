"""A small field at once: one matrix of all pairs in both orders, in fixed shapes and without a synchronization.

A GPU computes a small field faster than Python launches it. Here the data decide on numbers only: on no length of a
list, and on no path. So all of it can be recorded, and repeated as one CUDA graph (`pfml.backends.cuda_graph`).

Row i of the matrix is what all charges do to the charge i. Distances come from one product. The pairs of one class are
listed by their labels. The others go through their law in strips that stay in the caches of a GPU. The matrix of slopes
that is left gives the forces, by another product.

Pairs that a product is not good enough for (the ladder of `pfml.backends.sweep`) are listed too, and come from
differences in float64. Lists have room for a number of pairs; where there are more, the caller is told.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.backends.sweep import EDGE, NEAR, OTHER, OWN, delicate_pairs
from pfml.backends.tile_groups import TileGroup, rows_at_once, slices
from pfml.field import Interaction
from pfml.superposition import Field, SourceWeights

__all__ = ["superpose_at_once"]

#: Pairs in a strip: 16 MiB in float32.
STRIP_PAIRS = 2**22
#: Room for the pairs of one class: so many for each charge, and so many in any case.
POSITIVES_PER_CHARGE, POSITIVES = 128, 2**18
#: Room for the pairs of each channel that come from differences.
DIFFERENCES = 2**13


@dataclass(eq=False)
class _Charges:
    """All charges, and what is known about them on the device only."""

    group: TileGroup
    is_proxy: Tensor  # (n,)
    slopes: Tensor | None  # (2, n) d energy / d sums, which are known already; None for 1 everywhere
    exact: Tensor  # (n, D) float64
    margin: Tensor  # (): bound on the error of r^2 from a product
    near: Tensor  # (): below this, that error is too large a share of r^2

    def __len__(self) -> int:
        return len(self.group)


def superpose_at_once(
    group: TileGroup,
    num_samples: int,
    field: Field,
    own: SourceWeights,
    other: SourceWeights,
    slopes: Tensor | None = None,
) -> Tensor:
    """Add the field of all pairs of `group` to its sums unless they are known, and to its gradient if it has one.

    Args:
        group: Samples and proxies.
        num_samples: The first so many are samples.
        field: What attraction and repulsion are.
        own, other: How much each source counts.
        slopes: (2, n), d energy / d sums, when the sums are known already; None for 1 everywhere.

    Returns:
        0 on the device; anything else if a list had no room for all of its pairs, so that the field is incomplete.
    """
    rows, dtype = slice(None), group.points.dtype
    positions, norms = group.centered(rows, dtype), group.squared_norms.to(dtype)
    squares = (norms[:, None] + norms).addmm_(positions, positions.T, alpha=-2).fill_diagonal_(torch.inf)
    scale = 2 * norms.amax()
    charges = _Charges(
        group,
        is_proxy=torch.arange(len(group), device=norms.device) >= num_samples,
        slopes=slopes,
        exact=group.exact(rows),
        margin=EDGE[dtype] * scale,
        near=NEAR[dtype, dtype] * scale,
    )
    listed, left_out = _positives(group.labels)
    picked = squares.view(-1)[listed]  # (k,)
    squares.view(-1).index_fill_(0, listed, torch.inf)
    if any(other):
        left_out = left_out + _add_matrix(charges, squares, field.other_pair, other)
    else:
        squares.zero_()
    if any(own):
        left_out = left_out + _add_list(charges, squares, listed, picked, field.own_pair, own)
    if group.gradient is not None:
        total = squares.sum(dim=1, keepdim=True)  # (n, 1)
        group.gradient += torch.addmm(total * positions, squares, positions, alpha=-1)
    return left_out


def _positives(labels: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs of one class, as positions in the flattened matrix; and how many of them found no room.

    The list is filled up with charges and themselves: many of them, so that additions do not wait for each other.
    """
    n = len(labels)
    room = min(max(POSITIVES_PER_CHARGE * n, POSITIVES), n * n)
    ordered, order = labels.sort(stable=True)
    first = torch.searchsorted(ordered, labels)  # (n,)
    counts = torch.searchsorted(ordered, labels, right=True) - first
    ends = counts.cumsum(0)
    slots = torch.arange(room, device=order.device)
    i = torch.searchsorted(ends, slots, right=True).clamp_(max=n - 1)
    j = order[((first + counts - ends)[i] + slots).clamp_(max=n - 1)]
    used = (slots < ends[-1]) & (i != j)
    return torch.where(used, i * n + j, slots % n * (n + 1)), (ends[-1] - room).clamp_min(0)


def _add_list(
    charges: _Charges, pulls: Tensor, listed: Tensor, squares: Tensor, pair: Interaction, weights: SourceWeights
) -> Tensor:
    """Add the listed pairs to the sums, and what they pull to `pulls`; see `superpose_at_once` on what is returned."""
    delicate = delicate_pairs(squares, pair, charges.margin, charges.near)  # (k,)
    energy, slope = _energy_and_slope(charges, squares, delicate, pair)
    i, j = _ends(charges, listed)
    at_anchor, at_source = _weights(charges, weights, i, j)
    if energy is not None:
        charges.group.sums[OWN].index_add_(0, i, (energy * at_anchor).double())
    if slope is not None:
        pulls.view(-1).index_copy_(0, listed, slope * _factor(charges, OWN, at_anchor, at_source, i, j))
    return _add_from_differences(charges, delicate, listed, pair, weights, OWN)


def _add_matrix(charges: _Charges, squares: Tensor, pair: Interaction, weights: SourceWeights) -> Tensor:
    """Add the pairs of different classes to the sums, with what they pull in place of `squares`; see `_add_list`."""
    n = len(charges)
    every = torch.arange(n, device=squares.device)
    delicate = torch.empty_like(squares, dtype=torch.bool)
    for rows in slices(n, max(STRIP_PAIRS // n, 1)):
        part, found = squares[rows], delicate[rows]
        found.copy_(delicate_pairs(part, pair, charges.margin, charges.near))
        energy, slope = _energy_and_slope(charges, part, found, pair)
        i, j = every[rows, None], every
        at_anchor, at_source = _weights(charges, weights, i, j)
        if energy is not None:
            of_rows = (
                (energy * at_anchor).sum(dim=1) if isinstance(at_anchor, Tensor) else energy.sum(dim=1) * at_anchor
            )
            charges.group.sums[OTHER, rows].add_(of_rows)
        if slope is not None:
            torch.mul(slope, _factor(charges, OTHER, at_anchor, at_source, i, j), out=part)
    return _add_from_differences(charges, delicate.view(-1), None, pair, weights, OTHER)


def _energy_and_slope(
    charges: _Charges, squares: Tensor, delicate: Tensor, pair: Interaction
) -> tuple[Tensor | None, Tensor | None]:
    """Energy and slope / r, each if it is wanted; zero where nothing acts, and for delicate pairs."""
    r = squares.clamp_min(0).sqrt_()
    idle = torch.ge(delicate, r < pair.stop)  # or out of reach, as infinity is
    if pair.start > 0:
        idle |= r < pair.start
    energy, slope = _evaluated(charges, pair, r)
    if energy is not None:
        energy = energy.masked_fill(idle, 0.0)
    if slope is not None:
        slope = (slope / r).masked_fill_(idle.logical_or_(r == 0), 0.0)  # coincident charges have no direction
    return energy, slope


def _evaluated(charges: _Charges, pair: Interaction, r: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Energy and slope of each pair, each if it is wanted."""
    if charges.slopes is not None:
        return None, pair.slope(r)
    if charges.group.gradient is None:
        return pair.potential(r), None
    return pair.potential_and_slope(r)


def _add_from_differences(
    charges: _Charges, delicate: Tensor, listed: Tensor | None, pair: Interaction, weights: SourceWeights, channel: int
) -> Tensor:
    """Add the delicate ones of the listed pairs (None: of all) in float64; anything but 0 is returned if all are."""
    group = charges.group
    room = min(DIFFERENCES, rows_at_once(group.points), len(delicate))
    counts = delicate.cumsum(0, dtype=torch.int32)  # up to each of them
    numbers = torch.arange(room, dtype=torch.int32, device=counts.device)
    used = numbers < counts[-1:]  # (room,)
    spread = numbers.long() * max(len(delicate) // max(room, 1), 1)  # additions of nothing do not wait for each other
    found = torch.where(used, torch.searchsorted(counts, numbers + 1), spread)
    i, j = _ends(charges, found if listed is None else listed[found])
    difference = charges.exact[i] - charges.exact[j]  # (k, D)
    r = torch.linalg.vector_norm(difference, dim=1)  # (k,)
    acts = used & (r >= pair.start) & (r < pair.stop)
    energy, slope = _evaluated(charges, pair, r)
    at_anchor, at_source = _weights(charges, weights, i, j)
    if energy is not None:
        group.sums[channel].index_add_(0, i, torch.where(acts, energy, 0.0) * at_anchor)
    if slope is not None and group.gradient is not None:
        slope = torch.where(acts & (r > 0), slope / r, 0.0) * _factor(charges, channel, at_anchor, at_source, i, j)
        group.gradient.index_add_(0, i, (difference * slope[:, None]).to(group.gradient.dtype))
    return (counts[-1] - room).clamp_min(0)


def _ends(charges: _Charges, listed: Tensor) -> tuple[Tensor, Tensor]:
    """Anchor and source of pairs that are listed as positions in the flattened matrix."""
    i = listed // len(charges)
    return i, listed - i * len(charges)


def _weights(charges: _Charges, weights: SourceWeights, i: Tensor, j: Tensor) -> tuple[Tensor | float, Tensor | float]:
    """How much the charge j counts at the anchor i, and i at j."""
    if len(set(weights)) == 1:
        return weights[0], weights[0]
    of_samples, of_mixed, of_mixed_back, of_proxies = (charges.group.points.new_full((), weight) for weight in weights)
    left, right = charges.is_proxy[i], charges.is_proxy[j]
    alike = torch.where(left, of_proxies, of_samples)
    there = torch.where(left == right, alike, torch.where(left, of_mixed_back, of_mixed))
    back = torch.where(left == right, alike, torch.where(left, of_mixed, of_mixed_back))
    return there, back


def _factor(
    charges: _Charges, channel: int, at_anchor: Tensor | float, at_source: Tensor | float, i: Tensor, j: Tensor
) -> Tensor | float:
    """By how much the slope of a pair counts: d energy / d pair(r)."""
    if charges.slopes is None:
        return at_anchor + at_source
    slopes = charges.slopes[channel]
    return at_anchor * slopes[i] + at_source * slopes[j]
