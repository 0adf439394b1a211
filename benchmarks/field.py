"""Speed, memory and exactness of the field: every method, size and state in a process of its own.

python benchmarks/field.py            all of it, about 20 minutes on two cores
python benchmarks/field.py --quick    two sizes, under 90 seconds

Writes bench.csv and bench.png to --out, prints one table and a verdict. The ratio of a row is to one n x n x 512
product that was timed in the same process right before and right after the method; the smaller of the two counts.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from charge_sets import DIMS, SIZES, STATES
from measure import Case, Measurement
from methods import METHODS
from report import plot, results_table, verdict_table, write_csv

__all__ = ["benchmark", "cases", "environment", "main"]

QUICK_SIZES = [1_600, 6_100]
FULL_SIZES = [1_600, 6_100, 11_100, 22_736]


def cases(
    *, sizes: Sequence[int], states: Sequence[str], methods: Sequence[str], repeats: int, seconds: float
) -> list[Case]:
    """All combinations; a method to which the state makes no difference runs once per size."""
    return [
        Case(method, state, size, repeats, seconds)
        for size in sizes
        for method in methods
        for state in (states if METHODS[method].depends_on_state else states[:1])
    ]


def measure_in_fresh_process(case: Case) -> Measurement:
    """`measure(case)`, with no memory and no threads left over from another case."""
    script = Path(__file__).with_name("measure.py")
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(asdict(case))], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return Measurement(**json.loads(done.stdout.splitlines()[-1]))
    reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return Measurement(case.method, case.state, case.points, DIMS, note=f"failed: {reason}")


def benchmark(
    todo: Sequence[Case],
    out: Path,
    *,
    run: Callable[[Case], Measurement] = measure_in_fresh_process,
    console: Console | None = None,
) -> list[Measurement]:
    """Run all cases, and write bench.csv (after each of them) and bench.png to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    about = environment()
    rows: list[Measurement] = []
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(todo))
        for case in todo:
            progress.update(task, description=f"{case.points:,} {case.method} {case.state}")
            rows.append(run(case))
            write_csv(rows, about, out / "bench.csv")
            progress.advance(task)
    plot(rows, out / "bench.png")
    return rows


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


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for bench.csv and bench.png")
    parser.add_argument("--sizes", type=int, nargs="+", choices=sorted(SIZES), metavar="N", help=f"of {sorted(SIZES)}")
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD")
    parser.add_argument("--repeats", type=int, help="at most this many runs of a case (default 15, quick 5)")
    parser.add_argument("--quick", action="store_true", help=f"sizes {QUICK_SIZES}, fewer repeats")
    given = parser.parse_args(arguments)

    todo = cases(
        sizes=given.sizes or (QUICK_SIZES if given.quick else FULL_SIZES),
        states=given.states,
        methods=given.methods,
        repeats=given.repeats or (5 if given.quick else 15),
        seconds=5.0 if given.quick else 60.0,
    )
    console = Console(width=None if sys.stdout.isatty() else 150)
    rows = benchmark(todo, given.out, console=console)
    console.print(results_table(rows))
    console.print(verdict_table(rows))
    console.print(f"{given.out / 'bench.csv'}  {given.out / 'bench.png'}", highlight=False)
    return int(any(row.note.startswith("failed") for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
