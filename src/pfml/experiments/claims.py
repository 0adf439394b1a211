"""Which process does which run: a lock file for each, that the system frees when its process dies."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["claim"]

if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Whether the lock file `path` is ours within the block; a file that a dead process left is taken over."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _locked(path)
    if descriptor is None:
        yield False
        return
    try:
        owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
        os.truncate(descriptor, 0)
        os.write(descriptor, owner.encode())
        yield True
    finally:
        with suppress(OSError):  # Windows cannot remove an open file; it stays, unlocked
            path.unlink()
        os.close(descriptor)


def _locked(path: Path) -> int | None:
    """A descriptor that holds the lock; None if another process does."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _try_lock(descriptor):
            os.close(descriptor)
            return None
        # its owner may have removed the file between our opening and our locking it
        with suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                return descriptor
        os.close(descriptor)
