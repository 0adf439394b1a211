"""One state of an index in memory: which entries count, what they are called, and where they are."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, compress
from pathlib import Path
from typing import TypeVar

import numpy
import torch
from torch import Tensor

from pfml.search.backends import BACKENDS, Searcher, distances_between, vectors_at
from pfml.search.index_folder import Snapshot
from pfml.search.ivf import Choice, IvfSearcher, choose_backend
from pfml.search.metadata import TAGS, EntryColumns, EntryMetadata, all_tags, short_path
from pfml.search.neighborhood import mean_nearest_distance
from pfml.search.where import parse_where
from pfml.storage.columns import TextColumn
from pfml.storage.file_state import FileState
from pfml.storage.files import DamagedFileError
from pfml.storage.shard import VectorShard
from pfml.storage.values import Value

__all__ = ["SPREAD_IMAGES", "Entry", "Hit", "IndexState"]

T = TypeVar("T")
#: Images of a class that `IndexState.class_spread` measures.
SPREAD_IMAGES = 256
#: Filters whose result is kept until the index changes: a page asks again with each query.
KEPT_FILTERS = 8


@dataclass(frozen=True)
class Entry:
    """An image of an index.

    Args:
        id: Names this version of this image forever; an image that is added again gets another.
        path: Of the image.
        class_name: "" if the class is unknown.
        source: The folder or list that it was found by, "" for none.
        file: The state of the file when it was embedded.
        given_class: Its class by that source: `class_name` before it was renamed or merged.
        metadata: Column -> value, without those that are missing.
    """

    id: int
    path: str
    class_name: str
    source: str
    file: FileState
    given_class: str
    metadata: Mapping[str, Value] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Hit:
    """What a search found.

    Args:
        id: See `Entry`.
        path: Of the image.
        class_name: "" if the class is unknown.
        distance: Euclidean, between points of the unit sphere: 0 to 2.
        source: See `Entry`.
        metadata: See `Entry`.
    """

    id: int
    path: str
    class_name: str
    distance: float
    source: str = ""
    metadata: Mapping[str, Value] = field(default_factory=dict, hash=False)


class IndexState:
    """A snapshot and what is looked up in it: rows are counted over all shards, in their order.

    `stored` rows were not removed, `live` ones were not left out by an edit either. Shards have the classes that
    sources gave; `names` has what these are called now, and `classes` which one each row has, relabeled or not.
    """

    def __init__(self, folder: Path, snapshot: Snapshot, backend: str, before: IndexState | None = None) -> None:
        self.snapshot = snapshot
        self.stored = snapshot.stored()
        self.ids = torch.cat([torch.empty(0, dtype=torch.int64), *(shard.ids for shard in snapshot.shards)])
        self.first = [0, *accumulate(len(shard) for shard in snapshot.shards)]
        self._searcher: Searcher | None = None
        self._spreads: dict[str, float] = {}
        self._filtered: dict[str, Tensor] = {}
        files = () if before is None else before.snapshot.files
        if before is not None and snapshot.files[: len(files)] == files:
            self._resume_from(before)
        else:
            self.row_of_path: dict[str, int] = {}
            self.given_counts: dict[str, int] = {}
            self._numbers: dict[str, int] = {}
            self._given = torch.empty(0, dtype=torch.int32)  # (rows,), the number of the class that a source gave
            self._count(0)
        self.names = snapshot.edits.names(self.given_counts)
        self.tags = self._by_row(snapshot.edits.tags)
        self.classes = self._classes()
        self.live = self._live()
        self.counts = self._counts()
        self.num_entries = sum(self.counts.values())
        self.choice: Choice = choose_backend(
            backend, folder, snapshot.files, self.num_entries, None if before is None else before.choice
        )

    def _resume_from(self, before: IndexState) -> None:
        """Take over what was looked up before, so that many small additions to a large index stay cheap."""
        # Of two states of one index only the newer one is written to, and only writing looks up paths.
        self.row_of_path, self.given_counts = before.row_of_path, dict(before.given_counts)
        self._numbers, self._given = dict(before._numbers), before._given
        seen = len(before.stored)
        for row in (before.stored & ~self.stored[:seen]).nonzero()[:, 0].tolist():
            shard, k = self._place(row)
            if self.row_of_path.get(shard.paths[k]) == row:
                del self.row_of_path[shard.paths[k]]
            self.given_counts[shard.class_names[k]] -= 1
        self._count(len(before.snapshot.files))
        self.given_counts = {name: count for name, count in self.given_counts.items() if count}

    def _count(self, first_shard: int) -> None:
        """Add the paths and classes of the shards from `first_shard` on to what is looked up."""
        given = [self._given]
        for row, shard in zip(self.first[first_shard:], self.snapshot.shards[first_shard:], strict=False):
            stored = self.stored[row : row + len(shard)].tolist()
            self.row_of_path.update(compress(zip(shard.paths, range(row, row + len(shard)), strict=True), stored))
            for name, count in Counter(compress(shard.class_names, stored)).items():
                self.given_counts[name] = self.given_counts.get(name, 0) + count
            for name in dict.fromkeys(shard.class_names):
                self._numbers.setdefault(name, len(self._numbers))
            given.append(torch.tensor([self._numbers[name] for name in shard.class_names], dtype=torch.int32))
        self._given = torch.cat(given)

    def _by_row(self, by_path: Mapping[str, T]) -> dict[int, T]:
        """Row -> value, of the paths that are in the index."""
        return {self.row_of_path[path]: said for path, said in by_path.items() if path in self.row_of_path}

    def _classes(self) -> TextColumn:
        """The class of each row as it is called now; missing where it was deleted."""
        relabeled = self._by_row(self.snapshot.edits.relabeled)
        texts = tuple(dict.fromkeys(name for name in (*self.names.values(), *relabeled.values()) if name is not None))
        number: dict[str | None, int] = {name: k for k, name in enumerate(texts)}
        # what was removed may have had a class that no image has any more
        now = [number.get(self.names.get(given), -1) for given in self._numbers]
        codes = torch.tensor([*now, -1], dtype=torch.int32)[self._given.long()]
        if relabeled:
            codes[[*relabeled]] = torch.tensor([number.get(name, -1) for name in relabeled.values()], dtype=torch.int32)
        return TextColumn(codes, texts)

    def _live(self) -> Tensor:
        """(rows,) bool: the entries that count."""
        live = self.stored & self.classes.present()
        paths = self.snapshot.edits.left_out
        live[[self.row_of_path[path] for path in paths if path in self.row_of_path]] = False
        return live

    def _counts(self) -> dict[str, int]:
        """Class, as it is called now -> number of its images."""
        counts = torch.bincount(self.classes.codes[self.live].long(), minlength=len(self.classes.texts)).tolist()
        return {name: count for name, count in zip(self.classes.texts, counts, strict=True) if count}

    @cached_property
    def metadata(self) -> EntryMetadata:
        """The metadata of all rows."""
        return EntryMetadata(self.ids, self.snapshot.metadata)

    @cached_property
    def columns(self) -> EntryColumns:
        """The columns that a filter can name."""
        return EntryColumns(self.metadata, self.live, self.classes, self.tags, self.snapshot.shards)

    def column(self, name: str, rows: Tensor) -> list[Value | None]:
        """The values of a column in these rows, None where there is none."""
        if name == "class":
            return [self.classes.value(row) or None for row in rows.tolist()]
        if name == "path":
            places = [self._place(row) for row in rows.tolist()]
            return [short_path(shard.paths[k], shard.sources[k]) for shard, k in places]
        if name == TAGS and self.tags:
            return [all_tags(self.metadata.row(row), self.tags.get(row, ())) or None for row in rows.tolist()]
        column = self.metadata.table(rows).columns.get(name)
        return [None] * len(rows) if column is None else [column.value(k) for k in range(len(rows))]

    def matching(self, where: str) -> Tensor:
        """(rows,) bool: those that pass a filter, whether they count or not; see `pfml.search.where`."""
        found = self._filtered.get(where)
        if found is None:
            found = parse_where(where, self.columns.kinds).mask(self.columns)
            if len(self._filtered) >= KEPT_FILTERS:
                self._filtered.clear()
            self._filtered[where] = found
        return found

    def searcher(self) -> Searcher:
        """The searcher of nearest rows, made at the first search."""
        if self._searcher is None:
            vectors = [shard.vectors for shard in self.snapshot.shards]
            file = self.choice.file
            self._searcher = BACKENDS[self.choice.backend](vectors) if file is None else IvfSearcher(file, vectors)
        return self._searcher

    def rows_of_classes(self, class_names: Sequence[str]) -> Tensor:
        """(rows,) bool: entries of these classes that count."""
        number = {name: k for k, name in enumerate(self.classes.texts)}
        wanted = [number[name] for name in class_names if name in number]
        codes = self.classes.codes.numpy()
        found = codes == wanted[0] if len(wanted) == 1 else numpy.isin(codes, wanted)
        return torch.from_numpy(found & self.live.numpy())

    def class_spread(self, class_name: str) -> float:
        """See `ImageIndex.class_spread`."""
        if class_name not in self._spreads:
            rows = self.rows_of_classes([class_name]).nonzero()[:, 0]
            self._spreads[class_name] = mean_nearest_distance(self.vectors(rows), most=SPREAD_IMAGES)
        return self._spreads[class_name]

    def entry(self, row: int) -> Entry:
        """The entry of a row that counts."""
        shard, k = self._place(row)
        name = str(self.classes.value(row) or "")
        given = shard.class_names[k]
        return Entry(int(shard.ids[k]), shard.paths[k], name, shard.sources[k], shard.file(k), given, self._known(row))

    def _known(self, row: int) -> Mapping[str, Value]:
        """The metadata of a row, with its tags."""
        known = self.metadata.row(row)
        return {**known, TAGS: all_tags(known, self.tags[row])} if row in self.tags else known

    def vectors(self, rows: Tensor) -> Tensor:
        """(len(rows), D)."""
        if not len(rows):
            return torch.empty(0, self.snapshot.dimension)
        # approximate search maps its files anyway
        is_mapped = self.choice.file is not None
        return vectors_at([shard.vectors for shard in self.snapshot.shards], rows, mapped=is_mapped)

    def shard(self, rows: Tensor) -> VectorShard:
        """These rows, ascending, as one shard."""
        chosen = []
        for first, shard in zip(self.first, self.snapshot.shards, strict=False):
            here = rows[(rows >= first) & (rows < first + len(shard))] - first
            if len(here):
                chosen.append(shard.rows(here))
        return VectorShard.joined(chosen)

    def hits(self, query: Tensor, rows: Tensor) -> list[Hit]:
        """The entries of `rows`, ascending, by their distance to the query."""
        distances, order = distances_between(query[None], self.vectors(rows)).sort(stable=True)
        if not torch.isfinite(distances).all():
            bad = self.entry(int(rows[order[~torch.isfinite(distances)][0]]))
            raise DamagedFileError(
                f"the vectors of an index must be finite, got one that is not for {bad.path}: its memory or its files "
                f"were damaged while it was open; restore the index, or index again"
            )
        found = zip(rows[order].tolist(), distances.tolist(), strict=True)
        return [self._hit(row, distance) for row, distance in found]

    def _hit(self, row: int, distance: float) -> Hit:
        shard, k = self._place(row)
        name = str(self.classes.value(row) or "")
        return Hit(int(shard.ids[k]), shard.paths[k], name, distance, shard.sources[k], dict(self._known(row)))

    def _place(self, row: int) -> tuple[VectorShard, int]:
        """The shard of a row, and where in it."""
        number = bisect_right(self.first, row) - 1
        return self.snapshot.shards[number], row - self.first[number]
