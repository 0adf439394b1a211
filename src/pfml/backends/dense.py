"""The readable reference: every pair at once in float64, distances from explicit differences, forces by autograd.

Memory is O(n^2), time O(n^2 D) at the speed of subtraction. Every other backend is tested against this one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pfml.sphere import unit
from pfml.superposition import Charges, Field, PairWeights

__all__ = ["dense_energy"]


def dense_energy(samples: Charges, proxies: Charges, field: Field, weights: PairWeights) -> Tensor:
    """The total energy of samples and proxies under `field`, a scalar."""
    positions = [group.points.double() for group in (samples, proxies)]
    points = torch.cat([unit(at) if g.on_sphere else at for at, g in zip(positions, (samples, proxies), strict=True)])
    labels = torch.cat([samples.labels, proxies.labels])
    is_proxy = torch.arange(len(points), device=points.device) >= len(samples.points)

    r = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")  # (n, n)
    same_class = labels[:, None] == labels[None, :]  # (n, n)
    not_itself = ~torch.eye(len(points), dtype=torch.bool, device=points.device)  # (n, n)
    own_weight, other_weight = _pair_weights(is_proxy, weights, points)  # (n, n) each

    sums = []
    for pair, relation, weight in (
        (field.own_pair, same_class, own_weight),
        (field.other_pair, ~same_class, other_weight),
    ):
        counts = relation & not_itself & (r >= pair.start) & (r < pair.stop)
        # r = 1 stands in where nothing is counted, so that no undefined gradient meets a zero weight
        potential = pair.potential(torch.where(counts, r, 1.0))
        sums.append((torch.where(counts, potential, 0.0) * weight).sum(dim=1))  # (n,)

    energies = field.anchor_energies(*sums)
    if not field.rule.proxies_are_anchors:
        energies = energies[: len(samples.points)]
    return energies.sum().to(samples.points.dtype)


def _pair_weights(is_proxy: Tensor, weights: PairWeights, like: Tensor) -> tuple[Tensor, Tensor]:
    """(n, n) weights of same-class and of different-class pairs, by the kinds of the two charges."""
    proxies_in_pair = is_proxy.long()[:, None] + is_proxy.long()[None, :]  # 0, 1 or 2
    table = zip(weights.of_samples(), weights.of_mixed(), weights.of_proxies(), strict=True)
    own, other = (like.new_tensor(column)[proxies_in_pair] for column in table)
    return own, other
