"""How much memory a copy of an index may take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

__all__ = ["available_memory"]

PROCESSES = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")
#: controller of a line of /proc/self/cgroup ("" for version 2) -> folder of groups, limit, usage, pages of files in it
LAYOUTS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


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
