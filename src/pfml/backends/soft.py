"""Pairs of soft charges: both interactions of every pair, by share, in rows of bounded size.

Up to a batch there is nothing to leave out: each pair acts, so distances come from explicit differences and sums are
added up in float64 throughout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pfml.backends.groups import CHUNK, Group, slices
from pfml.field import Interaction
from pfml.superposition import Field

__all__ = ["superpose_shares"]


def superpose_shares(group: Group, shares: Tensor, field: Field, *, own: float, other: float) -> None:
    """Add the field of all pairs of `group` to its sums, and to its gradient if it has one.

    Args:
        group: The charges.
        shares: (n, n), by how much each pair belongs together; row i is what the charge i goes by as an anchor.
        field: What attraction and repulsion are.
        own, other: How much attraction and repulsion count.
    """
    points = group.exact(slice(None))
    shares = shares.double()
    height = max(CHUNK.get(points.device.type, CHUNK["cpu"]) // max(len(points), 1), 1)
    for rows in slices(len(points), height):
        r = torch.cdist(points[rows], points, compute_mode="donot_use_mm_for_euclid_dist")  # (k, n)
        itself = (
            torch.arange(len(points), device=r.device) == torch.arange(rows.start, rows.stop, device=r.device)[:, None]
        )
        pulls = torch.zeros_like(r)
        for channel, pair, weight, part in (
            (0, field.own_pair, own, lambda share: share),
            (1, field.other_pair, other, lambda share: 1 - share),
        ):
            if not weight:
                continue
            energy, slope = _acting(pair, r, itself)
            here, there = weight * part(shares[rows]), weight * part(shares[:, rows].T)  # at either end of a pair
            group.sums[channel, rows] += (here * energy).sum(dim=1)
            slopes = group.slopes[channel].double()
            pulls += slope * (here * slopes[rows, None] + there * slopes[None, :])
        if group.gradient is not None:
            total = pulls.sum(dim=1, keepdim=True)
            group.gradient[rows] += torch.addmm(total * points[rows], pulls, points, alpha=-1).to(group.gradient.dtype)


def _acting(pair: Interaction, r: Tensor, itself: Tensor) -> tuple[Tensor, Tensor]:
    """Energy and slope / r of each pair; zero where nothing acts, and no slope where there is no direction."""
    acts = (r >= pair.start) & (r < pair.stop) & ~itself
    energy, slope = pair.potential_and_slope(torch.where(acts, r, 1.0))
    return torch.where(acts, energy, 0.0), torch.where(acts & (r > 0), slope / r, 0.0)
