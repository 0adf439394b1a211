"""The nearest vectors, exactly, by torch or by faiss: one visible dict, one signature, the same results.

`pfml.search.ivf` has the third backend, "ivf", which is approximate and has a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import numpy
import torch
from torch import Tensor

from pfml.packages import require_packages
from pfml.precision import full_precision
from pfml.storage.shard import StoredVectors

__all__ = [
    "BACKENDS",
    "ExactSearcher",
    "FaissSearcher",
    "Searcher",
    "Vectors",
    "best_of_both",
    "distances_between",
    "num_allowed",
    "require_backend",
    "vectors_at",
]

#: Bytes of similarities that are held at once.
MEMORY = 2**26
#: Queries that are compared at once.
QUERIES_AT_ONCE = 1024
#: Vectors that are copied at once.
ROWS_AT_ONCE = 8192
#: Allowed rows up to which these alone are read, if they are a small fraction of all.
FEW_ROWS = 8192
FEW_FRACTION = 1 / 8

#: Of a shard: in memory, or read from its file tile by tile.
Vectors: TypeAlias = Tensor | StoredVectors


class Searcher(Protocol):
    """Vectors that are searched."""

    def nearest(self, queries: Tensor, k: int, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """Similarities and rows, (N, k) each, of the k most similar vectors among the allowed ones, best first.

        Args:
            queries: (N, D) float32 of unit length.
            k: At most the number of allowed rows.
            allowed: (rows,) bool.
        """


class ExactSearcher:
    """Every vector is compared, tile by tile, in full float32."""

    def __init__(self, shards: Sequence[Vectors]) -> None:
        self.shards = shards

    @staticmethod
    def is_few(allowed: int, rows: int) -> bool:
        """Whether so many allowed rows of all are read one by one."""
        return allowed <= min(FEW_ROWS, FEW_FRACTION * rows)

    def nearest(self, queries: Tensor, k: int, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """See `Searcher.nearest`."""
        if self.is_few(num_allowed(allowed), len(allowed)):
            return self._nearest_of_few(queries, k, torch.from_numpy(allowed.numpy().nonzero()[0]))
        found = [self._nearest(some, k, allowed) for some in queries.split(QUERIES_AT_ONCE)]
        return torch.cat([values for values, _ in found]), torch.cat([rows for _, rows in found])

    def _nearest_of_few(self, queries: Tensor, k: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        vectors = vectors_at(self.shards, rows)
        with full_precision(queries.device):
            found = [(some @ vectors.T).topk(min(k, len(rows)), dim=1) for some in queries.split(QUERIES_AT_ONCE)]
        return torch.cat([one.values for one in found]), rows[torch.cat([one.indices for one in found])]

    def _nearest(self, queries: Tensor, k: int, allowed: Tensor) -> tuple[Tensor, Tensor]:
        best = queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64)
        height = max(MEMORY // (4 * max(len(queries), 1)), 1)
        first = 0
        with full_precision(queries.device):
            for shard in self.shards:
                for vectors in shard.split(height):
                    open_rows = allowed[first : first + len(vectors)]
                    best = best_of_both(best, _best_of_tile(queries, vectors, open_rows, k, first), k)
                    first += len(vectors)
        return best


class FaissSearcher:
    """faiss's flat index: a copy of the vectors in memory, every one of which is compared."""

    def __init__(self, shards: Sequence[Vectors]) -> None:
        self.faiss = _faiss()
        self.flat = self.faiss.IndexFlatIP(shards[0].shape[1])
        for shard in shards:
            for vectors in shard.split(ROWS_AT_ONCE):
                self.flat.add(vectors.numpy())

    def nearest(self, queries: Tensor, k: int, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """See `Searcher.nearest`."""
        options = None
        if not bool(allowed.all()):
            bits = numpy.packbits(allowed.numpy(), bitorder="little")
            options = self.faiss.SearchParameters(sel=self.faiss.IDSelectorBitmap(bits))
        # faiss.contrib.torch_utils, which others may import, puts its own `search` in place of this one
        search = getattr(self.flat, "search_numpy", self.flat.search)
        similarities, rows = search(queries.contiguous().numpy(), k, params=options)
        return torch.from_numpy(similarities), torch.from_numpy(rows)


BACKENDS: dict[str, Callable[[Sequence[Vectors]], Searcher]] = {"exact": ExactSearcher, "faiss": FaissSearcher}


def distances_between(one: Tensor, other: Tensor) -> Tensor:
    """(N,) float64 distances, row by row, from differences: products have no digits left where points are close."""
    rows = max(len(one), len(other))
    pairs = zip(one.expand(rows, -1).split(ROWS_AT_ONCE), other.expand(rows, -1).split(ROWS_AT_ONCE), strict=True)
    return torch.cat([torch.empty(0).double(), *((a.double() - b.double()).norm(dim=1) for a, b in pairs)])


def require_backend(name: str) -> None:
    """Raise ValueError unless `name` is a backend, and ImportError if its package is not installed."""
    if name not in (*BACKENDS, "ivf", "auto"):
        raise ValueError(f"backend must be one of {', '.join((*BACKENDS, 'ivf', 'auto'))}, got {name!r}")
    if name in ("faiss", "ivf"):
        _faiss(name)


def num_allowed(allowed: Tensor) -> int:
    """How many rows are allowed. By NumPy: torch would wake threads for what takes one of them microseconds."""
    return int(numpy.count_nonzero(allowed.numpy()))


def vectors_at(shards: Sequence[Vectors], rows: Tensor, *, mapped: bool = False) -> Tensor:
    """(len(rows), D): the vectors at `rows`, counted over all shards in their order.

    Args:
        shards: In their order.
        rows: (n,) int64.
        mapped: Whether files are mapped into memory, see `StoredVectors.gathered`.
    """
    # by NumPy, whose calls cost less: a search makes many small ones
    firsts, wanted = [0, *accumulate(len(shard) for shard in shards)], rows.numpy()
    order = numpy.argsort(wanted, kind="stable")
    ordered = wanted[order]
    ends = numpy.searchsorted(ordered, firsts).tolist()
    found = numpy.empty((len(rows), shards[0].shape[1]), numpy.float32)
    for shard, first, begin, end in zip(shards, firsts, ends, ends[1:], strict=False):
        if begin < end:
            own = torch.from_numpy(ordered[begin:end] - first)
            some = shard.gathered(own) if mapped and isinstance(shard, StoredVectors) else shard[own]
            found[order[begin:end]] = some.numpy()
    return torch.from_numpy(found)


def _faiss(backend: str = "faiss") -> Any:
    require_packages("faiss", purpose=f"backend={backend!r}", install="pfml[faiss]")
    import faiss

    return faiss


def _best_of_tile(queries: Tensor, vectors: Tensor, allowed: Tensor, k: int, first: int) -> tuple[Tensor, Tensor]:
    """Similarities and rows of the best k (or all) allowed vectors; `first` is the row of the first vector."""
    count = int(allowed.sum())
    if 2 * count < len(vectors):  # few: a copy of these is cheaper than a product with all
        chosen = allowed.nonzero()[:, 0]
        values, columns = (queries @ vectors[chosen].T).topk(min(k, count), dim=1)
        return values, chosen[columns] + first
    tile = queries @ vectors.T
    if count < len(vectors):
        tile.masked_fill_(~allowed, -torch.inf)
    values, columns = tile.topk(min(k, count), dim=1)
    return values, columns + first


def best_of_both(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], k: int) -> tuple[Tensor, Tensor]:
    """The best k of both."""
    values, rows = torch.cat([one[0], other[0]], dim=1), torch.cat([one[1], other[1]], dim=1)
    values, columns = values.topk(min(k, values.shape[1]), dim=1)
    return values, rows.gather(1, columns)
