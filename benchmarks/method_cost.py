"""What a training step costs by each method: the embedded glyphs, the convnet and batches of the experiments.

python benchmarks/method_cost.py [--steps 30] [--methods pfml,proxy-anchor]

Prints seconds of one core per epoch, and their ratio to Proxy Anchor's. They are processor seconds of the first steps
of a run with one thread (crops, model, loss, optimizer), so that others on the machine change them little; methods
take turns, and the lower quartile of the steps counts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pfml.data.image_source import open_images
from pfml.experiments.catalog import base_config
from pfml.methods import METHODS
from pfml.models import Embedder
from pfml.models.freezing import start_training_mode
from pfml.runs.data import prepare_data
from pfml.runs.folder import RunFolder
from pfml.training.loop import Training
from pfml.training.progress import Monitor

__all__ = ["main", "seconds_of_steps"]

REFERENCE = "proxy-anchor"


def seconds_of_steps(methods: Sequence[str], steps: int) -> tuple[dict[str, list[float]], int]:
    """Method -> processor seconds of each of the first steps, and the steps of an epoch."""
    data, _ = prepare_data(base_config("glyphs", "convnet", REFERENCE).data)
    source = open_images(data.train)
    found: dict[str, list[float]] = {method: [] for method in methods}
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for method in methods:
            config = base_config("glyphs", "convnet", method)
            torch.manual_seed(0)
            sources = {"train": source}
            run_folder = RunFolder(Path(folder) / method)
            runs[method] = Training(Embedder(config.model), data, sources, config, run_folder, Monitor())
            start_training_mode(runs[method].embedder, batch_norm=config.batch_norm)
            runs[method].initialize_proxies()
        batches = {method: run.batches.batches(0) for method, run in runs.items()}
        for step in range(steps + 1):
            for method, run in runs.items():
                start = time.process_time()
                _advance(run, batches[method][step])
                if step:  # the first one also loads code and allocates
                    found[method].append(time.process_time() - start)
    return found, len(run.batches)


def _advance(run: Training, batch: Tensor) -> None:
    """One step, as `Training.train_epoch` does it."""
    (pixels,) = run.sources["train"].crops(run.plan([batch]))
    run.update(batch, pixels)
    run.state.position += 1


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    trained = [name for name, method in METHODS.items() if method.trains]
    parser.add_argument("--methods", default=",".join(trained), help="names between commas; by default all")
    parser.add_argument("--steps", type=int, default=30, help="of each method")
    options = parser.parse_args()
    torch.set_num_threads(1)
    methods = list(dict.fromkeys([REFERENCE, *options.methods.split(",")]))
    found, per_epoch = seconds_of_steps(methods, options.steps)
    quartiles = {method: statistics.quantiles(seconds, n=4)[0] for method, seconds in found.items()}
    table = Table("method", "core seconds per epoch", f"of {REFERENCE}'s")
    for method, quartile in quartiles.items():
        table.add_row(method, f"{per_epoch * quartile:.2f}", f"{quartile / quartiles[REFERENCE]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
