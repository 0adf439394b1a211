"""The ranks of a query's matches among all gallery items: exact, in bounded memory, without sorting the gallery.

A match is a gallery item of the query's own class; R is how many there are. Every retrieval metric is a function of
the ranks of the matches, and the k-th best match has rank

    k + (number of other-class items that are better than the k-th best match).

So nothing needs sorting but the R matches. The similarities to all other items are computed tile by tile and compared
with two numbers per query:

    better than its best match: counted, not looked at (or placed like the next, where they are few);
    worse than its worst match that may still be among the first R: not looked at;
    between: placed among the matches by bisection. A match with R others before it leaves the race, so that after a
    few tiles hardly an item lies between.

When queries search among each other, similarity is symmetric and half of the tiles serve both sides.

Order. Items are ordered by similarity, equal ones by index. A float32 product cannot tell which similarities are
equal: what lies within its rounding error of a match is computed again in float64, and there two similarities that
differ by less than 1e-13 are equal. So the result depends neither on tiles nor on threads nor on the device.

Memory: a sorted copy of the embeddings or two, one tile and its masks (6 bytes per pair), and about 100 bytes per match
(`MATCHES_AT_ONCE` bounds them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.precision import full_precision

__all__ = ["QueryScores", "Race", "Shelf", "query_scores"]

#: Numbers that are gathered at once in float64.
GATHERED = 2**23
#: Pairs that are placed at once, at about 200 bytes each.
PLACED = 2**22
#: Above this share of a tile's pairs work on all of them is faster than work on one at a time.
MANY = 1 / 64
#: Similarities in float64 that differ by less are equal.
EQUAL = 1e-13


@dataclass(frozen=True, eq=False)
class Shelf:
    """Points in the order of their classes: `points[k]` is the point `index[k]` of the caller."""

    points: Tensor  # (n, D) float32, unit length
    classes: Tensor  # (n,) int64, ascending
    index: Tensor  # (n,) int64
    first: Tensor  # (C + 1,) int64: class c lies in [first[c], first[c + 1])


class Race:
    """The matches of some queries, and how many other items have been seen before each of them.

    The matches of query q are in the slots [start[q], start[q] + num_matches[q]), most similar first.

    A CPU looks at numbers to save work. A GPU would have to be waited for, and its work is cheap: there only the lists
    of pairs are waited for, three times in a tile at most.
    """

    def __init__(self, queries: Shelf, gallery: Shelf, num_matches: Tensor, alone: bool) -> None:
        device = queries.points.device
        self.queries, self.gallery, self.num_matches = queries, gallery, num_matches
        self.may_wait = _may_wait(device)
        self.start = num_matches.cumsum(0) - num_matches
        total, self.most = torch.stack([num_matches.sum(), num_matches.max()]).tolist()
        rows = torch.arange(len(num_matches), device=device)
        self.query = rows.repeat_interleave(num_matches, output_size=total)  # of each slot
        self.similarity = torch.empty(total, dtype=torch.float64, device=device)
        self.item = torch.empty(total, dtype=torch.int64, device=device)  # in the caller's numbering
        # items between this match and the one before
        self.passed = torch.zeros(total, dtype=torch.int64, device=device)
        self.margin = 1e-7 * max(queries.points.shape[1], 16) ** 0.5  # error of a float32 product, with room
        self._find_matches(alone)
        self.running = num_matches  # matches that may still be among the first R; at least the best one
        self.thresholds()

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
            for some in classes.split(max(GATHERED // numbers, 1)):
                rows = self.queries.first[some, None] + asking  # (c, q)
                columns = self.gallery.first[some, None] + offered  # (c, g)
                own = self.queries.points[rows].double() @ self.gallery.points[columns].double().mT  # (c, q, g)
                index = self.gallery.index[columns][:, None, :].expand_as(own)
                if alone:
                    own.masked_fill_(self.queries.index[rows][:, :, None] == index, -torch.inf)
                own, order = _by_similarity_then_index(own)
                slots = self.start[rows][:, :, None] + offered[kept]
                self.similarity[slots] = own[:, :, kept]
                self.item[slots] = index.gather(2, order)[:, :, kept]

    def ranks(self) -> Tensor:
        """The rank of each match among the items seen so far, and a lower bound of it for those out of the race."""
        passed = self.passed.cumsum(0)
        before = (passed - self.passed)[self.start]
        place = torch.arange(1, len(passed) + 1, device=passed.device)
        return place + passed - (before + self.start)[self.query]

    def thresholds(self) -> None:
        """Take matches out of the race that are not among the first R, and say what is worth looking at."""
        in_time = (self.ranks() <= self.num_matches[self.query]).to(torch.int64)
        counted = in_time.cumsum(0)
        last = self.start + self.num_matches - 1
        among_first = counted[last] - (counted - in_time)[self.start]
        self.running = torch.minimum(self.running, among_first.clamp_min(1))
        self.surely_better = (self.similarity[self.start] + self.margin).float()
        self.worth_a_look = (self.similarity[self.start + self.running - 1] - self.margin).float()

    def see(self, tile: Tensor, rows: slice, columns: slice, *, queries_are_rows: bool) -> None:
        """Take note of the similarities of queries `rows` to items `columns`; own-class items must be -2."""
        shape = (-1, 1) if queries_are_rows else (1, -1)
        look = tile >= self.worth_a_look[rows].view(shape)
        if not self.may_wait or int(_count(look, dim=1).sum()) > MANY * look.numel():
            better = tile > self.surely_better[rows].view(shape)
            self.passed[self.start[rows]] += _count(better, dim=1 if queries_are_rows else 0)
            look.logical_xor_(better)
            del better
        self._look(look, tile, rows, columns, queries_are_rows)

    def _look(self, look: Tensor, tile: Tensor, rows: slice, columns: slice, queries_are_rows: bool) -> None:
        """Place the pairs of the tile that are marked in `look`, in halves if they are very many."""
        height = len(look)
        if look.numel() > PLACED and height > 1 and int(_count(look, dim=1).sum()) > PLACED:
            for part in (slice(height // 2), slice(height // 2, height)):
                if queries_are_rows:
                    self._look(look[part], tile[part], _within(rows, part), columns, queries_are_rows)
                else:
                    self._look(look[part], tile[part], rows, _within(columns, part), queries_are_rows)
            return
        first, second = _where(look)
        if len(first):
            asked, found = (first, second) if queries_are_rows else (second, first)
            self._place(asked + rows.start, found + columns.start, tile[first, second].double(), rows, columns)

    def _place(self, query: Tensor, item: Tensor, similarity: Tensor, rows: slice, columns: slice) -> None:
        """Count each of these pairs before the first match that is not better than its item."""
        before, until = self._between(query, similarity, self.margin)
        close = (before < until).nonzero()[:, 0]
        if len(close):
            query_, item_ = query[close], item[close]
            if len(close) > MANY * (rows.stop - rows.start) * (columns.stop - columns.start):
                exact = self.queries.points[rows].double() @ self.gallery.points[columns].double().mT
                similarity_ = exact[query_ - rows.start, item_ - columns.start]
            else:
                similarity_ = self._exact(query_, item_)
            place, until = self._between(query_, similarity_, EQUAL)
            index = self.gallery.index[item_]  # equal similarities: the lower index is better
            before[close] = self._bisect(query_, place, until, lambda slots: self.item[slots] < index)
        slots = (self.start[query] + before).clamp_max_(len(self.passed) - 1)
        self.passed.index_add_(0, slots, (before < self.running[query]).to(torch.int64))

    def _exact(self, query: Tensor, item: Tensor) -> Tensor:
        result = torch.empty(len(query), dtype=torch.float64, device=query.device)
        for some in torch.arange(len(query), device=query.device).split(GATHERED // self.queries.points.shape[1]):
            left = self.queries.points[query[some]].double()
            result[some] = left.mul_(self.gallery.points[item[some]]).sum(dim=1)
        return result

    def _between(self, query: Tensor, similarity: Tensor, margin: float) -> tuple[Tensor, Tensor]:
        """How many running matches are better than `similarity` by more than `margin`, and how many at least equal."""
        bounds = torch.stack([similarity + margin, similarity - margin])  # (2, n)
        end = self.running[query].expand_as(bounds)
        first, last = self._bisect(query, torch.zeros_like(end), end, lambda slots: self.similarity[slots] > bounds)
        return first, last

    def _bisect(self, query: Tensor, low: Tensor, high: Tensor, before: Callable[[Tensor], Tensor]) -> Tensor:
        """The first match in [low, high) of each query whose slot is not `before`, or high."""
        start = self.start[query]
        widest = int((high - low).max()) if self.may_wait else self.most
        for _ in range(widest.bit_length()):
            middle = (low + high) >> 1
            right = before((start + middle).clamp_max_(len(self.item) - 1)) & (middle < high)
            low, high = torch.where(right, middle + 1, low), torch.where(right, high, middle)
        return low

    def scores(self) -> tuple[Tensor, Tensor, Tensor]:
        """First rank, R-precision and average precision of each query, once all tiles have been seen.

        They are added up on the CPU, one after the other: a GPU would add in an order of its own.
        """
        device = self.start.device
        ranks, query, start, size, running = (
            values.cpu() for values in (self.ranks(), self.query, self.start, self.num_matches, self.running)
        )
        place = torch.arange(len(ranks)) - start[query]
        in_time = (ranks <= size[query]) & (place < running[query])
        precision = torch.where(in_time, (place + 1) / ranks.double(), 0.0)
        found = torch.zeros(len(size), dtype=torch.float64).index_add_(0, query, in_time.double())
        precisions = torch.zeros_like(found).index_add_(0, query, precision)
        return ranks[start].to(device), (found / size).to(device), (precisions / size).to(device)


def _may_wait(device: torch.device) -> bool:
    """Whether a number can be looked at without waiting for work that is under way."""
    return device.type == "cpu"


def _within(whole: slice, part: slice) -> slice:
    """The slice `part` of the range `whole`."""
    return slice(whole.start + (part.start or 0), whole.start + part.stop)


def _by_similarity_then_index(similarity: Tensor) -> tuple[Tensor, Tensor]:
    """The last dimension in descending order, and that order; what is equal stays in the order that it was in."""
    similarity, order = similarity.sort(dim=-1, descending=True)
    gaps = torch.zeros_like(order)
    gaps[..., 1:] = similarity[..., :-1] - similarity[..., 1:] > EQUAL
    again = (gaps.cumsum(dim=-1) * order.shape[-1] + order).argsort(dim=-1)
    return similarity.gather(-1, again).cummin(dim=-1).values, order.gather(-1, again)


def _count(mask: Tensor, dim: int) -> Tensor:
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
    """Rows and columns that are True; on a CPU, where hardly any are, eight are looked at at once."""
    if mask.device.type != "cpu" or mask.shape[1] % 8:
        rows, columns = mask.nonzero().unbind(1)
        return rows, columns
    rows, words = mask.view(torch.int64).nonzero().unbind(1)
    place, byte = mask.view(mask.shape[0], -1, 8)[rows, words].nonzero().unbind(1)
    return rows[place], words[place] * 8 + byte


#: Pairs in a tile: 2,048 x 2,048 on a CPU, so that it stays in the caches; a GPU is waited for in each, and wants few.
TILE_PAIRS = {"cpu": 2**22, "cuda": 2**26}
#: Long sides of tiles are multiples of this, which products like.
ALIGNED = 64
#: Items in the first block: few, because at first most items lie between a query's matches.
FIRST_BLOCK = 64
#: Matches whose similarities are held at once.
MATCHES_AT_ONCE = 2**23


@dataclass(frozen=True, eq=False)
class QueryScores:
    """What each query found; NaN and rank 0 for a query without a match.

    Args:
        num_matches: (N,) int64: R.
        first_rank: (N,) int64: the rank of the best match, from 1. Recall@K is the share of queries with at most K.
        r_precision: (N,) float64: the share of matches among the first R items.
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
        queries: (N, D) float32 of unit length, as `neighbors.directions` makes them.
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
    place = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(0)).to(labels.device)
    if alone:  # classes of one member last: they are found, but search for nothing
        place = (place + len(distinct) * (torch.bincount(renamed[: len(labels)]) == 1)).argsort().argsort()
    classes, item_classes = place[renamed].split([len(labels), len(item_labels)])
    shelf = _shelve(items, item_classes, len(distinct))

    num_matches = shelf.first.diff()[classes] - int(alone)
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
            asked = _shelve(queries[some], classes[some], len(distinct), some)
            race = Race(asked, shelf, num_matches[asked.index], alone)
            if together:
                _run_symmetric(race, edge)
            _run(race, edge, skip=len(asked.points) if together else 0)
            first_rank, r_precision, average_precision = race.scores()
            scores.first_rank[asked.index] = first_rank
            scores.r_precision[asked.index] = r_precision
            scores.average_precision_at_r[asked.index] = average_precision
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


