"""A segment: vectors of some images and what is known of these, one safetensors file that never changes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from pfml.storage.file_state import FileState, unpacked
from pfml.storage.files import DamagedFileError, refuse_non_finite, save_tensors, sha256_of

__all__ = ["CheckedFile", "Segment", "SegmentFile", "StoredVectors", "read_segment", "write_segment"]

#: Bytes that are read at once: a tile that stays in the processor's cache while it is compared.
TILE_BYTES = 2**22
#: Most bytes of a description of tensors; safetensors has the same limit.
MOST_HEADER = 100_000_000
#: Tiles that nobody reads into.
_TILES: list[Tensor] = []
TYPES = {"F32": torch.float32, "I64": torch.int64, "U8": torch.uint8}


class _Verdict:
    """Whether a file has a checksum, computed once for each state that the file is found in."""

    def __init__(self, sha256: str, size: int) -> None:
        self.sha256 = sha256
        self.size = size
        self._lock = threading.Lock()
        self._good: tuple[int, ...] | None = None
        self._bad: tuple[int, ...] | None = None

    def is_good(self, found: os.stat_result, digest: Callable[[], str]) -> bool:
        state = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)
        if state == self._good:
            return True
        with self._lock:
            # times are new after a change of rights, or where a backup makes a link: the checksum decides
            if state not in (self._good, self._bad):
                if found.st_size == self.size and digest() == self.sha256:
                    self._good = state
                else:
                    self._bad = state
            return state == self._good


class CheckedFile:
    """A safetensors file that is kept open and was compared with its checksum.

    Args:
        path: Of the file.
        sha256: What it must hash to.
        size: The bytes that it must have.
    """

    def __init__(self, path: Path, sha256: str, size: int) -> None:
        self.path = path
        self.sha256 = sha256
        self.size = size
        descriptor = _opened(path)
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        self._reading = threading.Lock()
        self._opened, self._named = _Verdict(sha256, size), _Verdict(sha256, size)
        self._named.is_good(os.fstat(descriptor), lambda: sha256)  # what is opened here, and compared in the next line
        self.require_unchanged()
        self._tensors = self._described()

    def close(self) -> None:
        """Give the descriptor back, after what is wanted was read."""
        self._close()

    def is_unchanged(self) -> bool:
        """Whether the file that was opened is what it was, wherever it lies now."""
        try:
            self.require_unchanged()
        except DamagedFileError:
            return False
        return True

    def require_unchanged(self) -> None:
        """Raise DamagedFileError if the file is not what it was; what was read before this call is right otherwise."""
        found = os.fstat(self._descriptor)
        if self._opened.is_good(found, self._digest):
            return
        if found.st_size != self.size:
            raise DamagedFileError(
                f"{self.path} must have {self.size:,} bytes, got {found.st_size:,}: it was cut short or replaced"
            )
        raise DamagedFileError(
            f"{self.path} must have sha256 {self.sha256[:12]}..., got another: the file was damaged or changed after "
            f"it was written; restore it from a copy"
        )

    def is_whole(self) -> bool:
        """Whether the file that has this name now is the one that was read, or one like it."""
        try:
            return self._named.is_good(os.stat(self.path), lambda: sha256_of(self.path))
        except OSError:
            return False

    def tensor(self, name: str) -> Tensor:
        """A tensor of the file in memory; KeyError if there is none of that name."""
        stored = self.stored(name)
        return stored.read(0, len(stored))

    def stored(self, name: str) -> StoredVectors:
        """A tensor that stays in the file; KeyError if there is none of that name."""
        dtype, shape, first = self._tensors[name]
        return StoredVectors(self, dtype, shape, first)

    def read_into(self, tensor: Tensor, offset: int) -> None:
        """Fill a contiguous tensor with the bytes from `offset` on."""
        if not tensor.numel():
            return
        left = tensor.numpy().reshape(-1).view("uint8").data
        while len(left):
            count = self._read(left, offset)
            if count == 0:
                size = os.fstat(self._descriptor).st_size
                raise DamagedFileError(
                    f"{self.path} must have {self.size:,} bytes, got {size:,}: it was cut short while it was in use; "
                    f"restore it from a copy"
                )
            left, offset = left[count:], offset + count

    def _read(self, into: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._descriptor, [into], offset)
        with self._reading:  # Windows reads at a position that all threads share
            os.lseek(self._descriptor, offset, os.SEEK_SET)
            found = os.read(self._descriptor, len(into))
        into[: len(found)] = found
        return len(found)

    def _digest(self) -> str:
        digest, offset = hashlib.sha256(), 0
        with _tile() as tile:
            while offset < self.size:
                part = tile[: self.size - offset]
                self.read_into(part, offset)
                digest.update(part.numpy().data)
                offset += len(part)
        return digest.hexdigest()

    def _described(self) -> dict[str, tuple[torch.dtype, tuple[int, ...], int]]:
        """Type, shape and place of each tensor, by the head of a safetensors file."""
        try:
            length = torch.zeros(1, dtype=torch.int64)
            self.read_into(length, 0)
            size = int(length)
            if not 0 < size <= min(self.size - 8, MOST_HEADER):
                raise ValueError(f"a head of {size} bytes")
            text = torch.empty(size, dtype=torch.uint8)
            self.read_into(text, 8)
            head = json.loads(text.numpy().tobytes())
            return {name: self._place(one, 8 + size) for name, one in head.items() if name != "__metadata__"}
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise DamagedFileError(
                f"{self.path} must be a whole safetensors file, got one that cannot be read: {error!r}"
            ) from None

    def _place(self, described: dict[str, Any], data: int) -> tuple[torch.dtype, tuple[int, ...], int]:
        dtype, shape = TYPES[described["dtype"]], tuple(described["shape"])
        begin, end = described["data_offsets"]
        if not shape or not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)):
            raise ValueError(f"shape {shape} at {begin} to {end}")
        numel = 1
        for number in shape:
            numel *= number
        if end - begin != numel * dtype.itemsize or data + end > self.size:
            raise ValueError(f"shape {shape} at {begin} to {end}")
        return dtype, shape, data + begin


@dataclass(frozen=True, eq=False)
class StoredVectors:
    """A tensor that lies in a file; its rows are read when they are asked for.

    Args:
        file: Where they lie.
        dtype: Of the numbers.
        shape: (n, ...).
        first: The byte of the first row.
    """

    file: CheckedFile
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.dtype.itemsize * int(torch.Size(self.shape[1:]).numel())

    def __getitem__(self, rows: Tensor) -> Tensor:
        """The rows at `rows`, int64, in that order."""
        found = torch.empty(len(rows), *self.shape[1:], dtype=self.dtype)
        if not len(rows):
            return found
        low, high = int(rows.min()), int(rows.max()) + 1
        if high - low <= 4 * len(rows):  # most of what lies between them
            return self.read(low, high)[rows - low]
        for row, place in zip(found, rows.tolist(), strict=True):
            self.file.read_into(row, self.first + place * self.row_bytes)
        self.file.require_unchanged()
        return found

    def read(self, start: int, stop: int) -> Tensor:
        """The rows from `start` to `stop`."""
        found = torch.empty(stop - start, *self.shape[1:], dtype=self.dtype)
        self.file.read_into(found, self.first + start * self.row_bytes)
        self.file.require_unchanged()
        return found

    def split(self, height: int) -> Iterator[Tensor]:
        """All rows, at most `height` at a time; each part is overwritten by the next one."""
        height = max(min(height, TILE_BYTES // max(self.row_bytes, 1)), 1)
        with _tile(height * self.row_bytes) as tile:
            for start in range(0, len(self), height):
                rows = min(height, len(self) - start)
                part = tile[: rows * self.row_bytes].view(self.dtype).reshape(rows, *self.shape[1:])
                self.file.read_into(part, self.first + start * self.row_bytes)
                yield part
        self.file.require_unchanged()


@contextmanager
def _tile(size: int = TILE_BYTES) -> Iterator[Tensor]:
    """Bytes to read into, within the block, used again afterwards.

    Tiles that come and go between the paths of an index, which stay, would leave the heap full of holes.
    """
    try:
        tile = _TILES.pop()
    except IndexError:
        tile = torch.empty(TILE_BYTES, dtype=torch.uint8)
    if size > len(tile):  # a single row is larger
        tile = torch.empty(size, dtype=torch.uint8)
    try:
        yield tile
    finally:
        _TILES.append(tile)


def _opened(path: Path) -> int:
    """A descriptor of a file; where a process may have more of them than it has asked for so far, it asks."""
    # a pipe of that name must not be waited for
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    with suppress(ImportError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise OSError(
            f"{path} must be opened beside the other files of the index, but this process may have no more: raise the "
            f"limit (ulimit -n), then pfml index --compact makes fewer of them"
        ) from None


#: Bytes up to which the vectors of a segment are held in memory whatever was asked for.
SMALL_BYTES = 2**18
#: Rows that are looked through at once.
ROWS_AT_ONCE = 8192


@dataclass(frozen=True, eq=False)
class Segment:
    """Entries of an index, row by row.

    Args:
        vectors: (n, D) float32 of unit length.
        ids: (n,) int64, ascending.
        paths: Of the images.
        class_names: "" where the class is unknown.
        sources: The folder or list that each image was found by, "" for none.
        states: (n, 2) int64, size and time of each file when it was embedded.
        digests: (n, 32) uint8, the SHA-256 of each file.
        origin: The file that it was read from, None for a segment that is to be written.
    """

    vectors: Tensor | StoredVectors
    ids: Tensor
    paths: tuple[str, ...]
    class_names: tuple[str, ...]
    sources: tuple[str, ...]
    states: Tensor
    digests: Tensor
    origin: CheckedFile | None = None

    def __post_init__(self) -> None:
        columns: dict[str, Any] = {
            "ids": self.ids,
            "paths": self.paths,
            "class_names": self.class_names,
            "sources": self.sources,
            "states of files": self.states,
            "digests": self.digests,
        }
        for name, column in columns.items():
            if len(column) != len(self.vectors):
                raise ValueError(f"{name} must be {len(self.vectors)}, one per vector, got {len(column)}")

    def __len__(self) -> int:
        return len(self.vectors)

    def file(self, row: int) -> FileState:
        """The state of the file of a row."""
        return unpacked(self.states, self.digests, row)

    def rows(self, chosen: Tensor) -> Segment:
        """The entries at `chosen`, in that order."""
        listed = chosen.tolist()
        paths, class_names, sources = (
            tuple(column[k] for k in listed) for column in (self.paths, self.class_names, self.sources)
        )
        tensors = (column[chosen] for column in (self.vectors, self.ids, self.states, self.digests))
        vectors, ids, states, digests = tensors
        return Segment(vectors, ids, paths, class_names, sources, states, digests)

    @staticmethod
    def joined(parts: Sequence[Segment]) -> Segment:
        """All entries of all parts (at least one), in their order."""
        return Segment(
            torch.cat([part.vectors[torch.arange(len(part))] for part in parts]),
            torch.cat([part.ids for part in parts]),
            tuple(path for part in parts for path in part.paths),
            tuple(name for part in parts for name in part.class_names),
            tuple(source for part in parts for source in part.sources),
            torch.cat([part.states for part in parts]),
            torch.cat([part.digests for part in parts]),
        )


@dataclass(frozen=True)
class SegmentFile:
    """How a manifest names a segment."""

    file: str
    sha256: str
    bytes: int
    entries: int

    def __post_init__(self) -> None:
        for name, kind in (("file", str), ("sha256", str), ("bytes", int), ("entries", int)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} of a segment must be {kind.__name__}, got {getattr(self, name)!r}")


def write_segment(folder: Path, segment: Segment) -> SegmentFile:
    """Write a segment to a file of a fresh name; it belongs to the index when a manifest names it."""
    path = folder / f"segment-{uuid4().hex[:12]}.safetensors"
    # escapes, so that names of files that are no valid Unicode come back as they are
    text = json.dumps({"paths": segment.paths, "class_names": segment.class_names, "sources": segment.sources})
    assert isinstance(segment.vectors, Tensor)
    tensors = {
        "vectors": segment.vectors,
        "ids": segment.ids,
        "states": segment.states,
        "digests": segment.digests,
        "text": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8),
    }
    sha256 = save_tensors(path, tensors)
    return SegmentFile(path.name, sha256, path.stat().st_size, len(segment))


def read_segment(folder: Path, described: SegmentFile, dimension: int, *, hold: bool = False) -> Segment:
    """The segment of a file, after comparing its size and checksum.

    Args:
        folder: Of the index.
        described: The file.
        dimension: D.
        hold: Whether the vectors are read into memory; else they are read when they are searched, but for a segment of
            few vectors, which is not worth a file that is kept open.
    """
    path = folder / Path(described.file).name
    file = CheckedFile(path, described.sha256, described.bytes)
    hold = hold or described.bytes <= SMALL_BYTES
    try:
        text = json.loads(file.tensor("text").numpy().tobytes())
        known: dict[str, str] = {}  # one string for each class and source instead of one for each image
        class_names = tuple(known.setdefault(name, name) for name in text["class_names"])
        sources = tuple(known.setdefault(name, name) for name in text["sources"])
        segment = Segment(
            file.tensor("vectors") if hold else file.stored("vectors"),
            file.tensor("ids"),
            tuple(text["paths"]),
            class_names,
            sources,
            file.tensor("states"),
            file.tensor("digests"),
            file,
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, DamagedFileError):
            raise
        raise DamagedFileError(f"{path} must hold a segment of an index, got {error!r}") from None
    if segment.vectors.shape != (described.entries, dimension):
        shape = tuple(segment.vectors.shape)
        raise DamagedFileError(f"{path} must hold vectors of shape ({described.entries}, {dimension}), got {shape}")
    # Least and greatest need no memory, and are NaN if anything is. Masks as large as the vectors, made for segment
    # after segment between the paths that stay, would leave the heap as full of holes as the index is large.
    for part in segment.vectors.split(ROWS_AT_ONCE) if len(segment) else ():
        if not torch.isfinite(torch.stack(part.aminmax())).all():
            refuse_non_finite({"vectors": part}, path)
    if hold:
        file.close()
    return segment
