"""An index on disk: shards that never change, and a manifest that says which of them count.

index.json               the manifest: model, shards with their checksums, edits (`pfml.search.edits`); sealed
index-*.safetensors      the ids of removed entries, named by the manifest (`pfml.storage.sealed_tensors`)
shard-*.safetensors      vectors, paths, classes; see `pfml.storage.shard`
metadata-*.safetensors   other columns of what is known of entries; see `pfml.storage.metadata_shard`
lock                     held by the one writer

A change writes new files first and the manifest last, by a rename. So an interruption at any moment leaves the state
before, and a reader, who reads the manifest and then what it names, has one whole state or the other. Shards that a
manifest no longer names stay for `GRACE_SECONDS`, for readers that hold the one before.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from pfml.search.edits import Edits
from pfml.search.identity import ModelIdentity
from pfml.storage.files import DamagedFileError, read_while_replaced, remove_partials
from pfml.storage.lock import WriterLock
from pfml.storage.manifest import Format
from pfml.storage.metadata_shard import MetadataEntry, MetadataShard, read_metadata, write_metadata
from pfml.storage.sealed_tensors import copy_file, copy_sealed_tensors, read_sealed_tensors, write_sealed_tensors
from pfml.storage.shard import ShardEntry, VectorShard, read_shard, write_shard

__all__ = ["GRACE_SECONDS", "INDEX", "IndexFolder", "Snapshot", "read_edits"]

#: How long a replaced shard stays on disk.
GRACE_SECONDS = 600.0
INDEX = Format("image index", 2, "make the index again with pfml index")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One whole state of an index.

    Args:
        generation: Counts the changes.
        model: What made the vectors.
        dimension: D.
        next_id: Ids from here on have never been given.
        files: The shards' files.
        shards: Their contents.
        removed: (n,) int64, ids of entries that no longer count, ascending.
        retired: File name -> time since when no shard is there of that name.
        edits: What a person has changed about classes and images.
        metadata_files: The files of the metadata shards.
        metadata: Their contents.
    """

    generation: int
    model: ModelIdentity
    dimension: int
    next_id: int
    files: tuple[ShardEntry, ...]
    shards: tuple[VectorShard, ...]
    removed: Tensor
    retired: dict[str, float]
    edits: Edits
    metadata_files: tuple[MetadataEntry, ...] = ()
    metadata: tuple[MetadataShard, ...] = ()

    def file_names(self) -> set[str]:
        """The names of all shards' files."""
        return {file.file for file in self.files} | {file.file for file in self.metadata_files}

    def stored(self) -> Tensor:
        """(all rows,) bool: which entries were not removed, shard after shard."""
        ids = [shard.ids for shard in self.shards]
        return torch.isin(torch.cat([torch.empty(0, dtype=torch.int64), *ids]), self.removed, invert=True)


