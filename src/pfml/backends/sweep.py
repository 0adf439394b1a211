"""The exact field in bounded memory: one symmetric product in tiles, and work only where a force acts.

Why it is fast. Attraction acts within a class, repulsion within `reach`: of n^2 pairs only a few feel anything. One
product of the points with themselves, half of it by symmetry, finds them tile by tile; a tile without such a pair is
left after its product. Energy and gradient come out of the same pass over the tiles where the field allows it
(`Normalization.linear`), out of a second pass otherwise.

Why it is exact. r^2 = |a|^2 + |b|^2 - 2 a.b loses the digits of close pairs, and a pair at the edge of an
interaction has a force on one side and none on the other. A product adds the pairs that it is good enough for; the
others climb a ladder:

    product in float32  ->  product in float64  ->  explicit differences in float64

A step is left out where few pairs are left. Where very many are (a tight crowd of points), the crowd becomes a tile
around its own center first, in which the ladder starts again on the scale of the crowd.

Where launches are costly (`COSTLY_LAUNCHES`: on a GPU) tiles are larger, and all that has to be few is: samples and
proxies are one group, pairs of one class are listed for all tiles at once, masks of a tile replace other lists, and
the pairs that are left for differences wait for those of the other tiles.

Where only some proxies are anchors, these are swept as a third tile group of copies, against all proxies and in one
direction: no symmetry, but few rows.

Memory: the gradient (n, D), a working copy of the points if it is small, and one tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pfml.backends.tile_groups import TileGroup, rows_at_once, slices
from pfml.field import Interaction
from pfml.superposition import Field, PairWeights, source_weights

__all__ = [
    "EDGE",
    "NEAR",
    "OTHER",
    "OWN",
    "Counts",
    "delicate_pairs",
    "sweep",
    "sweep_block",
    "sweep_joined",
]

OWN, OTHER = 0, 1  # rows of `TileGroup.sums` and `TileGroup.slopes`

#: Pairs in a tile: 1,024 x 1,024 stay in a CPU's caches; a GPU wants them so large that it need not wait for Python.
TILE_PAIRS = {"cpu": 2**20, "cuda": 2**27}
#: Whether a launch costs more than a pass over a large tile: then masks take the place of lists where they can, and
#: pairs that are left for differences are collected from all tiles.
COSTLY_LAUNCHES = {"cpu": False, "cuda": True}
#: Where launches are costly, up to this share of all pairs may be of one class to be taken by differences.
FEW_POSITIVES = 1 / 256
#: ... and up to this many, at 64 bytes each while they are listed.
MOST_POSITIVES = 2**23
#: ... and tiles are multiples of this wide, which products prefer.
TILE_MULTIPLE = 128
#: Up to this share of a tile's pairs is taken by explicit differences (about a third of the product's time).
FEW = 1 / 1024
#: ... and up to this many in any case.
FEW_AT_LEAST = 256
#: Up to this share of a tile's pairs a list of pairs beats a matrix of them; a GPU multiplies faster than it sorts.
SPARSE = {"cpu": 1 / 12, "cuda": 1 / 2000}
#: Up to this share of a tile on the diagonal its pairs are listed in both orders.
MIRRORED = 1 / 16
#: A tile on the diagonal is computed in this many strips, each from the diagonal on.
STRIPS = 4
#: ... that are at least this high, below which products are slow.
SMALLEST_STRIP = 64

#: Bound on the error of r^2 from a product, by its precision, relative to |a|^2 + |b|^2.
EDGE = {torch.float32: 2e-6, torch.float64: 4e-15}
#: Below this, relative to |a|^2 + |b|^2, that error is too large a share of r^2; by the precision of the points and
#: of the product. It keeps a steep force within 1e-4 for float32 points, within 1e-9 for float64 points.
NEAR = {
    (torch.float32, torch.float32): 3e-3,
    (torch.float32, torch.float64): 1e-6,
    (torch.float64, torch.float64): 1e-5,
}
#: From this many delicate pairs on a tile is searched for crowds, and a crowd gets a tile of its own.
CROWD_PAIRS = 2**10
#: ... if the scale of that tile is at most this share of the scale of the tile that the crowd is in.
CROWD_SCALE = 1 / 16


class Counts(NamedTuple):
    """How much a pair counts at its left and at its right end: what the right one is to the left one, and back."""

    left: float
    right: float


@dataclass(eq=False)
class Tile:
    """The pairs (left[rows], right[columns]) of a block; on the diagonal of a symmetric block, each pair once."""

    left: TileGroup
    right: TileGroup
    rows: slice
    columns: slice
    on_diagonal: bool
    #: Pairs of each channel that are left for differences, as positions in the flattened block; None: none are left.
    later: tuple[list[Tensor], list[Tensor]] | None = None

    @property
    def scale(self) -> float:
        """Bound of |a|^2 + |b|^2."""
        return self.left.largest_square + self.right.largest_square

    def squared_distances(self, dtype: torch.dtype) -> Tensor:
        """r^2 from one product, (rows, columns); undefined below a diagonal, where little is computed."""
        a, b = self.left.centered(self.rows, dtype), self.right.centered(self.columns, dtype)
        a_squares = self.left.squared_norms[self.rows, None].to(dtype)
        b_squares = self.right.squared_norms[None, self.columns].to(dtype)
        if not self.on_diagonal:
            return (a_squares + b_squares).addmm_(a, b.T, alpha=-2)
        squares = a.new_empty(len(a), len(b))
        for strip in self._strips():
            right = slice(strip.start, len(b))
            part = torch.add(a_squares[strip], b_squares[:, right], out=squares[strip, right])
            part.addmm_(a[strip], b[right].T, alpha=-2)
        return squares

    def _strips(self) -> Iterator[slice]:
        """The strips in which a tile on the diagonal is computed."""
        height = self.rows.stop - self.rows.start
        return slices(height, _even_split(height, max(height // STRIPS, SMALLEST_STRIP)))

    def without_lower_half(self, squares: Tensor) -> Tensor:
        """`squares`, infinite below a diagonal, and on it; in place."""
        if self.on_diagonal:
            for strip in self._strips():
                squares[strip, : strip.start] = math.inf
                part = squares[strip, strip]
                part.masked_fill_(part.new_ones(part.shape, dtype=torch.bool).tril_(), math.inf)
        return squares

    def same_class(self) -> Tensor:
        """Which pairs are of one class, (rows, columns)."""
        return self.left.labels[self.rows, None] == self.right.labels[None, self.columns]

    def no_pairs(self) -> Tensor | None:
        """Where there is no pair: below a diagonal; a charge and its copy, (rows, columns). None for nowhere."""
        columns = torch.arange(self.columns.start, self.columns.stop, device=self.left.labels.device)
        if self.on_diagonal:
            return columns[:, None] >= columns
        if self.left.copied_rows is not None:
            return self.left.copied_rows[self.rows, None] == columns
        return None

    def without_copies(self, squares: Tensor) -> Tensor:
        """`squares`, infinite for a charge and its copy; in place."""
        if self.left.copied_rows is not None:
            itself = self.left.copied_rows[self.rows] - self.columns.start  # (rows,)
            i = ((itself >= 0) & (itself < squares.shape[1])).nonzero().squeeze(1)
            squares[i, itself[i]] = math.inf
        return squares

    def count_positives(self) -> int:
        """How many `positives` has, copies included."""
        own, others = self.left.labels[self.rows], self.right.labels[self.columns].sort().values
        pairs = int((torch.searchsorted(others, own, right=True) - torch.searchsorted(others, own)).sum())
        return (pairs - len(own)) // 2 if self.on_diagonal else pairs

    def positives(self) -> Tensor:
        """The pairs of one class that are to be counted, as positions in the flattened tile, row by row."""
        own, others = self.left.labels[self.rows], self.right.labels[self.columns]
        ordered, order = others.sort(stable=True)
        first = torch.searchsorted(ordered, own)  # (rows,)
        counts = torch.searchsorted(ordered, own, right=True) - first
        i = torch.arange(len(own), device=own.device).repeat_interleave(counts)  # (k,)
        j = order[torch.arange(len(i), device=own.device) + (first - counts.cumsum(0) + counts)[i]]
        listed = i * len(others) + j
        if self.on_diagonal:
            return listed[j > i]
        if self.left.copied_rows is not None:
            return listed[j + self.columns.start != self.left.copied_rows[self.rows][i]]
        return listed

    def ends(self, listed: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column, within the tile, of pairs that are listed as positions in the flattened tile."""
        width = self.columns.stop - self.columns.start
        i = listed // width
        return i, listed - i * width


