"""The tiled backend: the sweep of `sweep`, made an operator; on a GPU, a small field is computed at once."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pfml.backends.cuda_graph import CudaGraphed
from pfml.backends.operator import FieldOperator
from pfml.backends.sweep import COSTLY_LAUNCHES, sweep, sweep_joined
from pfml.backends.tile_groups import CHUNK, PREPARED_BYTES, TileGroup, chunks, slices
from pfml.backends.whole_field import superpose_at_once
from pfml.field import Interaction
from pfml.sphere import inverse_norms
from pfml.superposition import Anchors, Charges, Field, PairWeights, source_weights

__all__ = ["AT_ONCE_PAIRS", "centered_groups", "group_of", "pair_sums", "superpose_shares", "tiled_energy"]

#: Up to so many pairs, in both orders, a field is computed at once: where launching tiles takes longer than their work.
AT_ONCE_PAIRS = {"cpu": 0, "cuda": 2**26}


def superpose_shares(group: TileGroup, shares: Tensor, field: Field, *, own: float, other: float) -> None:
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


def _superpose(
    samples: Charges, proxies: Charges, field: Field, weights: PairWeights, slopes: Tensor | None, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums and gradients; see `operator.Superpose`."""
    if _fits_at_once(samples, proxies):
        kept = () if slopes is None else (slopes,)
        *results, left_out = _at_once(samples, proxies, field, weights, *kept, with_gradient=with_gradient)
        if not left_out.item():
            return results[0], results[1], results[2]
    if proxies.anchors is None and COSTLY_LAUNCHES.get(samples.points.device.type, False):
        return _superpose_joined(samples, proxies, field, weights, slopes, with_gradient)
    groups = sample_group, proxy_group = centered_groups(samples, proxies, gradients=with_gradient)
    if slopes is not None:
        sample_group.slopes, proxy_group.slopes = slopes.split([len(samples.points), len(proxies.points)], dim=1)
    if samples.shares is not None:
        own, other = weights.of_samples()
        superpose_shares(sample_group, samples.shares, field, own=own, other=other)
        weights = replace(weights, sample_sample=0.0)  # these pairs are done
    if proxies.anchors is None:
        sweep(sample_group, proxy_group, proxy_group, field, weights)
    else:
        subsample = proxy_group.copies(_distinct_rows(proxies.anchors))
        sweep(sample_group, proxy_group, subsample, field, weights)
        proxy_group.add_copies(subsample)
    for group in groups:
        group.project_gradient()
    sums = torch.cat([group.sums for group in groups], dim=1)
    return sums, _gradient_or_nothing(sample_group), _gradient_or_nothing(proxy_group)


