"""Execution of a plan: each run once, by any number of processes, resuming what an earlier call has begun."""

from __future__ import annotations

import math
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pfml.data.datasets import BENCHMARKS
from pfml.evaluation.metrics import summary
from pfml.experiments.catalog import EXPERIMENTS
from pfml.experiments.plan import Plan, PlannedRun
from pfml.experiments.run_key import result_key
from pfml.experiments.store import FORMAT, ResultsStore
from pfml.experiments.tasks import TASKS, RunContext, prepared, write_figures
from pfml.memory import keep_freed_memory
from pfml.methods import is_untrained
from pfml.runs.config_files import plain
from pfml.runs.folder import RunFolder
from pfml.storage.lock import claim
from pfml.terminal import plain_console, print_line
from pfml.training.environment import resolve_device
from pfml.training.progress import Monitor, ProgressMonitor
from pfml.training.shutdown import Interrupted, catch_shutdown_requests
from pfml.version import __version__

if TYPE_CHECKING:
    from rich.console import Console


__all__ = [
    "Estimate",
    "Estimator",
    "Session",
    "Summary",
    "commit",
    "device_kind",
    "device_name",
    "execute",
    "now",
    "record_of",
    "states",
    "summarize_session",
    "versions",
    "work",
]


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
        "format": FORMAT,
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


#: How processes are started: a copy of a process that has used a GPU could not use it.
CONTEXT = multiprocessing.get_context("spawn")
#: Tasks whose result another experiment may have already.
REUSABLE = ("train", "untrained", "figures")


@dataclass(frozen=True)
class Session:
    """What all processes of one call share.

    Args:
        plan: What to do.
        out: Folder of the store (results.jsonl), of the locks, and of the runs: EXPERIMENT/KEY.
        started: ISO time; a run that failed after it is not tried again.
        deadline: Time (of `time.time`) by which runs must be expected to end in order to be started; None for none.
        keep_checkpoints: Whether runs that are done keep them; they are several times as large as the model.
    """

    plan: Plan
    out: Path
    started: str
    deadline: float | None = None
    keep_checkpoints: bool = False

    @property
    def store(self) -> ResultsStore:
        """Where results are stored."""
        return ResultsStore(self.out / "results.jsonl")

    def folder(self, experiment: str, key: str) -> Path:
        """Where a run keeps its files."""
        return self.out / experiment / key


@dataclass(frozen=True)
class Summary:
    """How a plan stands.

    Args:
        done: Runs whose results are in the store.
        failed: Run and error of those that failed in this session.
        left: Runs that were not started: over the budget, in another process, or waiting for one of these or for a
            run that failed.
    """

    done: int
    failed: tuple[tuple[PlannedRun, str], ...]
    left: tuple[PlannedRun, ...]


