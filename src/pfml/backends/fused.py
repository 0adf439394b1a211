"""The field on a GPU: a screen in 8-bit integers finds the tiles in which something acts, fused kernels do the rest.

Positions are scaled to lengths below 2^7, and split into two float16 numbers: high, a multiple of 2^-5, and low, the
rest. Sums of products of high parts are multiples of 2^-10 below 2^14, which float32 has digits for: tensor cores add
them up without an error, and the distance of two high parts is exact.

Pairs of different classes act within reach only. Each position is also rounded to multiples of a 127th of its largest
component, and knows a bound of the distance to what it is rounded to. One product of these integers, half of it by
symmetry, finds the tiles in which a pair can be within reach (`kernels.tiles.screen` has the proof); the others end
there. In those found, four products of the float16 parts give r^2 to float32's accuracy. Where pairs are so close that
even that is not enough, a tile is done from differences. Forces are three such products again, of the pulls (scaled row
by row) with the positions. Points are first sorted by the nearest of a few pivots, which puts crowds of points into few
tiles.

Pairs of one class are few, and come from differences, class by class. Where only a few charges have partners (samples,
if pairs of proxies do not count; or `Anchors`), the tiles are those of the few against all.

Memory: positions in split precision and the gradient, twice (n, D) floats; quantized positions, (n, D) bytes; the pulls
of TILES tiles, 128 MiB. Larger fields take several rounds. Equal inputs give equal bits.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pfml.backends.cuda_graph import CudaGraphed
from pfml.backends.operator import FieldOperator
from pfml.backends.split_precision import (
    BLOCK,
    INTERPRETED,
    LONGEST,
    WIDTH,
    ChargeSet,
    SplitPoints,
    by_pivot,
    power_of_two,
    row_warps,
)
from pfml.field import DecayLaw, Interaction
from pfml.superposition import Anchors, Charges, Field, PairWeights, SourceWeights, source_weights

if TYPE_CHECKING:
    from pfml.backends.kernels.laws import PairNumbers

__all__ = ["fused_energy", "knows_law", "unavailable"]

#: Below this r^2, relative to the longest position's square, pairs are taken from differences.
NEAR = 2e-3
#: Warps and stages of the pipeline, of `interact` and of `gather`; of the screen also the registers of a thread, so few
#: that two programs share a multiprocessor.
SCREEN, INTERACT, GATHER = (8, 3, 128), (8, 3), (8, 3)
#: Tiles that a program screens if there are enough of them, and programs that there should be.
SCREENED, SCREEN_PROGRAMS = (2, 1) if INTERPRETED else (8, 1056)
#: Most dimensions of its rows that stay in shared memory meanwhile.
KEPT = 64 if INTERPRETED else 512
#: Flags of tiles that a program numbers.
INDEXED = 2 if INTERPRETED else 4096
#: Programs of `interact`, which take turns at the tiles: those of a round without tiles end soon.
PROGRAMS = 3 if INTERPRETED else 528
#: Tiles whose pulls are held at once (64 KiB each; half as many where they are held twice), and the rounds above which
#: the device is asked how many it needs.
TILES, ROUNDS = 2048, 8
#: Dimensions at a time in products of points.
CHUNK = 64
#: Side of the parts of a tile that are done from differences.
CLOSE = min(16, BLOCK)
#: Sets from this size on are sorted by pivots.
SORTED_FROM = 4096
LARGEST_DIMS = 2048
#: Pairs of blocks that 32 bits can number: 5.9 million charges.
MOST_TILES = 2**31 - 1

INSTALLED = find_spec("triton") is not None


def unavailable(device: torch.device, dtype: torch.dtype, dims: int, field: Field) -> str | None:
    """Why this backend cannot compute such a field, in words; None if it can."""
    if device.type != "cuda" and not INTERPRETED:
        return f"the triton backend needs a CUDA device, got {device}: use backend='tiled'"
    if dtype != torch.float32:
        return f"the triton backend computes in float32, got {dtype}: use backend='tiled'"
    if dims > LARGEST_DIMS:
        return f"the triton backend takes up to {LARGEST_DIMS} dimensions, got {dims}: use backend='tiled'"
    if not INSTALLED:
        return "the triton backend needs the package triton: pip install triton, or use backend='tiled'"
    if not knows_law(field.law):
        return f"the triton backend knows the laws that ship, not {type(field.law).__name__}: use backend='tiled'"
    return None


def knows_law(law: DecayLaw) -> bool:
    """Whether the kernels have this law; needs the package triton."""
    from pfml.backends.kernels.laws import GPU_LAWS

    return type(law) in GPU_LAWS


def fused_energy(samples: Charges, proxies: Charges, field: Field, weights: PairWeights) -> Tensor:
    """The total energy of samples and proxies under `field`, a scalar."""
    reason = unavailable(samples.points.device, samples.points.dtype, samples.points.shape[1], field)
    if samples.shares is not None:
        reason = "the triton backend has no soft charges: use backend='tiled', or 'dense' for a batch"
    if reason is not None:
        raise ValueError(reason)
    return _operator.energy(samples, proxies, field, weights)


def _superpose(
    samples: Charges, proxies: Charges, field: Field, weights: PairWeights, slopes: Tensor | None, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums and gradients; see `operator.Superpose`."""
    with torch.cuda.device_of(samples.points):  # Triton launches on the current device, whatever it is given
        return _superpose_here(samples, proxies, field, weights, slopes, with_gradient)


