"""Speed, memory and exactness on one GPU, each against its target and against what the hardware could do.

python benchmarks/gpu.py                        all of it, a few minutes on an H200
python benchmarks/gpu.py --sections field small
python benchmarks/gpu.py --quick                small sizes, no targets
python benchmarks/gpu.py --quick --device cpu   tiny sizes, to see that it runs

Prints one table, and writes gpu.csv (after each row) and gpu.png to --out. Times are medians after a warm-up, forward
and backward, by events on the GPU; memory is what a run allocates above what was there before it (in all of it for the
million proxies); an error is that of the forces against float64. The last columns say what bounds a row: the products
that the algorithm needs at least, the memory that it must read and write, or the number of its kernels, at the rates
that were measured in the same run; and how much of that bound was reached.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import io
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from evaluation import DIMS, SIZES, embeddings_of
from gpu_field import field_section, plot_section
from gpu_loss import million_section, small_section
from gpu_measure import GIB, Recorder, Row, Setting, extra_mib, gpu_environment, times_ms, timing
from gpu_plot import draw_curves
from gpu_rates import Bound, Rates, measure_rates
from gpu_teachers import teachers_section
from pfml.evaluation.retrieval import retrieval_metrics

__all__ = ["SECTIONS", "main", "results_table", "run"]

#: Spread around class centers -> how well such embeddings are trained.
QUALITIES = {"well trained": 0.05, "medium": 0.1, "badly trained": 0.3}
RECALL_AT = (1, 10, 100, 1000)
#: Embeddings whose metrics are compared with a CPU's.
COMPARED = 8_000


def evaluation_section(recorder: Recorder, setting: Setting, rates: Rates) -> None:
    """All metrics of the test set of Stanford Online Products; `error` is the largest difference from a CPU's."""
    whole = setting.on_gpu and not setting.quick
    points, classes = SIZES["SOP test"] if whole else SIZES["small"] if setting.on_gpu else (300, 60)
    for quality, spread in QUALITIES.items():
        what = f"retrieval_metrics, {quality}, {points:,} x {DIMS}, {classes:,} classes"

        def measure(what: str = what, quality: str = quality, spread: float = spread) -> Row:
            embeddings, labels = embeddings_of(points, classes, spread)
            on_device, on_cpu = (
                retrieval_metrics(embeddings[:COMPARED].to(device), labels[:COMPARED], recall_at=RECALL_AT).as_dict()
                for device in (setting.device, "cpu")
            )
            embeddings, labels = embeddings.to(setting.device), labels.to(setting.device)

            def step() -> object:
                return retrieval_metrics(embeddings, labels, recall_at=RECALL_AT)

            memory = extra_mib(step, setting)
            times = timing(times_ms(step, setting, at_least=5, seconds=setting.longest, warm_up=2, wall=True))
            bound = Bound(1.0 * points**2 * DIMS, 4.0 * points * DIMS, "fp32")  # half a product
            return Row(
                "evaluation",
                what,
                "retrieval_metrics",
                points,
                DIMS,
                quality,
                target_ms=1_500.0 if whole else math.nan,
                mib=memory,
                target_error=0.0,
                error=max(abs(on_device[name] - on_cpu[name]) for name in on_cpu),
                **times,
                **rates.explain(bound, times["p50_ms"]),
            )

        recorder.attempt("evaluation", what, measure, points=points, state=quality)


def training_section(recorder: Recorder, setting: Setting, rates: Rates) -> None:
    """The rows of benchmarks/training.py, from the CSV that it writes; if it fails, the other sections run."""
    try:
        main_of_training: Callable[[Sequence[str]], int] = importlib.import_module("training").main
    except (ImportError, AttributeError) as error:
        recorder.add(Row("training", "training", note=f"left out: {error}"))
        return
    arguments = ["--device", setting.device.type, "--out", str(recorder.path.parent), *_TRAINING]
    if setting.quick:
        arguments.append("--quick")
    table = recorder.path.with_name("training.csv")
    table.unlink(missing_ok=True)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it has a table of its own
            main_of_training(arguments)
    except (Exception, SystemExit) as error:  # of argparse, too
        recorder.add(Row("training", "training", note=f"failed: {type(error).__name__}: {error}"))
    for line in csv.DictReader(table.open()) if table.exists() else ():
        recorder.add(_training_row(line, promised=not setting.quick))


#: So that it takes its share of a few minutes; the whole is `python benchmarks/training.py`.
_TRAINING = ("--networks", "eager,loss", "--rounds", "1", "--steps", "20", "--synthetic-images", "1000")
_LOOP_PER_STEP = 0.85


