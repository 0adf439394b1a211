"""Speed, memory and exactness of the field: every method, size and state in a process of its own.

python benchmarks/field.py            all of it, about 35 minutes on two cores
python benchmarks/field.py --quick    two sizes, under 90 seconds

Writes bench.csv and bench.png to --out, prints one table and a verdict. The ratio of a row is to one n x n x 512
product that was timed in the same process right before and right after the method; the smaller of the two counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from charge_sets import DIMS, SIZES, STATES
from machine import BUSY, environment, wait_until_quiet
from measure import Case, Measurement
from methods import METHODS
from report import plot, results_table, verdict_table, write_csv

__all__ = ["benchmark", "cases", "main"]

SIZES_RUN = (1_600, 6_100, 11_100, 22_736)
QUICK_SIZES = (1_600, 6_100)
QUICK_STATES = ("random", "crowded")
QUICK_METHODS = ("product", "naive", "tiled")


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


def measure_when_quiet(case: Case, *, patience: float) -> Measurement:
    """The least disturbed of several measurements, each begun when no other process is busy, if possible.

    There is one measurement if it is not disturbed, and no further one once `patience` seconds are spent on the case.
    """
    start = time.perf_counter()
    attempts: list[Measurement] = []
    while True:
        wait_until_quiet(patience - (time.perf_counter() - start))
        attempts.append(measure_in_fresh_process(case))
        if attempts[-1].note or attempts[-1].cores_busy_elsewhere < BUSY:
            return attempts[-1]
        if time.perf_counter() - start >= patience:
            return min(attempts, key=lambda row: row.cores_busy_elsewhere)


def benchmark(
    todo: Sequence[Case], out: Path, *, run: Callable[[Case], Measurement], console: Console | None = None
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


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for bench.csv and bench.png")
    parser.add_argument("--sizes", type=int, nargs="+", choices=sorted(SIZES), metavar="N", help=f"of {sorted(SIZES)}")
    parser.add_argument("--states", nargs="+", choices=STATES)
    parser.add_argument("--methods", nargs="+", choices=METHODS, metavar="METHOD", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--repeats", type=int, help="at most this many runs of a case (default 15, quick 5)")
    parser.add_argument(
        "--patience",
        type=float,
        help="seconds that a case may wait, and be run again, while other processes are busy (default 120, quick 0)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="other defaults: two sizes, two states, three methods, fewer repeats"
    )
    given = parser.parse_args(arguments)
    quick = given.quick

    todo = cases(
        sizes=given.sizes or (QUICK_SIZES if quick else SIZES_RUN),
        states=given.states or (QUICK_STATES if quick else STATES),
        methods=given.methods or (QUICK_METHODS if quick else tuple(METHODS)),
        repeats=given.repeats or (5 if quick else 15),
        seconds=4.0 if quick else 60.0,
    )
    patience = given.patience if given.patience is not None else (0.0 if quick else 120.0)
    console = Console(width=None if sys.stdout.isatty() else 150)
    rows = benchmark(todo, given.out, run=partial(measure_when_quiet, patience=patience), console=console)
    console.print(results_table(rows))
    console.print(verdict_table(rows))
    console.print(f"{given.out / 'bench.csv'}  {given.out / 'bench.png'}", highlight=False)
    return int(any(row.note.startswith("failed") for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
