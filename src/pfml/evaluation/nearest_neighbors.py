"""Exact nearest neighbors of unit vectors, in bounded memory, on a CPU or a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from pfml.precision import full_precision
from pfml.sphere import inverse_norms

__all__ = ["directions", "nearest"]

#: Bytes of similarities that are held at once.
MEMORY = {"cpu": 2**26, "cuda": 2**30}
#: Rows that are normalized at once: float64 copies of all of them would be large.
ROWS_AT_ONCE = 4096


def nearest(queries: Tensor, gallery: Tensor | None, k: int, *, memory: int | None = None) -> tuple[Tensor, Tensor]:
    """The k most similar gallery items of each query: (similarities, indices), both (N, k), best first.

    Similarity is the cosine, so the order is that of Euclidean distance between the normalized vectors. Products are
    full float32. Items of equal similarity are listed by index; torch.topk decides which of those that tie for the
    last position are listed. (`retrieval_metrics` does not depend on such ties: it counts ranks.)

    Args:
        queries: (N, D), normalized here.
        gallery: (G, D), normalized here; None to search the queries among each other, each without itself. Itself
            means its index: an equal vector elsewhere is a neighbor like any other.
        k: How many, at most the size of the gallery.
        memory: Bytes for similarities, 64 MiB on a CPU and 1 GiB on a GPU by default; at least one row is held.

    Example:
        >>> similarities, indices = nearest(torch.tensor([[1.0, 0.0], [0.0, 1.0], [3.0, 4.0]]), None, 1)
        >>> indices[:, 0].tolist()
        [2, 2, 1]
    """
    among_themselves = gallery is None
    queries = directions(queries, "queries")
    items = queries if gallery is None else directions(gallery, "gallery")
    if items.shape[1] != queries.shape[1]:
        raise ValueError(f"gallery must have {queries.shape[1]} dimensions like the queries, got {items.shape[1]}")
    available = len(items) - among_themselves
    if not 1 <= k <= max(available, 0):
        raise ValueError(f"k must lie in [1, {available}], the items that a query can find, got {k}")

    rows = max((MEMORY[queries.device.type] if memory is None else memory) // (4 * len(items)), 1)
    buffer = queries.new_empty(min(rows, len(queries)), len(items))
    similarities = queries.new_empty(len(queries), k)
    indices = torch.empty(len(queries), k, dtype=torch.int64, device=queries.device)
    with full_precision(queries.device):
        for start in range(0, len(queries), rows):
            stop = min(start + rows, len(queries))
            tile = torch.mm(queries[start:stop], items.T, out=buffer[: stop - start])
            if among_themselves:
                tile.diagonal(start).fill_(-torch.inf)
            best = tile.topk(k, dim=1)
            by_index, order = best.indices.sort(dim=1)
            similarities[start:stop], order = best.values.gather(1, order).sort(dim=1, descending=True, stable=True)
            indices[start:stop] = by_index.gather(1, order)
    return similarities, indices


def directions(embeddings: Tensor, name: str) -> Tensor:
    """The embeddings divided by their lengths, (N, D) float32; the lengths are measured in float64."""
    if embeddings.ndim != 2 or not embeddings.is_floating_point():
        raise ValueError(
            f"{name} must be a matrix of floats (N, D), got {embeddings.dtype} of shape {tuple(embeddings.shape)}"
        )
    result = torch.empty(embeddings.shape, dtype=torch.float32, device=embeddings.device)
    for rows, part in zip(result.split(ROWS_AT_ONCE), embeddings.detach().split(ROWS_AT_ONCE), strict=True):
        rows.copy_(part.double() * inverse_norms(part))
    broken = (~result.isfinite().all(dim=1)).nonzero()[:, 0].tolist()
    if broken:
        more = f" and {len(broken) - 5} more" if len(broken) > 5 else ""
        raise ValueError(f"{name} must be finite, got NaN or Inf in row {', '.join(map(str, broken[:5]))}{more}")
    return result