def _superpose_here(
    samples: Charges, proxies: Charges, field: Field, weights: PairWeights, slopes: Tensor | None, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    points, num_samples = samples.points, len(samples.points)
    n, dims = num_samples + len(proxies.points), points.shape[1]
    sums = points.new_empty(2, n, dtype=torch.float64)
    gradients = [torch.empty_like(g.points) if with_gradient else points.new_empty(0) for g in (samples, proxies)]
    if n == 0 or dims == 0:
        return sums.zero_(), *(gradient.zero_() for gradient in gradients)  # type: ignore[return-value]
    own, other = source_weights(field, weights, proxies.anchors is not None)
    if slopes is None and with_gradient:
        slopes = points.new_ones(2, n)
    charges = ChargeSet(samples, proxies, slopes)
    sort = any(other) and proxies.anchors is None and other.proxies_on_proxies != 0 and n >= SORTED_FROM
    rows, found = charges.split(only_high=sort), None
    if sort:
        rows = charges.split(by_pivot(rows, charges.num, field.other_pair.stop), into=rows)
    if any(other):
        between = _Between(charges, field, other, with_gradient)
        if proxies.anchors is not None:
            found = between.from_anchors(rows, proxies.anchors)
        elif other.proxies_on_proxies == 0:
            found = between.from_samples(rows)
        else:
            found = between.interact(rows, rows)[0]
    _finish(charges, rows, found, field.own_pair, field.law, own, sums, gradients, with_gradient)
    return sums, gradients[0], gradients[1]


_operator = FieldOperator("triton", _superpose, accelerate=CudaGraphed)


def _pulls_are_alike(pair: Interaction) -> bool:
    """Whether pulls between charges on the sphere, but for close ones, are so alike that one unit fits them all."""
    nearest, farthest = math.sqrt(NEAR), min(pair.stop, 2.0)
    r = torch.linspace(min(nearest, farthest), farthest, 64, dtype=torch.float64, device="cpu")
    pulls = (pair.slope(r) / r).abs()
    pulls = pulls[pulls > 0]
    return len(pulls) == 0 or bool(pulls.max() < 2**20 * pulls.min())


class _Between:
    """Pairs of different classes."""

    def __init__(self, charges: ChargeSet, field: Field, weights: SourceWeights, with_gradient: bool) -> None:
        self.charges, self.weights, self.with_gradient = charges, weights, with_gradient
        self.pair = field.other_pair
        self.numbers, self.settings = _pair_arguments(field.other_pair, field.law)
        self.settings["GRADIENT"] = with_gradient
        self.twice = not field.rule.linear or not _pulls_are_alike(field.other_pair)
        self.tiles_at_once = 8 * TILES if not with_gradient else TILES // 2 if self.twice else TILES

    def interact(self, rows: SplitPoints, columns: SplitPoints, *, of_columns: bool = True) -> tuple[_Found, _Found]:
        """What the columns do to the rows, and the rows to the columns (the same thing if they are the same).

        The energy is that of the rows, and that of the columns unless of_columns is False.
        """
        from pfml.backends.kernels import tiles as kernels

        symmetric = rows is columns
        tiles = rows.blocks * (rows.blocks + 1) // 2 if symmetric else rows.blocks * columns.blocks
        found = _Found.of(rows, self.with_gradient)
        found_back = found if symmetric else _Found.of(columns, self.with_gradient)
        if tiles == 0:
            return found, found_back
        at_once = min(self.tiles_at_once, tiles)
        pulls = TilePulls.of(rows, at_once, self.with_gradient, self.twice)
        listed = self._list_tiles(rows, columns, tiles)
        left, right = (points._replace(slopes=points.slopes[1]) for points in (rows, columns))
        if not of_columns:
            right = right._replace(slopes=torch.zeros_like(right.slopes))
        rounds = -(-tiles // at_once)
        if rounds > ROUNDS and not (rows.high.is_cuda and torch.cuda.is_current_stream_capturing()):
            rounds = -(-int(listed.size) // at_once)
        warps, stages = INTERACT
        for first in range(0, rounds * at_once, at_once):
            kernels.interact[(min(at_once, PROGRAMS),)](
                left, right, listed, pulls, first, at_once, columns.blocks, rows.high.shape[1],
                self.weights, self.numbers, self.pair.flat_below * (1 - 1e-4), math.sqrt(NEAR) * LONGEST,
                **self.settings, ALIKE=set(self.weights) == {1.0}, SYMMETRIC=symmetric, TWICE=self.twice,
                BLOCK=BLOCK, CHUNK=CHUNK, num_warps=warps, num_stages=stages,
            )  # fmt: skip
            self._gather(rows, columns, listed, listed.slots, pulls, found, first, at_once, symmetric, mirrored=False)
            if not symmetric:
                self._gather(
                    columns, rows, listed, listed.slots.T, pulls, found_back, first, at_once, symmetric, mirrored=True
                )
        self._closely(left, right, listed.slots, found)
        if not symmetric:
            self._closely(right, left, listed.slots.T, found_back)
        return found, found_back

    def _list_tiles(self, rows: SplitPoints, columns: SplitPoints, tiles: int) -> TileList:
        """The tiles that may hold an acting pair."""
        from pfml.backends.kernels import tiles as kernels

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=rows.high.device)

        if rows.blocks * columns.blocks > MOST_TILES:
            raise ValueError(
                f"the triton backend takes up to {BLOCK * math.isqrt(MOST_TILES):,} charges, got "
                f"{len(columns.high):,}: draw some of the proxies (proxy_sample), or use backend='tiled'"
            )
        symmetric, padded = rows is columns, rows.high.shape[1]
        flags = torch.zeros(rows.blocks, columns.blocks, dtype=torch.int8, device=rows.high.device)
        slots, listed, count = empty(rows.blocks, columns.blocks), empty(tiles), empty()
        everywhere = self.pair.stop == math.inf
        reach = 0.0 if everywhere else self.pair.stop * (1 + 2.0**-20)  # more than float32 rounds off
        shape = _ScreenShape.of(padded)
        warps, stages, registers = SCREEN
        at_once = max(min(tiles // SCREEN_PROGRAMS, SCREENED), 1)
        kernels.screen[(rows.blocks, -(-(columns.blocks // 2 + 1 if symmetric else columns.blocks) // at_once))](
            rows, columns, flags, at_once, rows.blocks, columns.blocks, padded, reach, self.weights,
            SYMMETRIC=symmetric, EVERYWHERE=everywhere, BLOCK=BLOCK, PARTS=BLOCK // shape.columns,
            CHUNK=shape.chunk, WHOLE=shape.whole, num_warps=warps, num_stages=stages, maxnreg=registers,
        )  # fmt: skip
        kernels.index[(-(-flags.numel() // INDEXED),)](
            flags, slots, listed, count, flags.numel(), columns.blocks,
            SYMMETRIC=symmetric, AT_ONCE=INDEXED, COUNTED=4 * INDEXED, num_warps=8,
        )  # fmt: skip
        return TileList(slots, listed, count)

    def _gather(
        self, rows: SplitPoints, columns: SplitPoints, listed: TileList, slots: Tensor, pulls: TilePulls, found: _Found,
        first: int, num_tiles: int, symmetric: bool, mirrored: bool,
    ) -> None:  # fmt: skip
        from pfml.backends.kernels import tiles as kernels

        padded = rows.high.shape[1]
        width = min(WIDTH, padded)
        warps, stages = GATHER
        kernels.gather[(rows.blocks, -(-padded // width) if self.with_gradient else 1)](
            rows, columns, slots, *slots.stride(), listed.size, pulls, found.sums, found.gradient, first, num_tiles,
            columns.blocks, padded,
            GRADIENT=self.with_gradient, SYMMETRIC=symmetric, MIRRORED=mirrored, BLOCK=BLOCK, WIDTH=width,
            CHUNK=min(CHUNK, BLOCK), AT_ONCE=32, num_warps=warps, num_stages=stages,
        )  # fmt: skip

    def _closely(self, rows: SplitPoints, columns: SplitPoints, slots: Tensor, found: _Found) -> None:
        from pfml.backends.kernels import differences

        differences.interact_closely[(len(rows.high) // CLOSE,)](
            self.charges.given, rows, columns, slots, *slots.stride(), found.sums, found.gradient, columns.blocks,
            rows.high.shape[1], self.weights, self.numbers,
            **self.settings, AT_ONCE=128, ROWS=CLOSE, COLUMNS=CLOSE, BLOCK=BLOCK, CHUNK=32,
        )  # fmt: skip

    def from_samples(self, everything: SplitPoints) -> _Found:
        """`interact` of all charges, where pairs of proxies do not count."""
        num = self.charges.num_samples
        samples = self.charges.split(torch.arange(num, device=everything.high.device))
        of_samples, found = self.interact(samples, everything)
        found.sums[:num] = of_samples.sums[:num]
        if self.with_gradient:
            found.gradient[:num] = of_samples.gradient[:num]
        return found

    def from_anchors(self, everything: SplitPoints, anchors: Anchors) -> _Found:
        """`interact` of all charges, where only samples and these proxies are anchors."""
        num_samples = self.charges.num_samples
        samples = torch.arange(num_samples, device=anchors.rows.device)
        order = torch.cat([samples, torch.where(anchors.weights > 0, anchors.rows + num_samples, -1)])
        of_anchors, found = self.interact(self.charges.split(order), everything, of_columns=False)
        rows = order.clamp_min(0)  # padding adds zeros
        found.sums.zero_().index_add_(0, rows, of_anchors.sums[: len(order)])
        if self.with_gradient:
            found.gradient.index_add_(0, rows, of_anchors.gradient[: len(order)])
        return found


class _ScreenShape(NamedTuple):
    """What the screen takes at a time: shared memory has room for two programs."""

    whole: bool  # whether all dimensions of the rows are kept
    chunk: int  # dimensions at a time
    columns: int

    @classmethod
    def of(cls, padded: int) -> _ScreenShape:
        """For positions of so many dimensions."""
        whole = padded <= KEPT and padded == power_of_two(padded)
        chunk = padded if whole else min(padded, 128)
        return cls(whole, chunk, min(32 if chunk > 256 else 64, BLOCK // 2))


class _Found(NamedTuple):
    """What other classes do to some rows."""

    sums: Tensor  # (N,) float64
    gradient: Tensor  # (N, P) float32, at positions; empty unless asked for

    @classmethod
    def of(cls, rows: SplitPoints, with_gradient: bool) -> _Found:
        gradient = rows.squares.new_zeros(rows.high.shape if with_gradient else 0)
        return cls(rows.squares.new_zeros(len(rows.high), dtype=torch.float64), gradient)


class TileList(NamedTuple):
    """The tiles that may hold an acting pair, by number."""

    slots: Tensor  # (row blocks, column blocks) int32: the number of each tile, or -1; -2 for "from differences"
    listed: Tensor  # (tiles,) int32: tile by number
    size: Tensor  # () int32: how many tiles are listed


class TilePulls(NamedTuple):
    """The pulls of T tiles, in split precision and in units of their sizes; sums of their energies and pulls."""

    high: Tensor  # (T, BLOCK, BLOCK) float16
    low: Tensor
    back_high: Tensor  # the same, or in other units
    back_low: Tensor
    row_sizes: Tensor  # (T, BLOCK) float32
    column_sizes: Tensor
    row_sums: Tensor
    column_sums: Tensor
    row_pulls: Tensor
    column_pulls: Tensor

    @classmethod
    def of(cls, rows: SplitPoints, tiles: int, with_gradient: bool, twice: bool) -> TilePulls:
        """Room for the pulls of some tiles, once or twice."""
        pulls = rows.high.new_empty(4 if twice else 2, tiles if with_gradient else 0, BLOCK, BLOCK)
        return cls(*pulls[:2], *pulls[-2:], *rows.squares.new_empty(6, tiles, BLOCK))


def _finish(
    charges: ChargeSet, rows: SplitPoints, found: _Found | None, pair: Interaction, law: DecayLaw,
    weights: SourceWeights, sums: Tensor, gradients: list[Tensor], with_gradient: bool,
) -> None:  # fmt: skip
    """Add the pairs of one class, and write all sums and gradients in the order and for the points as given."""
    from pfml.backends.kernels import differences

    attracts = any(weights)
    classes, by_class = rows.labels[: charges.num].sort(stable=True) if attracts else (rows.labels, rows.labels)
    found = _Found.of(rows, with_gradient) if found is None else found
    numbers, settings = _pair_arguments(pair, law)
    differences.finish[(charges.num,)](
        charges.given, rows._replace(slopes=rows.slopes[0]), classes, by_class, found.sums, found.gradient, sums,
        *gradients, charges.num, rows.high.shape[1], weights, numbers,
        **settings, GRADIENT=with_gradient, ANY_PAIRS=attracts,
        SAMPLES_ON_SPHERE=charges.samples.on_sphere, PROXIES_ON_SPHERE=charges.proxies.on_sphere,
        WIDTH=power_of_two(charges.dims), num_warps=row_warps(charges.dims),
    )  # fmt: skip


def _pair_arguments(pair: Interaction, law: DecayLaw) -> tuple[PairNumbers, dict[str, Any]]:
    """What the kernels are told of an interaction: its numbers, and the law's function as constants."""
    from pfml.backends.kernels.laws import gpu_law, pair_numbers

    attracts = pair.pair_potential == law.attraction
    functions = gpu_law(law)
    constants = {"LAW": functions.attraction if attracts else functions.repulsion, "ATTRACTS": attracts}
    return pair_numbers(pair, law), constants
