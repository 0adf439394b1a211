"""Speed, memory and exactness of the retrieval metrics, each method in a process of its own.

python benchmarks/evaluation.py            20,000 embeddings, and Stanford Online Products' 60,502; a few minutes
python benchmarks/evaluation.py --quick    a few thousand, under a minute

Every method computes Recall@1, R-precision and MAP@R of the same 512-dimensional embeddings, and `pfml` Recall@K up to
K = 1,000 besides. Its numbers are compared with those of pytorch-metric-learning's AccuracyCalculator: with its default
search (faiss) for speed, with its searches by float32 similarities for equality, since faiss rounds distances enough to
swap neighbors. All of these compute n^2 similarities, pfml half of them, and that is the limit of its lead. A ratio is
to one pass of full products (all similarities, in chunks of rows, kept nowhere) timed right before and right after in
the same process; the smaller of the two counts. Memory is measured in another process, where what is freed goes back to
the system. Writes evaluation.csv to --out and prints one table.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from machine import BUSY, OthersClock, environment, peak_extra_bytes
from pfml.evaluation.retrieval import retrieval_metrics

__all__ = ["METHODS", "Case", "Row", "benchmark", "embeddings_of", "main", "measure", "results_table"]

DIMS = 512
#: Embeddings and classes.
SIZES = {"20,000": (20_000, 3_774), "SOP test": (60_502, 11_316), "small": (4_000, 755)}
COMPARED = ("precision_at_1", "r_precision", "map_at_r")
DEFAULT_SEARCH = "AccuracyCalculator, faiss"
#: What the metrics may differ by, the promised speed over the default search, and the memory at the size of SOP.
TOLERANCE, SPEED_UP, MEMORY_MIB = 1e-6, 5.0, 2_048

Metrics = dict[str, float]


def _pfml(embeddings: Tensor, labels: Tensor) -> Metrics:
    return retrieval_metrics(embeddings, labels, recall_at=(1, 10, 100, 1000)).as_dict()


def _accuracy_calculator(search: Callable[[], Any]) -> Callable[[Tensor, Tensor], Metrics]:
    """pytorch-metric-learning's metrics by way of one of its neighbor searches."""

    def metrics(embeddings: Tensor, labels: Tensor) -> Metrics:
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

        calculator = AccuracyCalculator(
            include=("precision_at_1", "r_precision", "mean_average_precision_at_r"),
            k="max_bin_count",
            device=torch.device("cpu"),
            knn_func=search(),
            kmeans_func=len,  # never called, and needs no faiss
        )
        found = calculator.get_accuracy(embeddings, labels)
        return {"map_at_r" if name.startswith("mean") else name: value for name, value in found.items()}

    return metrics


def _faiss() -> Any:
    from pytorch_metric_learning.utils.inference import FaissKNN

    return FaissKNN()


def _matrix(rows: int | None) -> Any:
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.utils.inference import CustomKNN

    return CustomKNN(CosineSimilarity(), batch_size=rows)


#: Name -> metrics of embeddings and labels. The second is what AccuracyCalculator does if it is told nothing else.
METHODS: dict[str, Callable[[Tensor, Tensor], Metrics]] = {
    "pfml": _pfml,
    DEFAULT_SEARCH: _accuracy_calculator(_faiss),
    "AccuracyCalculator, in batches": _accuracy_calculator(lambda: _matrix(1_024)),
    "AccuracyCalculator, one matrix": _accuracy_calculator(lambda: _matrix(None)),
}


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    method: str
    points: int
    classes: int
    repeats: int = 3
    memory: bool = False


@dataclass(frozen=True)
class Row:
    """What a case gave; NaN where it was not measured, and then `note` says why."""

    method: str
    points: int
    classes: int
    seconds: float = math.nan
    ratio_to_product: float = math.nan
    peak_extra_mib: float = math.nan
    largest_difference: float = math.nan
    speed_up: float = math.nan
    repeats: int = 0
    cores_busy_elsewhere: float = math.nan
    metrics: Metrics = field(default_factory=dict)
    note: str = ""


