"""What the benchmark asks of the machine (Linux): what it is, its free memory, and whether others are using it."""

from __future__ import annotations

import ctypes
import datetime
import gc
import importlib.metadata
import os
import platform
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = [
    "BUSY",
    "OthersClock",
    "available_bytes",
    "environment",
    "peak_extra_bytes",
    "resident_bytes",
    "wait_until_quiet",
]

#: With more cores than this busy elsewhere, times are not to be trusted: threads that wait for one another at every
#: operation lose far more than their share of the cores.
BUSY = 0.15


def environment() -> dict[str, str]:
    """What the times depend on besides the code."""
    try:
        version = importlib.metadata.version("pfml")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "torch": torch.__version__,
        "pfml": version,
        "python": platform.python_version(),
        "cores": str(len(os.sched_getaffinity(0))),
        "cpu": found[1] if found else platform.processor(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def available_bytes() -> int:
    """Memory that a new process could use."""
    return _kib(Path("/proc/meminfo"), "MemAvailable") * 1024


def resident_bytes(process: int | str = "self") -> int:
    """Memory of this process, or of another by its id."""
    return _kib(Path(f"/proc/{process}/status"), "VmRSS") * 1024


def peak_extra_bytes(step: Callable[[], object]) -> tuple[float, int]:
    """Seconds of `step`, and how far it raised the resident memory above what it found.

    To be called with the first full-size run: then the allocator holds nothing back that would hide a part of the peak.
    """
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    resident = _kib(Path("/proc/self/status"), "VmRSS")
    reset = _reset_peak()
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    peak = _kib(Path("/proc/self/status"), "VmHWM") if reset else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return seconds, max(peak - resident, 0) * 1024


def _reset_peak() -> bool:
    """Set VmHWM to the present resident memory; False where the kernel does not permit it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _kib(path: Path, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    assert found, f"{path} has no {name}"
    return int(found[1])


class OthersClock:
    """Counts how many cores other processes keep busy, on average since its construction."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), self._seconds_elsewhere()

    def cores_busy(self) -> float:
        """Cores that were busy elsewhere."""
        moment, seconds = self._start
        return max((self._seconds_elsewhere() - seconds) / (time.perf_counter() - moment), 0.0)

    @staticmethod
    def _seconds_elsewhere() -> float:
        ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        busy = sum(ticks) - ticks[3] - ticks[4]  # less idle, less waiting for disks
        own = os.times()
        return busy / os.sysconf("SC_CLK_TCK") - own.user - own.system


def wait_until_quiet(patience: float) -> None:
    """Return once no other process has been busy for two seconds, or after `patience` seconds."""
    start = time.perf_counter()
    while time.perf_counter() - start < patience:
        clock = OthersClock()
        time.sleep(2.0)
        if clock.cores_busy() < BUSY:
            return
