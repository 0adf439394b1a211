"""By what one tells that a file has changed since its image was embedded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pfml.storage.files import sha256_of

__all__ = ["UNKNOWN_FILE", "FileState", "packed", "unpacked"]


@dataclass(frozen=True)
class FileState:
    """By what one tells that a file has changed.

    Args:
        size: In bytes; -1 for what is no file.
        modified: Time of the last change, in nanoseconds.
        sha256: Of the content.
    """

    size: int
    modified: int
    sha256: str

    @classmethod
    def of(cls, path: str | Path) -> FileState:
        """The state of a file that exists."""
        found = os.stat(path)  # before the content is read: a change after this will be seen by the next comparison
        return cls(found.st_size, found.st_mtime_ns, sha256_of(Path(path)))

    def is_of(self, path: str | Path) -> bool:
        """Whether the file still is what it was: by size and time, and by content where only the time is new."""
        try:
            found = os.stat(path)
            if found.st_size != self.size:
                return False
            return found.st_mtime_ns == self.modified or sha256_of(Path(path)) == self.sha256
        except OSError:
            return False


#: For vectors whose images are not files.
UNKNOWN_FILE = FileState(-1, -1, "0" * 64)


def packed(files: Sequence[FileState]) -> tuple[Tensor, Tensor]:
    """Sizes and times (n, 2) int64, and digests (n, 32) uint8, of n files."""
    states = torch.tensor([(file.size, file.modified) for file in files], dtype=torch.int64).reshape(-1, 2)
    digests = bytearray().join(bytes.fromhex(file.sha256) for file in files)
    if not digests:
        return states, torch.empty(0, 32, dtype=torch.uint8)
    return states, torch.frombuffer(digests, dtype=torch.uint8).reshape(-1, 32)


def unpacked(states: Tensor, digests: Tensor, row: int) -> FileState:
    """The state of the file of a row of what `packed` gave."""
    size, modified = states[row].tolist()
    return FileState(size, modified, digests[row].numpy().tobytes().hex())
