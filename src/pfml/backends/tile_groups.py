"""Tile groups: the charges of one kind during a sweep (`pfml.backends.sweep`), with positions, sums and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

__all__ = ["PREPARED_BYTES", "TileGroup", "chunks", "rows_at_once", "slices"]

#: A group whose prepared copy is larger than this is prepared tile by tile instead.
PREPARED_BYTES = 2**27
#: Numbers that are handled at once in float64: so that they stay in a CPU's caches; a GPU wants more.
CHUNK = {"cpu": 2**18, "cuda": 2**24}


@dataclass(eq=False)
class TileGroup:
    """The charges of one kind during a sweep, and what the sweep adds up for them."""

    points: Tensor  # (n, D) as given
    labels: Tensor  # (n,)
    inverse_norms: Tensor | None  # (n, 1) float64, for charges on the sphere
    center: Tensor  # (D,) float64, subtracted before products: the closer the points, the smaller the rounding
    squared_norms: Tensor  # (n,) float64: |point - center|^2
    sums: Tensor  # (2, n) float64: own and other
    slopes: Tensor  # (2, n): d energy / d sums; used where there is a gradient. One number that is repeated: 1
    gradient: Tensor | None = None  # (n, D)
    prepared: Tensor | None = None  # (n, D)
    copied_rows: Tensor | None = None  # (n,) for copies of charges of another group: their rows there

    def __len__(self) -> int:
        return len(self.points)

    @cached_property
    def largest_square(self) -> float:
        """The largest of `squared_norms`, read back from the device when it is asked for."""
        return self.squared_norms.max().item() if len(self) else 0.0

    def exact(self, where: Tensor | slice) -> Tensor:
        """The charges' positions in float64, (k, D)."""
        rows = self.points[where] if isinstance(where, slice) else self.points.index_select(0, where)
        rows = rows.to(torch.float64, copy=True)
        return rows if self.inverse_norms is None else rows.mul_(self.inverse_norms[where])

    def centered(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Positions relative to the center, (k, D)."""
        if self.prepared is not None and dtype == self.prepared.dtype:
            return self.prepared[rows]
        return self.exact(rows).sub_(self.center).to(dtype)

    def prepare(self) -> None:
        """Measure distances from the center, and keep a centered copy if it is small."""
        fits = self.points.nbytes <= PREPARED_BYTES
        self.prepared = torch.empty_like(self.points) if fits else None
        for rows in chunks(self.points):
            centered = self.exact(rows).sub_(self.center)
            if self.prepared is not None:
                self.prepared[rows] = centered
            self.squared_norms[rows] = centered.square_().sum(dim=1)

    def copies(self, rows: Tensor, center: Tensor | None = None) -> TileGroup:
        """Copies of the charges in these rows, with sums and a gradient, and if given a center, of their own."""
        points = self.points.index_select(0, rows)
        made = TileGroup(
            points=points,
            labels=self.labels[rows],
            inverse_norms=None if self.inverse_norms is None else self.inverse_norms[rows],
            center=self.center if center is None else center,
            squared_norms=torch.empty_like(self.squared_norms[rows]),
            sums=torch.zeros_like(self.sums[:, rows]),
            slopes=self.slopes[:, rows],
            gradient=None if self.gradient is None else torch.zeros_like(points),
            copied_rows=rows,
        )
        made.prepare()
        return made

    def part(self, rows: slice) -> TileGroup:
        """Consecutive charges of this group: what is added up for them is added up here."""
        assert self.copied_rows is None
        part = TileGroup(
            points=self.points[rows],
            labels=self.labels[rows],
            inverse_norms=None if self.inverse_norms is None else self.inverse_norms[rows],
            center=self.center,
            squared_norms=self.squared_norms[rows],
            sums=self.sums[:, rows],
            slopes=self.slopes[:, rows],
            gradient=None if self.gradient is None else self.gradient[rows],
            prepared=None if self.prepared is None else self.prepared[rows],
        )
        part.largest_square = self.largest_square
        return part

    def add_copies(self, copies: TileGroup) -> None:
        """Add what was summed for copies of some of these charges."""
        assert copies.copied_rows is not None
        self.sums.index_add_(1, copies.copied_rows, copies.sums)
        if self.gradient is not None and copies.gradient is not None:
            self.gradient.index_add_(0, copies.copied_rows, copies.gradient)

    def project_gradient(self, within: slice = slice(None)) -> None:
        """Turn the gradient at points / |points| into the gradient at points, in place; for the charges `within`."""
        if self.inverse_norms is None or self.gradient is None:
            return
        first, stop, _ = within.indices(len(self))
        for chunk in chunks(self.points[within]):
            rows = slice(first + chunk.start, min(first + chunk.stop, stop))
            position, gradient = self.exact(rows), self.gradient[rows].double()
            radial = (gradient * position).sum(dim=1, keepdim=True)
            self.gradient[rows] = gradient.addcmul_(radial, position, value=-1).mul_(self.inverse_norms[rows])


def chunks(points: Tensor) -> Iterator[slice]:
    """Consecutive rows of `points`, at most `CHUNK` numbers at once."""
    return slices(len(points), rows_at_once(points))


def rows_at_once(points: Tensor) -> int:
    """How many rows of `points` make `CHUNK` numbers."""
    return max(CHUNK.get(points.device.type, CHUNK["cpu"]) // max(points.shape[1], 1), 1)


def slices(length: int, size: int) -> Iterator[slice]:
    """Consecutive parts of at most `size`."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))
