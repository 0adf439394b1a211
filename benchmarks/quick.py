"""A guard against slower code: ratios of one run beside those of benchmarks/baseline.json, in less than two minutes.

python benchmarks/quick.py            1 and a sentence per row that is more than 25 % above its baseline
python benchmarks/quick.py --write    make this run the baseline
python benchmarks/quick.py --leads    retrieval metrics of 20,000 embeddings beside faiss and AccuracyCalculator

Each row is a ratio to a matrix product that takes turns with it, both in processor time of one thread: what other
processes do changes such a ratio little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from charge_sets import charge_set
from evaluation import DEFAULT_SEARCH, SIZES, embeddings_of
from evaluation import METHODS as EVALUATIONS
from methods import METHODS
from pfml.evaluation.retrieval import retrieval_metrics

__all__ = ["BASELINE", "ROWS", "TOLERANCE", "main", "ratios", "regressions", "turns"]

BASELINE = Path(__file__).with_name("baseline.json")
#: How far above its baseline a ratio may be.
TOLERANCE = 0.25
POINTS = 1_600
ROUNDS = 9

Step = Callable[[], object]


def _field(method: str, state: str) -> tuple[Step, Step]:
    charges = charge_set(POINTS, state)
    return METHODS[method].step(charges), METHODS["product"].step(charges)


def _metrics() -> tuple[Step, Step]:
    embeddings, labels = embeddings_of(4_000, 755)
    return lambda: retrieval_metrics(embeddings, labels), lambda: embeddings @ embeddings.T


#: Name -> the step and the product that it is divided by.
ROWS: dict[str, Callable[[], tuple[Step, Step]]] = {
    "field, random": lambda: _field("tiled", "random"),
    "field, 1 % within reach": lambda: _field("tiled", "trained"),
    "field, 20 % within reach": lambda: _field("tiled", "crowded"),
    "field, log": lambda: _field("tiled-log", "trained"),
    "field, anchor": lambda: _field("tiled-anchor", "trained"),
    "retrieval metrics, 4,000": _metrics,
}


def turns(step: Step, product: Step, rounds: int) -> float:
    """Processor time of `step` over that of `product`, medians of `rounds` turns on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds + 1):
            for run, found in zip((step, product), times, strict=True):
                start = time.process_time()
                run()
                if number:  # the first turn warms up
                    found.append(time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    return statistics.median(times[0]) / statistics.median(times[1])


def ratios(rounds: int = ROUNDS) -> dict[str, float]:
    """The ratio of every row."""
    return {name: round(turns(*row(), rounds), 3) for name, row in ROWS.items()}


def leads(rounds: int) -> dict[str, float]:
    """How many times longer than the retrieval metrics of pfml others take: a search by faiss alone, and metrics."""
    import faiss

    embeddings, labels = embeddings_of(*SIZES["20,000"])
    vectors, neighbors = embeddings.numpy(), int(labels.bincount().max()) + 1

    def flat() -> None:
        index = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        index.search(vectors, neighbors)

    others: dict[str, Step] = {
        "faiss flat, search alone": flat,
        DEFAULT_SEARCH: lambda: EVALUATIONS[DEFAULT_SEARCH](embeddings, labels),
    }
    faiss.omp_set_num_threads(1)
    return {name: turns(run, lambda: EVALUATIONS["pfml"](embeddings, labels), rounds) for name, run in others.items()}


def regressions(found: Mapping[str, float], baseline: Mapping[str, float]) -> list[str]:
    """A sentence for each row that is slower than its baseline by more than `TOLERANCE`, or has none."""
    sentences = []
    for name, ratio in found.items():
        if name not in baseline:
            sentences.append(f"{name}: has no baseline; run python benchmarks/quick.py --write")
        elif not ratio <= baseline[name] * (1 + TOLERANCE):
            slower = ratio / baseline[name] - 1
            sentences.append(f"{name}: {ratio:.2f} products, {slower:.0%} above its baseline of {baseline[name]:.2f}")
    return sentences


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 if a row is slower than its baseline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, default=BASELINE, help="the JSON file of ratios")
    parser.add_argument("--write", action="store_true", help="write the baseline instead of comparing with it")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of a row, of which the median counts")
    parser.add_argument(
        "--leads", action="store_true", help="compare the retrieval metrics with other packages instead"
    )
    given = parser.parse_args(arguments)
    if given.leads:
        for name, lead in leads(given.rounds).items():
            print(f"{name}: {lead:.2f} times the time of pfml")
        return 0
    found = ratios(given.rounds)
    if given.write:
        given.baseline.write_text(json.dumps(found, indent=2) + "\n")
    baseline: dict[str, float] = json.loads(given.baseline.read_text())
    table = Table("row", "products", "baseline")
    for name, ratio in found.items():
        table.add_row(name, f"{ratio:.2f}", f"{baseline[name]:.2f}" if name in baseline else "")
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    slower = regressions(found, baseline)
    for sentence in slower:
        console.print(sentence, highlight=False)
    return int(bool(slower))


if __name__ == "__main__":
    raise SystemExit(main())
