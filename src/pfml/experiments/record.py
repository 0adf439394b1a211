"""What a record says of a run besides its results: what was asked for, where and with what it was done."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from pfml import __version__
from pfml.experiments.planned_run import PlannedRun
from pfml.training.config_files import plain
from pfml.training.environment import resolve_device

__all__ = ["commit", "device_name", "now", "record_of", "versions"]


def record_of(
    run: PlannedRun,
    *,
    results: dict[str, Any],
    images: dict[str, int],
    seconds: float,
    error: str | None = None,
) -> dict[str, Any]:
    """The record of a run that ended now, failed if there is an error."""
    return {
        "experiment": run.experiment,
        "key": run.key,
        "dataset": run.dataset,
        "method": run.method,
        "backbone": run.backbone,
        "dim": run.dim,
        "seed": run.seed,
        "epochs": run.epochs,
        "settings": dict(run.settings),
        "config": plain(run.config),
        "results": results,
        "images": images,
        "seconds": seconds,
        "device": device_name(run.config.device),
        "commit": commit(),
        "versions": versions(),
        "status": "done" if error is None else "failed",
        "error": error,
        "finished": now(),
        **({} if run.tuning is None else {"tuning": dict(run.tuning)}),
    }


def now() -> str:
    """The time, UTC, as an ISO string that sorts."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def device_name(name: str) -> str:
    """The kind of device, cpu or cuda, and the name of a GPU."""
    try:
        device = resolve_device(name)
    except ValueError:  # a run that failed because there is no such device
        return name
    return f"cuda: {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu"


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    return {"pfml": __version__, "torch": torch.__version__, "python": platform.python_version()}


@lru_cache(maxsize=1)
def commit() -> str:
    """The commit of the package's own repository, with "-changed" if files differ from it; "unknown" without git."""
    source = Path(__file__).parents[1]
    try:
        _git(source, "ls-files", "--error-unmatch", "__init__.py")  # the repository around it may be another one
        changed = _git(source, "status", "--porcelain", "--untracked-files=no", ".")
        return _git(source, "rev-parse", "HEAD") + ("-changed" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
