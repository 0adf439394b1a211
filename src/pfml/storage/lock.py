"""One writer at a time: a lock that ends with the process that holds it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = ["IndexLockedError", "WriterLock"]

#: The byte that is locked on Windows, where a locked byte cannot be read: the process number lies before it.
LOCKED_BYTE = 1024


class IndexLockedError(OSError):
    """Another process or thread is writing the index."""


class WriterLock:
    """The right to write in `folder`, for one thread of one process. A thread that has it may take it again.

    Or, if it is shared, for all who share it, to the exclusion of who wants it alone (not on Windows, which has no such
    locks: there, sharing is no lock at all).

    The operating system holds the lock (`flock`), so that a killed writer leaves nothing to clean up. Readers need no
    lock.
    """

    def __init__(self, folder: Path, *, shared: bool = False) -> None:
        self.path = folder / "lock"
        self.shared = shared
        self._thread = threading.RLock()
        self._depth = 0

    @contextmanager
    def held(self) -> Iterator[bool]:
        """The lock, within the block; True for the outermost of nested blocks."""
        if not self._thread.acquire(blocking=False):
            raise IndexLockedError(f"{self.path.parent} is being written by another thread: wait until it is done")
        try:
            if self._depth:
                self._depth += 1
                yield False
            else:
                with open(self.path, "a+b") as file:
                    self._take(file)
                    self._depth = 1
                    yield True
        finally:
            self._depth = max(self._depth - 1, 0)
            self._thread.release()

    def _take(self, file: IO[bytes]) -> None:
        """Lock the open file, which closing it ends."""
        try:
            _lock(file, self.shared)
        except OSError:
            file.seek(0)
            holder = file.read(20).decode(errors="replace").strip() or "unknown"
            raise IndexLockedError(
                f"{self.path.parent} must have one writer at a time, but process {holder} is writing it: "
                f"wait until it is done, or stop it"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
        file.flush()


def _lock(file: IO[bytes], shared: bool) -> None:
    """Lock an open file or raise OSError."""
    if os.name == "nt":
        if shared:
            return
        import msvcrt

        file.seek(LOCKED_BYTE)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        return
    import fcntl

    fcntl.flock(file.fileno(), (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
