"""The benchmark's table, CSV, plot and verdict."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich.table import Table

from machine import BUSY
from measure import Measurement
from methods import METHODS

__all__ = ["COLUMNS", "ENVIRONMENT_COLUMNS", "TARGETS", "plot", "results_table", "verdict_table", "write_csv"]

ENVIRONMENT_COLUMNS = ("torch", "pfml", "python", "cores", "cpu", "date")
COLUMNS = tuple(column.name for column in fields(Measurement)) + ENVIRONMENT_COLUMNS


def write_csv(rows: Sequence[Measurement], environment: dict[str, str], path: Path) -> None:
    """Write all rows, in one step, so that an interrupted benchmark leaves a whole file."""
    part = path.with_suffix(".part")
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS)
        writer.writeheader()
        for row in rows:
            writer.writerow(asdict(row) | environment)
    os.replace(part, path)


def results_table(rows: Sequence[Measurement]) -> Table:
    """One line per case, ordered by size, then by method."""
    table = Table(title="Forward and backward, CPU, float32, 512 dimensions (product: one n x n x 512 product)")
    for name in ("points", "method", "state"):
        table.add_column(name, justify="right" if name == "points" else "left", no_wrap=True)
    for name in ("inside", "p20 ms", "p50 ms", "p80 ms", "x product", "MiB", "force error", "runs", "busy"):
        table.add_column(name, justify="right", no_wrap=True)
    order = {name: number for number, name in enumerate(METHODS)}
    previous = None
    for row in sorted(rows, key=lambda row: (row.points, order[row.method])):
        if previous not in (None, row.points):
            table.add_section()
        previous = row.points
        state = row.state if METHODS[row.method].depends_on_state else "any"
        if row.note:
            table.add_row(f"{row.points:,}", row.method, state, *[""] * 8, row.note)
            continue
        table.add_row(
            f"{row.points:,}",
            row.method,
            state,
            f"{row.share_inside_delta:.1%}",
            *(f"{value:,.1f}" for value in (row.p20_ms, row.p50_ms, row.p80_ms)),
            f"{row.ratio_to_product:.2f}",
            f"{row.peak_extra_mib:,.0f}",
            "" if math.isnan(row.force_error) else f"{row.force_error:.1e}",
            str(row.repeats),
            f"{row.cores_busy_elsewhere:.1f}" if row.cores_busy_elsewhere > BUSY else "",
        )
    return table


@dataclass(frozen=True)
class Target:
    """A promise about `tiled` in some states, at one size or (None) at all that were run."""

    text: str
    states: tuple[str, ...]
    points: int | None
    #: (row of tiled, all rows by method, state and points) -> the number to compare, NaN if it cannot be formed
    quantity: Callable[[Measurement, dict[tuple[str, str, int], Measurement]], float]
    limit: float
    at_least: bool = False
    unit: str = "x"
    #: Whether it is about time, which other processes disturb.
    timed: bool = True

    def reached(self, value: float) -> bool:
        """Whether `value` keeps the promise."""
        return value >= self.limit if self.at_least else value <= self.limit


def _ratio(row: Measurement, rows: dict[tuple[str, str, int], Measurement]) -> float:
    return row.ratio_to_product


def _faster_than_naive(row: Measurement, rows: dict[tuple[str, str, int], Measurement]) -> float:
    """How many times faster than naive, both in units of the product timed beside them."""
    naive = rows.get(("naive", row.state, row.points))
    return math.nan if naive is None else naive.ratio_to_product / row.ratio_to_product


def _memory(row: Measurement, rows: dict[tuple[str, str, int], Measurement]) -> float:
    return row.peak_extra_mib / 1024


TARGETS = (
    Target("tiled / product, random and trained", ("random", "trained"), None, _ratio, 2.0),
    Target("tiled / product, crowded", ("crowded",), None, _ratio, 3.5),
    Target("naive / tiled, random and trained", ("random", "trained"), 11_100, _faster_than_naive, 5.0, at_least=True),
    Target("tiled, extra memory", ("random", "trained", "crowded"), 22_736, _memory, 0.5, unit="GiB", timed=False),
)


def verdict_table(rows: Sequence[Measurement]) -> Table:
    """Each target, and the worst value that was reached while nothing else used the machine."""
    table = Table(title="Targets, by the worst undisturbed case of this run")
    for name in ("target", "at", "wanted", "reached", "in", ""):
        table.add_column(name, no_wrap=True)
    for target in TARGETS:
        usable = [row for row in rows if not row.note and not (target.timed and row.cores_busy_elsewhere > BUSY)]
        by_key = {(row.method, row.state, row.points): row for row in usable}
        values = {
            row: target.quantity(row, by_key)
            for row in usable
            if row.method == "tiled" and row.state in target.states and target.points in (None, row.points)
        }
        values = {row: value for row, value in values.items() if not math.isnan(value)}
        wanted = f"{'>=' if target.at_least else '<='} {target.limit:g} {target.unit}"
        at = "all sizes" if target.points is None else f"{target.points:,}"
        if not values:
            table.add_row(target.text, at, wanted, "not run, or not undisturbed", "", "")
            continue
        worst = (min if target.at_least else max)(values, key=lambda row: values[row])
        verdict = "[green]yes" if target.reached(values[worst]) else "[red]no"
        reached = f"{values[worst]:.2f} {target.unit}"
        table.add_row(target.text, at, wanted, reached, f"{worst.state}, {worst.points:,}", verdict)
    return table


def plot(rows: Sequence[Measurement], path: Path) -> None:
    """Time and memory over n, log-log, one line per method; a column for the state random, one for crowded."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    quantities = (("p50_ms", "forward and backward, ms"), ("peak_extra_mib", "peak extra memory, MiB"))
    states = ("random", "crowded")
    colors = {name: f"C{number}" for number, name in enumerate(METHODS)}
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), sharex=True, sharey="row", layout="constrained")
    for axis_row, (quantity, label) in zip(axes, quantities, strict=True):
        for axis, state in zip(axis_row, states, strict=True):
            for name, method in METHODS.items():
                line = sorted(
                    (row.points, getattr(row, quantity))
                    for row in rows
                    if row.method == name and (row.state == state or not method.depends_on_state) and not row.note
                )
                if line:
                    axis.plot(*zip(*line, strict=True), "o-", markersize=4, color=colors[name], label=name)
            axis.set(xscale="log", yscale="log")
            axis.grid(True, which="major", alpha=0.3)
        axis_row[0].set_ylabel(label)
    sizes = sorted({row.points for row in rows})
    for axis, state in zip(axes[0], states, strict=True):
        shares = [row.share_inside_delta for row in rows if row.state == state and not row.note]
        axis.set_title(f"{state}: {max(shares, default=math.nan):.0%} of pairs inside delta")
    for axis in axes[1]:
        axis.set_xlabel("points n")
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes], minor=False)
        axis.minorticks_off()
    handles = {text: line for axis in axes.flat for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
