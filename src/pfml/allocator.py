"""The C library's allocator: freed memory kept for the next batch instead of given back to the system.

A network on a CPU allocates and frees tensors of many megabytes in every layer. By default glibc maps each of them from
the kernel and unmaps it when it is freed, so that every page is zeroed and faulted in again: on a CPU, embedding spends
more time in the kernel than in the network (docs/PERFORMANCE.md).
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

__all__ = ["keep_freed_memory"]

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


@cache
def _mallopt() -> Any | None:
    """glibc's function, or None in another C library."""
    if os.name == "nt":
        return None
    library = ctypes.CDLL(None)
    # mallopt of another C library has other parameters; gnu_get_libc_version is glibc's alone
    return getattr(library, "mallopt", None) if hasattr(library, "gnu_get_libc_version") else None