class IndexFolder:
    """The files of an index.

    Args:
        path: The folder.
        hold_bytes: Size of all shards up to which their vectors are read into memory.
    """

    def __init__(self, path: Path, hold_bytes: int = 0) -> None:
        self.path = path
        self.hold_bytes = hold_bytes
        self.manifest = path / "index.json"
        self._lock = WriterLock(path)

    def create(self, model: ModelIdentity, dimension: int) -> Snapshot:
        """An empty index in a folder that has none."""
        if dimension < 1:
            raise ValueError(f"dimension must be at least 1, got {dimension}")
        self.path.mkdir(parents=True, exist_ok=True)
        with self._lock.held():
            if self.manifest.exists():
                raise FileExistsError(f"{self.path} already holds an index: open it, or choose another folder")
            empty = Snapshot(0, model, dimension, 0, (), (), torch.empty(0, dtype=torch.int64), {}, Edits())
            self._write(empty)
        return empty

    def read(self, known: Snapshot | None = None) -> Snapshot:
        """The newest state; what `known` has of it is taken from there. Every other byte is checked."""
        if not self.manifest.is_file():
            raise FileNotFoundError(
                f"{self.path} must be an index, but there is no index.json; make it with pfml index"
            )
        return read_while_replaced(lambda: self._read(known), self.manifest.read_bytes, self.path)

    def copy(self, target: Path) -> None:
        """Copy one whole state to the folder `target`, whoever writes meanwhile, without the files that none needs."""
        content = copy_sealed_tensors(self.path, "index", target, INDEX)
        for described in _named(content):
            copy_file(self.path / Path(described["file"]).name, target)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The right to write, within the block; may be nested."""
        if not self.manifest.is_file():
            raise FileNotFoundError(
                f"{self.path} must be an index, but there is no index.json; make it with pfml index"
            )
        with self._lock.held() as outermost:
            if outermost:
                self._remove_unnamed()
            yield

    def commit(
        self,
        before: Snapshot,
        new: Iterable[VectorShard],
        *,
        removed: Tensor,
        next_id: int,
        metadata: Iterable[MetadataShard] = (),
        unused: Collection[int] = (),
    ) -> Snapshot:
        """The state with new shards and other removed ids, written; the caller holds the lock.

        Args:
            before: The state before.
            new: Shards to add.
            removed: See `Snapshot`.
            next_id: See `Snapshot`.
            metadata: Metadata shards to add.
            unused: Numbers of the metadata shards that no longer count.
        """
        files = tuple(self._write_shard(before, shard) for shard in new)
        kept = tuple(file for number, file in enumerate(before.metadata_files) if number not in unused)
        described = kept + tuple(map(self._write_metadata, metadata))
        after = replace(before, files=before.files + files, metadata_files=described, removed=removed, next_id=next_id)
        return self._publish(before, after, GRACE_SECONDS)

    def rewrite(
        self, before: Snapshot, shards: Iterable[VectorShard], metadata: Iterable[MetadataShard], grace: float
    ) -> Snapshot:
        """The state of these shards alone, nothing removed; those before are retired."""
        files = tuple(self._write_shard(before, shard) for shard in shards)
        described = tuple(map(self._write_metadata, metadata))
        after = replace(before, files=files, metadata_files=described, removed=torch.empty(0, dtype=torch.int64))
        return self._publish(before, after, grace)

    def edit(self, before: Snapshot, edits: Edits) -> Snapshot:
        """The state with these edits, written; the caller holds the lock."""
        return self._publish(before, replace(before, edits=edits), GRACE_SECONDS)

    def _write_shard(self, snapshot: Snapshot, shard: VectorShard) -> ShardEntry:
        """Write a shard to a file of a fresh name; it belongs to the index when the manifest names it."""
        path = self.path / f"shard-{uuid4().hex[:12]}.safetensors"
        return write_shard(path, shard, model_digest=snapshot.model.digest)

    def _write_metadata(self, shard: MetadataShard) -> MetadataEntry:
        return write_metadata(self.path / f"metadata-{uuid4().hex[:12]}.safetensors", shard)

    def _read_shard(self, entry: ShardEntry, dimension: int, hold: bool) -> VectorShard:
        path = self.path / Path(entry.file).name
        shard = read_shard(path, dimension=dimension, entry=entry, hold=hold)
        if len(shard) != entry.entries:
            raise DamagedFileError(f"{path} must hold {entry.entries:,} vectors, got {len(shard):,}")
        return shard

    def _publish(self, before: Snapshot, after: Snapshot, grace: float) -> Snapshot:
        """Make `after` the newest state; shards out of use for `grace` seconds are removed."""
        now = time.time()
        named, known = after.file_names(), before.file_names()
        retired = {**before.retired, **dict.fromkeys(known - named, now)}
        # a clock that was set back must not keep files forever
        due = {name for name, since in retired.items() if not now - grace < since <= now}
        retired = {name: since for name, since in retired.items() if name not in due}
        self._write(replace(after, generation=before.generation + 1, retired=retired))
        for name in due:
            (self.path / Path(name).name).unlink(missing_ok=True)
        return self.read(before)  # so that new vectors, too, lie where those before them do

    def _write(self, snapshot: Snapshot) -> None:
        content = {
            "generation": snapshot.generation,
            "model": asdict(snapshot.model),
            "dimension": snapshot.dimension,
            "next_id": snapshot.next_id,
            "shards": [asdict(file) for file in snapshot.files],
            "retired": snapshot.retired,
            "edits": snapshot.edits.content(),
        }
        if snapshot.metadata_files:
            content["metadata"] = [asdict(file) for file in snapshot.metadata_files]
        write_sealed_tensors(self.path, "index", {"removed": snapshot.removed}, content, INDEX)

    def _read(self, known: Snapshot | None) -> Snapshot:
        content, tensors = read_sealed_tensors(self.path, "index", INDEX)
        try:
            files = tuple(ShardEntry(**described) for described in content["shards"])
            model, dimension = ModelIdentity(**content["model"]), int(content["dimension"])
            generation, next_id = int(content["generation"]), int(content["next_id"])
            retired = {str(name): float(since) for name, since in content["retired"].items()}
            removed = tensors["removed"].clone()  # what is loaded is mapped: it would follow the file
            edits = _edits(content)
            # an index of before there were metadata has none
            metadata_files = tuple(MetadataEntry(**described) for described in content.get("metadata", ()))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedFileError(f"{self.manifest} must describe an index, got {error!r}") from None
        have = {} if known is None else dict(zip(known.files, known.shards, strict=True))
        said = {} if known is None else dict(zip(known.metadata_files, known.metadata, strict=True))
        hold = sum(file.bytes for file in files) <= self.hold_bytes
        shards = []
        for file in files:
            shards.append(have[file] if file in have else self._read_shard(file, dimension, hold))
        metadata = tuple(
            said[file] if file in said else read_metadata(self.path / Path(file.file).name, file)
            for file in metadata_files
        )
        return Snapshot(
            generation,
            model,
            dimension,
            next_id,
            files,
            tuple(shards),
            removed,
            retired,
            edits,
            metadata_files,
            metadata,
        )

    def _remove_unnamed(self) -> None:
        """Remove shards that an interrupted writer left before any manifest named them."""
        content, _ = read_sealed_tensors(self.path, "index", INDEX)
        named = {described["file"] for described in _named(content)} | set(content["retired"])
        for kind in ("shard-*", "metadata-*"):
            for path in self.path.glob(f"{kind}.safetensors"):
                if path.name not in named:
                    path.unlink(missing_ok=True)
            remove_partials(self.path, kind)


def read_edits(folder: Path) -> Edits:
    """The edits of the index in `folder`, whose shards are not read; none if there is no index."""
    if not (folder / "index.json").is_file():
        return Edits()
    content, _ = read_sealed_tensors(folder, "index", INDEX)
    try:
        return _edits(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFileError(f"{folder / 'index.json'} must describe an index, got {error!r}") from None


def _named(content: dict[str, Any]) -> list[dict[str, Any]]:
    """How a manifest names its shards, of both kinds."""
    return [*content["shards"], *content.get("metadata", ())]


def _edits(content: dict[str, Any]) -> Edits:
    return Edits.read(content.get("edits", []))  # an index of before there were edits has none
