"""A segment: vectors of some images and what is known of these, one safetensors file that never changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from pfml.evaluation.file_state import FileState, unpacked
from pfml.files import DamagedFileError, refuse_non_finite, save_tensors
from pfml.search.stored_vectors import CheckedFile, StoredVectors

__all__ = ["Segment", "SegmentFile", "read_segment", "write_segment"]

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