def execute(
    plan: Plan,
    out: Path,
    *,
    console: Console,
    jobs: int = 1,
    gpus: Sequence[int] = (),
    budget: float | None = None,
    keep_checkpoints: bool = False,
) -> Summary:
    """Do what is left of `plan`; a run that fails is recorded, and the others are done.

    Args:
        plan: See `plan_experiment`.
        out: Folder of results and runs. Calls that share it share the work, also at the same time.
        console: Where progress is shown.
        jobs: Processes, on each GPU if `gpus` are given.
        gpus: Numbers of GPUs; empty to compute where the plan's configurations say.
        budget: Minutes; no run is started that is not expected to end within them.
        keep_checkpoints: See `Session`.

    Raises:
        Interrupted: By SIGINT, SIGTERM or SIGHUP, after the runs in progress have saved their state.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be >= 1, got {jobs}")
    if jobs > 1 and EXPERIMENTS[plan.experiment].alone:
        print_line(
            console, f"{plan.experiment} measures time, so that runs do not share a device: 1 job instead of {jobs}"
        )
        jobs = 1
    deadline = None if budget is None else time.time() + 60 * budget
    session = Session(plan, Path(out), now(), deadline, keep_checkpoints)
    devices = [f"cuda:{gpu}" for gpu in gpus for _ in range(jobs)] if gpus else [None] * jobs
    if len(devices) == 1:
        work(session, console=console, device=devices[0])
    else:
        _work_in_processes(session, devices, console)
    return summarize_session(session)


def work(session: Session, *, console: Console, device: str | None = None, bars: bool = True) -> None:
    """Do runs of the plan that nobody else does, as long as there are any that are ready and in time."""
    did_something = True
    while did_something:
        did_something = False
        records = session.store.records()
        for run in session.plan.runs:
            if _parent_died():
                return
            if not _is_open(run, session, records):
                continue
            with claim(session.out / "locks" / f"{run.result_key}.lock") as is_ours:
                records = session.store.records()  # another process may have done it in the meantime
                if is_ours and _is_open(run, session, records):
                    _do(run if device is None else _on(run, device), session, console, bars)
                    did_something = True
                    records = session.store.records()


def states(plan: Plan, records: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Key -> "done", "as EXPERIMENT" if another one has the same result, or "to do"."""
    done = {record["key"]: record["experiment"] for record in records if record["status"] == "done"}
    by_result = {result_key(key): experiment for key, experiment in done.items()}
    found: dict[str, str] = {}
    for run in plan.runs:
        if run.key in done:
            found[run.key] = "done"
        elif run.task in REUSABLE and run.result_key in by_result:
            found[run.key] = f"as {by_result[run.result_key]}"
        else:
            found[run.key] = "to do"
            if run.task in REUSABLE:
                by_result[run.result_key] = f"in {run.experiment}"
    return found


def summarize_session(session: Session) -> Summary:
    """How the plan stands now."""
    records = session.store.records()
    done = {record["key"] for record in records if record["status"] == "done"}
    errors = {
        record["key"]: record["error"] or "unknown"
        for record in records
        if record["status"] == "failed" and record["finished"] >= session.started and record["key"] not in done
    }
    runs = session.plan.runs
    return Summary(
        done=sum(run.key in done for run in runs),
        failed=tuple((run, errors[run.key]) for run in runs if run.key in errors),
        left=tuple(run for run in runs if run.key not in done and run.key not in errors),
    )


def device_kind(plan: Plan, gpus: Sequence[int] = ()) -> str:
    """Where the plan will be computed: "cpu" or "cuda"."""
    return "cuda" if gpus else resolve_device(plan.runs[0].config.device if plan.runs else "auto").type


def _is_open(run: PlannedRun, session: Session, records: Sequence[dict[str, Any]]) -> bool:
    """Whether `run` is still to be done, can be done, and is expected to end in time."""
    done = {record["key"] for record in records if record["status"] == "done"}
    if run.key in done or not set(run.needs) <= done:
        return False
    if any(
        record["key"] == run.key and record["status"] == "failed" and record["finished"] >= session.started
        for record in records
    ):
        return False
    if session.deadline is None or _twin(run, records) is not None:
        return True
    seconds = Estimator(records, resolve_device(run.config.device).type).estimate(run).seconds
    return time.time() + seconds <= session.deadline


def _do(run: PlannedRun, session: Session, console: Console, bars: bool) -> None:
    """Do a run that is ours, and record how it ended."""
    records = session.store.records()
    number = f"{_count(session.plan, records) + 1}/{len(session.plan.runs)}"
    folder = session.folder(run.experiment, run.key)
    twin = _twin(run, records)
    if twin is not None and _reuse(run, twin, session):
        print_line(console, f"[{number}] {run}: the same run as in {twin['experiment']}, {_score(twin['results'])}")
        return
    print_line(console, f"[{number}] {run}: {run.epochs} epochs, in {folder}")
    monitor = _RunMonitor(console, number) if bars else Monitor()
    context = RunContext(folder, tuple(session.folder(run.experiment, key) for key in run.needs), monitor)
    spent = _Stopwatch(folder)
    try:
        outcome = TASKS[run.task](run, context)
    except Exception as error:
        monitor.stop()
        message = f"{type(error).__name__}: {error}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        counts = {"train": 0, "test": 0, "missing": 0}
        session.store.append(record_of(run, results={}, images=counts, seconds=spent.seconds(), error=message))
        print_line(console, f"[{number}] {run}: failed, {message}")
        return
    except BaseException:
        spent.keep()
        raise
    seconds = spent.seconds()
    run = run if outcome.dim is None else replace(run, dim=outcome.dim)
    session.store.append(record_of(run, results=outcome.results, images=outcome.images, seconds=seconds))
    if not session.keep_checkpoints and run.task != "figures":
        shutil.rmtree(RunFolder(folder).checkpoints, ignore_errors=True)
    print_line(console, f"[{number}] {run}: {_score(outcome.results)}, {seconds:.0f} s in all")