def sweep(samples: TileGroup, proxies: TileGroup, anchors: TileGroup, field: Field, weights: PairWeights) -> None:
    """Add the field of all pairs to `sums`, and to `gradient` in groups that have one.

    `anchors` are the proxies that are anchors: `proxies` itself, or copies of some of them.
    """
    sampled = anchors is not proxies
    of_sources = source_weights(field, weights, sampled)
    for left, right, (own, other) in (
        (samples, samples, [Counts(of.samples_on_samples, of.samples_on_samples) for of in of_sources]),
        (samples, proxies, [Counts(of.proxies_on_samples, of.samples_on_proxies) for of in of_sources]),
        (
            anchors,
            proxies,
            [Counts(of.proxies_on_proxies, 0 if sampled else of.proxies_on_proxies) for of in of_sources],
        ),
    ):
        sweep_block(left, right, field, own, other)


def sweep_joined(group: TileGroup, num_samples: int, field: Field, weights: PairWeights) -> None:
    """`sweep` of one group that begins with the samples: in few, large tiles.

    Pairs of one class are listed for the whole group, and taken by differences where they are few. The other pairs
    need no more than one block where all kinds of them count the same.
    """
    own, other = source_weights(field, weights, sampled=False)
    samples, proxies = slice(0, num_samples), slice(num_samples, len(group))
    kinds = [(samples, samples), (samples, proxies), (proxies, proxies)]
    of_own, of_other = (
        [
            Counts(of.samples_on_samples, of.samples_on_samples),
            Counts(of.proxies_on_samples, of.samples_on_proxies),
            Counts(of.proxies_on_proxies, of.proxies_on_proxies),
        ]
        for of in (own, other)
    )
    alike = len(set(other)) == 1
    if _add_few_positives(group, field, kinds, of_own):
        of_own = [Counts(0.0, 0.0)] * 3
    else:
        alike = alike and len(set(own)) == 1
    if alike:
        return sweep_block(group, group, field, of_own[0], of_other[0])
    of_samples, of_proxies = group.part(samples), group.part(proxies)
    parts = [(of_samples, of_samples), (of_samples, of_proxies), (of_proxies, of_proxies)]
    for (left, right), *counts in zip(parts, of_own, of_other, strict=True):
        sweep_block(left, right, field, *counts)


