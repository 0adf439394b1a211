"""Times, memory, and what the hardware could do: the instruments of `gpu.py`."""

from __future__ import annotations

import csv
import gc
import importlib.metadata
import math
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from machine import environment
from methods import Step

__all__ = [
    "Recorder",
    "Row",
    "Setting",
    "count_kernels",
    "extra_mib",
    "gpu_environment",
    "precision",
    "times_ms",
    "timing",
]

GIB = 1024.0  # in MiB


@dataclass(frozen=True)
class Setting:
    """Where to run, and how long."""

    device: torch.device
    quick: bool = False
    repeats: int = 20
    #: Seconds after which a row has been measured often enough, and those of a row whose runs are long.
    seconds: float = 0.5
    longest: float = 6.0

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


@dataclass(frozen=True)
class Row:
    """One line of the table; NaN where nothing was promised or measured."""

    section: str
    what: str
    method: str = ""
    points: int = 0
    dims: int = 0
    state: str = ""
    normalization: str = ""
    target_ms: float = math.nan
    p50_ms: float = math.nan
    p20_ms: float = math.nan
    p80_ms: float = math.nan
    target_mib: float = math.nan
    mib: float = math.nan
    target_error: float = math.nan
    error: float = math.nan
    target_ratio: float = math.nan
    ratio: float = math.nan
    bound: str = ""
    bound_ms: float = math.nan
    share_of_bound: float = math.nan
    flops: float = math.nan
    bytes: float = math.nan
    kernels: int = 0
    repeats: int = 0
    note: str = ""

    @property
    def failed(self) -> bool:
        return self.note.startswith("failed")

    @property
    def missed(self) -> list[str]:
        """Which promises were not kept."""
        promises = (
            ("time", self.p50_ms, self.target_ms),
            ("memory", self.mib, self.target_mib),
            ("error", self.error, self.target_error),
            ("ratio", self.target_ratio, self.ratio),  # the more, the better
        )
        return [name for name, reached, target in promises if not math.isnan(target) and not reached <= target]

    @property
    def verdict(self) -> str:
        """In words: met, missed and in what, failed, or nothing where nothing was promised."""
        if self.failed:
            return "failed"
        if all(map(math.isnan, (self.target_ms, self.target_mib, self.target_error, self.target_ratio))):
            return ""
        return f"missed: {', '.join(self.missed)}" if self.missed else "met"


@dataclass
class Recorder:
    """All rows so far, each written to the CSV as it comes."""

    path: Path
    about: dict[str, str]
    show: Callable[[Row], None] = lambda row: None
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Keep, write and show a row."""
        self.rows.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        with part.open("w", newline="") as file:
            writer = csv.DictWriter(file, [column.name for column in fields(Row)] + ["verdict", *self.about])
            writer.writeheader()
            for each in self.rows:
                writer.writerow(asdict(each) | {"verdict": each.verdict} | self.about)
        os.replace(part, self.path)
        self.show(row)

    def attempt(self, section: str, what: str, measure: Callable[[], Row], **known: Any) -> None:
        """Add the row that `measure` gives, or one that says why there is none."""
        try:
            row = measure()
        except Exception as error:  # whatever it is, the other rows are wanted
            traceback.clear_frames(error.__traceback__)  # they hold tensors
            reason = (str(error).strip().splitlines() or [""])[0][:160]
            row = Row(section, what, note=f"failed: {type(error).__name__}: {reason}", **known)
        self.add(row)
        _release()


def gpu_environment(device: torch.device, commit: str | None = None) -> dict[str, str]:
    """What the times depend on besides the options."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else environment()["cpu"]
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return {"device": name, "triton": triton, "commit": commit or _commit(), **environment()}


def _commit() -> str:
    def git(*arguments: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(("git", *arguments), cwd=folder, capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "--untracked-files=no").strip()
        return git("rev-parse", "--short", "HEAD").strip() + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@contextmanager
def precision(name: str) -> Iterator[None]:
    """float32 products on the GPU as "ieee" or "tf32"."""
    switch: Any = torch.backends.cuda.matmul
    outside = switch.fp32_precision
    switch.fp32_precision = name
    try:
        yield
    finally:
        switch.fp32_precision = outside


def times_ms(
    step: Step, setting: Setting, *, at_least: int, seconds: float, warm_up: int = 3, wall: bool = False
) -> list[float]:
    """Milliseconds of each run, from events on the GPU; `wall` for the clock, where the CPU works after the GPU.

    There are `at_least` runs, and as many more as fit into `seconds`, up to ten times as many.
    """
    for _ in range(warm_up):
        step()
    _synchronize(setting.device)
    begun = time.perf_counter()
    times: list[float] = []
    events: list[tuple[Any, Any]] = []
    while True:
        runs = max(len(times), len(events))
        if runs >= at_least and (runs >= 10 * at_least or time.perf_counter() - begun > seconds):
            break
        if setting.on_gpu and not wall:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            step()
            pair[1].record()
            events.append(pair)
            if len(events) % 10 == 0:
                _synchronize(setting.device)  # so that the clock above sees what the GPU has done
        else:
            start = time.perf_counter()
            step()
            _synchronize(setting.device)
            times.append((time.perf_counter() - start) * 1e3)
    _synchronize(setting.device)
    return times or [start.elapsed_time(stop) for start, stop in events]


def timing(times: Sequence[float]) -> dict[str, Any]:
    """The columns of a row about time."""
    p20, p50, p80 = torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8]).double()).tolist()
    return {"p20_ms": p20, "p50_ms": p50, "p80_ms": p80, "repeats": len(times)}


def extra_mib(step: Step, setting: Setting, release: Callable[[], None] = lambda: None) -> float:
    """MiB that one run allocates above what was there before; NaN on a CPU.

    Args:
        step: What runs.
        setting: Where.
        release: Frees what an earlier run has left, such as gradients.
    """
    if not setting.on_gpu:
        return math.nan
    release()
    _release()
    _synchronize(setting.device)
    base = torch.cuda.memory_allocated(setting.device)
    torch.cuda.reset_peak_memory_stats(setting.device)
    step()
    _synchronize(setting.device)
    return (torch.cuda.max_memory_allocated(setting.device) - base) / 2**20


def count_kernels(step: Step, setting: Setting) -> int:
    """How many kernels and copies one run gives to the GPU; 0 if they cannot be counted."""
    if not setting.on_gpu:
        return 0
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            step()
            _synchronize(setting.device)
        return sum(event.count for event in found.key_averages() if event.device_type.name == "CUDA")
    except Exception:  # a GPU may not permit it
        return 0


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