def _twin(run: PlannedRun, records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """A record with the result that `run` will have."""
    if run.task not in REUSABLE:
        return None
    for record in records:
        if record["status"] == "done" and result_key(record["key"]) == run.result_key:
            return record
    return None


def _reuse(run: PlannedRun, twin: dict[str, Any], session: Session) -> bool:
    """Record the result of `twin` for `run`, too; not if it asks for figures of a model that is gone."""
    if run.task == "figures":
        source = session.folder(twin["experiment"], twin["key"])
        if not RunFolder(source).model.exists():
            return False
        data, _ = prepared(run.config.data)
        write_figures(source, data, session.folder(run.experiment, run.key) / "figures", seed=run.seed)
    own = {"experiment": run.experiment, "key": run.key, "settings": dict(run.settings), "backbone": run.backbone}
    others = {name: value for name, value in twin.items() if name != "tuning"}
    tuning = {} if run.tuning is None else {"tuning": dict(run.tuning)}
    session.store.append({**others, **own, **tuning})
    return True


def _count(plan: Plan, records: Sequence[dict[str, Any]]) -> int:
    """Runs of the plan that are done."""
    done = {record["key"] for record in records if record["status"] == "done"}
    return sum(run.key in done for run in plan.runs)


def _score(results: dict[str, Any]) -> str:
    last, pace = results["last"], results.get("seconds_per_epoch")
    text = summary(last)
    return text if pace is None else f"{text}, {pace:.1f} s per epoch"


def _on(run: PlannedRun, device: str) -> PlannedRun:
    return replace(run, config=replace(run.config, device=device))


class _RunMonitor(ProgressMonitor):
    """The bar of a run, with its number in the plan."""

    def __init__(self, console: Console, number: str) -> None:
        super().__init__(console, lines=False)
        self.number = number

    def step(self, epoch: int, loss: float, images_per_second: float) -> None:
        super().step(epoch, loss, images_per_second)
        assert self._progress is not None
        description = f"run {self.number}, epoch {epoch + 1}/{self._epochs}"
        self._progress.update(self._bar, description=description)


class _Stopwatch:
    """Seconds that a run has taken, with those before it was stopped."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "seconds.txt"
        self.start = time.perf_counter()

    def seconds(self) -> float:
        before = 0.0
        with suppress(OSError, ValueError):
            before = float(self.file.read_text(encoding="utf-8"))
        return before + time.perf_counter() - self.start

    def keep(self) -> None:
        """Remember the time for the next try."""
        if self.file.parent.is_dir():
            self.file.write_text(f"{self.seconds():.3f}\n", encoding="utf-8")


def _work_in_processes(session: Session, devices: Sequence[str | None], console: Console) -> None:
    """Share the plan among as many processes as there are devices; a signal is passed on to them once."""
    threads = max((os.cpu_count() or 1) // len(devices), 1)
    arguments = [(session, device, threads, console.width) for device in devices]
    with catch_shutdown_requests() as request:
        workers: list[BaseProcess] = [CONTEXT.Process(target=_worker, args=one) for one in arguments]
        for worker in workers:
            worker.start()
        told = False
        while any(worker.is_alive() for worker in workers):
            for worker in workers:
                worker.join(timeout=0.1)
            if request.received and not told:
                told = True
                for worker in workers:
                    if worker.is_alive():
                        worker.terminate()
    if request.received:
        raise Interrupted("stopped, runs in progress have saved their state", request.signal)
    died = [worker.exitcode for worker in workers if worker.exitcode]
    if died:
        raise ChildProcessError(
            f"{len(died)} of {len(workers)} processes died (exit codes {died}): start the command again"
        )


def _worker(session: Session, device: str | None, threads: int, width: int) -> None:
    """The life of a process: quiet but for a line at start and end of each run."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C reaches the parent alone, which passes it on once: a second one would not save
    keep_freed_memory()
    torch.set_num_threads(threads)
    if device is not None:
        torch.cuda.set_device(device)
    with suppress(Interrupted):
        work(session, console=plain_console(width), device=device, bars=False)


def _parent_died() -> bool:
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()


#: Seconds to train on 1,000 images, by kind of device and backbone. On a CPU: measured on 2 busy cores. On a GPU:
#: ResNet-50 measured on an NVIDIA H200 in float32, the others guessed from it.
SECONDS_PER_1000: dict[str, dict[str, float]] = {
    "cpu": {"convnet": 1.0, "resnet50": 1500.0, "bn_inception": 760.0, "vit_small": 750.0},
    "cuda": {"convnet": 0.05, "resnet50": 0.35, "bn_inception": 0.2, "vit_small": 0.2},
}
LIKE = {"dino_small": "vit_small", "resnet50_he": "resnet50"}
#: An image that is only embedded costs this fraction of one that is trained on.
EMBEDDING = 1 / 3
START = 5.0  # seconds to open the images and build the model
GLYPHS = (6_768, 6_816)


@dataclass(frozen=True)
class Estimate:
    """Seconds, and whether they are a rough guess, without runs of the same kind."""

    seconds: float
    is_rough: bool


class Estimator:
    """How long runs take on one kind of device: as long as similar runs did, else a rough guess from measured speeds.

    Args:
        records: Of the store; the runs that are done tell how fast this machine is.
        device: "cpu" or "cuda".
    """

    def __init__(self, records: Sequence[Mapping[str, Any]], device: str) -> None:
        self.device = device
        self.speeds: dict[tuple[str, ...], list[float]] = {}
        for record in records:
            if record["status"] != "done" or record["device"].split(":")[0] != device or not record["seconds"] > START:
                continue
            images = record["images"]
            if is_untrained(record["method"]) or record["settings"].get("fold") == "concatenated":
                continue
            every = record["config"].get("evaluate_every", 1)
            work = _work(images["train"], images["test"], record["epochs"], every)
            kind = (record["backbone"], record["dataset"])
            for key in (kind, (*kind, record["method"])):
                self.speeds.setdefault(key, []).append((record["seconds"] - START) / work)

    def estimate(self, run: PlannedRun) -> Estimate:
        """How long `run` will take if it starts from its beginning."""
        train, test = GLYPHS
        if run.dataset in BENCHMARKS:
            train, test = BENCHMARKS[run.dataset].train[0], BENCHMARKS[run.dataset].test[0]
        if run.task in ("concatenate", "untrained"):
            work = max(len(run.needs), 1) * test * EMBEDDING
        else:
            fraction = 1.0 if run.config.data.validation == "none" else 0.75
            work = _work(fraction * train, test + (1 - fraction) * train, run.epochs, run.config.evaluate_every)
        for key in ((run.backbone, run.dataset, run.method), (run.backbone, run.dataset)):
            if key in self.speeds:
                return Estimate(START + statistics.median(self.speeds[key]) * work, is_rough=False)
        seconds = SECONDS_PER_1000[self.device][LIKE.get(run.backbone, run.backbone)] / 1000
        return Estimate(START + seconds * work, is_rough=True)


def _work(train: float, test: float, epochs: int, evaluate_every: int) -> float:
    """Images to process, those without a gradient at their lower cost."""
    evaluations = math.ceil(epochs / evaluate_every)
    return epochs * train + EMBEDDING * (evaluations * test + train)
