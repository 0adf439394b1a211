"""Search an index with query expansion, or re-rank the first hits by k-reciprocal neighbors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pfml.evaluation.reranking import Expansion, KReciprocal, expand_queries, k_reciprocal_ranking
from pfml.search.identity import ModelIdentity
from pfml.search.index import Hit, ImageIndex

__all__ = ["DEPTH", "search_reranked"]

#: Hits that are re-ranked; neighbors of a hit are looked for among these.
DEPTH = 100


def search_reranked(
    index: ImageIndex,
    vectors: Tensor,
    k: int,
    *,
    settings: Expansion | KReciprocal,
    model: ModelIdentity,
    class_names: Sequence[str] | None = None,
    where: str | None = None,
) -> list[list[Hit]]:
    """The k best images of each query, as `ImageIndex.search` has them; distances are those to the query itself.

    Args:
        index: What is searched.
        vectors: (N, D), the queries.
        k: How many images to find.
        settings: `Expansion` searches again with each query's mean with its nearest hits. `KReciprocal` ranks the
            first `DEPTH` hits (or k, if that is more) again.
        model: What made the vectors.
        class_names: Search these classes only.
        where: Search the images only that pass this filter (`pfml.search.where`).
    """
    depth = settings.k if isinstance(settings, Expansion) else max(DEPTH, k)
    first = index.search(vectors, depth, model=model, class_names=class_names, where=where)
    if isinstance(settings, KReciprocal):
        return [_reranked(index, vector, hits, k, settings) for vector, hits in zip(vectors, first, strict=True)]
    expanded = torch.stack(
        [
            expand_queries(vector[None], index.vectors([hit.id for hit in hits]), settings)[0] if hits else vector
            for vector, hits in zip(vectors, first, strict=True)
        ]
    )
    found = index.search(expanded, k, model=model, class_names=class_names, where=where)
    return [_measured(index, vector, hits) for vector, hits in zip(vectors, found, strict=True)]


def _reranked(index: ImageIndex, vector: Tensor, hits: list[Hit], k: int, settings: KReciprocal) -> list[Hit]:
    if len(hits) < 2:
        return hits[:k]
    points = index.vectors([hit.id for hit in hits])
    order = k_reciprocal_ranking(vector[None].to(points), points, depth=min(k, len(hits)), settings=settings)[0]
    return [hits[position] for position in order.tolist()]


def _measured(index: ImageIndex, vector: Tensor, hits: list[Hit]) -> list[Hit]:
    """The hits with their distances to `vector`, which was not what they were found by."""
    if not hits:
        return hits
    points = index.vectors([hit.id for hit in hits]).double()
    unit = torch.nn.functional.normalize(vector.double(), dim=0)
    distances = (points - unit.to(points)).norm(dim=1).tolist()
    return [replace(hit, distance=distance) for hit, distance in zip(hits, distances, strict=True)]
