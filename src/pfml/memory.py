"""Memory of this process: what is left of it, and whether freed memory is kept or given back to the system.

A model on a CPU allocates and frees tensors of many megabytes in every layer. By default glibc maps each of them from
the kernel and unmaps it when it is freed, so that every page is zeroed and faulted in again: on a CPU, embedding spends
more time in the kernel than in the model (docs/PERFORMANCE.md).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

__all__ = ["available_memory", "keep_freed_memory", "return_freed_memory"]

#: The parameters of glibc's mallopt(3).
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
#: Blocks from this size on are still mapped by themselves, and go back to the system when they are freed: whole sets of
#: decoded images, not the tensors of a layer.
MAPPED_FROM = 2**30
#: Bytes that the heap grows by beyond what is asked for; they take no memory before they are used.
GROWTH = 2**26
#: Settings of the user's own, which stay as they are.
VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
TUNABLES = (
    "glibc.malloc.mmap_threshold",
    "glibc.malloc.trim_threshold",
    "glibc.malloc.top_pad",
    "glibc.malloc.mmap_max",
)

PROCESSES = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
#: controller of a line of /proc/self/cgroup ("" for version 2) -> folder of groups, limit, usage, pages of files in it
LAYOUTS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def keep_freed_memory() -> bool:
    """Make this process keep the memory that it frees; whether that is so now.

    The process holds on to its peak memory, as torch does on a GPU; `malloc_trim` still gives it back. The command line
    calls this at its start, and so do worker processes. Importing pfml does not: in a program of one's own, call it
    once before the first batch. Without glibc (macOS, Windows, musl) nothing is done, and neither where the environment
    sets these parameters itself (`MALLOC_TRIM_THRESHOLD_` and its kin, `GLIBC_TUNABLES`).
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if any(name in os.environ for name in VARIABLES) or any(name in tunables for name in TUNABLES):
        return False
    mallopt = _mallopt()
    if mallopt is None:
        return False
    # older versions refuse a threshold above 32 MiB, but can be told to map nothing
    mapped = mallopt(M_MMAP_THRESHOLD, MAPPED_FROM) or mallopt(M_MMAP_MAX, 0)
    return bool(mapped and mallopt(M_TRIM_THRESHOLD, -1) and mallopt(M_TOP_PAD, GROWTH))


def return_freed_memory() -> None:
    """Give freed pages back, where the C library can (glibc's `malloc_trim`); elsewhere nothing is done.

    A writer of an index makes arrays of megabytes between paths that stay. The C library keeps the holes that these
    leave, and the process grows by as much as it writes.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


def available_memory(processes: Path = PROCESSES, groups: Path = GROUPS) -> int | None:
    """Bytes that this process can take without others being swapped out or killed; None if the system does not say.

    It is what Linux calls available, or what the container or job (its control groups) leaves, whichever is less.

    Args:
        processes: Where Linux tells of processes.
        groups: Where it tells of control groups.
    """
    with suppress(OSError, ValueError, KeyError):
        kibibytes = _numbers((processes / "meminfo").read_text())["MemAvailable:"]
        return max(min([1024 * kibibytes, *_left_by_groups(processes, groups)]), 0)
    return None


@cache
def _mallopt() -> Any | None:
    """glibc's function, or None in another C library."""
    if os.name == "nt":
        return None
    library = ctypes.CDLL(None)
    # mallopt of another C library has other parameters; gnu_get_libc_version is glibc's alone
    return getattr(library, "mallopt", None) if hasattr(library, "gnu_get_libc_version") else None


@cache
def _trim() -> Any | None:
    if os.name == "nt":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def _left_by_groups(processes: Path, groups: Path) -> Iterator[int]:
    """What each control group that has a limit leaves to this process."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (processes / "self" / "cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in LAYOUTS.keys() & controllers.split(","):
            top, limit, usage, pages = LAYOUTS[controller]
            # a limit of any group above holds too; in a container the path may be that of the machine
            for group in (PurePosixPath(path), *PurePosixPath(path).parents):
                folder = groups / top / str(group).lstrip("/")
                with suppress(OSError, ValueError):  # there is no such group, or its limit is "max"
                    allowed, used = (int((folder / name).read_text()) for name in (limit, usage))
                    # pages of files count as used, and are given back when they are needed
                    yield allowed - used + _numbers((folder / "memory.stat").read_text()).get(pages, 0)


def _numbers(text: str) -> dict[str, int]:
    """The first number of each line by the word before it."""
    return {words[0]: int(words[1]) for words in map(str.split, text.splitlines()) if len(words) > 1}
