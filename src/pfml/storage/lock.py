"""Locks that end with the process that holds them, on filelock's `lock_descriptor`.

What is locked is an open file or folder, so that a folder needs no further file. filelock's own shared lock is an
SQLite database, so that the shared lock here is `flock` itself, which the exclusive one respects.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import lock_descriptor, unlock_descriptor

__all__ = ["LockedError", "WriterLock", "claim", "locked_file", "locked_folder"]

log = logging.getLogger(__name__)

#: Seconds between two attempts.
POLL = 0.01
#: Seconds after which a wait is logged.
PATIENCE = 5.0
#: Longest text that names an owner.
OWNER_BYTES = 200


class LockedError(OSError):
    """Another process or thread is writing."""


class WriterLock:
    """The right to write in `folder`, for one thread of one process. A thread that has it may take it again.

    Or, if it is shared, for all who share it, to the exclusion of who wants it alone (not on Windows, which has no such
    locks: there, sharing is no lock at all). Readers need no lock.
    """

    def __init__(self, folder: Path, *, shared: bool = False) -> None:
        self.path = folder / "lock"
        self.shared = shared
        self._thread = threading.RLock()
        self._depth = 0

    @contextmanager
    def held(self) -> Iterator[bool]:
        """The lock, within the block; True for the outermost of nested blocks.

        Raises:
            LockedError: If another process or thread has it.
        """
        if not self._thread.acquire(blocking=False):
            raise LockedError(f"{self.path.parent} is being written by another thread: wait until it is done")
        try:
            if self._depth:
                self._depth += 1
                yield False
            else:
                with _opened(self.path) as descriptor, _held(descriptor, self.path, 0.0, shared=self.shared) as held:
                    _require_locks(held, self.path)
                    if not held:
                        raise LockedError(
                            f"{self.path.parent} must have one writer at a time, but {_owner(descriptor)} is writing "
                            f"it: wait until it is done, or stop it"
                        )
                    _name_owner(descriptor)
                    self._depth = 1
                    yield True
        finally:
            self._depth = max(self._depth - 1, 0)
            self._thread.release()


@contextmanager
def claim(path: Path) -> Iterator[bool]:
    """Whether the lock file `path` is ours within the block; a file that a dead process left is taken over.

    The file names its owner, and is removed at the end.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with _opened(path) as descriptor, _held(descriptor, path, 0.0) as held:
            _require_locks(held, path)
            if not held:
                yield False
                return
            # its owner may have removed the file between our opening and our locking it
            if not _has_name(descriptor, path):
                continue
            try:
                _name_owner(descriptor)
                yield True
            finally:
                with suppress(OSError):  # Windows cannot remove an open file; it stays, unlocked
                    path.unlink()
            return


@contextmanager
def locked_folder(folder: Path, *, wait: float = 0.0) -> Iterator[bool | None]:
    """Hold a folder within the block.

    True if it is held. False if another process or thread held it for `wait` seconds, or the folder is gone. None where
    folders cannot be locked: on Windows, and on some file systems over a network.
    """
    if os.name == "nt":
        yield None
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield False
        return
    try:
        with _held(descriptor, folder, wait) as held:
            yield held
    finally:
        os.close(descriptor)


@contextmanager
def locked_file(path: Path, descriptor: int) -> Iterator[None]:
    """Hold the file `path`, open as `descriptor`, within the block; wait as long as another process has it."""
    if os.name != "nt":
        with _held(descriptor, path, math.inf) as held:
            _require_locks(held, path)
            yield
        return
    # Windows lets nobody read what is locked
    beside = path.with_name(f"{path.name}.lock")
    with _opened(beside) as other, _held(other, beside, math.inf):
        yield


@contextmanager
def _held(descriptor: int, path: Path, wait: float, *, shared: bool = False) -> Iterator[bool | None]:
    """Lock what is open: True if it is locked, False if others had it for `wait` seconds, None without locks."""
    held = _wait(descriptor, path, wait, shared)
    try:
        yield held
    finally:
        # closing alone would leave it locked as long as a process lives that was forked meanwhile
        if held:
            with suppress(OSError):
                unlock_descriptor(descriptor)


def _wait(descriptor: int, path: Path, wait: float, shared: bool) -> bool | None:
    began, is_logged = time.monotonic(), False
    while True:
        try:
            if _try_lock(descriptor, shared):
                return True
        except OSError as error:
            if error.errno != errno.EINTR:
                return None  # there are no locks here
        waited = time.monotonic() - began
        if waited >= wait:
            return False
        if waited > PATIENCE and not is_logged:
            log.warning("waiting for %s, which another process is writing", path)
            is_logged = True
        time.sleep(POLL)


def _try_lock(descriptor: int, shared: bool) -> bool:
    if not shared:
        return lock_descriptor(descriptor, blocking=False)
    if os.name != "nt":
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _require_locks(held: bool | None, path: Path) -> None:
    if held is None:
        raise OSError(f"{path} must lie where files can be locked, and this file system cannot: choose another folder")


def _has_name(descriptor: int, path: Path) -> bool:
    """Whether the open file still is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _name_owner(descriptor: int) -> None:
    """Write who holds the lock, behind the first byte, which nobody can read on Windows while it is locked."""
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.write(descriptor, f"\nprocess {os.getpid()} on {socket.gethostname()}\n".encode())


def _owner(descriptor: int) -> str:
    os.lseek(descriptor, 1, os.SEEK_SET)
    return os.read(descriptor, OWNER_BYTES).decode(errors="replace").strip() or "another process"
