"""The field on a GPU: a screen in low precision finds the tiles in which something acts, fused kernels do the rest.

Pairs of different classes act within reach only. One product of bfloat16 copies, half of it by symmetry, bounds every
squared distance from below: rounding moves a product of two points by at most (2 u + u^2) |a| |b|, u = 2^-8, so that
r^2 is off by less than SCREEN_MARGIN (|a|^2 + |b|^2). Tiles in which no pair can be within reach end there. In the
others pairs are evaluated at float32 accuracy, close ones from differences. Points are first sorted by the nearest of a
few pivots, which puts crowds of points into few tiles.

Pairs of one class are few, and come from differences, class by class.

Memory: positions and what they are rounded by, a copy and the gradient, (n, D) each; a list of tiles.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from pfml.backends.operator import FieldOperator
from pfml.field import ContrastiveLaw, DecayLaw, Interaction, LogarithmicLaw, PowerLaw
from pfml.superposition import Charges, Field, PairWeights

__all__ = ["fused_energy", "knows_law", "unavailable"]

#: Bound on the error of r^2 from products of bfloat16 copies, relative to |a|^2 + |b|^2: 2 (2 u + u^2) / 2 = 0.00783,
#: and room for float32 sums.
SCREEN_MARGIN = 0.0081
#: How float32 products are made of products that the hardware has, and below which r^2, relative to |a|^2 + |b|^2,
#: pairs are taken from differences instead; from WIDE dimensions on, and below. In many dimensions rounding averages
#: out, and three products of bfloat16 are as good as, and faster than, three of tf32.
WIDE = 256
PRECISION, NEAR = ("bf16x3", "tf32x3"), (1e-3, 5e-3)
#: Sides of the tiles: of the screen, and of the exact evaluation (half of it).
SCREEN_BLOCK, BLOCK = 128, 64
#: How a tile is evaluated: dimensions at a time, warps, and stages of the pipeline.
CHUNK, WARPS, STAGES = 32, 4, 3
#: Programs that share the listed tiles.
PROGRAMS = 132 * 4
#: Sets from this size on are sorted by pivots.
SORTED_FROM, PIVOTS = 4096, 512
LARGEST_DIMS = 2048

INSTALLED = find_spec("triton") is not None
#: Whether Triton runs its kernels in Python, on a CPU: for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def unavailable(device: torch.device, dtype: torch.dtype, dims: int, field: Field) -> str | None:
    """Why this backend cannot compute such a field, in words; None if it can."""
    if device.type != "cuda" and not INTERPRETED:
        return f"the triton backend needs a CUDA device, got {device}: use backend='tiled'"
    if dtype != torch.float32:
        return f"the triton backend computes in float32, got {dtype}: use backend='tiled'"
    if dims > LARGEST_DIMS:
        return f"the triton backend takes up to {LARGEST_DIMS} dimensions, got {dims}: use backend='tiled'"
    if not knows_law(field.law):
        return f"the triton backend knows the laws that ship, not {type(field.law).__name__}: use backend='tiled'"
    if not INSTALLED:
        return "the triton backend needs the package triton: pip install triton, or use backend='tiled'"
    return None


def knows_law(law: DecayLaw) -> bool:
    """Whether the kernels have this law; a subclass may be anything."""
    return type(law) in (PowerLaw, LogarithmicLaw, ContrastiveLaw)


def fused_energy(samples: Charges, proxies: Charges, field: Field, weights: PairWeights) -> Tensor:
    """The total energy of samples and proxies under `field`, a scalar."""
    reason = unavailable(samples.points.device, samples.points.dtype, samples.points.shape[1], field)
    if reason is not None:
        raise ValueError(reason)
    return _operator.energy(samples, proxies, field, weights)


@dataclass(eq=False)
class _Plan:
    """All charges in one order, as the kernels want them."""

    order: Tensor  # (n,) int64: row k is charge order[k], samples first
    positions: Tensor  # (n, D) float32
    rests: Tensor  # (n, D) float32: what the positions are rounded by
    copy: Tensor  # (n, D) for the screen
    squares: Tensor  # (n,) float32
    inverses: Tensor  # (n,) float64: 1 / |point|
    labels: Tensor  # (n,) int64
    is_sample: Tensor  # (n,) int32


def _superpose(
    samples: Charges, proxies: Charges, field: Field, weights: PairWeights, slopes: Tensor | None, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums and gradients; see `operator.Superpose`."""
    points, n, dims = samples.points, len(samples.points) + len(proxies.points), samples.points.shape[1]
    sums = points.new_zeros(2, n, dtype=torch.float64)
    groups = (samples, proxies)
    gradients = [torch.zeros_like(g.points) if with_gradient else points.new_empty(0) for g in groups]
    if n == 0 or dims == 0:
        return sums, gradients[0], gradients[1]
    plan = _prepare(samples, proxies)
    moved = n >= SORTED_FROM
    slopes = points.new_ones(2, n) if slopes is None else slopes[:, plan.order].contiguous() if moved else slopes
    gradient = points.new_zeros(n, dims) if with_gradient else points.new_empty(0)
    found = torch.zeros_like(sums) if moved else sums
    _interact(plan, field, weights, slopes[1], found[1], gradient, with_gradient)
    _attract(plan, field, weights, slopes[0], found[0], gradient, with_gradient)
    if moved:
        sums[:, plan.order] = found
    if with_gradient:
        _project(plan, gradient, groups, gradients)
    return sums, gradients[0], gradients[1]


