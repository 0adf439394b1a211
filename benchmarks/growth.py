"""How cost grows: the field with its points and its classes, exact search with the vectors of an index.

python benchmarks/growth.py                 growth.csv and growth.png in --out; a few minutes
python benchmarks/growth.py --seconds 2     stop each curve sooner

Every cost is processor time of one thread, as a multiple of the first one of its curve. A curve ends where the next
size would take longer than --seconds or more memory than is free. The exponent is the slope of the last three sizes in
logarithms. Sizes that were not run are estimated by it, and marked.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from machine import available_bytes
from methods import ANCHOR, PAPER
from pfml.backends import BACKENDS
from pfml.plots.theme import LIGHT, add_legend, new_figure, png_of_figure, style_axes
from pfml.search.backends import ExactSearcher
from pfml.sphere import unit
from pfml.superposition import Charges, Field, PairWeights

__all__ = ["CURVES", "Curve", "Point", "exponent", "main", "measured"]

BATCH = 100
QUERIES = 100
#: No curve may take more than this share of the free memory.
MEMORY_SHARE = 0.5
#: Sizes from which the exponent is fitted: the largest ones, where fixed costs are small.
FITTED = 3

Step = Callable[[], object]


@dataclass(frozen=True)
class Curve:
    """One line of the figure."""

    name: str
    step: Callable[[int], Step]
    sizes: tuple[int, ...]
    dims: int


@dataclass(frozen=True)
class Point:
    """One size of a curve: its cost as a multiple of the first one, and whether it was estimated."""

    curve: str
    size: int
    seconds: float
    cost: float
    exponent: float
    estimated: bool


def _field_step(proxies: int, classes: int, dims: int, field: Field) -> Step:
    generator = torch.Generator().manual_seed(0)
    samples = unit(torch.randn(BATCH, dims, generator=generator)).requires_grad_()
    points = unit(torch.randn(proxies, dims, generator=generator)).requires_grad_()
    labels = torch.arange(proxies) * classes // proxies
    groups = (
        Charges(samples, torch.randint(classes, (BATCH,), generator=generator)),
        Charges(points, labels, on_sphere=True),
    )

    def step() -> None:
        for group in groups:
            group.points.grad = None
        BACKENDS["tiled"](*groups, field, PairWeights()).backward()

    return step


def _search_step(vectors: int, dims: int) -> Step:
    generator = torch.Generator().manual_seed(0)
    stored = unit(torch.randn(vectors, dims, generator=generator))
    queries = unit(torch.randn(QUERIES, dims, generator=generator))
    allowed = torch.ones(vectors, dtype=torch.bool)
    return lambda: ExactSearcher([stored]).nearest(queries, 10, allowed)


#: Points with two proxies per class as SOP has them; classes with one proxy each under "anchor", whose pairs are
#: those of the batch; vectors that a batch of queries is compared with.
CURVES = (
    Curve(
        "field, points", lambda n: _field_step(n - BATCH, n // 2, 128, PAPER),
        (1_000, 3_000, 10_000, 30_000, 100_000), 128,
    ),
    Curve(
        'field, classes ("anchor")', lambda c: _field_step(c, c, 64, ANCHOR),
        (10, 100, 1_000, 10_000, 100_000, 1_000_000), 64,
    ),
    Curve(
        "exact search, vectors", lambda n: _search_step(n, 128),
        (10_000, 100_000, 1_000_000, 10_000_000), 128,
    ),
)  # fmt: skip


def exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """The slope of log seconds over log size by least squares, of the last `FITTED` sizes."""
    x = [math.log(size) for size in sizes[-FITTED:]]
    y = [math.log(value) for value in seconds[-FITTED:]]
    if len(x) < 2:
        return math.nan
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    return sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / sum((a - x_mean) ** 2 for a in x)


def measured(curve: Curve, *, seconds: float) -> list[Point]:
    """The sizes of a curve that take at most about `seconds` each, and estimates of the others."""
    sizes: list[int] = []
    times: list[float] = []
    for size in curve.sizes:
        if times:
            growth = exponent(sizes, times) if len(times) > 1 else 2.0
            expected = times[-1] * (size / sizes[-1]) ** growth
            # the points, their float64 norms, a gradient and the random numbers that they are made of
            if expected > seconds or 24 * size * curve.dims > MEMORY_SHARE * available_bytes():
                break
        times.append(_cost(curve.step(size)))
        sizes.append(size)
    slope = exponent(sizes, times)
    points = []
    for size in curve.sizes:
        known = size in sizes
        value = times[sizes.index(size)] if known else times[-1] * (size / sizes[-1]) ** slope
        points.append(Point(curve.name, size, value, value / times[0], slope, estimated=not known))
    return points


def _cost(step: Step) -> float:
    """Processor seconds: the least of up to three runs after the first, or the first where it is long."""
    found: list[float] = []
    for _ in range(4):
        start = time.process_time()
        step()
        found.append(time.process_time() - start)
        if found[0] > 2.0:
            return found[0]
    return min(found)


def table_of(points: Sequence[Point]) -> Table:
    """One line per size."""
    table = Table("curve", "size", "cost", "exponent", "")
    for point in points:
        cells = (f"{point.size:,}", f"{point.cost:,.3g}", f"{point.exponent:.2f}")
        table.add_row(point.curve, *cells, "estimated" if point.estimated else "")
    return table


def draw(points: Sequence[Point], path: Path) -> None:
    """Cost over size, log-log; estimates are hollow."""
    figure = new_figure(LIGHT, width=640, height=400)
    axes = figure.add_subplot()
    style_axes(axes, LIGHT)
    for name, color in zip(dict.fromkeys(point.curve for point in points), LIGHT.series[1:], strict=False):
        line = [point for point in points if point.curve == name]
        label = f"{name}: exponent {line[0].exponent:.2f}"
        axes.plot([p.size for p in line], [p.cost for p in line], color=color, linewidth=1.5, label=label)
        for point in line:
            fill = LIGHT.paper if point.estimated else color
            axes.plot(point.size, point.cost, "o", color=color, markerfacecolor=fill, markersize=5)
    axes.set(xscale="log", yscale="log", xlabel="size", ylabel="cost, multiple of the first")
    add_legend(figure, LIGHT, columns=1)
    path.write_bytes(png_of_figure(figure))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder for growth.csv and growth.png")
    parser.add_argument("--seconds", type=float, default=20.0, help="the longest step")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    points = [point for curve in CURVES for point in measured(curve, seconds=given.seconds)]
    given.out.mkdir(parents=True, exist_ok=True)
    with (given.out / "growth.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[column.name for column in fields(Point)])
        writer.writeheader()
        writer.writerows(asdict(point) for point in points)
    draw(points, given.out / "growth.png")
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table_of(points))
    console.print(f"{given.out / 'growth.csv'}  {given.out / 'growth.png'}", highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
