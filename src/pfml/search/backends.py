"""Ways to find the nearest vectors: one visible dict, one signature, the same results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from pfml.precision import full_precision
from pfml.storage.segment import StoredVectors

__all__ = [
    "BACKENDS",
    "COMFORTABLE_SHARE",
    "FAISS_FROM",
    "ExactSearcher",
    "FaissSearcher",
    "Searcher",
    "available_memory",
    "backend_for",
]

PROCESSES = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
#: controller of a line of /proc/self/cgroup ("" for version 2) -> folder of groups, limit, usage, pages of files in it
LAYOUTS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def available_memory(processes: Path = PROCESSES, groups: Path = GROUPS) -> int | None:
    """Bytes that this process can take without others being swapped out or killed; None if the system does not say.

    It is what Linux calls available, or what the container or job (its control groups) leaves, whichever is less.

    Args:
        processes: Where Linux tells of processes.
        groups: Where it tells of control groups.
    """
    with suppress(OSError, ValueError, KeyError):
        kibibytes = _numbers((processes / "meminfo").read_text())["MemAvailable:"]
        return max(min([1024 * kibibytes, *_left_by_groups(processes, groups)]), 0)
    return None


def _left_by_groups(processes: Path, groups: Path) -> Iterator[int]:
    """What each control group that has a limit leaves to this process."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (processes / "self" / "cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in LAYOUTS.keys() & controllers.split(","):
            top, limit, usage, pages = LAYOUTS[controller]
            # a limit of any group above holds too; in a container the path may be that of the machine
            for group in (PurePosixPath(path), *PurePosixPath(path).parents):
                folder = groups / top / str(group).lstrip("/")
                with suppress(OSError, ValueError):  # there is no such group, or its limit is "max"
                    allowed, used = (int((folder / name).read_text()) for name in (limit, usage))
                    # pages of files count as used, and are given back when they are needed
                    yield allowed - used + _numbers((folder / "memory.stat").read_text()).get(pages, 0)


def _numbers(text: str) -> dict[str, int]:
    """The first number of each line by the word before it."""
    return {words[0]: int(words[1]) for words in map(str.split, text.splitlines()) if len(words) > 1}


#: Bytes of similarities that are held at once.
MEMORY = 2**26
#: Queries that are compared at once.
QUERIES_AT_ONCE = 1024
#: Vectors that are copied at once.
ROWS_AT_ONCE = 8192
#: Entries from which "auto" takes faiss, if it is installed and its copy of the vectors fits comfortably: in this share
#: of the available memory, since the copy grows by being copied itself, and the caller has other uses for the rest.
FAISS_FROM = 1_000_000
COMFORTABLE_SHARE = 0.25

#: Of a segment: in memory, or read from its file part by part.
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

    def __init__(self, parts: Sequence[Vectors]) -> None:
        self.parts = parts

    def nearest(self, queries: Tensor, k: int, allowed: Tensor) -> tuple[Tensor, Tensor]:
        found = [self._nearest(some, k, allowed) for some in queries.split(QUERIES_AT_ONCE)]
        return torch.cat([values for values, _ in found]), torch.cat([rows for _, rows in found])

    def _nearest(self, queries: Tensor, k: int, allowed: Tensor) -> tuple[Tensor, Tensor]:
        best = queries.new_empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64)
        height = max(MEMORY // (4 * max(len(queries), 1)), 1)
        first = 0
        with full_precision(queries.device):
            for part in self.parts:
                for vectors in part.split(height):
                    open_rows = allowed[first : first + len(vectors)]
                    best = _merged(best, _best_of_tile(queries, vectors, open_rows, k, first), k)
                    first += len(vectors)
        return best


class FaissSearcher:
    """faiss's flat index: a copy of the vectors in memory, every one of which is compared."""

    def __init__(self, parts: Sequence[Vectors]) -> None:
        self.faiss = _faiss()
        self.flat = self.faiss.IndexFlatIP(parts[0].shape[1])
        for part in parts:
            for vectors in part.split(ROWS_AT_ONCE):
                self.flat.add(vectors.numpy())

    def nearest(self, queries: Tensor, k: int, allowed: Tensor) -> tuple[Tensor, Tensor]:
        import numpy

        options = None
        if not bool(allowed.all()):
            bits = numpy.packbits(allowed.numpy(), bitorder="little")
            options = self.faiss.SearchParameters(sel=self.faiss.IDSelectorBitmap(bits))
        # faiss.contrib.torch_utils, which others may import, puts its own `search` in place of this one
        search = getattr(self.flat, "search_numpy", self.flat.search)
        similarities, rows = search(queries.contiguous().numpy(), k, params=options)
        return torch.from_numpy(similarities), torch.from_numpy(rows)


BACKENDS: dict[str, Callable[[Sequence[Vectors]], Searcher]] = {"exact": ExactSearcher, "faiss": FaissSearcher}


def backend_for(name: str, entries: int, copied_bytes: int = 0) -> str:
    """The key of `BACKENDS` that `name` means for an index.

    Args:
        name: A key, or "auto".
        entries: Of the index.
        copied_bytes: What a copy of its vectors takes. They lie in files: only "exact" leaves them there.
    """
    if name == "auto":
        is_wanted = entries >= FAISS_FROM and find_spec("faiss") is not None
        return "faiss" if is_wanted and _fits(copied_bytes) else "exact"
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join((*BACKENDS, 'auto'))}, got {name!r}")
    if name == "faiss":
        _faiss()
    return name


def _fits(copied_bytes: int) -> bool:
    available = available_memory()
    return available is not None and copied_bytes <= COMFORTABLE_SHARE * available


def _faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise ImportError("backend='faiss' needs the package faiss-cpu: install it, or use backend='exact'") from None
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


def _merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], k: int) -> tuple[Tensor, Tensor]:
    """The best k of both."""
    values, rows = torch.cat([one[0], other[0]], dim=1), torch.cat([one[1], other[1]], dim=1)
    values, columns = values.topk(min(k, values.shape[1]), dim=1)
    return values, rows.gather(1, columns)
