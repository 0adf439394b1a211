"""Memory that was freed goes back to the system."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

__all__ = ["return_freed_memory"]


def return_freed_memory() -> None:
    """Give freed pages back, where the C library can (glibc's `malloc_trim`); elsewhere nothing is done.

    A writer of an index makes arrays of megabytes between paths that stay. The C library keeps the holes that these
    leave, and the process grows by as much as it writes.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any | None:
    if os.name == "nt":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
