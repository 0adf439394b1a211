"""The ranks of a query's matches among all gallery items: exact, in bounded memory, without sorting the gallery.

A match is a gallery item of the query's own class; R is how many there are. All other items are negatives. Every
retrieval metric is a function of the ranks of the matches, and the k-th best match has rank

    k + (number of negatives that are more similar than the k-th best match).

So only the R matches are sorted, and negatives are counted. Their similarities are computed tile by tile and compared
with two thresholds per query:

    above the best match: counted for all matches at once, from a mask (one by one where they are few);
    below the worst match that may still be among the first R: skipped;
    between: counted before the right match, which bisection finds. A match with R negatives before it cannot be among
    the first R any more and is dropped, so that after a few tiles hardly a negative lies between the thresholds.

When queries search among each other, similarity is symmetric and each tile off the diagonal is used for both sides.
Where the processor is quick at it, products of integers first tell which pairs of a tile can be above the lower
threshold (`screening`); if they are few, only they are computed as floats.

Order. Items are ordered by similarity, equal ones by index. A float32 product cannot tell which similarities are
equal: what lies within its rounding error of a match is computed again in float64, and there two similarities that
differ by less than 1e-13 are equal. So the result depends neither on tiles nor on threads nor on the device.

Memory: one or two copies of the embeddings sorted by class, one tile and its masks (6 bytes per pair), and about 100
bytes per match (`MATCHES_AT_ONCE` bounds them).

Written by hand for exact ties in bounded memory; benchmarks/evaluation.py compares it with faiss and others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.evaluation.screening import Screen, listed_products, pays
from pfml.precision import full_precision

__all__ = ["QueryScores", "query_scores"]

#: Pairs in a tile: 2,048 x 2,048 on a CPU, so that it stays in the caches; a GPU synchronizes in each, and wants few.
TILE_PAIRS = {"cpu": 2**22, "cuda": 2**26}
#: Long sides of tiles are multiples of this, which matrix products are fastest for.
ALIGNED = 64
#: Strips of a tile on the diagonal, of which a part below it is not computed.
STRIPS = 4
#: Items in the first block: few, because at first most negatives lie between the thresholds.
FIRST_BLOCK = 64
#: Matches whose similarities are held at once.
MATCHES_AT_ONCE = 2**23
#: Numbers that are gathered at once in float64.
GATHERED_AT_ONCE = 2**23
#: Pairs that are bisected at once, at about 200 bytes each.
PAIRS_AT_ONCE = 2**22
#: Above this fraction of a tile's pairs, work on the whole tile is faster than work on a list of pairs.
DENSE_SHARE = 1 / 64
#: Bounds on the errors of a similarity in float32 and in float64, for each dimension. Components that are alike reach
#: them, since they round alike.
ROUNDING, ROUNDING_OF_DOUBLES = 6e-8, 2.3e-16
#: Similarities in float64 that differ by less are equal in any case.
EQUAL = 1e-13


@dataclass(frozen=True, eq=False)
class QueryScores:
    """What each query found; NaN and rank 0 for a query without a match.

    Args:
        num_matches: (N,) int64: R.
        first_rank: (N,) int64: the rank of the best match, from 1. Recall@K is the fraction of queries with at most K.
        r_precision: (N,) float64: the fraction of matches among the first R items.
        average_precision_at_r: (N,) float64: (1/R) sum over i <= R of precision(i) where item i is a match.
    """

    num_matches: Tensor
    first_rank: Tensor
    r_precision: Tensor
    average_precision_at_r: Tensor


def query_scores(
    queries: Tensor,
    labels: Tensor,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    *,
    tile_pairs: int | None = None,
    matches_at_once: int = MATCHES_AT_ONCE,
) -> QueryScores:
    """Ranks and precisions of each query, (N,) each, on the device of `queries`.

    Args:
        queries: (N, D) float32 of unit length, as `nearest_neighbors.directions` makes them.
        labels: (N,) int64.
        gallery: (G, D) likewise, or None to search the queries among each other, each without itself.
        gallery_labels: (G,) int64.
        tile_pairs: Similarities that are held at once. The result does not depend on it.
        matches_at_once: Matches whose similarities are held at once. The result does not depend on it.
    """
    alone = gallery is None or gallery_labels is None
    items, item_labels = (queries, labels) if gallery is None or gallery_labels is None else (gallery, gallery_labels)
    distinct, renamed = torch.cat([labels, item_labels]).unique(return_inverse=True)
    # Classes in random order, so that the first blocks are a fair sample where neighboring classes are alike.
    position = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(0)).to(labels.device)
    if alone:  # classes of one member last: they are gallery items, but no queries
        position = (position + len(distinct) * (torch.bincount(renamed[: len(labels)]) == 1)).argsort().argsort()
    classes, item_classes = position[renamed].split([len(labels), len(item_labels)])
    sorted_items = _sort_by_class(items, item_classes, len(distinct))

    num_matches = sorted_items.first.diff()[classes] - int(alone)
    scores = QueryScores(
        num_matches,
        torch.zeros_like(labels),
        torch.full(labels.shape, torch.nan, dtype=torch.float64, device=labels.device),
        torch.full(labels.shape, torch.nan, dtype=torch.float64, device=labels.device),
    )
    edge = _edge(tile_pairs or TILE_PAIRS[queries.device.type])
    with full_precision(queries.device):
        matched = (num_matches > 0).nonzero()[:, 0]
        together = alone and int(num_matches.sum()) <= matches_at_once
        for some in _portions(matched, num_matches, classes, matches_at_once):
            sorted_queries = _sort_by_class(queries[some], classes[some], len(distinct), some)
            counter = RankCounter(sorted_queries, sorted_items, num_matches[sorted_queries.index], alone)
            if together:
                _count_symmetric(counter, edge)
            _count_all(counter, edge, skip=len(sorted_queries.points) if together else 0)
            first_rank, r_precision, average_precision = counter.scores()
            scores.first_rank[sorted_queries.index] = first_rank
            scores.r_precision[sorted_queries.index] = r_precision
            scores.average_precision_at_r[sorted_queries.index] = average_precision
    return scores


def _edge(tile_pairs: int) -> int:
    """The side of a tile."""
    edge = max(int(tile_pairs**0.5), 1)
    return edge - edge % ALIGNED if edge > 16 * ALIGNED else edge


def _portions(matched: Tensor, num_matches: Tensor, classes: Tensor, limit: int) -> Iterator[Tensor]:
    """The queries that have a match, by class, in portions with at most `limit` matches (but at least one query)."""
    by_class = matched[classes[matched].argsort(stable=True)]
    total = num_matches[by_class].cumsum(0).cpu()
    start = 0
    while start < len(by_class):
        before = int(total[start - 1]) if start else 0
        stop = max(int(torch.searchsorted(total, before + limit, right=True)), start + 1)
        yield by_class[start:stop]
        start = stop


@dataclass(frozen=True, eq=False)
class SortedByClass:
    """Points in the order of their classes: `points[k]` is the point `index[k]` of the caller."""

    points: Tensor  # (n, D) float32, unit length
    classes: Tensor  # (n,) int64, ascending
    index: Tensor  # (n,) int64
    first: Tensor  # (C + 1,) int64: class c lies in [first[c], first[c + 1])


def _sort_by_class(points: Tensor, classes: Tensor, num_classes: int, index: Tensor | None = None) -> SortedByClass:
    order = classes.argsort(stable=True)
    ordered = classes[order]
    first = torch.searchsorted(ordered, torch.arange(num_classes + 1, device=classes.device))
    return SortedByClass(points[order], ordered, order if index is None else index[order], first)


def _count_all(counter: RankCounter, edge: int, skip: int) -> None:
    """Count all gallery items but the first `skip`, block after block."""
    tile = _Tile(counter, edge)
    next_update = FIRST_BLOCK
    for columns in _blocks(len(counter.gallery.points), edge, skip):
        if columns.start >= next_update:
            counter.update_thresholds()
            next_update = 2 * columns.start
        for rows in _blocks(len(counter.queries.points), edge, smallest=edge):
            counter.count(tile.at(rows, columns), queries_are_rows=True)


def _count_symmetric(counter: RankCounter, edge: int) -> None:
    """Count the queries among each other, which are also the first gallery items: each tile for both sides."""
    tile = _Tile(counter, edge)
    blocks = list(_blocks(len(counter.queries.points), edge))
    next_update = FIRST_BLOCK
    for number, rows in enumerate(blocks):
        if rows.start >= next_update:
            counter.update_thresholds()
            next_update = 2 * rows.start
        pairs = [(rows, columns) for columns in blocks[number + 1 :]]
        for some, columns in (*_on_diagonal(rows), *pairs):
            counter.count(tile.at(some, columns), queries_are_rows=True)
            if columns != some:
                counter.count(tile, queries_are_rows=False)


def _on_diagonal(block: slice) -> Iterator[tuple[slice, slice]]:
    """Strips of a block on the diagonal: with themselves, and with what comes after them in the block."""
    length = block.stop - block.start
    height = length // STRIPS if length % (STRIPS * ALIGNED) == 0 else length
    for start in range(block.start, block.stop, height):
        strip = slice(start, start + height)
        yield strip, strip
        if strip.stop < block.stop:
            yield strip, slice(strip.stop, block.stop)


def _blocks(length: int, edge: int, start: int = 0, smallest: int = FIRST_BLOCK) -> Iterator[slice]:
    """Consecutive slices: small ones first, then of `edge`."""
    size = min(smallest, edge)
    while start < length:
        stop = min(start + size, length)
        yield slice(start, stop)
        start, size = stop, min(4 * size, edge)


class _Tile:
    """A block of queries and a block of items: their similarities, in buffers that all tiles share."""

    def __init__(self, counter: RankCounter, edge: int) -> None:
        self.counter = counter
        rows, columns = min(edge, len(counter.queries.points)), min(edge, len(counter.gallery.points))
        self.buffers = {
            dtype: counter.queries.points.new_empty(rows * columns, dtype=dtype)
            for dtype in ((torch.float32, torch.int32) if counter.screen else (torch.float32,))
        }
        self.classes = [points.classes.tolist() for points in (counter.queries, counter.gallery)]  # no synchronization
        self.at(slice(0), slice(0))

    def at(self, rows: slice, columns: slice) -> _Tile:
        """Itself, as the tile of queries `rows` and items `columns`."""
        self.rows, self.columns = rows, columns
        self.computed: dict[torch.dtype, Tensor] = {}
        return self

    def similarities(self) -> Tensor:
        """The products of all pairs, with -2 where both are of one class."""
        if torch.float32 not in self.computed:
            tile, points = self._empty(torch.float32), self.counter.queries.points[self.rows]
            torch.mm(points, self.counter.gallery.points[self.columns].T, out=tile)
            self.computed[torch.float32] = self._without_matches(tile, -2.0)
        return self.computed[torch.float32]

    def integers(self, screen: Screen) -> Tensor:
        """The products of all pairs as the screen has them, with the least integer where both are of one class."""
        if torch.int32 not in self.computed:
            tile = screen.products(self.rows, self.columns, self._empty(torch.int32))
            self.computed[torch.int32] = self._without_matches(tile, torch.iinfo(torch.int32).min)
        return self.computed[torch.int32]

    def _empty(self, dtype: torch.dtype) -> Tensor:
        height, width = self.rows.stop - self.rows.start, self.columns.stop - self.columns.start
        return self.buffers[dtype][: height * width].view(height, width)

    def _without_matches(self, tile: Tensor, value: float) -> Tensor:
        own, found = self.classes
        rows, columns = self.rows, self.columns
        if own[rows.start] <= found[columns.stop - 1] and found[columns.start] <= own[rows.stop - 1]:
            classes = self.counter.queries.classes[rows, None] == self.counter.gallery.classes[None, columns]
            tile.masked_fill_(classes, value)
        return tile


class RankCounter:
    """The matches of some queries, and how many negatives have been counted before each of them.

    The matches of query q are in the slots [start[q], start[q] + num_matches[q]), most similar first.

    A CPU reads counts to save work. A GPU would have to synchronize for that, and its work is cheap: there only the
    lists of pairs synchronize, at most three times per side of a tile.
    """

    def __init__(self, queries: SortedByClass, gallery: SortedByClass, num_matches: Tensor, alone: bool) -> None:
        device = queries.points.device
        self.queries, self.gallery, self.num_matches = queries, gallery, num_matches
        self.may_synchronize = _may_synchronize(device)
        self.start = num_matches.cumsum(0) - num_matches
        total, self.most = torch.stack([num_matches.sum(), num_matches.max()]).tolist()
        rows = torch.arange(len(num_matches), device=device)
        self.query = rows.repeat_interleave(num_matches, output_size=total)  # of each slot
        self.similarity = torch.empty(total, dtype=torch.float64, device=device)
        self.item = torch.empty(total, dtype=torch.int64, device=device)  # in the caller's numbering
        # negatives between this match and the one before
        self.gap = torch.zeros(total, dtype=torch.int64, device=device)
        self.margin = ROUNDING * (queries.points.shape[1] + 8)
        self.equal = max(EQUAL, ROUNDING_OF_DOUBLES * queries.points.shape[1])
        self._find_matches(alone)
        self.screen = Screen(queries.points, gallery.points) if pays(gallery.points) else None
        self.active = num_matches  # matches that may still be among the first R; at least the best one
        self.update_thresholds()

    def _find_matches(self, alone: bool) -> None:
        """Fill `similarity` and `item`, all classes of one size at once."""
        device, dims = self.start.device, self.queries.points.shape[1]
        sizes = torch.stack([self.queries.first.diff(), self.gallery.first.diff()], dim=1)
        sizes, group, counts = sizes.cpu().unique(dim=0, return_inverse=True, return_counts=True)
        by_size = group.argsort(stable=True).to(device).split(counts.tolist())
        for (num_queries, num_items), classes in zip(sizes.tolist(), by_size, strict=True):
            if num_queries == 0:
                continue
            asking, offered = (torch.arange(count, device=device) for count in (num_queries, num_items))
            kept = slice(num_items - int(alone))
            numbers = (num_queries + num_items) * (dims + num_items)
            for some in classes.split(max(GATHERED_AT_ONCE // numbers, 1)):
                rows = self.queries.first[some, None] + asking  # (c, q)
                columns = self.gallery.first[some, None] + offered  # (c, g)
                own = self.queries.points[rows].double() @ self.gallery.points[columns].double().mT  # (c, q, g)
                index = self.gallery.index[columns][:, None, :].expand_as(own)
                if alone:
                    own.masked_fill_(self.queries.index[rows][:, :, None] == index, -torch.inf)
                own, order = _by_similarity_then_index(own, self.equal)
                slots = self.start[rows][:, :, None] + offered[kept]
                self.similarity[slots] = own[:, :, kept]
                self.item[slots] = index.gather(2, order)[:, :, kept]

    def ranks(self) -> Tensor:
        """The rank of each match among the items counted so far; a lower bound of it for matches that were dropped."""
        negatives = self.gap.cumsum(0)
        before = (negatives - self.gap)[self.start]
        slot = torch.arange(1, len(negatives) + 1, device=negatives.device)
        return slot + negatives - (before + self.start)[self.query]

    def update_thresholds(self) -> None:
        """Drop the matches that cannot be among the first R, and set the thresholds from the others."""
        in_first_r = (self.ranks() <= self.num_matches[self.query]).to(torch.int64)
        counted = in_first_r.cumsum(0)
        last = self.start + self.num_matches - 1
        still_active = counted[last] - (counted - in_first_r)[self.start]
        self.active = torch.minimum(self.active, still_active.clamp_min(1))
        self.upper_threshold = (self.similarity[self.start] + self.margin).float()
        self.lower_threshold = (self.similarity[self.start + self.active - 1] - self.margin).float()
        if self.screen:
            self.screen.forget()

    def count(self, tile: _Tile, *, queries_are_rows: bool) -> None:
        """Count the negatives of a tile for its queries, or for its items, which then are queries as well."""
        if self.screen and self.screen.promising and self._count_screened(self.screen, tile, queries_are_rows):
            return
        rows, columns = (tile.rows, tile.columns) if queries_are_rows else (tile.columns, tile.rows)
        similarities = tile.similarities()
        shape = (-1, 1) if queries_are_rows else (1, -1)
        marked = similarities >= self.lower_threshold[rows].view(shape)
        if not self.may_synchronize or int(_count_true(marked, dim=1).sum()) > DENSE_SHARE * marked.numel():
            better = similarities > self.upper_threshold[rows].view(shape)
            self.gap[self.start[rows]] += _count_true(better, dim=1 if queries_are_rows else 0)
            marked.logical_xor_(better)
            del better
        self._count_marked(marked, similarities, rows, columns, queries_are_rows)

    def _count_screened(self, screen: Screen, tile: _Tile, queries_are_rows: bool) -> bool:
        """Count the negatives of a tile pair by pair if only few pairs can matter; else count nothing."""
        rows, columns = (tile.rows, tile.columns) if queries_are_rows else (tile.columns, tile.rows)
        least = screen.least(self.lower_threshold[rows], rows, columns)
        marked = tile.integers(screen) >= least.view((-1, 1) if queries_are_rows else (1, -1))
        screen.tried += 1
        if int(_count_true(marked, dim=1).sum()) > DENSE_SHARE * marked.numel():
            screen.wasted += 1
            return False
        first, second = _where(marked)
        queries, items = self.queries.points[tile.rows], self.gallery.points[tile.columns]
        similarity = listed_products(queries, items, first, second)
        query, item = (first, second) if queries_are_rows else (second, first)
        near = (similarity >= self.lower_threshold[rows][query]).nonzero()[:, 0]
        if len(near):
            query, item = query[near] + rows.start, item[near] + columns.start
            self._count_pairs(query, item, similarity[near].double(), rows, columns)
        return True

    def _count_marked(self, marked: Tensor, tile: Tensor, rows: slice, columns: slice, queries_are_rows: bool) -> None:
        """Count the pairs of the tile where `marked` is True, split in two if they are too many at once."""
        height = len(marked)
        if marked.numel() > PAIRS_AT_ONCE and height > 1 and int(_count_true(marked, dim=1).sum()) > PAIRS_AT_ONCE:
            for half in (slice(height // 2), slice(height // 2, height)):
                if queries_are_rows:
                    self._count_marked(marked[half], tile[half], _within(rows, half), columns, queries_are_rows)
                else:
                    self._count_marked(marked[half], tile[half], rows, _within(columns, half), queries_are_rows)
            return
        first, second = _where(marked)
        if len(first):
            query, item = (first, second) if queries_are_rows else (second, first)
            similarity = tile[first, second].double()
            self._count_pairs(query + rows.start, item + columns.start, similarity, rows, columns)

    def _count_pairs(self, query: Tensor, item: Tensor, similarity: Tensor, rows: slice, columns: slice) -> None:
        """Count the item of each pair before the first match of its query that is not better."""
        before, until = self._between(query, similarity, self.margin)
        close = (before < until).nonzero()[:, 0]
        if len(close):
            query_, item_ = query[close], item[close]
            if len(close) > DENSE_SHARE * (rows.stop - rows.start) * (columns.stop - columns.start):
                exact = self.queries.points[rows].double() @ self.gallery.points[columns].double().mT
                similarity_ = exact[query_ - rows.start, item_ - columns.start]
            else:
                similarity_ = self._exact(query_, item_)
            first, until = self._between(query_, similarity_, self.equal)
            index = self.gallery.index[item_]  # equal similarities: the lower index is better
            before[close] = self._bisect(query_, first, until, lambda slots: self.item[slots] < index)
        slots = (self.start[query] + before).clamp_max_(len(self.gap) - 1)
        self.gap.index_add_(0, slots, (before < self.active[query]).to(torch.int64))

    def _exact(self, query: Tensor, item: Tensor) -> Tensor:
        """The similarity of each pair in float64."""
        result = torch.empty(len(query), dtype=torch.float64, device=query.device)
        rows_at_once = GATHERED_AT_ONCE // self.queries.points.shape[1]
        for some in torch.arange(len(query), device=query.device).split(rows_at_once):
            left = self.queries.points[query[some]].double()
            result[some] = left.mul_(self.gallery.points[item[some]]).sum(dim=1)
        return result

    def _between(self, query: Tensor, similarity: Tensor, margin: float) -> tuple[Tensor, Tensor]:
        """How many active matches are better than `similarity` by more than `margin`, and how many at least equal."""
        bounds = torch.stack([similarity + margin, similarity - margin])  # (2, n)
        end = self.active[query].expand_as(bounds)
        first, last = self._bisect(query, torch.zeros_like(end), end, lambda slots: self.similarity[slots] > bounds)
        return first, last

    def _bisect(self, query: Tensor, low: Tensor, high: Tensor, before: Callable[[Tensor], Tensor]) -> Tensor:
        """The first match in [low, high) of each query whose slot is not `before`, or high."""
        start = self.start[query]
        widest = int((high - low).max()) if self.may_synchronize else self.most
        for _ in range(widest.bit_length()):
            middle = (low + high) >> 1
            right = before((start + middle).clamp_max_(len(self.item) - 1)) & (middle < high)
            low, high = torch.where(right, middle + 1, low), torch.where(right, high, middle)
        return low

    def scores(self) -> tuple[Tensor, Tensor, Tensor]:
        """First rank, R-precision and average precision of each query, once all tiles have been counted.

        Sums are taken on the CPU, in order: a GPU would add in an order of its own.
        """
        device = self.start.device
        ranks, query, start, size, active = (
            values.cpu() for values in (self.ranks(), self.query, self.start, self.num_matches, self.active)
        )
        number = torch.arange(len(ranks)) - start[query]
        in_first_r = (ranks <= size[query]) & (number < active[query])
        precision = torch.where(in_first_r, (number + 1) / ranks.double(), 0.0)
        found = torch.zeros(len(size), dtype=torch.float64).index_add_(0, query, in_first_r.double())
        precisions = torch.zeros_like(found).index_add_(0, query, precision)
        return ranks[start].to(device), (found / size).to(device), (precisions / size).to(device)


def _may_synchronize(device: torch.device) -> bool:
    """Whether reading a value is free: on a GPU it waits for all work that is queued."""
    return device.type == "cpu"


def _within(whole: slice, part: slice) -> slice:
    """The slice `part` of the range `whole`."""
    return slice(whole.start + (part.start or 0), whole.start + part.stop)


def _by_similarity_then_index(similarity: Tensor, equal: float) -> tuple[Tensor, Tensor]:
    """The last dimension in descending order, and that order; what differs by `equal` at most stays in its order."""
    similarity, order = similarity.sort(dim=-1, descending=True)
    gaps = torch.zeros_like(order)
    gaps[..., 1:] = similarity[..., :-1] - similarity[..., 1:] > equal
    again = (gaps.cumsum(dim=-1) * order.shape[-1] + order).argsort(dim=-1)
    return similarity.gather(-1, again).cummin(dim=-1).values, order.gather(-1, again)


def _count_true(mask: Tensor, dim: int) -> Tensor:
    """How many are True along `dim`, int64.

    On a CPU torch adds booleans one at a time. Eight at once, as the bytes of an int64 whose sums stay below 256, take
    a hundredth of the time.
    """
    if mask.device.type != "cpu":
        return mask.sum(dim=dim)
    height, width = mask.shape
    per_sum = 128
    if dim == 1:
        padded = torch.nn.functional.pad(mask, (0, -width % (8 * per_sum))) if width % (8 * per_sum) else mask
        sums = padded.view(torch.int64).view(height, -1, per_sum).sum(dim=2)
        return sums.view(torch.uint8).sum(dim=1)
    down, right = -height % per_sum, -width % 8
    padded = torch.nn.functional.pad(mask, (0, right, 0, down)) if down or right else mask
    sums = padded.view(torch.int64).view(-1, per_sum, padded.shape[1] // 8).sum(dim=1)
    return sums.view(torch.uint8).sum(dim=0)[:width]


def _where(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns that are True; on a CPU, where few are, eight are tested at once."""
    if mask.device.type != "cpu" or mask.shape[1] % 8:
        rows, columns = mask.nonzero().unbind(1)
        return rows, columns
    rows, words = mask.view(torch.int64).nonzero().unbind(1)
    word, byte = mask.view(mask.shape[0], -1, 8)[rows, words].nonzero().unbind(1)
    return rows[word], words[word] * 8 + byte