def _add_few_positives(group: TileGroup, field: Field, kinds: list[tuple[slice, slice]], counts: list[Counts]) -> bool:
    """Add the pairs of one class from differences, by kind; False if they are too many for that."""
    if len(set(counts)) == 1:
        everything = slice(0, len(group))
        kinds, counts = [(everything, everything)], counts[:1]
    tiles = [
        (Tile(group, group, rows, columns, rows == columns), of_pair)
        for (rows, columns), of_pair in zip(kinds, counts, strict=True)
        if any(of_pair)
    ]
    if sum(tile.count_positives() for tile, _ in tiles) > min(FEW_POSITIVES * len(group) ** 2 / 2, MOST_POSITIVES):
        return False
    for tile, of_pair in tiles:
        _add_from_differences(tile, tile.positives(), field.own_pair, OWN, of_pair)
    return True


def sweep_block(left: TileGroup, right: TileGroup, field: Field, own: Counts, other: Counts) -> None:
    """Add the field of every pair of a charge of `left` and one of `right`; each pair once if they are one group.

    Both groups need the same center. Energies are added to the sums of both, forces to the gradients if both have one.
    """
    if not any(own + other) or not len(left) or not len(right):
        return
    if _launches_are_costly(left):
        return _sweep_masked(left, right, field, own, other)
    if (left is right or left.copied_rows is not None) and bool((right.labels[1:] > right.labels[:-1]).all()):
        own = Counts(0.0, 0.0)  # one charge per class has no positives
    for tile, may_share_class in _tiles(left, right):
        if any(other) or (any(own) and may_share_class):
            _superpose(tile, field, own, other, may_share_class)