def _shelve(points: Tensor, classes: Tensor, num_classes: int, index: Tensor | None = None) -> Shelf:
    order = classes.argsort(stable=True)
    ordered = classes[order]
    first = torch.searchsorted(ordered, torch.arange(num_classes + 1, device=classes.device))
    return Shelf(points[order], ordered, order if index is None else index[order], first)


def _run(race: Race, edge: int, skip: int) -> None:
    """See all gallery items but the first `skip`, block after block."""
    tile = _Tile(race, edge)
    seen = FIRST_BLOCK
    for columns in _blocks(len(race.gallery.points), edge, skip):
        if columns.start >= seen:
            race.thresholds()
            seen = 2 * columns.start
        for rows in _blocks(len(race.queries.points), edge, smallest=edge):
            race.see(tile.similarities(rows, columns), rows, columns, queries_are_rows=True)


def _run_symmetric(race: Race, edge: int) -> None:
    """See the queries among each other, which are also the first gallery items: each tile from both sides."""
    tile = _Tile(race, edge)
    blocks = list(_blocks(len(race.queries.points), edge))
    seen = FIRST_BLOCK
    for number, rows in enumerate(blocks):
        if rows.start >= seen:
            race.thresholds()
            seen = 2 * rows.start
        for columns in blocks[number:]:
            similarities = tile.similarities(rows, columns)
            race.see(similarities, rows, columns, queries_are_rows=True)
            if columns != rows:
                race.see(similarities, columns, rows, queries_are_rows=False)


