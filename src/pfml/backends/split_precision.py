"""Split-precision points: the charges as the kernels of `pfml.backends.fused` take them.

A position is the sum of two float16 numbers per component, high and low; rows are padded to whole tiles. Beside it
lies a quantized one, of one byte per component, with a bound of its error: for the screen.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

from pfml.superposition import Charges

__all__ = [
    "BLOCK",
    "INTERPRETED",
    "LONGEST",
    "WIDTH",
    "ChargeSet",
    "GivenPoints",
    "SplitPoints",
    "by_pivot",
    "power_of_two",
    "row_warps",
]

#: Length to which the longest position is scaled; its high part, a multiple of 2^-5, stays below 2^7.
LONGEST = 126.0
#: Whether Triton runs its kernels in Python, on a CPU: for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: Side of a tile.
BLOCK = 8 if INTERPRETED else 128
#: Dimensions of the forces that one program sums.
WIDTH = 128
#: Dimensions of one row that one warp takes.
WARP_DIMS = 512
#: By the nearest of so many charges a large set is sorted.
PIVOTS = 512


class GivenPoints(NamedTuple):
    """Samples and proxies as given, for kernels that take differences."""

    samples: Tensor  # (n, D) float32
    proxies: Tensor  # (m, D) float32
    num_samples: int
    dims: int


class SplitPoints(NamedTuple):
    """Some or all charges in some order, padded to whole tiles; kernels take all of it as one argument."""

    high: Tensor  # (N, P) float16
    low: Tensor  # (N, P) float16
    squares: Tensor  # (N,) float32: |high|^2
    rests: Tensor  # (N,) float32: |high + low|^2 - |high|^2
    quantized: Tensor  # (N, P) int8: the position is close to steps * quantized
    steps: Tensor  # (N,) float32
    quantized_squares: Tensor  # (N,) float32: |steps * quantized|^2
    errors: Tensor  # (N,) float32: |position - steps * quantized| is less
    inverses: Tensor  # (N,) float64: 1 / |point|
    labels: Tensor  # (N,) int64
    kinds: Tensor  # (N,) int32: 1 for a sample, 0 for a proxy, -1 for padding
    charges: Tensor  # (N,) int32: which charge it is, samples first
    slopes: Tensor  # (2, N) float32: d energy / d sums, where gradients are wanted; a kernel gets one row of it
    scale: Tensor  # () float32: what positions are multiplied by

    @property
    def blocks(self) -> int:
        """How many tiles they are high."""
        return len(self.high) // BLOCK


class ChargeSet:
    """Samples and proxies as given, and split-precision points of them."""

    def __init__(self, samples: Charges, proxies: Charges, slopes: Tensor | None) -> None:
        self.samples, self.proxies, self.slopes = samples, proxies, slopes
        self.num_samples, self.num = len(samples.points), len(samples.points) + len(proxies.points)
        self.dims = samples.points.shape[1]
        self.padded = _multiple(self.dims, 64 if self.dims <= 64 else WIDTH)
        self.scale = _scale(samples, proxies)
        self.given = GivenPoints(samples.points, proxies.points, self.num_samples, self.dims)

    def split(
        self, order: Tensor | None = None, *, into: SplitPoints | None = None, only_high: bool = False
    ) -> SplitPoints:
        """All charges, or those of `order` (-1 for none), in new memory or in that of others that are done with.

        With `only_high`, everything but their high parts is left as it is: enough for `by_pivot`.
        """
        from pfml.backends.kernels.points import prepare

        num = self.num if order is None else len(order)
        rows = self._empty(num) if into is None else into
        prepare[(len(rows.high),)](
            self.given, self.samples.labels, self.proxies.labels,
            rows.slopes if self.slopes is None else self.slopes, rows.labels if order is None else order, rows,
            self.num, num, self.padded,
            ORDERED=order is not None, SLOPES=self.slopes is not None, SAMPLES_ON_SPHERE=self.samples.on_sphere,
            PROXIES_ON_SPHERE=self.proxies.on_sphere, ONLY_HIGH=only_high, WIDTH=power_of_two(self.padded),
            num_warps=row_warps(self.padded),
        )  # fmt: skip
        return rows

    def _empty(self, num: int) -> SplitPoints:
        points = self.samples.points
        padded_rows = _multiple(num, BLOCK)

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return points.new_empty(shape, dtype=dtype)

        return SplitPoints(
            high=empty(padded_rows, self.padded, dtype=torch.float16),
            low=empty(padded_rows, self.padded, dtype=torch.float16),
            squares=empty(padded_rows, dtype=torch.float32),
            rests=empty(padded_rows, dtype=torch.float32),
            quantized=empty(padded_rows, self.padded, dtype=torch.int8),
            steps=empty(padded_rows, dtype=torch.float32),
            quantized_squares=empty(padded_rows, dtype=torch.float32),
            errors=empty(padded_rows, dtype=torch.float32),
            inverses=empty(padded_rows, dtype=torch.float64),
            labels=empty(padded_rows, dtype=torch.int64),
            kinds=empty(padded_rows, dtype=torch.int32),
            charges=empty(padded_rows, dtype=torch.int32),
            slopes=empty(2, 0 if self.slopes is None else padded_rows, dtype=torch.float32),
            scale=self.scale,
        )


def _scale(samples: Charges, proxies: Charges) -> Tensor:
    """What brings the longest position to LONGEST; a tensor on the device."""
    free = [g.points for g in (samples, proxies) if len(g.points) and not g.on_sphere]
    if not free:
        return samples.points.new_full((), LONGEST)
    on_sphere = any(len(g.points) and g.on_sphere for g in (samples, proxies))
    # in float64, which has the squares of all float32 numbers
    norms = [torch.linalg.vector_norm(points, dim=1, dtype=torch.float64).amax() for points in free]
    longest = torch.stack(norms).amax().clamp_min(1.0 if on_sphere else 1e-35)
    return (LONGEST / longest).to(samples.points.dtype)


def by_pivot(rows: SplitPoints, num: int, reach: float) -> Tensor:
    """An order of the first `num` rows in which charges with the same nearest pivot are neighbors.

    Pivots within reach of each other are neighbors too.
    """
    positions = rows.high[:num]
    pivots = positions[:: max(num // PIVOTS, 1)][:PIVOTS]
    nearest = (positions @ pivots.T).argmax(dim=1)
    wide = pivots.float()
    squares = wide.square().sum(dim=1)
    apart = squares[:, None] + squares[None, :] - 2 * (wide @ wide.T)
    number = torch.arange(len(pivots), device=apart.device, dtype=torch.int32)  # sorted in half the time of int64
    together = apart <= torch.minimum((1.5 * reach * rows.scale) ** 2, apart.mean() / 2)
    leader = torch.where(together, number[None, :], number[:, None]).amin(dim=1)
    return (leader * len(pivots) + number)[nearest].argsort(stable=True)


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


def power_of_two(size: int) -> int:
    """The next one, from 16 on."""
    return max(1 << (size - 1).bit_length(), 16)


def row_warps(dims: int) -> int:
    """Warps of a program that has one row of so many dimensions: one as long as registers hold the row."""
    return max(power_of_two(dims) // WARP_DIMS, 1)
