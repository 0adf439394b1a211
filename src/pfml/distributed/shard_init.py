"""Initial proxies of a shard: those of a single process with the same seed.

Every rank generates all proxies, chunk by chunk or class by class, and keeps its own. So initialization is independent
of the world size, and no rank ever holds all proxies.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Generator, Tensor

from pfml.losses.proxy_init import class_proxies

__all__ = ["normal_rows", "sample_rows"]

#: Numbers that are drawn at once.
CHUNK_NUMBERS = 2**22
#: torch draws normal numbers in blocks of this size: chunks of whole blocks give the numbers of one large draw.
BLOCK = 16


def normal_rows(total: int, dim: int, rows: slice, generator: Generator | None = None) -> Tensor:
    """Rows `rows` of torch.randn(total, dim), without the others in memory; the generator moves on as if with them."""
    kept = torch.empty(rows.stop - rows.start, dim)
    for start, stop in _chunks(total, dim):
        drawn = torch.randn(stop - start, dim, generator=generator)
        _keep(kept, rows, start, drawn)
    return kept


def _chunks(total: int, dim: int) -> Iterator[tuple[int, int]]:
    size = BLOCK * max(CHUNK_NUMBERS // (BLOCK * dim), 1)
    starts = list(range(0, max(total, 1), size))
    if len(starts) > 1 and (total - starts[-1]) * dim < BLOCK:
        starts.pop()  # torch draws fewer numbers than a block in another way
    return zip(starts, [*starts[1:], total], strict=True)


def sample_rows(
    init: str, points: Tensor, labels: Tensor, sizes: tuple[int, int], rows: slice, generator: Generator | None
) -> Tensor:
    """Rows `rows` of the (C * M, D) proxies that `PROXY_INITS[init]` places among the samples of each class.

    Args:
        init: A key of `PROXY_INITS`.
        points: (n, D), samples; proxies of a class without any start anywhere.
        labels: (n,), int64.
        sizes: C and M.
        rows: Which proxies to keep.
        generator: One in the same state on every rank.
    """
    num_classes, per_class = sizes
    order = torch.argsort(labels, stable=True)
    by_class = order.split(torch.bincount(labels, minlength=num_classes).tolist())
    kept = points.new_empty(rows.stop - rows.start, points.shape[1])
    for c, members in enumerate(by_class):
        _keep(kept, rows, c * per_class, class_proxies(init, points[members], per_class, generator=generator))
    return kept


def _keep(kept: Tensor, rows: slice, start: int, drawn: Tensor) -> None:
    """Copy into `kept`, the rows `rows` of a whole, what `drawn`, its rows from `start` on, has of them."""
    first, last = max(start, rows.start), min(start + len(drawn), rows.stop)
    if first < last:
        kept[first - rows.start : last - rows.start] = drawn[first - start : last - start]