def _blocks(length: int, edge: int, start: int = 0, smallest: int = FIRST_BLOCK) -> Iterator[slice]:
    """Consecutive slices: small ones first, then of `edge`."""
    size = min(smallest, edge)
    while start < length:
        stop = min(start + size, length)
        yield slice(start, stop)
        start, size = stop, min(4 * size, edge)


class _Tile:
    """One buffer for all products, and which pairs of them are of one class."""

    def __init__(self, race: Race, edge: int) -> None:
        self.race = race
        rows, columns = min(edge, len(race.queries.points)), min(edge, len(race.gallery.points))
        self.buffer = race.queries.points.new_empty(rows * columns)
        self.ends = [shelf.classes.tolist() for shelf in (race.queries, race.gallery)]  # to look up without waiting

    def similarities(self, rows: slice, columns: slice) -> Tensor:
        """The product of queries `rows` and items `columns`, with -2 where both are of one class."""
        queries, gallery = self.race.queries, self.race.gallery
        height, width = rows.stop - rows.start, columns.stop - columns.start
        tile = self.buffer[: height * width].view(height, width)
        torch.mm(queries.points[rows], gallery.points[columns].T, out=tile)
        asked, found = self.ends
        if asked[rows.start] <= found[columns.stop - 1] and found[columns.start] <= asked[rows.stop - 1]:
            tile.masked_fill_(queries.classes[rows, None] == gallery.classes[None, columns], -2.0)
        return tile