def _superpose_joined(
    samples: Charges, proxies: Charges, field: Field, weights: PairWeights, slopes: Tensor | None, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums and gradients from a sweep of samples and proxies as one group."""
    group, num_samples = joined_group(samples, proxies, gradient=with_gradient), len(samples.points)
    if slopes is not None:
        group.slopes = slopes
    if samples.shares is not None:
        own, other = weights.of_samples()
        superpose_shares(group.part(slice(0, num_samples)), samples.shares, field, own=own, other=other)
        weights = replace(weights, sample_sample=0.0)  # these pairs are done
    sweep_joined(group, num_samples, field, weights)
    return group.sums, *_gradients_of_kinds(group, samples, proxies)


def _fits_at_once(samples: Charges, proxies: Charges) -> bool:
    """Whether a field is so small that it is computed at once."""
    n, dims = len(samples.points) + len(proxies.points), samples.points.shape[1]
    return (
        0 < n * n <= AT_ONCE_PAIRS.get(samples.points.device.type, 0)
        and 0 < n * dims * samples.points.element_size() <= PREPARED_BYTES
        and proxies.anchors is None
        and samples.shares is None
    )


def _superpose_at_once(
    samples: Charges, proxies: Charges, field: Field, weights: PairWeights, *slopes: Tensor, with_gradient: bool
) -> tuple[Tensor, ...]:
    """Sums and gradients without a synchronization, and whether they leave out pairs: where very many are close."""
    group = joined_group(samples, proxies, gradient=with_gradient)
    of_sources = source_weights(field, weights, sampled=False)
    left_out = superpose_at_once(group, len(samples.points), field, *of_sources, *slopes)
    return group.sums, *_gradients_of_kinds(group, samples, proxies), left_out


_at_once = CudaGraphed(_superpose_at_once)
_operator = FieldOperator("tiled", _superpose)
tiled_energy = _operator.energy
pair_sums = _operator.sums


def centered_groups(samples: Charges, proxies: Charges, *, gradients: bool) -> tuple[TileGroup, TileGroup]:
    """Samples and proxies, ready for a sweep; both centered at the mean of a few of them."""
    made = group_of(samples, gradient=gradients), group_of(proxies, gradient=gradients)
    few = torch.cat([group.exact(slice(0, 512)) for group in made])
    for group in made:
        if len(few):
            group.center = few.mean(dim=0)
        group.prepare()
    return made


def joined_group(samples: Charges, proxies: Charges, *, gradient: bool) -> TileGroup:
    """Samples and proxies as one group, samples first, centered as in `centered_groups`; ready for a sweep."""
    points = torch.cat([samples.points, proxies.points])
    both = Charges(points, torch.cat([samples.labels, proxies.labels]), samples.on_sphere or proxies.on_sphere)
    group = group_of(both, gradient=gradient)
    if samples.on_sphere != proxies.on_sphere and group.inverse_norms is not None:
        free = slice(0, len(samples.points)) if proxies.on_sphere else slice(len(samples.points), None)
        group.inverse_norms[free] = 1.0
    few = [group.exact(slice(start, start + 512)) for start in (0, len(samples.points))]
    group.center = torch.cat(few).mean(dim=0)
    group.prepare()
    return group


def group_of(charges: Charges, *, gradient: bool) -> TileGroup:
    """Charges with room for what a sweep adds up for them; set a center and call `prepare` before a sweep."""
    points = charges.points
    return TileGroup(
        points=points,
        labels=charges.labels,
        inverse_norms=_inverse_norms(points) if charges.on_sphere else None,
        center=points.new_zeros(points.shape[1], dtype=torch.float64),
        squared_norms=points.new_zeros(len(points), dtype=torch.float64),
        sums=points.new_zeros(2, len(points), dtype=torch.float64),
        slopes=points.new_ones(()).expand(2, len(points)),
        gradient=torch.zeros_like(points) if gradient else None,
    )


def _distinct_rows(anchors: Anchors) -> Tensor:
    """The rows of anchors that count, in order, so that tiles hold few classes."""
    return anchors.rows[anchors.weights > 0].sort().values


def _inverse_norms(points: Tensor) -> Tensor:
    """1 / |points|, (n, 1) in float64, without a float64 copy of all points."""
    inverse = points.new_empty(len(points), 1, dtype=torch.float64)
    for rows in chunks(points):
        inverse[rows] = inverse_norms(points[rows])
    return inverse


def _gradients_of_kinds(group: TileGroup, samples: Charges, proxies: Charges) -> tuple[Tensor, Tensor]:
    """The gradients of samples and of proxies in a joined group, at the points as given; they share no memory."""
    if group.gradient is None:
        return group.points.new_empty(0), group.points.new_empty(0)
    of_samples, of_proxies = slice(0, len(samples.points)), slice(len(samples.points), len(group))
    for charges, rows in ((samples, of_samples), (proxies, of_proxies)):
        if charges.on_sphere:
            group.project_gradient(rows)
    return group.gradient[of_samples].clone(), group.gradient[of_proxies]


def _gradient_or_nothing(group: TileGroup) -> Tensor:
    return group.points.new_empty(0) if group.gradient is None else group.gradient
