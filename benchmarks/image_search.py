"""Time of a search by each backend of `pfml.search`, turn by turn in one process.

python benchmarks/image_search.py --entries 100000 --queries 100

Random unit vectors, in a folder of their own. The time of a search is the median of --turns, in which the backends take
turns, so that what else the machine does falls on all of them; a ratio compares the two times of one turn. It covers
the whole of `ImageIndex.search`: products, selection, distances in float64, paths, classes. Opening is timed once: it
reads every byte and compares its checksum. Results are required to be equal. "held" is the exact search with vectors in
memory, as `pfml serve` has them; "exact" reads them from their file in every search. "half" is the exact search with a
filter on two columns that half of the entries pass.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from pfml.search import Hit, ImageIndex, ModelIdentity

MODEL = ModelIdentity("0" * 64, "random vectors")
Result = TypeVar("Result")


def measure(entries: int, dimension: int, queries: int, k: int, turns: int, folder: Path) -> None:
    """Print the times."""
    generator = torch.Generator().manual_seed(0)
    gallery = torch.randn(entries, dimension, generator=generator)
    asked = torch.randn(queries, dimension, generator=generator)
    index = ImageIndex.create(folder / "index", MODEL, dimension)
    known = [{"price": float(k % 100), "brand": f"brand {k % 7}"} for k in range(entries)]
    paths = [f"{k}.jpg" for k in range(entries)]
    seconds, _ = timed(lambda: index.add(gallery, paths, model=MODEL, metadata=known))
    print(f"{entries:,} vectors x {dimension}, {queries} queries, k = {k}, {torch.get_num_threads()} threads")
    print(f"add     {seconds:8.3f} s")
    print(f"open    {timed(lambda: ImageIndex.open(folder / 'index'))[0]:8.3f} s")
    opened = {name: ImageIndex.open(folder / "index", backend=name) for name in ("exact", "faiss")}
    opened["held"] = ImageIndex.open(folder / "index", hold_bytes=2**62)
    times: dict[str, list[float]] = {name: [] for name in (*opened, "half")}
    half = "price < 50 and brand != 'brand 9'"
    for turn in range(turns + 1):
        found: dict[str, list[list[Hit]]] = {}
        for name, one in opened.items():
            seconds, found[name] = timed(lambda one=one: one.search(asked, k, model=MODEL))  # type: ignore[misc]
            if turn:  # the first warms up, and copies the vectors for faiss
                times[name].append(seconds)
        seconds, _ = timed(lambda: opened["exact"].search(asked, k, model=MODEL, where=half))
        if turn:
            times["half"].append(seconds)
        ids = {name: [[hit.id for hit in hits] for hits in results] for name, results in found.items()}
        if not ids["exact"] == ids["faiss"] == ids["held"]:
            raise AssertionError("the backends must find the same images, and do not")
    for name, each in times.items():
        print(f"{name:<8}{statistics.median(each):8.3f} s")
    for name in ("faiss", "held", "half"):
        ratios = [other / exact for exact, other in zip(times["exact"], times[name], strict=True)]
        print(f"{name} / exact: median {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


def timed(function: Callable[[], Result]) -> tuple[float, Result]:
    """Seconds that a call takes, and its result."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(options.entries, options.dimension, options.queries, options.k, options.turns, Path(folder))
