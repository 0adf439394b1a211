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

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.evaluation.race import Race, Shelf
from pfml.precision import full_precision

__all__ = ["QueryScores", "query_scores"]

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
        queries: (N, D) float32 of unit length, as `neighbours.directions` makes them.
        labels: (N,) int64.
        gallery: (G, D) likewise, or None to search the queries among each other, each without itself.
        gallery_labels: (G,) int64.
        tile_pairs: Similarities that are held at once. The result does not depend on it.
        matches_at_once: Matches whose similarities are held at once. The result does not depend on it.
    """
    alone = gallery is None or gallery_labels is None
    items, item_labels = (queries, labels) if gallery is None or gallery_labels is None else (gallery, gallery_labels)
    distinct, renamed = torch.cat([labels, item_labels]).unique(return_inverse=True)
    # Classes in random order, so that the first blocks are a fair sample where neighbouring classes are alike.
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
