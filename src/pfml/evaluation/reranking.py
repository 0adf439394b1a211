"""Better rankings from the neighborhoods of a trained embedding: query expansion and k-reciprocal re-ranking.

Both use nothing but embeddings, cost search time, and can be used with any model.

`expand_queries` is alpha query expansion (Radenovic et al., TPAMI 2019): a query becomes the mean of itself and its K
nearest items, each weighted by its similarity to the power alpha. Average query expansion is the case alpha = 0.

`k_reciprocal_ranking` is Zhong et al., "Re-ranking Person Re-identification with k-reciprocal Encoding" (CVPR 2017).
Two images are k-reciprocal neighbors if each is among the k nearest of the other. Each image is described by its
k-reciprocal neighbors, weighted by exp(-distance), and images are ranked by how far these descriptions overlap (the
Jaccard distance) and by their distance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.data.decoding import Track
from pfml.evaluation.nearest_neighbors import directions, nearest
from pfml.evaluation.ranks import QueryScores
from pfml.evaluation.retrieval import RetrievalMetrics, metrics_of
from pfml.precision import full_precision
from pfml.sphere import unit

__all__ = [
    "Expansion",
    "KReciprocal",
    "expand_queries",
    "expanded_ranking",
    "k_reciprocal_ranking",
    "ranking_scores",
    "reranked_metrics",
]

#: Numbers that are compared at once.
COMPARED_AT_ONCE = 2**24


@dataclass(frozen=True)
class Expansion:
    """Settings of query expansion.

    Args:
        k: Nearest items that join a query.
        alpha: The power of their similarity that weights them; 0 weights all alike.
    """

    k: int = 5
    alpha: float = 3.0

    def __post_init__(self) -> None:
        if self.k < 1 or self.alpha < 0:
            raise ValueError(f"query expansion must have k >= 1 and alpha >= 0, got {self.k} and {self.alpha}")


@dataclass(frozen=True)
class KReciprocal:
    """Settings of k-reciprocal re-ranking; the defaults are the authors'.

    Args:
        k1: Neighbors among which reciprocal ones are looked for.
        k2: Neighbors whose descriptions are averaged with an image's own.
        distance_weight: Weight of the plain distance beside the Jaccard distance, in [0, 1].
    """

    k1: int = 20
    k2: int = 6
    distance_weight: float = 0.3

    def __post_init__(self) -> None:
        if not 1 <= self.k2 <= self.k1:
            raise ValueError(f"k-reciprocal re-ranking must have 1 <= k2 <= k1, got k1 {self.k1} and k2 {self.k2}")
        if not 0 <= self.distance_weight <= 1:
            raise ValueError(f"distance_weight must lie in [0, 1], got {self.distance_weight}")


def expand_queries(queries: Tensor, gallery: Tensor | None = None, settings: Expansion | None = None) -> Tensor:
    """Unit vectors (N, D) to search with in place of `queries`.

    Args:
        queries: (N, D), normalized here.
        gallery: (G, D) where neighbors are found; None for the queries themselves, each without itself.
        settings: How many neighbors, and their weights.
    """
    settings = settings or Expansion()
    queries = directions(queries, "queries")
    items = queries if gallery is None else directions(gallery, "gallery")
    k = min(settings.k, len(items) - (gallery is None))
    if k < 1:
        return queries
    similarities, indices = nearest(queries, None if gallery is None else items, k)
    weights = similarities.clamp_min(0) ** settings.alpha
    return unit(queries + torch.einsum("nk,nkd->nd", weights, items[indices]))


def expanded_ranking(
    queries: Tensor, gallery: Tensor | None = None, *, depth: int, settings: Expansion | None = None
) -> Tensor:
    """The first `depth` gallery items of each expanded query, (N, depth) int64, best first.

    The arguments are those of `expand_queries`; without a gallery, no query finds itself.
    """
    expanded = expand_queries(queries, gallery, settings)
    items = directions(queries if gallery is None else gallery, "gallery")
    ranking = torch.empty(len(expanded), depth, dtype=torch.int64, device=items.device)
    with full_precision(items.device):
        for rows in torch.arange(len(expanded), device=items.device).split(max(COMPARED_AT_ONCE // len(items), 1)):
            similarity = expanded[rows] @ items.T
            if gallery is None:
                similarity[torch.arange(len(rows), device=rows.device), rows] = -torch.inf
            ranking[rows] = similarity.sort(dim=1, descending=True, stable=True).indices[:, :depth]
    return ranking


def k_reciprocal_ranking(
    queries: Tensor,
    gallery: Tensor | None = None,
    *,
    depth: int,
    settings: KReciprocal | None = None,
    track: Track | None = None,
) -> Tensor:
    """The first `depth` gallery items of each query after re-ranking, (N, depth) int64, best first.

    Queries and gallery are neighbors of each other, as in the authors' code.

    Args:
        queries: (N, D), normalized here.
        gallery: (G, D); None to rank the queries among each other, each without itself.
        depth: How many items, at most those that a query can find.
        settings: Of the method.
        track: Shows the progress, as track(iterable, description, total).
    """
    settings = settings or KReciprocal()
    alone = gallery is None
    points = directions(queries, "queries")
    count = len(points)
    if gallery is not None:
        points = torch.cat([points, directions(gallery, "gallery")])
    first = 0 if alone else count
    available = len(points) - first - int(alone)
    if not 1 <= depth <= max(available, 0):
        raise ValueError(f"depth must lie in [1, {available}], the items that a query can find, got {depth}")
    description = _Descriptions.of(points, settings)
    result = torch.empty(count, depth, dtype=torch.int64, device=points.device)
    numbers: Iterable[int] = range(count)
    for row in numbers if track is None else track(numbers, "re-ranking", count):
        squared = (2 - 2 * points[first:] @ points[row]).clamp_min(0)
        overlap = description.overlaps(row)[first:]
        jaccard = 1 - overlap / (2 - overlap)  # each description sums to 1
        weight = settings.distance_weight
        distance = (1 - weight) * jaccard + weight * squared / squared.max().clamp_min(1e-12)
        if alone:
            distance[row] = torch.inf
        result[row] = distance.sort(stable=True).indices[:depth]
    return result


def ranking_scores(ranking: Tensor, labels: Tensor, gallery_labels: Tensor | None = None) -> QueryScores:
    """What each query found in a ranking of gallery items, as `query_scores` has it for distances.

    Args:
        ranking: (N, depth) int64, gallery items from best to worst; depth must reach the number of matches of every
            query.
        labels: (N,) int64.
        gallery_labels: (G,) int64; None if the gallery is the queries, each without itself.
    """
    items = labels if gallery_labels is None else gallery_labels
    counts = torch.bincount(items, minlength=int(torch.cat([labels, items]).max()) + 1)
    num_matches = counts[labels] - int(gallery_labels is None)
    depth = ranking.shape[1]
    if depth < int(num_matches.max()):
        raise ValueError(f"a ranking must reach the {int(num_matches.max())} matches of a query, got {depth} items")
    is_match = items[ranking] == labels[:, None]
    position = torch.arange(1, depth + 1, device=ranking.device)
    found = is_match.cumsum(1)
    counted = is_match & (position <= num_matches[:, None])
    first_rank = torch.where(is_match.any(1), is_match.int().argmax(1) + 1, depth + 1)
    matches = num_matches.double()
    precisions = torch.where(counted, found.double() / position, 0.0).sum(1)
    none = num_matches == 0
    return QueryScores(
        num_matches,
        first_rank.masked_fill(none, 0),
        (counted.sum(1) / matches).masked_fill(none, torch.nan),
        (precisions / matches).masked_fill(none, torch.nan),
    )


def reranked_metrics(
    queries: Tensor,
    labels: Tensor,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    *,
    settings: Expansion | KReciprocal,
    recall_at: Sequence[int] = (1, 2, 4, 8),
    track: Track | None = None,
) -> RetrievalMetrics:
    """`retrieval_metrics` after query expansion or re-ranking, whichever `settings` are given for."""
    labels = labels.to(queries.device)
    gallery_labels = None if gallery_labels is None else gallery_labels.to(queries.device)
    items, points = (labels, queries) if gallery is None or gallery_labels is None else (gallery_labels, gallery)
    known = int(torch.cat([labels, items]).max()) + 1
    matches = torch.bincount(items, minlength=known)[labels] - int(gallery is None)
    depth = min(max(int(matches.max()), *recall_at, 1), len(points) - int(gallery is None))
    if isinstance(settings, Expansion):
        ranking = expanded_ranking(queries, gallery, depth=depth, settings=settings)
    else:
        ranking = k_reciprocal_ranking(queries, gallery, depth=depth, settings=settings, track=track)
    scores = ranking_scores(ranking, labels, gallery_labels)
    return metrics_of(scores, queries, labels, gallery, gallery_labels, recall_at=recall_at)


@dataclass(frozen=True, eq=False)
class _Descriptions:
    """For each point, weights of other points that sum to 1; sparse, and the same by column."""

    start: Tensor  # (n + 1,) of each row
    column: Tensor
    weight: Tensor
    column_start: Tensor  # (n + 1,) of each column
    row_by_column: Tensor
    weight_by_column: Tensor

    @classmethod
    def of(cls, points: Tensor, settings: KReciprocal) -> _Descriptions:
        """... by the k-reciprocal neighbors of each point, averaged over its nearest ones."""
        n = len(points)
        k1 = min(settings.k1, n - 1)
        neighbors = nearest(points, None, k1)[1] if k1 else points.new_empty(n, 0, dtype=torch.int64)
        itself = torch.arange(n, device=points.device)[:, None]
        neighbors = torch.cat([itself, neighbors], dim=1)  # (n, k1 + 1), itself first
        wide = _reciprocal(neighbors, k1 + 1)
        half = round(k1 / 2)
        narrow = _reciprocal(neighbors, half + 1)
        rows, columns = _expanded(neighbors, wide, narrow, half + 1)
        keys = (rows * n + columns).unique()
        rows, columns = keys // n, keys % n
        squared = (2 - 2 * _products(points, rows, columns)).clamp_min(0)
        weights = torch.exp(-squared)
        weights = weights / weights.new_zeros(n).index_add_(0, rows, weights)[rows]
        return cls._sorted(*_averaged(rows, columns, weights, neighbors[:, : settings.k2], n), n)

    @classmethod
    def _sorted(cls, rows: Tensor, columns: Tensor, weights: Tensor, n: int) -> _Descriptions:
        ends = torch.arange(n + 1, device=rows.device)
        by_column = columns.argsort(stable=True)  # rows are sorted already
        return cls(
            torch.searchsorted(rows, ends),
            columns,
            weights,
            torch.searchsorted(columns[by_column].contiguous(), ends),
            rows[by_column],
            weights[by_column],
        )

    def overlaps(self, row: int) -> Tensor:
        """The sum over all points of the smaller of two weights, of `row` and of every point: (n,)."""
        mine = slice(int(self.start[row]), int(self.start[row + 1]))
        columns, weights = self.column[mine], self.weight[mine]
        first, last = self.column_start[columns], self.column_start[columns + 1]
        lengths = last - first
        offset = torch.arange(int(lengths.sum()), device=columns.device)
        offset = offset - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        entries = first.repeat_interleave(lengths) + offset
        smaller = torch.minimum(self.weight_by_column[entries], weights.repeat_interleave(lengths))
        result = weights.new_zeros(len(self.start) - 1)
        return result.index_add_(0, self.row_by_column[entries], smaller)


def _reciprocal(neighbors: Tensor, k: int) -> Tensor:
    """Which of the first k neighbors of each point have it among their first k, (n, k)."""
    near = neighbors[:, :k]
    result = torch.empty_like(near, dtype=torch.bool)
    for rows in torch.arange(len(near), device=near.device).split(max(COMPARED_AT_ONCE // (k * k), 1)):
        result[rows] = (near[near[rows]] == rows[:, None, None]).any(-1)
    return result


def _expanded(neighbors: Tensor, wide: Tensor, narrow: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Points and their k-reciprocal neighbors, with the sets of neighbors that overlap by more than two thirds."""
    rows_of, columns_of = [], []
    width, near = neighbors.shape[1], neighbors[:, :k]
    for rows in torch.arange(len(neighbors), device=neighbors.device).split(
        max(COMPARED_AT_ONCE // (width * width * k), 1)
    ):
        mine, is_mine = neighbors[rows], wide[rows]  # (b, w)
        theirs, is_theirs = near[mine], narrow[mine]  # (b, w, k): the sets of my neighbors
        shared = ((theirs[..., None] == mine[:, None, None]) & is_mine[:, None, None]).any(-1) & is_theirs
        joins = is_mine & (3 * shared.sum(-1) > 2 * is_theirs.sum(-1))
        for found, kept in ((mine, is_mine), (theirs.flatten(1), (is_theirs & joins[..., None]).flatten(1))):
            rows_of.append(rows[:, None].expand_as(found)[kept])
            columns_of.append(found[kept])
    return torch.cat(rows_of), torch.cat(columns_of)


def _products(points: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The similarity of each pair."""
    at_once = max(COMPARED_AT_ONCE // points.shape[1], 1)
    parts = zip(rows.split(at_once), columns.split(at_once), strict=True)
    return torch.cat([(points[some] * points[others]).sum(1) for some, others in parts])


def _averaged(rows: Tensor, columns: Tensor, weights: Tensor, near: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of the descriptions of each point's nearest ones, itself among them."""
    start = torch.searchsorted(rows, torch.arange(n + 1, device=rows.device))
    asked = near.flatten()
    lengths = (start[1:] - start[:-1])[asked]
    offset = torch.arange(int(lengths.sum()), device=rows.device)
    offset = offset - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    entries = start[asked].repeat_interleave(lengths) + offset
    point = torch.arange(n, device=rows.device).repeat_interleave(near.shape[1]).repeat_interleave(lengths)
    keys, position = (point * n + columns[entries]).unique(return_inverse=True)
    mean = weights.new_zeros(len(keys)).index_add_(0, position, weights[entries]) / near.shape[1]
    return keys // n, keys % n, mean
