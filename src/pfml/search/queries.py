"""A query of several images: like these, not like those."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from pfml.evaluation.nearest_neighbors import directions
from pfml.search.identity import ModelIdentity
from pfml.search.index import Hit, ImageIndex

__all__ = ["COMBINATIONS", "UNLIKE_WEIGHT", "Combination", "Query", "search_queries"]

Combination = Literal["mean", "any"]
COMBINATIONS: tuple[Combination, ...] = get_args(Combination)
#: Weight of the mean of the negatives.
UNLIKE_WEIGHT = 0.5


@dataclass(frozen=True, eq=False)
class Query:
    """Images to be like, and images not to be like.

    Negatives move a query away by Rocchio's rule (1971): it becomes the direction of q - w mean(negatives), where w is
    `UNLIKE_WEIGHT` and all vectors have unit length.

    Args:
        like: (P, D), one at least.
        unlike: (N, D); None for none.
        combine: "mean" searches by the mean of `like`: what they have in common. "any" takes the distance of an image
            to the nearest of them.
        without: Ids that are not to be found: those of the images themselves.

    Example:
        >>> query = Query(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        >>> query.points()
        tensor([[0.7071, 0.7071]])
    """

    like: Tensor
    unlike: Tensor | None = None
    combine: Combination = "mean"
    without: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.combine not in COMBINATIONS:
            raise ValueError(f"combine must be one of {', '.join(COMBINATIONS)}, got {self.combine!r}")
        if not len(self.like):
            raise ValueError("a query must have an image at least that results are to be like, got none")

    @classmethod
    def of_ids(
        cls, index: ImageIndex, like: Sequence[int], unlike: Sequence[int] = (), combine: Combination = "mean"
    ) -> Query:
        """The query by images of an index, which does not find these themselves; KeyError if it has no such id."""
        return cls(index.vectors(like), index.vectors(unlike), combine, (*like, *unlike))

    @property
    def is_plain(self) -> bool:
        """Whether it is a single image, so that a threshold applies to its distances."""
        return len(self.like) == 1 and (self.unlike is None or not len(self.unlike))

    def points(self) -> Tensor:
        """(1, D), or (P, D) for "any": the unit vectors to search by."""
        like = directions(self.like, "like").cpu()
        points = like if self.combine == "any" or len(like) == 1 else like.mean(dim=0, keepdim=True)
        if self.unlike is not None and len(self.unlike):
            points = points - UNLIKE_WEIGHT * directions(self.unlike, "unlike").cpu().mean(dim=0, keepdim=True)
        if bool((points.norm(dim=1) < 1e-6).any()):
            raise ValueError("the images of a query must not cancel each other: leave some of them out")
        return directions(points, "query")


def search_queries(
    index: ImageIndex,
    queries: Sequence[Query],
    k: int = 10,
    *,
    model: ModelIdentity,
    class_names: Sequence[str] | None = None,
    where: str | None = None,
) -> list[list[Hit]]:
    """The k images nearest to each query, nearest first; fewer if there are fewer.

    Args:
        index: What is searched.
        queries: Distances are those to the point of a query, for "any" to the nearest of its points.
        k: How many.
        model: What made the vectors of the queries.
        class_names: Search these classes only.
        where: Search the images only that pass this filter (`pfml.search.where`).
    """
    if not queries:
        return []
    points = [query.points() for query in queries]
    depth = k + max(len(set(query.without)) for query in queries)
    found = iter(index.search(torch.cat(points), depth, model=model, class_names=class_names, where=where))
    return [_nearest([next(found) for _ in some], query, k) for some, query in zip(points, queries, strict=True)]


def _nearest(lists: Sequence[Sequence[Hit]], query: Query, k: int) -> list[Hit]:
    """The k nearest hits of all lists, each once."""
    best: dict[int, Hit] = {}
    for hit in sorted((hit for hits in lists for hit in hits), key=lambda hit: (hit.distance, hit.id)):
        if hit.id not in query.without:
            best.setdefault(hit.id, hit)
    return list(best.values())[:k]