def _training_row(line: dict[str, str], *, promised: bool) -> Row:
    """A step of training, or the loss within it, as a line of our table."""
    number = {name: float(line.get(name) or math.nan) for name in ("step_ms", "loss_ms", "ratio")}
    of_loss = line.get("network") == "loss"
    what = f"{line.get('method')}, {line.get('network')}, {line.get('classes')} classes, batch {line.get('batch')}"
    ratio = math.nan if of_loss else number["ratio"]
    return Row(
        "training",
        what + (", loss within a step" if of_loss else ", step; loop / step"),
        line.get("method", ""),
        p50_ms=number["loss_ms" if of_loss else "step_ms"],
        ratio=ratio,
        target_ratio=_LOOP_PER_STEP if promised and not math.isnan(ratio) else math.nan,
        note=line.get("note", ""),
    )


Section = Callable[[Recorder, Setting, Rates], None]

SECTIONS: dict[str, Section] = {
    "field": field_section,
    "small": small_section,
    "million": million_section,
    "evaluation": evaluation_section,
    "plot": plot_section,
    "teachers": teachers_section,
    "training": training_section,  # last, as the longest
}


def run(sections: Sequence[str], setting: Setting, recorder: Recorder) -> Rates:
    """Measure the rates of the machine, then all rows of these sections."""
    rates = measure_rates(setting)
    for name in sections:
        SECTIONS[name](recorder, setting, rates)
    return rates


def results_table(rows: Sequence[Row], about: dict[str, str], rates: Rates) -> Table:
    """One line per row."""
    hardware = (
        f"products at {rates.low / 1e12:,.3g} (16-bit), {rates.tf32 / 1e12:,.3g} (tf32), {rates.fp32 / 1e12:,.3g} "
        f"(fp32) TFLOP/s, memory at {rates.bandwidth / 1e12:.3g} TB/s, a kernel in {rates.kernel * 1e6:.1f} us"
    )
    software = f"torch {about['torch']}, triton {about['triton']}, commit {about['commit']}"
    table = Table(title=f"{about['device']}, {software}\n{hardware}")
    for name in ("section", "what", "target", "reached", "", "bounded by"):
        table.add_column(name, no_wrap=name in ("section", "bounded by"))
    for previous, row in zip([None, *rows], rows, strict=False):
        if previous is not None and previous.section != row.section:
            table.add_section()
        color = {"met": "[green]", "": ""}.get(row.verdict, "[red]")
        table.add_row(row.section, row.what, *_numbers(row), f"{color}{row.verdict}", _bounded_by(row))
    return table


def _numbers(row: Row) -> tuple[str, str]:
    """Targets and what was reached, in the same order."""
    if row.note:
        return "", row.note
    columns = (
        (row.target_ms, row.p50_ms, "{:,.3g} ms"),
        (row.target_mib / GIB, row.mib / GIB, "{:,.3g} GiB"),
        (row.target_error, row.error, "error {:.1e}"),
        (row.target_ratio, row.ratio, "{:.0%}"),
    )
    targets = [text.format(target) for target, _, text in columns if not math.isnan(target)]
    reached = [text.format(value) for _, value, text in columns if not math.isnan(value)]
    return ", ".join(targets), ", ".join(reached)


def _bounded_by(row: Row) -> str:
    return f"{row.share_of_bound:.0%} of {row.bound_ms:.3g} ms: {row.bound}" if row.bound else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 if a row failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for gpu.csv and gpu.png")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --quick")
    parser.add_argument("--repeats", type=int, default=20, help="runs of a row with a target, at least")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--commit", help="what the CSV says, where git cannot be asked")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is available; --device cpu --quick tries the script at tiny sizes")

    console = Console(width=None if sys.stdout.isatty() else 170)
    begun = time.perf_counter()

    def show(row: Row) -> None:
        target, reached = _numbers(row)
        verdict = row.verdict if target else ""
        console.print(
            f"{time.perf_counter() - begun:5.0f} s  {row.section}: {row.what}: {reached}  {verdict}",
            highlight=False,
            markup=False,
        )

    about = gpu_environment(device, given.commit)
    recorder = Recorder(given.out / "gpu.csv", about, show)
    rates = run(given.sections, Setting(device, given.quick, given.repeats), recorder)
    console.print(results_table(recorder.rows, about, rates))
    console.print(given.out / "gpu.csv", highlight=False)
    if "plot" in given.sections:
        draw_curves(recorder.rows, given.out / "gpu.png", about["device"])
        console.print(given.out / "gpu.png", highlight=False)
    return int(any(row.failed for row in recorder.rows))


if __name__ == "__main__":
    raise SystemExit(main())