def _sweep_masked(left: TileGroup, right: TileGroup, field: Field, own: Counts, other: Counts) -> None:
    """`sweep_block` where launches are costly; what is left for differences is taken from all tiles at once."""
    later: tuple[list[Tensor], list[Tensor]] = [], []
    for tile, _ in _tiles(left, right):
        tile.later = later
        _superpose_masked(tile, field, own, other)
    block = Tile(left, right, slice(0, len(left)), slice(0, len(right)), on_diagonal=left is right)
    for channel, pair, counts in ((OWN, field.own_pair, own), (OTHER, field.other_pair, other)):
        if later[channel]:
            _add_from_differences(block, torch.cat(later[channel]), pair, channel, counts)


def _launches_are_costly(group: TileGroup) -> bool:
    """Whether a group is on a device on which fewer launches are worth more passes over a tile."""
    return COSTLY_LAUNCHES.get(group.points.device.type, False)


def _tiles(left: TileGroup, right: TileGroup) -> Iterator[tuple[Tile, bool]]:
    """The tiles of a block, each with whether a class may occur on both of its sides."""
    if not len(left) or not len(right):
        return
    pairs = TILE_PAIRS.get(left.points.device.type, TILE_PAIRS["cpu"])
    height = _side(left, math.isqrt(pairs))
    width = height if left is right else _side(right, max(pairs // height, 1))
    bands = [(rows, *_label_range(left, rows)) for rows in slices(len(left), height)]
    stacks = bands if left is right else [(cols, *_label_range(right, cols)) for cols in slices(len(right), width)]
    for i, (rows, low, high) in enumerate(bands):
        for columns, right_low, right_high in stacks[i:] if left is right else stacks:
            on_diagonal = left is right and rows == columns
            yield Tile(left, right, rows, columns, on_diagonal), low <= right_high and right_low <= high


def _side(group: TileGroup, largest: int) -> int:
    """The side of equal tiles, at most `largest`; of large ones a multiple of what products prefer."""
    side = _even_split(len(group), largest)
    if _launches_are_costly(group) and len(group) > side > 8 * TILE_MULTIPLE:
        return math.ceil(side / TILE_MULTIPLE) * TILE_MULTIPLE
    return side


def _even_split(length: int, largest: int) -> int:
    """The size of equal parts of `length`, at most `largest`."""
    return math.ceil(length / math.ceil(length / largest))


def _label_range(group: TileGroup, rows: slice) -> tuple[int, int]:
    if _launches_are_costly(group):
        return 0, 0  # as if all were alike
    low, high = torch.aminmax(group.labels[rows])
    return int(low), int(high)


def _superpose(tile: Tile, field: Field, own: Counts, other: Counts, may_share_class: bool) -> None:
    """Add what the pairs of a tile do to each other."""
    squares = tile.without_copies(tile.without_lower_half(tile.squared_distances(tile.left.points.dtype)))
    if may_share_class:
        positives = tile.positives()
        if any(own):
            _interact(tile, squares, positives, field.own_pair, OWN, own)
        squares.view(-1).index_fill_(0, positives, math.inf)
    if not any(other):
        return
    limit = field.other_pair.stop**2 + EDGE[squares.dtype] * tile.scale
    if limit == math.inf:
        _interact(tile, squares, _listed(squares != math.inf), field.other_pair, OTHER, other)
    elif squares.amin().item() < limit:  # most tiles end here
        _interact(tile, squares, _listed(squares < limit), field.other_pair, OTHER, other)


def _superpose_masked(tile: Tile, field: Field, own: Counts, other: Counts) -> None:
    """`_superpose` by masks of the tile: with few launches, and no synchronization but for the length of a list."""
    squares = tile.squared_distances(tile.left.points.dtype)
    limit = field.other_pair.stop**2 + EDGE[squares.dtype] * tile.scale
    if any(own):
        listed = _listed(_without(tile.same_class(), tile.no_pairs()))
        _interact(tile, squares, listed, field.own_pair, OWN, own)
    if any(other):
        within_reach = squares < limit if limit < math.inf else ~tile.same_class()
        listed = _listed(_without(_without(within_reach, tile.same_class()), tile.no_pairs()))
        _interact(tile, squares, listed, field.other_pair, OTHER, other)


def _without(pairs: Tensor, excluded: Tensor | None) -> Tensor:
    """The pairs but for those excluded; in place."""
    return pairs if excluded is None else torch.gt(pairs, excluded, out=pairs)


def _listed(pairs: Tensor) -> Tensor:
    """The pairs that are True, as positions in the flattened tile."""
    return pairs.view(-1).nonzero().squeeze(1)


def _interact(tile: Tile, squares: Tensor, listed: Tensor, pair: Interaction, channel: int, counts: Counts) -> None:
    """Add one interaction of the listed pairs, whose r^2 are in `squares`; repulsion may overwrite it."""
    if len(listed) <= _few(squares):
        if len(listed):
            _take_differences(tile, listed, pair, channel, counts)
        return
    margin = EDGE[squares.dtype] * tile.scale
    picked = squares.view(-1).index_select(0, listed)  # (k,)
    delicate = delicate_pairs(picked, pair, margin, NEAR[tile.left.points.dtype, squares.dtype] * tile.scale)
    which = _listed(delicate)
    if len(which):
        _add_delicate(tile, squares, listed[which], pair, channel, counts)
    if len(which) == len(listed):
        return
    r = picked.clamp_min_(0).sqrt_()
    energy, slope = pair.potential_and_slope(r)
    done_or_inert = delicate
    if pair.stop < math.inf:
        done_or_inert |= r >= pair.stop
    if pair.start > 0:
        done_or_inert |= r < pair.start
    energy.masked_fill_(done_or_inert, 0.0)
    slope = (slope / r).masked_fill_(done_or_inert.logical_or_(r == 0), 0.0)  # coincident charges have no direction
    sparse = SPARSE.get(squares.device.type, SPARSE["cpu"])
    if len(listed) < squares.numel() * sparse:
        return _add_as_list(tile, listed, energy, slope, channel, counts)
    matrix = squares if channel == OTHER else torch.empty_like(squares)  # r^2 is not needed any more
    _add_as_matrix(tile, matrix.zero_(), listed, energy, slope, channel, counts)


def _few(squares: Tensor) -> int:
    """How many pairs of a tile are quicker from differences than from another product."""
    return max(int(squares.numel() * FEW), FEW_AT_LEAST)


def delicate_pairs(squares: Tensor, pair: Interaction, margin: float | Tensor, near: float | Tensor) -> Tensor:
    """Where a product is not good enough: close pairs with a force, and pairs at the kink, where the force jumps."""
    at_kink = None
    if 0 < pair.kink < math.inf:
        at_kink = (squares >= pair.kink**2 - margin) & (squares < pair.kink**2 + margin)
        if not isinstance(near, Tensor) and near <= pair.flat_below**2:
            return at_kink  # close pairs feel nothing
    close = squares < near
    if pair.flat_below > 0:
        close &= squares >= pair.flat_below**2 - margin
    return close if at_kink is None else close.logical_or_(at_kink)


def _add_delicate(tile: Tile, squares: Tensor, listed: Tensor, pair: Interaction, channel: int, counts: Counts) -> None:
    """Add the listed pairs, for which `squares` are not good enough: the next step of the ladder."""
    if len(listed) > (CROWD_PAIRS if tile.later is None else max(CROWD_PAIRS, _few(squares))):
        listed = _add_crowds(tile, listed, pair, channel, counts)
    if len(listed) > _few(squares) and squares.dtype != torch.float64:
        return _interact(tile, tile.squared_distances(torch.float64), listed, pair, channel, counts)
    _take_differences(tile, listed, pair, channel, counts)


def _take_differences(tile: Tile, listed: Tensor, pair: Interaction, channel: int, counts: Counts) -> None:
    """Add the listed pairs from differences: now, or with those of the other tiles."""
    if tile.later is None:
        return _add_from_differences(tile, listed, pair, channel, counts)
    i, j = tile.ends(listed)
    tile.later[channel].append((i + tile.rows.start) * len(tile.right) + (j + tile.columns.start))


def _add_crowds(tile: Tile, listed: Tensor, pair: Interaction, channel: int, counts: Counts) -> Tensor:
    """Add those of the listed pairs that are in large, tight crowds; the others, still listed, are left over."""
    i, j = tile.ends(listed)
    first_rows = torch.arange(tile.rows.stop - tile.rows.start, device=listed.device)
    of_columns = first_rows.new_full((tile.columns.stop - tile.columns.start,), len(first_rows))
    for _ in range(2):  # a crowd agrees on its first row at once; a chain of points is cut somewhere
        of_columns = of_columns.scatter_reduce(0, j, first_rows[i], "amin")
        first_rows = first_rows.scatter_reduce(0, i, of_columns[j], "amin")
    crowds = first_rows[i]  # (k,)
    left_over = torch.ones_like(listed, dtype=torch.bool)
    for crowd in (torch.bincount(crowds) > CROWD_PAIRS).nonzero().flatten().tolist():
        pairs = (crowds == crowd).nonzero().squeeze(1)
        if _add_crowd(tile, i[pairs], j[pairs], pair, channel, counts):
            left_over[pairs] = False
    return listed[left_over]


def _add_crowd(tile: Tile, i: Tensor, j: Tensor, pair: Interaction, channel: int, counts: Counts) -> bool:
    """Add the pairs of row i and column j in a tile around their own center; False if it would be hardly smaller."""
    rows, i = _distinct(i, tile.rows)
    columns, j = _distinct(j, tile.columns)
    center = tile.left.exact(rows).mean(dim=0)
    left, right = tile.left.copies(rows, center), tile.right.copies(columns, center)
    crowd = Tile(left, right, slice(0, len(left)), slice(0, len(right)), on_diagonal=False)
    if crowd.scale > CROWD_SCALE * tile.scale:
        return False
    _interact(crowd, crowd.squared_distances(left.points.dtype), i * len(right) + j, pair, channel, counts)
    tile.left.add_copies(left)
    tile.right.add_copies(right)
    return True


def _distinct(numbers: Tensor, within: slice) -> tuple[Tensor, Tensor]:
    """Rows of a group, each once, that `numbers` count from the start of `within`; and where among them each one is."""
    used = torch.zeros(within.stop - within.start, dtype=torch.bool, device=numbers.device)
    used[numbers] = True
    return used.nonzero().squeeze(1) + within.start, (used.cumsum(0) - 1)[numbers]


def _add_from_differences(tile: Tile, listed: Tensor, pair: Interaction, channel: int, counts: Counts) -> None:
    """Add the listed pairs from explicit differences in float64; exact at every distance."""
    left, right = tile.left, tile.right
    for chunk in listed.split(rows_at_once(left.points)):
        i, j = tile.ends(chunk)
        i, j = i + tile.rows.start, j + tile.columns.start
        difference = left.exact(i).sub_(right.exact(j))  # (k, D)
        r = torch.linalg.vector_norm(difference, dim=1)  # (k,)
        acts = (r >= pair.start) & (r < pair.stop)
        energy, slope = (torch.where(acts, value, 0.0) for value in pair.potential_and_slope(r))
        left.sums[channel].index_add_(0, i, energy, alpha=counts.left)
        right.sums[channel].index_add_(0, j, energy, alpha=counts.right)
        if left.gradient is None or right.gradient is None:
            continue
        slope = torch.where(r > 0, slope / r, 0.0)
        slope *= _slope_counts(left.slopes[channel], right.slopes[channel], counts, i, j)
        pull = difference.mul_(slope[:, None]).to(left.gradient.dtype)
        left.gradient.index_add_(0, i, pull)
        right.gradient.index_add_(0, j, pull, alpha=-1)


def _add_as_list(tile: Tile, listed: Tensor, energy: Tensor, slope: Tensor, channel: int, counts: Counts) -> None:
    """Add the listed pairs, a small share of the tile: the gradient is a weighted sum of a few rows."""
    left, right, rows, columns = tile.left, tile.right, tile.rows, tile.columns
    i, j = tile.ends(listed)
    left.sums[channel, rows].index_add_(0, i, energy.double(), alpha=counts.left)
    right.sums[channel, columns].index_add_(0, j, energy.double(), alpha=counts.right)
    if left.gradient is None or right.gradient is None:
        return
    slope = slope * _slope_counts(left.slopes[channel, rows], right.slopes[channel, columns], counts, i, j)
    a, b = left.centered(rows, slope.dtype), right.centered(columns, slope.dtype)
    _add_pulls(left.gradient[rows], a, b, i, j, slope)
    order = torch.argsort(j, stable=True)
    _add_pulls(right.gradient[columns], b, a, j[order], i[order], slope[order])


def _add_pulls(gradient: Tensor, at: Tensor, source: Tensor, i: Tensor, j: Tensor, slope: Tensor) -> None:
    """gradient[i] += slope * (at[i] - source[j]) over a list of pairs sorted by i."""
    first = torch.searchsorted(i, torch.arange(len(at), device=i.device))
    pulled = F.embedding_bag(j, source, first, mode="sum", per_sample_weights=slope)  # (rows, D)
    total = torch.zeros_like(at[:, 0]).index_add_(0, i, slope)
    if gradient.dtype == pulled.dtype:
        gradient.sub_(pulled).addcmul_(total[:, None], at)
    else:
        gradient += pulled.neg_().addcmul_(total[:, None], at)  # close pairs: cancel before rounding


def _add_as_matrix(
    tile: Tile, matrix: Tensor, listed: Tensor, energy: Tensor, slope: Tensor, channel: int, counts: Counts
) -> None:
    """Add the listed pairs, a large share of the tile, as a matrix, given as zeros: the gradient is two products."""
    left, right, rows, columns = tile.left, tile.right, tile.rows, tile.columns
    matrix.view(-1).index_copy_(0, listed, energy)
    left.sums[channel, rows].add_(matrix.sum(dim=1), alpha=counts.left)
    right.sums[channel, columns].add_(matrix.sum(dim=0), alpha=counts.right)
    if left.gradient is None or right.gradient is None:
        return
    weights = _slope_counts(left.slopes[channel, rows, None], right.slopes[channel, None, columns], counts)
    if not isinstance(weights, Tensor):
        slope = slope * weights
    matrix.view(-1).index_copy_(0, listed, slope)
    mirrored = tile.on_diagonal and counts.left == counts.right and len(listed) < matrix.numel() * MIRRORED
    if mirrored:
        i, j = tile.ends(listed)
        matrix.view(-1).index_copy_(0, j * len(matrix) + i, slope)
    if isinstance(weights, Tensor):
        matrix *= weights
    a, b = left.centered(rows, slope.dtype), right.centered(columns, slope.dtype)
    if tile.on_diagonal:  # both ends are rows of one gradient: one product
        return _add_product(left.gradient[rows], a, matrix if mirrored else matrix + matrix.T, b)
    _add_product(left.gradient[rows], a, matrix, b)
    _add_product(right.gradient[columns], b, matrix.T, a)


def _add_product(gradient: Tensor, at: Tensor, slope: Tensor, source: Tensor) -> None:
    """gradient[i] += slope[i, j] * (at[i] - source[j]) over all j."""
    total = slope.sum(dim=1, keepdim=True)  # (rows, 1)
    if gradient.dtype == slope.dtype:
        gradient.addcmul_(total, at).addmm_(slope, source, alpha=-1)
    else:
        gradient += torch.addmm(total * at, slope, source, alpha=-1)  # close pairs: cancel before rounding


def _slope_counts(
    left: Tensor, right: Tensor, counts: Counts, i: Tensor | None = None, j: Tensor | None = None
) -> Tensor | float:
    """What slopes of pairs count at both of their ends together; of the listed pairs, or of all."""
    if not any(left.stride()) and not any(right.stride()):  # 1 everywhere, as `TileGroup` has it
        return counts.left + counts.right
    left, right = (left, right) if i is None or j is None else (left[i], right[j])
    return counts.left * left + counts.right * right
