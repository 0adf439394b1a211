"""A shard: the vectors of some images and what is known of these, in one safetensors file that never changes.

An index (`pfml.search.index_folder`) and an embedded collection (`pfml.storage.embeddings`) are folders of shards. The
tensors of a shard are

vectors    (n, D) float32 or float16
ids        (n,) int64, ascending
states     (n, 2) int64, size and time of change (nanoseconds) of each file when it was embedded
digests    (n, 32) uint8, the SHA-256 of each file
columns    (bytes,) uint8, JSON: paths, class_names, sources, and what could not be read ([path, reason])

and its metadata hold a sealed manifest (`pfml.storage.manifest`) with the SHA-256 of each tensor. So a shard proves
itself, tensor by tensor: columns can be read and checked without the vectors. Other programs read it in two lines:

    tensors = safetensors.numpy.load_file("shard-....safetensors")
    vectors, paths = tensors["vectors"], json.loads(tensors["columns"].tobytes())["paths"]

It is read by position (`pread`), and mapped for approximate search only (`StoredVectors.gathered`): a file that is cut
short under a mapping kills the process, and one that is overwritten changes what was read before. safetensors itself
only maps, which is why the header is parsed here.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import threading
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from pfml.storage.file_state import FileState, unpacked
from pfml.storage.files import DamagedFileError, refuse_non_finite, save_tensors
from pfml.storage.manifest import Format, digest_of, parse_manifest, sealed

__all__ = [
    "DTYPES",
    "ShardEntry",
    "ShardFile",
    "StoredVectors",
    "VectorShard",
    "read_columns",
    "read_shard",
    "write_shard",
]

SHARD = Format("vector shard", 1, "embed or index the images again")
#: Where the manifest stands in a file's metadata.
METADATA = "pfml"
#: How vectors may be stored.
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "float16": torch.float16}
#: Types as safetensors names them.
TYPES = {"F32": torch.float32, "F16": torch.float16, "I64": torch.int64, "U8": torch.uint8}
#: Most bytes of a header; safetensors has the same limit.
MOST_HEADER = 100_000_000
#: Bytes that are read at once: a tile that stays in the processor's cache while it is compared.
TILE_BYTES = 2**22
#: Bytes up to which the vectors of a shard are held in memory whatever was asked for.
SMALL_BYTES = 2**18
#: Tiles that nobody reads into.
_TILES: list[Tensor] = []


@dataclass(frozen=True, eq=False)
class VectorShard:
    """Images row by row.

    Args:
        vectors: (n, D).
        ids: (n,) int64, ascending.
        paths: Of the images.
        class_names: "" where the class is unknown.
        sources: The folder or list that each image was found by, "" for none.
        states: (n, 2) int64, size and time of each file when it was embedded.
        digests: (n, 32) uint8, the SHA-256 of each file.
        unreadable: Paths of images that could not be read, and why.
        origin: The file that it was read from, None for a shard that is to be written.
    """

    vectors: Tensor | StoredVectors
    ids: Tensor
    paths: tuple[str, ...]
    class_names: tuple[str, ...]
    sources: tuple[str, ...]
    states: Tensor
    digests: Tensor
    unreadable: tuple[tuple[str, str], ...] = ()
    origin: ShardFile | None = None

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

    def mentioned(self) -> tuple[str, ...]:
        """All paths of which the shard says something."""
        return (*self.paths, *(path for path, _ in self.unreadable))

    def rows(self, chosen: Tensor) -> VectorShard:
        """The images at `chosen`, in that order, without those that could not be read."""
        listed = chosen.tolist()
        paths, class_names, sources = (
            tuple(column[k] for k in listed) for column in (self.paths, self.class_names, self.sources)
        )
        tensors = (column[chosen] for column in (self.vectors, self.ids, self.states, self.digests))
        vectors, ids, states, digests = tensors
        return VectorShard(vectors, ids, paths, class_names, sources, states, digests)

    @staticmethod
    def joined(shards: Sequence[VectorShard]) -> VectorShard:
        """All images of all shards (at least one), in their order."""
        return VectorShard(
            torch.cat([shard.vectors[torch.arange(len(shard))] for shard in shards]),
            torch.cat([shard.ids for shard in shards]),
            tuple(path for shard in shards for path in shard.paths),
            tuple(name for shard in shards for name in shard.class_names),
            tuple(source for shard in shards for source in shard.sources),
            torch.cat([shard.states for shard in shards]),
            torch.cat([shard.digests for shard in shards]),
        )


@dataclass(frozen=True)
class ShardEntry:
    """How an index names a shard.

    Args:
        file: Name of the file.
        seal: Checksum of what its manifest holds: the checksums of the tensors.
        bytes: Of the file.
        entries: Vectors in it.
    """

    file: str
    seal: str
    bytes: int
    entries: int

    def __post_init__(self) -> None:
        for name, kind in (("file", str), ("seal", str), ("bytes", int), ("entries", int)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} of a shard must be {kind.__name__}, got {getattr(self, name)!r}")


def write_shard(path: Path, shard: VectorShard, *, model_digest: str) -> ShardEntry:
    """Write a shard as `write_atomically` does; equal shards give equal bytes."""
    columns: dict[str, Any] = {"paths": shard.paths}
    # what no image has is left out
    columns |= {name: column for name in ("class_names", "sources") if any(column := getattr(shard, name))}
    columns |= {"unreadable": shard.unreadable} if shard.unreadable else {}
    assert isinstance(shard.vectors, Tensor)
    tensors = {
        "vectors": shard.vectors.detach().cpu().contiguous(),
        "ids": shard.ids,
        "states": shard.states,
        "digests": shard.digests,
        # escapes, so that names of files that are no valid Unicode come back as they are
        "columns": torch.frombuffer(bytearray(json.dumps(columns).encode()), dtype=torch.uint8),
    }
    described = {name: _described(tensor) for name, tensor in tensors.items()}
    content = {"model_digest": model_digest, "tensors": described}
    save_tensors(path, tensors, {METADATA: json.dumps(sealed(content, SHARD))}, digest=False)
    return ShardEntry(path.name, digest_of(content), path.stat().st_size, len(shard))


def read_shard(
    path: Path, *, dimension: int, dtype: str = "float32", entry: ShardEntry | None = None, hold: bool = False
) -> VectorShard:
    """The shard in a file, all of which is compared with its checksums.

    Args:
        path: The file.
        dimension: D.
        dtype: A key of `DTYPES`.
        entry: What an index says of the file.
        hold: Whether the vectors are read into memory; else they are read when they are used, but for a shard of few
            vectors, which is not worth a file that is kept open.
    """
    file = ShardFile(path, entry)
    file.require_unchanged()
    shard = _shard(file, dimension, dtype)
    file.require_finite("vectors")
    if hold or file.size <= SMALL_BYTES:
        assert isinstance(shard.vectors, StoredVectors)
        shard = replace(shard, vectors=shard.vectors.read(0, len(shard)))
        file.close()
    return shard


def read_columns(path: Path, *, dimension: int, dtype: str) -> VectorShard:
    """The shard in a file, all of which but the vectors is compared with its checksums; they are when they are used."""
    file = ShardFile(path)
    file.require_unchanged(("ids", "states", "digests", "columns"))
    return _shard(file, dimension, dtype)


class ShardFile:
    """A shard's file that is kept open, and is compared with its checksums again whenever it has changed.

    Args:
        path: Of the file.
        entry: What an index says of it.
        good: Which tensors were compared before, and in what state of the file; new ones are added.
    """

    def __init__(
        self, path: Path, entry: ShardEntry | None = None, good: dict[str, tuple[int, ...]] | None = None
    ) -> None:
        self.path = path
        self._descriptor = _opened(path)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._reading, self._checking = threading.Lock(), threading.Lock()
        self._good = {} if good is None else good
        self._bad: tuple[int, ...] | None = None
        self._non_finite: set[str] = set()  # tensors with NaN or Inf
        self._named: tuple[int, ...] | None = None  # state of the file of this name when it was found whole
        self._mapped: dict[int, numpy.ndarray[Any, Any]] = {}
        self.size = os.fstat(self._descriptor).st_size
        if entry is not None and self.size != entry.bytes:
            raise DamagedFileError(
                f"{path} must have {entry.bytes:,} bytes, got {self.size:,}: it was cut short or replaced"
            )
        self._header, self.manifest, self._layout = self._read_header()
        self.seal = digest_of(self.manifest)
        if entry is not None and self.seal != entry.seal:
            raise DamagedFileError(
                f"{path} must have the checksum {entry.seal[:12]}..., got {self.seal[:12]}...: it was replaced by "
                f"another shard; restore it from a copy"
            )

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

    def require_unchanged(self, names: Collection[str] | None = None) -> None:
        """Raise DamagedFileError unless tensors are what was written; else what was read before this call is right.

        Args:
            names: Of the tensors; None for the whole file.
        """
        found = os.fstat(self._descriptor)
        state = _state(found)
        names = self._layout.keys() if names is None else names
        if all(self._good.get(name) == state for name in names):
            return
        with self._checking:
            if found.st_size != self.size:
                raise DamagedFileError(
                    f"{self.path} must have {self.size:,} bytes, got {found.st_size:,}: it was cut short or replaced"
                )
            # times are new after a change of rights, or where a backup makes a link: the checksums decide
            for name in names:
                if self._good.get(name) != state:
                    if state == self._bad or not self._is_good(name):
                        self._bad = state
                        raise DamagedFileError(
                            f"{self.path} does not match its checksum of the {name}: it was damaged or changed after "
                            f"it was written; restore it from a copy, or write it again"
                        )
                    self._good[name] = state

    def require_finite(self, name: str) -> None:
        """Raise DamagedFileError if a tensor that was compared with its checksum has NaN or Inf."""
        if name in self._non_finite:
            refuse_non_finite({name: self.tensor(name)}, self.path)

    def is_whole(self) -> bool:
        """Whether the file that has this name now is the one that was read, or one like it."""
        try:
            state = _state(os.stat(self.path))
            if state in (self._named, *self._good.values()):
                return True
            other = ShardFile(self.path)
            try:
                if other.seal != self.seal or not other.is_unchanged():
                    return False
            finally:
                other.close()
        except (OSError, DamagedFileError):
            return False
        self._named = state
        return True

    def tensor(self, name: str) -> Tensor:
        """A tensor of the file in memory; KeyError if there is none of that name."""
        stored = self.stored(name)
        return stored.read(0, len(stored))

    def stored(self, name: str) -> StoredVectors:
        """A tensor that stays in the file; KeyError if there is none of that name."""
        dtype, shape, first = self._layout[name]
        return StoredVectors(self, name, dtype, shape, first)

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

    def read_rows(self, tensor: Tensor, offsets: Sequence[int]) -> None:
        """Fill each row of a contiguous tensor with the bytes from an offset on."""
        size = tensor.numel() // max(len(offsets), 1) * tensor.itemsize
        every = tensor.numpy().reshape(-1).view("uint8").data
        for number, offset in enumerate(offsets):
            if self._read(every[number * size : (number + 1) * size], offset) != size:
                self.read_into(tensor[number], offset)  # the rest, or what is wrong

    def mapped(self, first: int, dtype: torch.dtype, shape: tuple[int, ...]) -> numpy.ndarray[Any, Any]:
        """A tensor in the pages of the file, which all processes share; made once. By NumPy, which can be read-only."""
        if first not in self._mapped:
            opened = mmap.mmap(self._descriptor, self.size, access=mmap.ACCESS_READ)
            kind = torch.empty(0, dtype=dtype).numpy().dtype
            self._mapped[first] = numpy.ndarray(shape, kind, opened, first)
        return self._mapped[first]

    def _read(self, into: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._descriptor, [into], offset)
        with self._reading:  # Windows reads at a position that all threads share
            os.lseek(self._descriptor, offset, os.SEEK_SET)
            found = os.read(self._descriptor, len(into))
        into[: len(found)] = found
        return len(found)

    def _is_good(self, name: str) -> bool:
        """Whether the header and a tensor are what was written."""
        if self._read_bytes(0, len(self._header)) != self._header:
            return False
        dtype, shape, offset = self._layout[name]
        left, digest = dtype.itemsize * torch.Size(shape).numel(), hashlib.sha256()
        with _tile() as tile:
            while left:
                some = tile[: min(left, len(tile))]
                self.read_into(some, offset)
                digest.update(some.numpy().data)
                # Least and greatest need no memory, and are NaN if anything is.
                if dtype.is_floating_point and not torch.stack(some.view(dtype).aminmax()).isfinite().all():
                    self._non_finite.add(name)
                offset, left = offset + len(some), left - len(some)
        return digest.hexdigest() == self.manifest["tensors"][name]["sha256"]

    def _read_bytes(self, offset: int, count: int) -> bytes:
        found = torch.empty(count, dtype=torch.uint8)
        self.read_into(found, offset)
        return found.numpy().tobytes()

    def _read_header(self) -> tuple[bytes, dict[str, Any], dict[str, tuple[torch.dtype, tuple[int, ...], int]]]:
        """The bytes before the tensors, the manifest in them, and type, shape and offset of each tensor."""
        try:
            length = int.from_bytes(self._read_bytes(0, min(self.size, 8)), "little")
            if not 0 < length <= min(self.size - 8, MOST_HEADER):
                raise ValueError(f"a header of {length} bytes")
            text = self._read_bytes(0, 8 + length)
            header = json.loads(text[8:])
            manifest = parse_manifest(header.pop("__metadata__")[METADATA].encode(), self.path, SHARD)
            layout = {name: self._tensor_layout(one, 8 + length) for name, one in header.items()}
            found = {name: (dtype, list(shape)) for name, (dtype, shape, _) in layout.items()}
            described = {name: (TYPES[one["dtype"]], one["shape"]) for name, one in manifest["tensors"].items()}
            if found != described:
                raise ValueError(f"tensors {found}, and not {described}")
            end = max(first + dtype.itemsize * torch.Size(shape).numel() for dtype, shape, first in layout.values())
            if end != self.size:
                raise ValueError(f"{self.size:,} bytes, and not {end:,}")
        except DamagedFileError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise DamagedFileError(
                f"{self.path} must be a whole vector shard, got one that cannot be read: {error!r}"
            ) from None
        return text, manifest, layout

    def _tensor_layout(self, described: dict[str, Any], data: int) -> tuple[torch.dtype, tuple[int, ...], int]:
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
    """A tensor that lies in a file; its rows are read when they are asked for, and compared with their checksum.

    Args:
        file: Where they lie.
        name: Of the tensor.
        dtype: Of the numbers.
        shape: (n, ...).
        first: The byte of the first row.
    """

    file: ShardFile
    name: str
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
        self.file.read_rows(found, [self.first + row * self.row_bytes for row in rows.tolist()])
        self.file.require_unchanged((self.name,))
        return found

    def gathered(self, rows: Tensor) -> Tensor:
        """The same through a mapping of the file, many times as fast for hundreds of scattered rows.

        The state of the file is compared before and after. One that is cut short in between ends the process.
        """
        self.file.require_unchanged((self.name,))
        found = self.file.mapped(self.first, self.dtype, self.shape)[rows.numpy()]
        self.file.require_unchanged((self.name,))
        return torch.from_numpy(found)

    def read(self, start: int, stop: int) -> Tensor:
        """The rows from `start` to `stop`."""
        found = torch.empty(stop - start, *self.shape[1:], dtype=self.dtype)
        self.file.read_into(found, self.first + start * self.row_bytes)
        self.file.require_unchanged((self.name,))
        return found

    def split(self, height: int) -> Iterator[Tensor]:
        """All rows, at most `height` at a time; each tile is overwritten by the next one."""
        height = max(min(height, TILE_BYTES // max(self.row_bytes, 1)), 1)
        with _tile(height * self.row_bytes) as tile:
            for start in range(0, len(self), height):
                rows = min(height, len(self) - start)
                some = tile[: rows * self.row_bytes].view(self.dtype).reshape(rows, *self.shape[1:])
                self.file.read_into(some, self.first + start * self.row_bytes)
                yield some
        self.file.require_unchanged((self.name,))


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
            f"{path} must be opened beside the other shards of the index, but this process may have no more: raise the "
            f"limit (ulimit -n), then pfml index --compact makes fewer of them"
        ) from None


def _shard(file: ShardFile, dimension: int, dtype: str) -> VectorShard:
    """What the file holds, the vectors left in it."""
    try:
        columns = json.loads(file.tensor("columns").numpy().tobytes())
        vectors, paths = file.stored("vectors"), tuple(columns["paths"])
        nothing = ("",) * len(paths)
        known: dict[str, str] = {}  # one string for each class and source instead of one for each image
        class_names, sources = (
            tuple(known.setdefault(text, text) for text in columns[name]) if name in columns else nothing
            for name in ("class_names", "sources")
        )
        shard = VectorShard(
            vectors,
            file.tensor("ids"),
            paths,
            class_names,
            sources,
            file.tensor("states"),
            file.tensor("digests"),
            tuple((str(path), str(reason)) for path, reason in columns.get("unreadable", ())),
            file,
        )
    except DamagedFileError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(f"{file.path} must hold a vector shard, got {error!r}") from None
    expected = (len(paths), dimension)
    if vectors.shape != expected or vectors.dtype != DTYPES[dtype]:
        raise DamagedFileError(
            f"{file.path} must hold vectors in {dtype} of shape {expected}, got {vectors.dtype} of {vectors.shape}"
        )
    return shard


def _described(tensor: Tensor) -> dict[str, Any]:
    names = {dtype: name for name, dtype in TYPES.items()}
    sha256 = hashlib.sha256(tensor.contiguous().numpy().reshape(-1).view("uint8").data).hexdigest()
    return {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "sha256": sha256}


def _state(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev)
