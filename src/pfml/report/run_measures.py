"""What a run's embedder does on unseen classes, query by query and class by class."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.evaluation import QueryScores, nearest, query_scores
from pfml.evaluation.neighbours import directions

__all__ = ["ClassScore", "HardPair", "Search", "best_queries", "class_scores", "hard_pairs", "search_unseen"]


@dataclass(frozen=True, eq=False)
class Search:
    """Every query searched among all others, or in a gallery.

    Args:
        embeddings, labels: (N, D) and (N,) of the queries, on the CPU.
        gallery, gallery_labels: Where they are searched; None for the queries themselves.
        scores: Ranks and precisions of each query.
        first: (N,) position of the nearest item of each query in the gallery.
        similarity: (N,) its cosine.
    """

    embeddings: Tensor
    labels: Tensor
    gallery: Tensor | None
    gallery_labels: Tensor | None
    scores: QueryScores
    first: Tensor
    similarity: Tensor

    @property
    def found_labels(self) -> Tensor:
        """(N,): the class of the nearest item of each query."""
        return (self.labels if self.gallery_labels is None else self.gallery_labels)[self.first]


@dataclass(frozen=True)
class ClassScore:
    """How well the images of one class are found.

    Args:
        label: The class.
        queries: Its images that have a match.
        recall_at_1, map_at_r: Means over them.
        confused_with: The class that is most often first in place of it; None if none ever is.
        confusions: How often.
    """

    label: int
    queries: int
    recall_at_1: float
    map_at_r: float
    confused_with: int | None
    confusions: int


@dataclass(frozen=True)
class HardPair:
    """Two classes that are taken for each other.

    Args:
        labels: The classes, the lower label first.
        queries: Images of either whose nearest image is of the other, most similar first.
        share: Of the images of both classes.
    """

    labels: tuple[int, int]
    queries: tuple[int, ...]
    share: float


def search_unseen(
    embeddings: Tensor, labels: Tensor, gallery: Tensor | None = None, gallery_labels: Tensor | None = None
) -> Search:
    """Search each embedding among all others, or in a gallery."""
    points = directions(embeddings.cpu(), "embeddings")
    items = None if gallery is None else directions(gallery.cpu(), "gallery")
    labels = labels.cpu()
    gallery_labels = None if gallery_labels is None else gallery_labels.cpu()
    scores = query_scores(points, labels, items, gallery_labels)
    similarity, first = nearest(points, items, 1)
    return Search(points, labels, items, gallery_labels, scores, first[:, 0], similarity[:, 0])


def class_scores(search: Search) -> list[ClassScore]:
    """One for each class that has a query with a match, worst first (R@1, then MAP@R, then label)."""
    scores, found = search.scores, search.found_labels
    matched = scores.num_matches > 0
    result = []
    for label in search.labels[matched].unique().tolist():
        mine = matched & (search.labels == label)
        wrong = Counter(found[mine & (found != label)].tolist())
        other, times = min(wrong.items(), key=lambda item: (-item[1], item[0])) if wrong else (None, 0)
        recall = (scores.first_rank[mine] == 1).double().mean().item()
        precision = scores.average_precision_at_r[mine].mean().item()
        result.append(ClassScore(label, int(mine.sum()), recall, precision, other, times))
    return sorted(result, key=lambda one: (one.recall_at_1, one.map_at_r, one.label))


def hard_pairs(search: Search, *, count: int) -> list[HardPair]:
    """The `count` pairs of classes most often taken for each other, by the share of their images; hardest first."""
    found, members = search.found_labels, Counter(search.labels.tolist())
    matched = search.scores.num_matches > 0
    mistakes: dict[tuple[int, int], list[int]] = {}
    for query in (matched & (found != search.labels)).nonzero()[:, 0].tolist():
        low, high = sorted((int(search.labels[query]), int(found[query])))
        mistakes.setdefault((low, high), []).append(query)
    pairs = [
        HardPair(
            pair,
            tuple(sorted(queries, key=lambda query: (-float(search.similarity[query]), query))),
            len(queries) / (members[pair[0]] + members[pair[1]]),
        )
        for pair, queries in mistakes.items()
    ]
    return sorted(pairs, key=lambda pair: (-pair.share, pair.labels))[:count]


def best_queries(search: Search, count: int) -> Tensor:
    """Positions of the `count` queries of highest average precision at R, no two of one class.

    Of equal ones, those with more matches come first: it is harder to find many.
    """
    scores = search.scores
    candidates = (scores.num_matches > 0).nonzero()[:, 0].tolist()

    def quality(query: int) -> tuple[float, int, int]:
        return (-float(scores.average_precision_at_r[query]), -int(scores.num_matches[query]), query)

    chosen: list[int] = []
    classes: set[int] = set()
    for query in sorted(candidates, key=quality):
        label = int(search.labels[query])
        if len(chosen) < count and label not in classes:
            chosen.append(query)
            classes.add(label)
    return torch.tensor(chosen, dtype=torch.int64)
