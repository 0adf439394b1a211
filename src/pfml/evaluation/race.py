"""The matches of queries, and the count of other items that come before each of them; see `ranks` for the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Race", "Shelf"]

#: Numbers that are gathered at once in float64.
GATHERED = 2**23
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
    first: Tensor  # (C + 1,) int64 on the CPU: class c lies in [first[c], first[c + 1])


class Race:
    """The matches of some queries, and how many other items have been seen before each of them.

    The matches of query q are in the slots [start[q], start[q] + num_matches[q]), most similar first.
    """

    def __init__(self, queries: Shelf, gallery: Shelf, num_matches: Tensor, alone: bool) -> None:
        self.queries, self.gallery, self.num_matches = queries, gallery, num_matches
        self.start = num_matches.cumsum(0) - num_matches
        total = int(num_matches.sum())
        device = queries.points.device
        self.similarity = torch.empty(total, dtype=torch.float64, device=device)
        self.item = torch.empty(total, dtype=torch.int64, device=device)  # in the caller's numbering
        self.passed = torch.zeros(
            total, dtype=torch.int64, device=device
        )  # items between this match and the one before
        self.margin = 1e-7 * max(queries.points.shape[1], 16) ** 0.5  # error of a float32 product, with room
        self._find_matches(alone)
        self.running = num_matches  # matches that may still be among the first R; at least the best one
        self.thresholds()

    def _find_matches(self, alone: bool) -> None:
        """Fill `similarity` and `item`, all classes of one size at once."""
        device, dims = self.start.device, self.queries.points.shape[1]
        sizes = torch.stack([self.queries.first.diff(), self.gallery.first.diff()], dim=1)
        sizes, group = sizes.unique(dim=0, return_inverse=True)
        for number, (num_queries, num_items) in enumerate(sizes.tolist()):
            if num_queries == 0:
                continue
            classes = (group == number).nonzero()[:, 0]
            numbers = (num_queries + num_items) * (dims + num_items)
            for some in classes.split(max(GATHERED // numbers, 1)):
                rows = (self.queries.first[some, None] + torch.arange(num_queries)).to(device)  # (c, q)
                columns = (self.gallery.first[some, None] + torch.arange(num_items)).to(device)  # (c, g)
                own = self.queries.points[rows].double() @ self.gallery.points[columns].double().mT  # (c, q, g)
                index = self.gallery.index[columns][:, None, :].expand_as(own)
                if alone:
                    own[self.queries.index[rows][:, :, None] == index] = -torch.inf
                own, order = _by_similarity_then_index(own)
                slots = self.start[rows][:, :, None] + torch.arange(num_items - int(alone), device=device)
                kept = slice(num_items - int(alone))
                self.similarity[slots] = own[:, :, kept]
                self.item[slots] = index.gather(2, order)[:, :, kept]

    def ranks(self) -> Tensor:
        """The rank of each match among the items seen so far, and a lower bound of it for those out of the race."""
        passed = self.passed.cumsum(0)
        before = (passed - self.passed)[self.start]
        place = torch.arange(1, len(passed) + 1, device=passed.device)
        return place + passed - (before + self.start).repeat_interleave(self.num_matches)

    def thresholds(self) -> None:
        """Take matches out of the race that are not among the first R, and say what is worth looking at."""
        in_time = self.ranks() <= self.num_matches.repeat_interleave(self.num_matches)
        counted = in_time.to(torch.int64).cumsum(0)
        last = self.start + self.num_matches - 1
        among_first = counted[last] - (counted - in_time.to(torch.int64))[self.start]
        self.running = torch.minimum(self.running, among_first.clamp_min(1))
        self.surely_better = (self.similarity[self.start] + self.margin).float()
        self.worth_a_look = (self.similarity[self.start + self.running - 1] - self.margin).float()

    def see(self, tile: Tensor, rows: slice, columns: slice, *, queries_are_rows: bool) -> None:
        """Take note of the similarities of queries `rows` to items `columns`; own-class items must be -2."""
        shape = (-1, 1) if queries_are_rows else (1, -1)
        look = tile >= self.worth_a_look[rows].view(shape)
        if int(_count(look, dim=1).sum()) > MANY * look.numel():
            better = tile > self.surely_better[rows].view(shape)
            self.passed[self.start[rows]] += _count(better, dim=1 if queries_are_rows else 0)
            look.logical_xor_(better)
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
            place = self._bisect(query_, place, until, lambda slots: self.item[slots] < index)
            before[close] = place
        counts = before < self.running[query]
        slots = (self.start[query] + before)[counts]
        self.passed.index_add_(0, slots, torch.ones_like(slots))

    def _exact(self, query: Tensor, item: Tensor) -> Tensor:
        result = torch.empty(len(query), dtype=torch.float64, device=query.device)
        for some in torch.arange(len(query), device=query.device).split(GATHERED // self.queries.points.shape[1]):
            left = self.queries.points[query[some]].double()
            result[some] = left.mul_(self.gallery.points[item[some]]).sum(dim=1)
        return result

    def _between(self, query: Tensor, similarity: Tensor, margin: float) -> tuple[Tensor, Tensor]:
        """How many running matches are better than `similarity` by more than `margin`, and how many at least equal."""
        start, end = torch.zeros_like(query), self.running[query]
        better, least = similarity + margin, similarity - margin
        first = self._bisect(query, start, end, lambda slots: self.similarity[slots] > better)
        return first, self._bisect(query, first, end, lambda slots: self.similarity[slots] > least)

    def _bisect(self, query: Tensor, low: Tensor, high: Tensor, before: Callable[[Tensor], Tensor]) -> Tensor:
        """The first match in [low, high) of each query whose slot is not `before`, or high."""
        start = self.start[query]
        for _ in range(int((high - low).max()).bit_length()):
            middle = (low + high) // 2
            right = before((start + middle).clamp_max_(len(self.item) - 1)) & (middle < high)
            low, high = torch.where(right, middle + 1, low), torch.where(right, high, middle)
        return low

    def scores(self) -> tuple[Tensor, Tensor, Tensor]:
        """First rank, R-precision and average precision of each query, once all tiles have been seen."""
        query = torch.arange(len(self.start), device=self.start.device).repeat_interleave(self.num_matches)
        ranks = self.ranks()
        place = torch.arange(len(ranks), device=ranks.device) - self.start[query]
        in_time = (ranks <= self.num_matches[query]) & (place < self.running[query])
        precision = torch.where(in_time, (place + 1) / ranks.double(), 0.0)
        size = self.num_matches.double()
        found = torch.zeros_like(size).index_add_(0, query, in_time.double())
        precisions = torch.zeros_like(size).index_add_(0, query, precision)
        return ranks[self.start], found / size, precisions / size


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
