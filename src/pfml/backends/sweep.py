"""The exact field in bounded memory: one symmetric product in tiles, and work only where a force acts.

Why it is fast. Attraction acts within a class, repulsion within `reach`: of n^2 pairs only a few feel anything. One
product of the points with themselves, half of it by symmetry, finds them tile by tile; a tile without such a pair is
left after its product. Energy and gradient come out of the same pass over the tiles where the field allows it
(`Normalization.linear`), out of a second pass otherwise.

Why it is exact. r^2 = |a|^2 + |b|^2 - 2 a.b loses the digits of close pairs, and a pair at the edge of an
interaction has a force on one side and none on the other. So a tile climbs a ladder until few pairs are delicate:

    product in float32  ->  product in float64  ->  explicit differences in float64, for the few that are left

Memory: the gradient (n, D), a working copy of the points if it is small, and one tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pfml.field import Interaction
from pfml.superposition import Field, PairWeights

__all__ = ["Group", "sweep"]

OWN, OTHER = 0, 1  # rows of `Group.sums` and `Group.slopes`

#: Pairs in a tile: 1,024 x 1,024 stay in a CPU's caches; a GPU wants larger ones.
TILE_PAIRS = {"cpu": 2**20, "cuda": 2**24}
#: Below this many points halve the side of a tile: less of the product is spent on the diagonal.
SMALL_SET = 4096
#: A group whose prepared copy is larger than this is prepared tile by tile instead.
PREPARED_BYTES = 2**27
#: Up to this share of a tile's pairs is taken by explicit differences (about a third of the product's time).
FEW = 1 / 1024
#: Up to this share of a tile's pairs a list of pairs beats a matrix of them.
SPARSE = 1 / 12
#: Pairs whose differences are taken at once.
CHUNK = 2048

#: Errors of r^2 from a product, relative to |a|^2 + |b|^2: bound, and where they reach 1e-4 of a steep force.
EDGE = {torch.float32: 2e-6, torch.float64: 4e-15}
NEAR = {torch.float32: 5e-3, torch.float64: 1e-9}
#: Where even float64 has only noise left, should more than a few pairs lie there.
SMALLEST = 1e-15


@dataclass(eq=False)
class Group:
    """The charges of one kind during a sweep, and what the sweep adds up for them."""

    points: Tensor  # (n, D) as given
    labels: Tensor  # (n,)
    inverse_norms: Tensor | None  # (n, 1) float64, for charges on the sphere
    centre: Tensor  # (D,) float64, subtracted before products: the closer the points, the smaller the rounding
    sums: Tensor  # (2, n) float64: own and other
    slopes: Tensor  # (2, n): d energy / d sums; used where there is a gradient
    gradient: Tensor | None = None  # (n, D)
    prepared: Tensor | None = None  # (n, D)
    largest_square: float = 0.0  # max |point - centre|^2

    def __len__(self) -> int:
        return len(self.points)

    def exact(self, where: Tensor | slice) -> Tensor:
        """The charges' positions in float64, (k, D)."""
        rows = self.points[where].double()
        return rows if self.inverse_norms is None else rows * self.inverse_norms[where]

    def centred(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Positions relative to the centre, (k, D)."""
        if self.prepared is not None and dtype == self.prepared.dtype:
            return self.prepared[rows]
        return (self.exact(rows) - self.centre).to(dtype)

    def prepare(self) -> None:
        """Measure the spread, and keep a centred copy if it is small."""
        fits = self.points.nbytes <= PREPARED_BYTES
        self.prepared = torch.empty_like(self.points) if fits else None
        for rows in _slices(len(self), CHUNK):
            centred = (self.exact(rows) - self.centre).to(self.points.dtype)
            self.largest_square = max(self.largest_square, centred.square().sum(dim=1).max().item())
            if self.prepared is not None:
                self.prepared[rows] = centred

    def project_gradient(self) -> None:
        """Turn the gradient at points / |points| into the gradient at points, in place."""
        if self.inverse_norms is None or self.gradient is None:
            return
        for rows in _slices(len(self), CHUNK):
            position, gradient = self.exact(rows), self.gradient[rows].double()
            radial = (gradient * position).sum(dim=1, keepdim=True)
            self.gradient[rows] = ((gradient - radial * position) * self.inverse_norms[rows]).to(self.gradient.dtype)


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


@dataclass(eq=False)
class Tile:
    """The pairs (left[rows], right[columns]); on the diagonal of a symmetric block, each pair once."""

    left: Group
    right: Group
    rows: slice
    columns: slice
    on_diagonal: bool

    @property
    def scale(self) -> float:
        """Bound of |a|^2 + |b|^2."""
        return self.left.largest_square + self.right.largest_square

    def squared_distances(self, dtype: torch.dtype) -> Tensor:
        """r^2 from one product, (rows, columns); NaN where a pair does not count."""
        a, b = self.left.centred(self.rows, dtype), self.right.centred(self.columns, dtype)
        squares = torch.addmm(b.square().sum(dim=1), a, b.T, alpha=-2).add_(a.square().sum(dim=1)[:, None])
        if self.on_diagonal:
            squares.masked_fill_(torch.ones_like(squares, dtype=torch.bool).tril_(), math.nan)
        return squares


def sweep(samples: Group, proxies: Group, field: Field, weights: PairWeights) -> None:
    """Add the field of all pairs to `sums`, and to `gradient` in groups that have one."""
    for left, right, (own_weight, other_weight) in (
        (samples, samples, weights.of_samples()),
        (samples, proxies, weights.of_mixed()),
        (proxies, proxies, weights.of_proxies()),
    ):
        for tile, may_share_class in _tiles(left, right):
            if other_weight == 0 and not (may_share_class and own_weight != 0):
                continue
            _superpose(tile, field, own_weight, other_weight, may_share_class)


def _tiles(left: Group, right: Group) -> Iterator[tuple[Tile, bool]]:
    """The tiles of a block, each with whether a class may occur on both of its sides."""
    if not len(left) or not len(right):
        return
    pairs = TILE_PAIRS.get(left.points.device.type, TILE_PAIRS["cpu"])
    side = math.isqrt(pairs if len(right) > SMALL_SET else pairs // 4)
    height = _even_split(len(left), side)
    width = height if left is right else _even_split(len(right), max(pairs // height, 1))
    bands = [(rows, *_label_range(left, rows)) for rows in _slices(len(left), height)]
    stacks = bands if left is right else [(cols, *_label_range(right, cols)) for cols in _slices(len(right), width)]
    for i, (rows, low, high) in enumerate(bands):
        for columns, right_low, right_high in stacks[i:] if left is right else stacks:
            on_diagonal = left is right and rows == columns
            yield Tile(left, right, rows, columns, on_diagonal), low <= right_high and right_low <= high


def _even_split(length: int, largest: int) -> int:
    """The size of equal parts of `length`, at most `largest`."""
    return math.ceil(length / math.ceil(length / largest))


def _label_range(group: Group, rows: slice) -> tuple[int, int]:
    low, high = torch.aminmax(group.labels[rows])
    return int(low), int(high)


def _superpose(tile: Tile, field: Field, own_weight: float, other_weight: float, may_share_class: bool) -> None:
    squares = tile.squared_distances(tile.left.points.dtype)
    own_pairs = other_pairs = None
    if may_share_class:
        own_pairs = tile.left.labels[tile.rows, None] == tile.right.labels[None, tile.columns]
        other_pairs = ~own_pairs
        if tile.on_diagonal:
            counted = squares == squares  # not NaN
            own_pairs, other_pairs = own_pairs & counted, other_pairs & counted
    elif squares.amin().item() >= field.other_pair.stop**2 + EDGE[squares.dtype] * tile.scale:
        return
    if own_pairs is not None and own_weight != 0:
        _interact(tile, squares, own_pairs, field.own_pair, OWN, own_weight)
    if other_weight != 0:
        _interact(tile, squares, other_pairs, field.other_pair, OTHER, other_weight)


def _interact(
    tile: Tile, squares: Tensor, candidates: Tensor | None, pair: Interaction, channel: int, weight: float
) -> None:
    """Add one interaction of the candidate pairs (None: all pairs of the tile)."""
    few = max(squares.numel() * FEW, 64)
    if candidates is not None and candidates.count_nonzero().item() <= few:
        return _add_from_differences(tile, candidates, pair, channel, weight)
    while True:
        margin = EDGE[squares.dtype] * tile.scale
        active = _between(squares, pair.start, pair.stop, margin)
        if candidates is not None:
            active &= candidates
        count = int(active.count_nonzero())
        if count <= few:
            return _add_from_differences(tile, active, pair, channel, weight)
        delicate = active & _delicate(squares, pair, margin, NEAR[squares.dtype] * tile.scale)
        num_delicate = int(delicate.count_nonzero())
        if num_delicate <= few or squares.dtype == torch.float64:
            break
        squares = tile.squared_distances(torch.float64)
    if num_delicate <= few:
        _add_from_differences(tile, delicate, pair, channel, weight)
        active ^= delicate
    r = squares.clamp_min(SMALLEST * tile.scale).sqrt_()
    add = _add_from_list if count < squares.numel() * SPARSE else _add_from_matrix
    add(tile, r, active, pair, channel, weight)


def _between(squares: Tensor, start: float, stop: float, margin: float) -> Tensor:
    """Where start <= r < stop, give or take the margin of r^2."""
    inside = squares < (stop**2 + margin) if math.isfinite(stop) else squares == squares  # not NaN
    if start > 0:
        inside &= squares >= start**2 - margin
    return inside


def _delicate(squares: Tensor, pair: Interaction, margin: float, near: float) -> Tensor:
    """Where a product is not good enough: close pairs, and pairs at an edge of the interaction."""
    delicate = squares < near
    for edge in (pair.start, pair.stop):
        if 0 < edge < math.inf:
            delicate |= (squares >= edge**2 - margin) & (squares < edge**2 + margin)
    return delicate


def _add_from_differences(tile: Tile, mask: Tensor, pair: Interaction, channel: int, weight: float) -> None:
    """Add the pairs in `mask` from explicit differences in float64; exact at every distance."""
    left, right = tile.left, tile.right
    for i, j in (chunk.T for chunk in mask.nonzero().split(CHUNK)):
        i, j = i + tile.rows.start, j + tile.columns.start
        difference = left.exact(i) - right.exact(j)  # (k, D)
        r = torch.linalg.vector_norm(difference, dim=1)  # (k,)
        acts = (r >= pair.start) & (r < pair.stop)
        energy = torch.where(acts, pair.potential(r), 0.0) * weight
        left.sums[channel].index_add_(0, i, energy)
        right.sums[channel].index_add_(0, j, energy)
        if left.gradient is None or right.gradient is None:
            continue
        slope = torch.where(acts & (r > 0), pair.slope(r) / r, 0.0) * weight
        slope *= left.slopes[channel, i] + right.slopes[channel, j]
        pull = difference.mul_(slope[:, None]).to(left.gradient.dtype)
        left.gradient.index_add_(0, i, pull)
        right.gradient.index_add_(0, j, pull, alpha=-1)


def _add_from_list(tile: Tile, r: Tensor, active: Tensor, pair: Interaction, channel: int, weight: float) -> None:
    """Add the active pairs, a small share of the tile, as a list sorted by rows."""
    left, right, rows, columns = tile.left, tile.right, tile.rows, tile.columns
    i, j = active.nonzero(as_tuple=True)
    r = r[i, j]  # (k,)
    energy = pair.potential(r).double() * weight
    left.sums[channel, rows].index_add_(0, i, energy)
    right.sums[channel, columns].index_add_(0, j, energy)
    if left.gradient is None or right.gradient is None:
        return
    slope = pair.slope(r).div_(r) * weight
    slope *= left.slopes[channel, rows][i] + right.slopes[channel, columns][j]
    a, b = left.centred(rows, r.dtype), right.centred(columns, r.dtype)
    _add_pulls(left.gradient[rows], a, b, i, j, slope)
    order = torch.argsort(j, stable=True)
    _add_pulls(right.gradient[columns], b, a, j[order], i[order], slope[order])


def _add_pulls(gradient: Tensor, at: Tensor, source: Tensor, i: Tensor, j: Tensor, slope: Tensor) -> None:
    """gradient[i] += slope * (at[i] - source[j]) over a list of pairs sorted by i."""
    first = torch.searchsorted(i, torch.arange(len(at), device=i.device))
    pulled = F.embedding_bag(j, source, first, mode="sum", per_sample_weights=slope)  # (rows, D)
    total = torch.zeros_like(at[:, 0]).index_add_(0, i, slope)
    gradient += total[:, None] * at - pulled


def _add_from_matrix(tile: Tile, r: Tensor, active: Tensor, pair: Interaction, channel: int, weight: float) -> None:
    """Add the active pairs, a large share of the tile, as a matrix: the gradient is two products."""
    left, right, rows, columns = tile.left, tile.right, tile.rows, tile.columns
    passive = ~active
    energy = pair.potential(r).masked_fill_(passive, 0.0)
    left.sums[channel, rows].add_(energy.sum(dim=1), alpha=weight)
    right.sums[channel, columns].add_(energy.sum(dim=0), alpha=weight)
    if left.gradient is None or right.gradient is None:
        return
    slope = pair.slope(r).div_(r).masked_fill_(passive, 0.0)
    slope *= weight * (left.slopes[channel, rows, None] + right.slopes[channel, None, columns])
    a, b = left.centred(rows, r.dtype), right.centred(columns, r.dtype)
    left.gradient[rows] += slope.sum(dim=1)[:, None] * a - slope @ b
    right.gradient[columns] += slope.sum(dim=0)[:, None] * b - slope.T @ a
