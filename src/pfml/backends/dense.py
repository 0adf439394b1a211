"""The readable reference: every pair at once in float64, distances from explicit differences, forces by autograd.

Memory is O(n^2), time O(n^2 D) at the speed of subtraction. Every other backend is tested against this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pfml.superposition import Charges, Field, PairWeights, source_weights

__all__ = ["dense_energy"]


def dense_energy(samples: Charges, proxies: Charges, field: Field, weights: PairWeights) -> Tensor:
    """The total energy of samples and proxies under `field`, a scalar."""
    groups = (group._replace(points=group.points.double()) for group in (samples, proxies))
    points = torch.cat([group.positions() for group in groups])
    labels = torch.cat([samples.labels, proxies.labels])
    charges = torch.arange(len(points), device=points.device)  # (n,)
    is_proxy = charges >= len(samples.points)
    anchors, counts = _anchors(samples, proxies, field)  # (k,) each

    r = torch.cdist(points[anchors], points, compute_mode="donot_use_mm_for_euclid_dist")  # (k, n)
    same_class = labels[anchors, None] == labels[None, :]  # (k, n)
    not_itself = anchors[:, None] != charges[None, :]  # (k, n)
    together = _shares(samples, same_class)  # (k, n)
    own_weights, other_weights = source_weights(field, weights, sampled=proxies.anchors is not None)

    sums = []
    for pair, share, of_sources in (
        (field.own_pair, together, own_weights),
        (field.other_pair, 1 - together, other_weights),
    ):
        table = points.new_tensor(of_sources).view(2, 2)  # by the kind of the anchor and the kind of the source
        weight = share * table[is_proxy[anchors].long()[:, None], is_proxy.long()[None, :]]  # (k, n)
        acts = (share > 0) & not_itself & (r >= pair.start) & (r < pair.stop)
        # r = 1 replaces the distance where nothing acts, so that no undefined gradient meets a zero weight
        potential = pair.potential(torch.where(acts, r, 1.0))
        sums.append((torch.where(acts, potential, 0.0) * weight).sum(dim=1))  # (k,)

    return (counts * field.anchor_energies(*sums)).sum().to(samples.points.dtype)


def _shares(samples: Charges, same_class: Tensor) -> Tensor:
    """By how much each pair belongs together, (k, n) in float64: 0 or 1 by its labels, anything between if soft."""
    shares = same_class.double()
    if samples.shares is not None:
        n = len(samples.points)
        shares[:n, :n] = samples.shares.detach()
    return shares


def _anchors(samples: Charges, proxies: Charges, field: Field) -> tuple[Tensor, Tensor]:
    """Which charges are anchors, samples first, and how many anchors each one counts for."""
    num_samples, num_proxies = len(samples.points), len(proxies.points)
    if not field.rule.proxies_are_anchors:
        num_proxies = 0
    rows = torch.arange(num_samples + num_proxies, device=samples.points.device)
    counts = torch.ones_like(rows, dtype=torch.float64)
    if proxies.anchors is None or num_proxies == 0:
        return rows, counts
    subsample, of_subsample = proxies.anchors
    return (
        torch.cat([rows[:num_samples], num_samples + subsample]),
        torch.cat([counts[:num_samples], of_subsample.double()]),
    )
