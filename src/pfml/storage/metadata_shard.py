"""A metadata shard: what is known of some entries of an index, in one safetensors file that never changes.

The tensors are `ids`, (n,) int64, ascending, and those of a `pfml.storage.columns.Table`. Where several shards of an
index speak of one entry, the last one counts, with all of its columns. So metadata change without a vector being
written again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from pfml.storage.columns import Table
from pfml.storage.files import DamagedFileError, open_regular, save_tensors, sha256_of

__all__ = ["MetadataEntry", "MetadataShard", "read_metadata", "write_metadata"]


@dataclass(frozen=True)
class MetadataEntry:
    """How an index names a metadata shard.

    Args:
        file: Name of the file.
        sha256: Of the file.
        bytes: Of the file.
        entries: Entries that it speaks of.
    """

    file: str
    sha256: str
    bytes: int
    entries: int

    def __post_init__(self) -> None:
        for name, kind in (("file", str), ("sha256", str), ("bytes", int), ("entries", int)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} of a metadata shard must be {kind.__name__}, got {getattr(self, name)!r}")


@dataclass(frozen=True, eq=False)
class MetadataShard:
    """What is known of some entries, in memory.

    Args:
        ids: (n,) int64, ascending.
        table: n rows.
    """

    ids: Tensor
    table: Table
    _whole: dict[tuple[int, ...], bool] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.table) or bool((self.ids.diff() <= 0).any()):
            raise ValueError(f"ids must be {len(self.table):,}, ascending, one per row, got {len(self.ids):,}")

    def is_whole(self, path: Path, entry: MetadataEntry) -> bool:
        """Whether the file is still what was read; it is hashed again whenever its state is new."""
        try:
            found = path.stat()
            state = found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino
            if state not in self._whole:
                self._whole[state] = sha256_of(path) == entry.sha256
        except OSError:
            return False
        return self._whole[state]


def write_metadata(path: Path, shard: MetadataShard) -> MetadataEntry:
    """Write a metadata shard as `write_atomically` does."""
    sha256 = save_tensors(path, {"ids": shard.ids, **shard.table.tensors()})
    return MetadataEntry(path.name, sha256, path.stat().st_size, len(shard.ids))


def read_metadata(path: Path, entry: MetadataEntry) -> MetadataShard:
    """The metadata shard in a file, which must have the checksum of `entry`; no mapping of the file is left."""
    with open_regular(path) as file:
        content = file.read(entry.bytes + 1)
    found = hashlib.sha256(content).hexdigest()
    if found != entry.sha256:
        raise DamagedFileError(
            f"{path} must have sha256 {entry.sha256[:12]}..., got {found[:12]}...: it was damaged or changed after it "
            f"was written; restore it from a copy"
        )
    try:
        tensors = load(content)
        ids = tensors["ids"]
        if ids.dtype != torch.int64 or len(ids) != entry.entries:
            raise ValueError(f"{len(ids)} ids of type {ids.dtype}")
        return MetadataShard(ids, Table.read(tensors, len(ids)))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(f"{path} must hold a metadata shard, got {error!r}") from None
