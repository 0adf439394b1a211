"""One state of an index in memory: what is looked up in it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from pfml.search.backends import BACKENDS, Searcher, backend_for
from pfml.search.storage import Snapshot
from pfml.storage.file_state import FileState
from pfml.storage.files import DamagedFileError
from pfml.storage.segment import Segment

__all__ = ["Entry", "Hit", "State", "distances_between"]

#: Rows that are compared by differences at once.
ROWS_AT_ONCE = 8192


@dataclass(frozen=True)
class Entry:
    """An image of an index.

    Args:
        id: Names this version of this image for ever; an image that is added again gets another.
        path: Of the image.
        class_name: "" if the class is unknown.
        source: The folder or list that it was found by, "" for none.
        file: The state of the file when it was embedded.
    """

    id: int
    path: str
    class_name: str
    source: str
    file: FileState


@dataclass(frozen=True)
class Hit:
    """What a search found.

    Args:
        id: See `Entry`.
        path: Of the image.
        class_name: "" if the class is unknown.
        distance: Euclidean, between points of the unit sphere: 0 to 2.
    """

    id: int
    path: str
    class_name: str
    distance: float


class State:
    """A snapshot and what is looked up in it: rows are counted over all segments, in their order."""

    def __init__(self, snapshot: Snapshot, backend: str, before: State | None = None) -> None:
        self.snapshot = snapshot
        self.live = snapshot.live()
        self.ids = torch.cat([torch.empty(0, dtype=torch.int64), *(segment.ids for segment in snapshot.segments)])
        self.num_entries = int(self.live.sum())
        self.backend = backend_for(backend, self.num_entries, 4 * len(self.ids) * snapshot.dimension)
        self.first = [0, *accumulate(len(segment) for segment in snapshot.segments)]
        self._searcher: Searcher | None = None
        files = () if before is None else before.snapshot.files
        if before is not None and snapshot.files[: len(files)] == files:
            self._go_on_from(before)
        else:
            self.row_of_path: dict[str, int] = {}
            self.counts: dict[str, int] = {}
            self._count(0)

    def _go_on_from(self, before: State) -> None:
        """Take over what was looked up before, so that many small additions to a large index stay cheap."""
        # Of two states of one index only the newer one is written to, and only writing looks up paths.
        self.row_of_path, self.counts = before.row_of_path, dict(before.counts)
        seen = len(before.live)
        for row in (before.live & ~self.live[:seen]).nonzero()[:, 0].tolist():
            segment, k = self._place(row)
            if self.row_of_path.get(segment.paths[k]) == row:
                del self.row_of_path[segment.paths[k]]
            self.counts[segment.class_names[k]] -= 1
        self._count(len(before.snapshot.files))
        self.counts = {name: count for name, count in self.counts.items() if count}

    def _count(self, first_segment: int) -> None:
        """Look at the segments from `first_segment` on."""
        row = self.first[first_segment]
        for segment in self.snapshot.segments[first_segment:]:
            live = self.live[row : row + len(segment)].tolist()
            for path, name, counts in zip(segment.paths, segment.class_names, live, strict=True):
                if counts:
                    self.row_of_path[path] = row
                    self.counts[name] = self.counts.get(name, 0) + 1
                row += 1

    def searcher(self) -> Searcher:
        if self._searcher is None:
            self._searcher = BACKENDS[self.backend]([segment.vectors for segment in self.snapshot.segments])
        return self._searcher

    def rows_of_classes(self, class_names: Sequence[str]) -> Tensor:
        """(rows,) bool: entries of these classes that count."""
        wanted = set(class_names)
        names = (name in wanted for segment in self.snapshot.segments for name in segment.class_names)
        return torch.tensor(list(names), dtype=torch.bool) & self.live

    def entry(self, row: int) -> Entry:
        segment, k = self._place(row)
        return Entry(int(segment.ids[k]), segment.paths[k], segment.class_names[k], segment.sources[k], segment.file(k))

    def vectors(self, rows: Tensor) -> Tensor:
        """(len(rows), D)."""
        found = torch.empty(len(rows), self.snapshot.dimension)
        for first, segment in zip(self.first, self.snapshot.segments, strict=False):
            here = (rows >= first) & (rows < first + len(segment))
            if here.any():
                found[here] = segment.vectors[rows[here] - first]
        return found

    def segment(self, rows: Tensor) -> Segment:
        """These rows, ascending, as one segment."""
        parts = []
        for first, segment in zip(self.first, self.snapshot.segments, strict=False):
            here = rows[(rows >= first) & (rows < first + len(segment))] - first
            if len(here):
                parts.append(segment.rows(here))
        return Segment.joined(parts)

    def hits(self, query: Tensor, rows: Tensor) -> list[Hit]:
        """The entries of `rows`, ascending, by their distance to the query."""
        distances, order = distances_between(query[None], self.vectors(rows)).sort(stable=True)
        if not torch.isfinite(distances).all():
            bad = self.entry(int(rows[order[~torch.isfinite(distances)][0]]))
            raise DamagedFileError(
                f"the vectors of an index must be finite, got one that is not for {bad.path}: its memory or its files "
                f"were damaged while it was open; restore the index, or index again"
            )
        found = [self.entry(row) for row in rows[order].tolist()]
        return [
            Hit(entry.id, entry.path, entry.class_name, distance)
            for entry, distance in zip(found, distances.tolist(), strict=True)
        ]

    def _place(self, row: int) -> tuple[Segment, int]:
        """The segment of a row, and where in it."""
        number = bisect_right(self.first, row) - 1
        return self.snapshot.segments[number], row - self.first[number]


def distances_between(one: Tensor, other: Tensor) -> Tensor:
    """(N,) float64 distances, row by row, from differences: products have no digits left where points are close."""
    rows = max(len(one), len(other))
    pairs = zip(one.expand(rows, -1).split(ROWS_AT_ONCE), other.expand(rows, -1).split(ROWS_AT_ONCE), strict=True)
    return torch.cat([torch.empty(0).double(), *((a.double() - b.double()).norm(dim=1) for a, b in pairs)])