_operator = FieldOperator("triton", _superpose)


def _prepare(samples: Charges, proxies: Charges) -> _Plan:
    from pfml.backends import kernels

    points, count = samples.points, len(samples.points)
    n, dims = count + len(proxies.points), points.shape[1]
    order, is_sample = _identity(n, count, points.device)
    labels = torch.cat([samples.labels, proxies.labels])
    plan = _Plan(
        order=order,
        positions=points.new_empty(n, dims),
        rests=points.new_empty(n, dims),
        copy=points.new_empty(n, dims, dtype=torch.float32 if INTERPRETED else torch.bfloat16),
        squares=points.new_empty(n),
        inverses=points.new_empty(n, dtype=torch.float64),
        labels=labels,
        is_sample=is_sample,
    )
    for group, first in ((samples, 0), (proxies, count)):
        if len(group.points):
            kernels.prepare[(len(group.points),)](
                group.points, plan.positions, plan.rests, plan.copy, plan.squares, plan.inverses,
                first, dims, ON_SPHERE=group.on_sphere, WIDTH=_width(dims),
            )  # fmt: skip
    return _sorted(plan) if n >= SORTED_FROM else plan


@lru_cache(maxsize=16)
def _identity(n: int, num_samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """0, 1, ..., n - 1, and which of them are samples; kept, since a small field is mostly launches."""
    order = torch.arange(n, device=device)
    return order, (order < num_samples).to(torch.int32)


def _sorted(plan: _Plan) -> _Plan:
    """The same charges, those with the same nearest pivot next to each other."""
    pivots = plan.copy[:: max(len(plan.copy) // PIVOTS, 1)][:PIVOTS]
    nearest = (plan.copy @ pivots.T).argmax(dim=1)
    by_pivot = nearest.argsort(stable=True)
    return _Plan(*(getattr(plan, part.name)[by_pivot] for part in fields(plan)))


def _interact(
    plan: _Plan, field: Field, weights: PairWeights, slopes: Tensor, sums: Tensor, gradient: Tensor, with_gradient: bool
) -> None:
    """Pairs of different classes."""
    from pfml.backends import kernels

    kinds = (weights.of_samples()[1], weights.of_mixed()[1], weights.of_proxies()[1])
    if not any(kinds):
        return
    n, dims = plan.positions.shape
    blocks = -(-n // SCREEN_BLOCK)
    reach = field.other_pair.stop
    everywhere = reach == float("inf")
    if everywhere:
        tiles = count = torch.full((1,), blocks * blocks, dtype=torch.int32, device=sums.device)
    else:
        tiles = torch.empty(blocks * (blocks + 1) // 2, dtype=torch.int32, device=sums.device)
        count = torch.zeros(1, dtype=torch.int32, device=sums.device)
        kernels.screen[(blocks, blocks)](
            plan.copy, plan.squares, plan.labels, plan.is_sample, tiles, count, n, dims,
            reach**2, SCREEN_MARGIN, *kinds, BLOCK=SCREEN_BLOCK, CHUNK=64, num_warps=8, num_stages=3,
        )  # fmt: skip
    sub = SCREEN_BLOCK // BLOCK
    programs = min(PROGRAMS, blocks * blocks * sub * sub)
    kernels.interact[(programs,)](
        plan.positions, plan.rests, plan.labels, plan.is_sample, slopes, tiles, count, sums, gradient, n, dims,
        blocks, *kinds, *_numbers(field.other_pair, field.law), NEAR[_careful(n, dims)],
        LAW=_law(field.law), ROLE=_role(field.other_pair, field.law), GRADIENT=with_gradient,
        PRECISION=_precision(n, dims), LISTED=not everywhere, SUB=sub, BLOCK=BLOCK, CHUNK=CHUNK,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip


def _attract(
    plan: _Plan, field: Field, weights: PairWeights, slopes: Tensor, sums: Tensor, gradient: Tensor, with_gradient: bool
) -> None:
    """Pairs of one class."""
    from pfml.backends import kernels

    kinds = (weights.of_samples()[0], weights.of_mixed()[0], weights.of_proxies()[0])
    if not any(kinds):
        return
    n, dims = plan.positions.shape
    classes, by_class = plan.labels.sort(stable=True)
    begin = torch.searchsorted(classes, classes)
    end = torch.searchsorted(classes, classes, right=True)
    kernels.attract[(n,)](
        plan.positions, plan.rests, plan.is_sample, slopes, by_class, begin, end, sums, gradient, dims,
        *kinds, *_numbers(field.own_pair, field.law),
        LAW=_law(field.law), ROLE=_role(field.own_pair, field.law), GRADIENT=with_gradient, WIDTH=_width(dims),
    )  # fmt: skip


def _project(plan: _Plan, gradient: Tensor, groups: tuple[Charges, Charges], results: list[Tensor]) -> None:
    """Gradients at positions to gradients at the points as given, in their own order."""
    from pfml.backends import kernels

    n, dims = gradient.shape
    first = 0
    for group, result in zip(groups, results, strict=True):
        if len(group.points):
            kernels.project[(n,)](
                gradient, plan.positions, plan.inverses, plan.order, result, first, len(group.points), dims,
                ON_SPHERE=group.on_sphere, WIDTH=_width(dims),
            )  # fmt: skip
        first += len(group.points)


def _numbers(pair: Interaction, law: DecayLaw) -> tuple[float, ...]:
    """alpha, edge, core, offset, start and stop of an interaction; float32's largest number for infinity."""
    largest = 3e38
    alpha = law.alpha if isinstance(law, PowerLaw) else 0.0
    return tuple(min(float(v), largest) for v in (alpha, pair.kink, pair.core, pair.offset, pair.start, pair.stop))


def _law(law: DecayLaw) -> int:
    from pfml.backends.kernels import LAWS

    mirrored = isinstance(law, ContrastiveLaw) and not law.bounded
    return LAWS[type(law).__name__ + (", mirrored" if mirrored else "")]


def _role(pair: Interaction, law: DecayLaw) -> int:
    from pfml.backends.kernels import ATTRACTION, REPULSION

    return ATTRACTION if pair.pair_potential == law.attraction else REPULSION


def _careful(n: int, dims: int) -> bool:
    """Whether rounding may show: in few dimensions, or where points are not sorted and tiles hold far ones too."""
    return dims < WIDE or n < SORTED_FROM


def _precision(n: int, dims: int) -> str:
    return "ieee" if INTERPRETED else PRECISION[_careful(n, dims)]


def _width(dims: int) -> int:
    """The power of two that holds a row."""
    return max(1 << (dims - 1).bit_length(), 16)
