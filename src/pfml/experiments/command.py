"""What `pfml experiment` prints and does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfml.experiments.catalog import EXPERIMENTS, THEORY
from pfml.experiments.plan import Plan
from pfml.experiments.run import Estimate, Estimator, Summary, device_kind, execute, say, states
from pfml.experiments.store import ResultsStore

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["list_experiments", "named_paths", "numbers", "run_plan", "show_plan"]


def list_experiments(console: Console) -> None:
    """Print the table of experiments."""
    from rich.table import Table

    table = Table("experiment", "what", "paper", "methods", "data sets", "seeds")
    for name, row in EXPERIMENTS.items():
        methods = f"{len(row.methods)}" if len(row.methods) > 7 else ", ".join(row.methods)
        table.add_row(name, row.description, row.answers, methods, ", ".join(row.datasets), f"{len(row.seeds)}")
    table.add_row(THEORY, "Proposition 1 and Corollary 1 on random points", "Sec. 3.3", "", "", "")
    console.print(table)


def show_plan(plan: Plan, out: Path, console: Console, *, gpus: Sequence[int] = (), jobs: int = 1) -> None:
    """Print each run of the plan, what is left of it, and how long that may take."""
    from rich.table import Column, Table

    records = ResultsStore(out / "results.jsonl").records()
    state, estimates = states(plan, records), _estimates(plan, records, gpus)
    headings = ("data set", "method", "backbone", "dim", "seed", "epochs", "settings", "state", "time")
    table = Table(Column("key", no_wrap=True), *headings)
    for run in plan.runs:
        settings = ", ".join(f"{name} {value}" for name, value in run.settings.items())
        seconds = estimates[run.key].seconds if state[run.key] == "to do" else 0.0
        cells = (run.dataset, run.method, run.backbone, run.dim, run.seed, run.epochs, settings)
        table.add_row(run.key, *map(str, cells), state[run.key], duration(seconds) if seconds else "")
    if plan.runs:
        console.print(table)
    for remark in plan.remarks:
        say(console, remark)
    left = [run for run in plan.runs if state[run.key] == "to do"]
    total = sum(estimates[run.key].seconds for run in left) / max(len(gpus), 1) / jobs
    rough = any(estimates[run.key].is_rough for run in left)
    how = "a rough guess from other machines' speeds" if rough else "from runs of the same kind in the store"
    say(
        console,
        f"{plan.experiment}: {len(plan.runs)} runs, {len(left)} to do"
        + (f", about {duration(total)} ({how})" if left else ""),
    )


def run_plan(plan: Plan, out: Path, console: Console, **options: Any) -> Summary:
    """Do what is left of the plan, and print how it ended."""
    for remark in plan.remarks:
        say(console, remark)
    summary = execute(plan, out, console=console, **options)
    say(console, f"{plan.experiment}: {summary.done} of {len(plan.runs)} runs are done, in {out / 'results.jsonl'}")
    for run, error in summary.failed:
        say(console, f"failed: {run} ({run.key}): {error}")
    if summary.left:
        say(
            console,
            f"not done: {len(summary.left)} runs (over the budget, in another process, or waiting for another run)",
        )
    return summary


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever reads best."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def numbers(given: Sequence[str], option: str) -> tuple[int, ...]:
    """Whole numbers, and those of ranges such as 0-4."""
    found: list[int] = []
    for one in given:
        first, dash, last = one.partition("-")
        try:
            found += range(int(first), int(last if dash else first) + 1)
        except ValueError:
            raise ValueError(f"{option} must be numbers such as 0 1, or ranges such as 0-4, got {one!r}") from None
    return tuple(found)


def named_paths(given: Sequence[str] | None, option: str) -> dict[str, Path]:
    """NAME=PATH, as often as given."""
    paths: dict[str, Path] = {}
    for one in given or ():
        name, equals, path = one.partition("=")
        if not equals or not path:
            raise ValueError(f"{option} must be NAME=PATH, got {one!r}")
        paths[name] = Path(path)
    return paths


def _estimates(plan: Plan, records: Sequence[dict[str, Any]], gpus: Sequence[int]) -> Mapping[str, Estimate]:
    estimator = Estimator(records, device_kind(plan, gpus))
    return {run.key: estimator.estimate(run) for run in plan.runs}