def embeddings_of(points: int, classes: int, spread: float = 0.1) -> tuple[Tensor, Tensor]:
    """Unit vectors around class centers; by default as hard to tell apart as those of a trained model on SOP."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randperm(points, generator=generator) % classes
    centers = torch.nn.functional.normalize(torch.randn(classes, DIMS, generator=generator))
    noise = torch.randn(points, DIMS, generator=generator).mul_(spread)
    return torch.nn.functional.normalize(noise.add_(centers[labels])), labels


def measure(case: Case) -> Row:
    """Time, or memory, of one case in this process."""
    row = Row(case.method, case.points, case.classes)
    if "faiss" in case.method and importlib.util.find_spec("faiss") is None:
        return replace(row, note="faiss is not installed")
    method = METHODS[case.method]
    embeddings, labels = embeddings_of(case.points, case.classes)
    method(*embeddings_of(200, 40))  # loads code
    if case.memory:
        return replace(row, peak_extra_mib=peak_extra_bytes(lambda: method(embeddings, labels))[1] / 2**20)
    clock = OthersClock()
    before = _seconds(lambda: _product(embeddings))
    metrics, times = {}, []
    for _ in range(case.repeats):
        start = time.perf_counter()
        metrics = method(embeddings, labels)
        times.append(time.perf_counter() - start)
    product = min(before, _seconds(lambda: _product(embeddings)))
    seconds = statistics.median(times)
    return replace(
        row,
        seconds=seconds,
        ratio_to_product=seconds / product,
        repeats=case.repeats,
        cores_busy_elsewhere=clock.cores_busy(),
        metrics=metrics,
    )


def _product(embeddings: Tensor) -> None:
    buffer = embeddings.new_empty(512, len(embeddings))
    for rows in embeddings.split(512):
        torch.mm(rows, embeddings.T, out=buffer[: len(rows)])


def _seconds(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure_in_fresh_processes(case: Case) -> Row:
    """`measure(case)` for time and again for memory, with nothing left over from another case."""
    row = _in_fresh_process(case)
    if row.note:
        return row
    # what is freed goes back to the system, so that the peak is of memory in use
    memory = _in_fresh_process(replace(case, memory=True), MALLOC_MMAP_THRESHOLD_="262144")
    return replace(row, peak_extra_mib=memory.peak_extra_mib, note=memory.note)


def _in_fresh_process(case: Case, **environment: str) -> Row:
    done = subprocess.run(
        [sys.executable, __file__, "--measure", json.dumps(asdict(case))],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    if done.returncode == 0:
        return Row(**json.loads(done.stdout.splitlines()[-1]))
    reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return Row(case.method, case.points, case.classes, note=f"failed: {reason}")


def benchmark(todo: Sequence[Case], out: Path, *, run: Callable[[Case], Row]) -> list[Row]:
    """Run all cases, compare `pfml` with the others of the same size, and write evaluation.csv to `out`."""
    rows = [run(case) for case in todo]
    ours = {row.points: row for row in rows if row.method == "pfml"}
    rows = [_compared(row, ours.get(row.points)) for row in rows]
    out.mkdir(parents=True, exist_ok=True)
    part, about = out / "evaluation.part", environment()
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*(column.name for column in fields(Row)), *about])
        writer.writeheader()
        for row in rows:
            writer.writerow(asdict(row) | {"metrics": json.dumps(row.metrics)} | about)
    os.replace(part, out / "evaluation.csv")
    return rows


def _compared(row: Row, ours: Row | None) -> Row:
    if ours is None or row is ours or not row.metrics or not ours.metrics:
        return row
    difference = max(abs(row.metrics[name] - ours.metrics[name]) for name in COMPARED)
    return replace(row, largest_difference=difference, speed_up=row.seconds / ours.seconds)


def results_table(rows: Sequence[Row]) -> Table:
    """One line per case; `pfml` is how many times faster it is, and `differs` by how much the metrics differ."""
    table = Table(title=f"Recall, R-precision and MAP@R, CPU, float32, {DIMS} dimensions")
    for name in ("points", "classes", "method", "s", "x product", "MiB", "pfml", "differs", "R@1", "MAP@R", "busy"):
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for previous, row in zip([None, *rows], rows, strict=False):
        if previous is not None and previous.points != row.points:
            table.add_section()
        start = (f"{row.points:,}", f"{row.classes:,}", row.method)
        if row.note:
            table.add_row(*start, row.note)
            continue
        table.add_row(
            *start,
            f"{row.seconds:.2f}",
            f"{row.ratio_to_product:.2f}",
            f"{row.peak_extra_mib:,.0f}",
            "" if math.isnan(row.speed_up) else f"{row.speed_up:.1f} x faster",
            "" if math.isnan(row.largest_difference) else f"{row.largest_difference:.0e}",
            f"{row.metrics['precision_at_1']:.4f}",
            f"{row.metrics['map_at_r']:.4f}",
            f"{row.cores_busy_elsewhere:.1f}" if row.cores_busy_elsewhere > BUSY else "",
        )
    return table


def differs(row: Row) -> bool:
    """Whether the metrics are others than those of `pfml`, where they should be the same."""
    return row.method != DEFAULT_SEARCH and row.largest_difference > TOLERANCE


def verdict(rows: Sequence[Row]) -> list[str]:
    """Whether the promises hold, one sentence each."""
    lines = []
    for row in rows:
        if row.method == "pfml" and not row.note:
            held, text = row.peak_extra_mib <= MEMORY_MIB, f"{row.points:,} in {row.peak_extra_mib:,.0f} MiB"
        elif math.isnan(row.largest_difference):
            continue
        elif row.method == DEFAULT_SEARCH:
            held, text = row.speed_up >= SPEED_UP, f"{SPEED_UP:g} x faster than {row.method}: {row.speed_up:.1f}"
        else:
            held, text = not differs(row), f"metrics of {row.method} to {TOLERANCE:g}"
        lines.append(f"{'ok' if held else 'NOT OK'}: {text}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 if a case failed or metrics differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for evaluation.csv")
    parser.add_argument("--repeats", type=int, default=3, help="runs of a case, of which the median counts")
    parser.add_argument("--quick", action="store_true", help="4,000 embeddings only")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # one case, in this process
    given = parser.parse_args(arguments)
    if given.measure:
        print(json.dumps(asdict(measure(Case(**json.loads(given.measure))))))
        return 0
    compared = "small" if given.quick else "20,000"
    todo = [Case(method, *SIZES[compared], given.repeats) for method in METHODS]
    if not given.quick:
        todo.append(Case("pfml", *SIZES["SOP test"], repeats=1))
    rows = benchmark(todo, given.out, run=measure_in_fresh_processes)
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(results_table(rows))
    for line in verdict(rows):
        console.print(line, highlight=False)
    console.print(given.out / "evaluation.csv", highlight=False)
    return int(any(row.note.startswith("failed") or differs(row) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
