"""The index of images: add, remove, edit, search. `pfml.search.index_folder` keeps it on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfml.data.decoding import Track
from pfml.evaluation.nearest_neighbors import directions
from pfml.memory import return_freed_memory
from pfml.search.backends import num_allowed, require_backend
from pfml.search.edits import Edit, Edits
from pfml.search.identity import ModelIdentity
from pfml.search.index_folder import GRACE_SECONDS, IndexFolder, Snapshot
from pfml.search.index_state import Entry, Hit, IndexState
from pfml.search.ivf import IvfSettings, is_due
from pfml.search.ivf_build import build_ivf
from pfml.search.metadata import require_kinds
from pfml.search.points import Points, payload, point_id
from pfml.storage.columns import Table, TextColumn
from pfml.storage.file_state import UNKNOWN_FILE, FileState, packed
from pfml.storage.metadata_shard import MetadataShard
from pfml.storage.shard import StoredVectors, VectorShard
from pfml.storage.values import Kind, Value
from pfml.typos import did_you_mean

__all__ = ["Entry", "Hit", "ImageIndex", "Points", "point_id"]


#: Entries in a shard that `compact` writes.
COMPACTED_ENTRIES = 65_536
#: Characters of the name of a class that a person chooses.
LONGEST_NAME = 200


class ImageIndex:
    """Vectors of images, with paths and classes, in a folder that is whole at every moment (`IndexFolder`).

    Make one by `ImageIndex.create` or `ImageIndex.open`. Searching is exact unless `backend` says otherwise, and may
    happen in several threads while another process writes; `refresh` takes up what was written since.
    """

    def __init__(self, folder: IndexFolder, snapshot: Snapshot, backend: str) -> None:
        self._folder = folder
        self._asked_backend = backend
        self._state = IndexState(folder.path, snapshot, backend)

    @classmethod
    def create(cls, folder: str | Path, model: ModelIdentity, dimension: int, *, backend: str = "exact") -> ImageIndex:
        """An empty index in `folder`, which must not hold one.

        Args:
            folder: Made if it does not exist.
            model: What will make the vectors; those of another model are refused.
            dimension: D.
            backend: How to search: "exact" (torch), "faiss" (its flat index, exact too, a copy in memory), "ivf"
                (approximate, by the file that `build_ivf` makes; exact until then), or "auto": "ivf" for an index of
                at least `IVF_FROM` images that has such a file, else exact.
        """
        require_backend(backend)
        on_disk = IndexFolder(Path(folder))
        return cls(on_disk, on_disk.create(model, dimension), backend)

    @classmethod
    def open(cls, folder: str | Path, *, backend: str = "exact", hold_bytes: int = 0) -> ImageIndex:
        """The index in `folder`, after comparing every checksum.

        Args:
            folder: Of the index.
            backend: As in `create`, but that "ivf" without a file for it is an error.
            hold_bytes: Size of all shards up to which their vectors are held in memory, whatever becomes of the
                files. Those of a larger index are read in every search, and refused if the file has changed.
        """
        require_backend(backend)
        on_disk = IndexFolder(Path(folder), hold_bytes)
        index = cls(on_disk, on_disk.read(), backend)
        if backend == "ivf" and index.backend != "ivf":
            raise ValueError(f"backend 'ivf' cannot be used: {index.backend_remark}")
        return index

    @property
    def path(self) -> Path:
        """The folder of the index."""
        return self._folder.path

    @property
    def model(self) -> ModelIdentity:
        """What made the vectors."""
        return self._state.snapshot.model

    @property
    def dimension(self) -> int:
        """D of the vectors."""
        return self._state.snapshot.dimension

    @property
    def backend(self) -> str:
        """How the index is searched: "auto" after its choice."""
        return self._state.choice.backend

    @property
    def backend_remark(self) -> str:
        """What a user should know of how the index is searched, in a sentence; "" for nothing."""
        return self._state.choice.remark

    @property
    def num_shards(self) -> int:
        """How many shards the vectors are stored in."""
        return len(self._state.snapshot.shards)

    @property
    def num_removed(self) -> int:
        """Entries that no longer count, but take space until `compact`."""
        return len(self._state.live) - len(self)

    @property
    def edits(self) -> Edits:
        """What a person has renamed, merged, deleted and left out since the images were added."""
        return self._state.snapshot.edits

    @property
    def generation(self) -> int:
        """How many changes were written, by anyone, up to this state."""
        return self._state.snapshot.generation

    @property
    def given_classes(self) -> dict[str, str | None]:
        """Class that a source gives an image -> its name now, None if it was deleted."""
        return dict(self._state.names)

    def __len__(self) -> int:
        return self._state.num_entries

    def __repr__(self) -> str:
        return f"ImageIndex({str(self.path)!r}, {len(self):,} images, {self.dimension} dimensions, {self.model})"

    @property
    def columns(self) -> dict[str, Kind]:
        """Column that a filter can name -> what it holds: "class" and "path", then the metadata."""
        return dict(self._state.columns.kinds)

    def class_counts(self) -> dict[str, int]:
        """Class name -> number of its images, sorted by name; "" for those of unknown class."""
        return dict(sorted(self._state.counts.items()))

    def entries(self) -> Iterator[Entry]:
        """All entries that count, in the order of their ids."""
        state = self._state
        return (state.entry(row) for row in state.live.nonzero()[:, 0].tolist())

    def points(self, batch_size: int = 256) -> Iterator[Points]:
        """All entries that count, in the order of their ids, at most `batch_size` at a time; see `Points`."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        state, model = self._state, self.model.digest
        for rows in state.live.nonzero()[:, 0].split(batch_size):
            entries = [state.entry(row) for row in rows.tolist()]
            payloads = (payload(entry, model) for entry in entries)
            if entries:
                yield Points(tuple(point_id(entry.path) for entry in entries), state.vectors(rows), tuple(payloads))

    def entry(self, id: int) -> Entry:  # noqa: A002 - what it is called everywhere
        """The entry of an id; KeyError if there is none, or none any more."""
        state = self._state
        return state.entry(self._row(state, id))

    def find(self, path: str | Path) -> Entry | None:
        """The entry of an image by its path, None if there is none."""
        state = self._state
        row = state.row_of_path.get(str(path))
        # another thread may be taking up a newer state, which takes over the paths of this one
        return None if row is None or row >= len(state.ids) or not state.live[row] else state.entry(row)

    def as_tensors(self) -> tuple[Tensor, TextColumn, Callable[[Tensor], Tensor]]:
        """The ids and classes of all entries, in the order of ids, and a function that reads vectors of some of them.

        It makes no object for each entry. The function takes positions, (n,) int64, and holds on to this state of the
        index.
        """
        state = self._state
        rows = state.live.nonzero()[:, 0]
        return state.ids[rows], state.classes.rows(rows), lambda chosen: state.vectors(rows[chosen])

    def column(self, name: str, ids: Tensor) -> list[Value | None]:
        """The values of a column for some entries; None where there is no value, or no such entry any more.

        Args:
            name: One of `columns`.
            ids: (n,) int64.
        """
        state = self._state
        if not len(state.ids):
            return [None] * len(ids)
        rows = torch.searchsorted(state.ids, ids).clamp(max=len(state.ids) - 1)
        there = (state.ids[rows] == ids) & state.live[rows]
        found = iter(state.column(name, rows[there]))
        return [next(found) if is_there else None for is_there in there.tolist()]

    def vectors(self, ids: Sequence[int]) -> Tensor:
        """The vectors of some entries, (len(ids), D)."""
        state = self._state
        return state.vectors(torch.tensor([self._row(state, each) for each in ids], dtype=torch.int64))

    def _row(self, state: IndexState, id: int) -> int:  # noqa: A002 - what it is called everywhere
        row = int(torch.searchsorted(state.ids, id)) if len(state.ids) else 0
        if row == len(state.ids) or int(state.ids[row]) != id or not bool(state.live[row]):
            raise KeyError(f"the index {self.path} has no entry {id}")
        return row

    def damaged_files(self) -> list[str]:
        """Names of the shards that are gone or damaged on disk since they were read.

        An index that is held in memory is searched rightly all the same, but could not be opened again.
        """
        now = self._state.snapshot
        described = zip(now.metadata, now.metadata_files, strict=True)
        files = [file.file for shard, file in described if not shard.is_whole(self.path / file.file, file)]
        shards = (one.origin for one in now.shards if one.origin is not None and not one.origin.is_whole())
        return [*(origin.path.name for origin in shards), *files]

    def unreadable_files(self) -> list[str]:
        """Names of the shards whose vectors are no longer what was opened, so that a search is refused."""
        stored = [one.origin for one in self._state.snapshot.shards if isinstance(one.vectors, StoredVectors)]
        return [file.path.name for file in stored if file is not None and not file.is_unchanged()]

    @property
    def is_held(self) -> bool:
        """Whether all vectors are in memory."""
        return all(isinstance(shard.vectors, Tensor) for shard in self._state.snapshot.shards)

    def refresh(self, *, model: ModelIdentity | None = None) -> bool:
        """Read what others have written since; whether there was anything.

        Args:
            model: What the newest state must belong to; the state before stays if it belongs to another model.
        """
        state = self._state
        newest = self._folder.read(state.snapshot)
        if model is not None:
            newest.model.require(model, f"the index {self.path}")
        # an index that was removed and made again may have as many changes behind it
        is_same = (newest.generation, newest.files) == (state.snapshot.generation, state.snapshot.files)
        if is_same and not state.choice.is_outdated(self.path):
            return False
        self._take(newest)
        return True

    def writing(self) -> AbstractContextManager[None]:
        """Keep all other writers out within the block, for several changes in a row.

        Raises:
            LockedError: If another process or thread is writing.
        """
        return self._folder.writing()

    def add(
        self,
        vectors: Tensor,
        paths: Sequence[str | Path],
        class_names: Sequence[str] | None = None,
        *,
        model: ModelIdentity,
        sources: Sequence[str] | None = None,
        files: Sequence[FileState] | None = None,
        metadata: Table | Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[int, ...]:
        """Add images, replacing the entries of the same paths; the ids of the new entries. All are added or none.

        Images that were left out, and those of deleted classes, stay out: they are an error until that is undone.

        Args:
            vectors: (N, D), normalized here.
            paths: N different ones, kept as they are given.
            class_names: N, "" where the class is unknown; None if no class is known. Any names are welcome.
            model: What made the vectors.
            sources: By what folder or list the images were found.
            files: The state of each file before it was embedded, by which a change is noticed.
            metadata: N rows of texts, numbers, dates and lists of texts by column (`pfml.storage.columns.Table.of`).
        """
        self.model.require(model, f"the index {self.path}")
        names = tuple(str(path) for path in paths)
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"paths must differ, got {twice} twice")
        points = directions(vectors, "vectors").cpu()
        if points.shape[1] != self.dimension:
            raise ValueError(f"vectors must have {self.dimension} dimensions, got {points.shape[1]}")
        if not names and not len(points):
            return ()
        with self.writing():
            self.refresh()
            first, state = self._state.snapshot.next_id, self._state
            classes = ("",) * len(names) if class_names is None else tuple(class_names)
            self._refuse_left_out(names, classes)
            shard = VectorShard(
                points,
                torch.arange(first, first + len(points)),
                names,
                classes,
                ("",) * len(names) if sources is None else tuple(sources),
                *packed([UNKNOWN_FILE] * len(names) if files is None else files),
            )
            replaced = [state.row_of_path[name] for name in names if name in state.row_of_path]
            self._commit([shard], replaced, first + len(points), self._metadata(shard.ids, metadata))
        return tuple(range(first, first + len(points)))

    def set_metadata(self, paths: Sequence[str | Path], metadata: Table | Sequence[Mapping[str, Any]]) -> None:
        """Replace what is known of images, all columns of each; vectors and ids stay. All are changed or none.

        Args:
            paths: Of images of the index, all different.
            metadata: A row for each, as in `add`.
        """
        with self.writing():
            self.refresh()
            state = self._state
            self._require_paths(map(str, paths))
            rows = torch.tensor([state.row_of_path[str(path)] for path in paths], dtype=torch.int64)
            order = rows.argsort()
            table = metadata if isinstance(metadata, Table) else Table.of(metadata)
            if len(table) != len(rows):
                raise ValueError(f"metadata must be {len(rows):,}, a row for each path, got {len(table):,}")
            if len(rows):
                new = MetadataShard(state.ids[rows[order]], table.rows(order))
                self._commit([], [], state.snapshot.next_id, [new])

    def remove(self, *, paths: Sequence[str | Path] = (), class_names: Sequence[str] = ()) -> int:
        """Remove images by path, or all of some classes; the number of images. Unknown paths and classes are errors.

        They return when they are added again; `edit` leaves them out for good.
        """
        with self.writing():
            self.refresh()
            state = self._state
            self._require_paths(map(str, paths))
            rows = {state.row_of_path[str(path)] for path in paths}
            self._require_classes(class_names)
            if class_names:
                rows.update(state.rows_of_classes(class_names).nonzero()[:, 0].tolist())
            if rows:
                self._commit([], sorted(rows), state.snapshot.next_id)
        return len(rows)

    def edit(self, edit: Edit) -> Edit:
        """Edit classes (rename, merge, delete) or images (relabel, tag, leave out), until that is undone.

        Returns the edit with its number.

        Vectors, ids and files stay as they are, and a later update from the same source respects the edit.

        Raises:
            ValueError: If there is no such class or image, or the new name of a class is taken.
        """
        with self.writing():
            self.refresh()
            self._require_paths(edit.paths)
            self._require_classes([name for name in (edit.class_name,) if name])
            counts = self._state.counts
            if edit.kind == "merge":
                self._require_classes([edit.into])
                if edit.into == edit.class_name:
                    raise ValueError(f"a class must be merged into another one, got {edit.into!r} for both")
            elif edit.kind == "rename":
                _require_name(edit.into)
                if edit.into in counts:
                    raise ValueError(
                        f"the new name of a class must be new, got {edit.into!r}, which is a class already: merge "
                        f"{edit.class_name!r} into it"
                    )
            elif edit.kind == "relabel" and edit.into not in counts:
                _require_name(edit.into)
            elif edit.tag:
                _require_name(edit.tag, "a tag")
            images = len(set(edit.paths)) or counts[edit.class_name]
            done = replace(edit, images=images, number=self._state.snapshot.generation + 1)
            self._take(self._folder.edit(self._state.snapshot, self.edits.added(done)))
        return done

    def undo(self, number: int | None = None) -> Edit:
        """Undo an edit, by default the last one; that edit. Entries that were compacted away stay away.

        Raises:
            ValueError: If there is no such edit any more, or a later one about its classes must be undone first.
        """
        with self.writing():
            self.refresh()
            rest, edit = self.edits.undone(number)
            self._take(self._folder.edit(self._state.snapshot, rest))
        return edit

    def missing(self, edit: Edit) -> int:
        """How many images of an edit that was undone do not return, since they were compacted away."""
        state = self._state
        if edit.kind == "leave_out":
            return sum(path not in state.row_of_path for path in edit.paths)
        stored = sum(count for name, count in state.given_counts.items() if state.names[name] == edit.class_name)
        return max(edit.images - stored, 0) if edit.kind == "delete" else 0

    def compact(self, *, grace_seconds: float = GRACE_SECONDS) -> None:
        """Write all entries that count to few new shards. The old ones stay for `grace_seconds`, for readers."""
        with self.writing():
            self.refresh()
            state = self._state
            chunks = state.live.nonzero()[:, 0].split(COMPACTED_ENTRIES)
            shards = (state.shard(rows) for rows in chunks if len(rows))
            described = (MetadataShard(state.ids[rows], state.metadata.table(rows)) for rows in chunks if len(rows))
            said = (shard for shard in described if shard.table.columns)
            self._take(self._folder.rewrite(state.snapshot, shards, said, grace_seconds))

    def build_ivf(
        self, *, precision: str | None = None, if_due: bool = False, track: Track | None = None
    ) -> IvfSettings | None:
        """Build the file of approximate search, in place of the one before; its settings. Writers need not wait.

        Args:
            precision: "float32", "float16", "int8" or "pq4" (product quantization, two bits for a number); None for
                that of the file before, "pq4" if there is none.
            if_due: Build nothing, and return None, unless the file is missing from an index of `IVF_FROM` images,
                is damaged, belongs to other shards, or lacks more than `NEWER_FRACTION` of the rows.
            track: Shows the progress, as track(iterable, description, total).
        """
        self.refresh()
        snapshot = self._state.snapshot
        if if_due and not is_due(self.path, snapshot.files, len(self)):
            return None
        vectors = [shard.vectors for shard in snapshot.shards]
        built = build_ivf(self.path, snapshot.files, vectors, precision=precision, track=track)
        self._take(snapshot)
        return built.settings

    def search(
        self,
        vectors: Tensor,
        k: int = 10,
        *,
        model: ModelIdentity,
        class_names: Sequence[str] | None = None,
        where: str | None = None,
    ) -> list[list[Hit]]:
        """The k nearest images of each query, nearest first; fewer if there are fewer.

        The order is that of float32 products, distances are differences in float64. Equal distances are listed by id.

        Args:
            vectors: (N, D), normalized here.
            k: How many.
            model: What made the vectors.
            class_names: Search these classes only.
            where: Search the images only that pass this filter, such as "price < 20" (`pfml.search.where`).
        """
        state = self._state
        state.snapshot.model.require(model, f"the index {self.path}")
        queries = directions(vectors, "vectors").cpu()
        if queries.shape[1] != self.dimension:
            raise ValueError(f"vectors must have {self.dimension} dimensions, got {queries.shape[1]}")
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        allowed = state.live
        if class_names is not None:
            self._require_classes(class_names)
            allowed = state.rows_of_classes(class_names)
        if where:
            allowed = allowed & state.matching(where)
        k = min(k, num_allowed(allowed))
        if k == 0 or not len(queries):
            return [[] for _ in queries]
        _, rows = state.searcher().nearest(queries, k, allowed)
        return [state.hits(query, found) for query, found in zip(queries, rows.sort(dim=1).values, strict=True)]

    def matching(self, where: str) -> Tensor:
        """The ids of the images that pass a filter (`pfml.search.where`), ascending."""
        state = self._state
        return state.ids[state.live & state.matching(where)]

    def class_spread(self, class_name: str) -> float:
        """The mean distance of an image of a class to the nearest other one of it; NaN for less than two images.

        Of a large class `SPREAD_IMAGES` images stand for all. The result is kept until the index changes.
        """
        return self._state.class_spread(class_name)

    def _require_classes(self, class_names: Sequence[str]) -> None:
        known = self._state.counts
        for name in class_names:
            if name not in known:
                raise ValueError(
                    f"class {name!r} must be in the index {self.path}, and is not" + did_you_mean(name, known)
                )

    def _require_paths(self, paths: Iterable[str]) -> None:
        state = self._state
        for path in paths:
            if path not in state.row_of_path or not state.live[state.row_of_path[path]]:
                there = (entry.path for entry in self.entries())
                raise ValueError(f"{path} must be in the index {self.path}, and is not" + _near(path, there))

    def _refuse_left_out(self, paths: Sequence[str], class_names: Sequence[str]) -> None:
        if len(paths) != len(class_names):
            return  # which the shard refuses
        for path, name in zip(paths, self.edits.classes_of(paths, class_names), strict=True):
            if name is None:
                raise ValueError(f"{path} was left out of the index {self.path}, or its class was: undo that first")

    def _take(self, snapshot: Snapshot) -> None:
        self._state = IndexState(self.path, snapshot, self._asked_backend, before=self._state)

    def _metadata(self, ids: Tensor, metadata: Table | Sequence[Mapping[str, Any]] | None) -> list[MetadataShard]:
        table = metadata if isinstance(metadata, Table) else Table.of(metadata or ())
        return [MetadataShard(ids, table)] if table.columns else []

    def _commit(
        self,
        new: list[VectorShard],
        removed_rows: list[int],
        next_id: int,
        metadata: Sequence[MetadataShard] = (),
    ) -> None:
        state = self._state
        removed = torch.cat([state.snapshot.removed, state.ids[removed_rows]]).sort().values
        counts = state.stored.clone()
        counts[removed_rows] = False
        for shard in metadata:
            counts &= torch.isin(state.ids, shard.ids, invert=True)
            require_kinds(shard.table, state.metadata.kinds(counts), f"the index {self.path}")
        unused = state.metadata.unused(counts) if metadata else ()
        after = self._folder.commit(
            state.snapshot, new, removed=removed, next_id=next_id, metadata=metadata, unused=unused
        )
        self._take(after)
        return_freed_memory()


def _require_name(name: str, what: str = "the name of a class") -> None:
    """Refuse what cannot be read, or told from another name, as the new name of a class, or as a tag."""
    if not name.isprintable() or name != name.strip() or len(name) > LONGEST_NAME:
        raise ValueError(
            f"{what} must be at most {LONGEST_NAME:,} printable characters without spaces around them, got {name!r}"
        )


def _near(path: str, known: Iterable[str]) -> str:
    """A hint at a path of the same file name."""
    same = next((other for other in known if Path(other).name == Path(path).name), None)
    return "" if same is None else f"; did you mean {same!r}?"
