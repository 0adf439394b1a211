"""Memory of a long training run: resident set, live tensors, live Python objects, open files and threads.

python benchmarks/soak.py --steps 2000

The shipped configuration `glyphs`, with evaluations and checkpoints as in any run. A sample is taken every --every
steps, after a garbage collection. What a leak is: the line through the samples of the second half rises.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from machine import environment, resident_bytes
from pfml.runs.config_files import shipped_config
from pfml.runs.data import prepare_data
from pfml.training import Monitor, RunConfig, run

__all__ = ["Sample", "Soak", "growth_per_step", "soak"]


@dataclass(frozen=True)
class Sample:
    """What the process holds at one moment.

    Args:
        step: Steps done.
        resident: Bytes of memory.
        tensors: Live torch tensors.
        tensor_bytes: Of their storages, each counted once.
        objects: Python objects that the garbage collector knows.
        files: Open file descriptors.
        threads: Of Python.
    """

    step: int
    resident: int
    tensors: int
    tensor_bytes: int
    objects: int
    files: int
    threads: int


class Soak(Monitor):
    """Takes a sample every so many steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.steps = 0
        self.samples: list[Sample] = []

    def step(self, epoch: int, loss: float, images_per_second: float) -> None:
        self.steps += 1
        if self.steps % self.every == 0:
            self.samples.append(sample(self.steps))


def sample(step: int) -> Sample:
    """What this process holds now, after a garbage collection."""
    gc.collect()
    objects = gc.get_objects()
    # `type`, since asking some lazy objects for their class imports modules; other kinds of tensors may hold no data
    tensors = [one for one in objects if type(one) in (torch.Tensor, torch.nn.Parameter)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    files = len(list(Path("/proc/self/fd").iterdir()))
    counts = len(tensors), sum(storages.values()), len(objects), files, threading.active_count()
    return Sample(step, resident_bytes(), *counts)


def soak(steps: int, every: int, out: Path, config: RunConfig | None = None) -> list[Sample]:
    """Samples of a run of at least `steps` steps with eight evaluations, of the shipped glyphs if None."""
    config = config or shipped_config("glyphs")
    per_epoch = max(len(prepare_data(config.data)[0].train) // config.batch.size, 1)
    epochs = -(-steps // per_epoch)
    monitor = Soak(every)
    run(replace(config, epochs=epochs, evaluate_every=max(epochs // 8, 1), device="cpu"), out=out, monitor=monitor)
    return monitor.samples


def growth_per_step(samples: list[Sample], field: str) -> float:
    """Slope of the least-squares line through the samples of the second half."""
    late = samples[len(samples) // 2 :]
    return statistics.linear_regression([one.step for one in late], [getattr(one, field) for one in late]).slope


def main() -> None:
    """Run it and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--json", type=Path, help="also write all samples to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples = soak(arguments.steps, arguments.every, Path(folder) / "run")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in samples], indent=1) + "\n")
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    print(_table(samples))


def _table(samples: list[Sample]) -> str:
    rows = [samples[0], *(samples[len(samples) * k // 4 - 1] for k in (1, 2, 3, 4))]
    lines = ["| step | resident MiB | tensors | their MiB | Python objects | open files | threads |"]
    lines.append("|---|---|---|---|---|---|---|")
    for one in rows:
        sizes = f"{one.resident / 2**20:,.1f} | {one.tensors:,} | {one.tensor_bytes / 2**20:,.2f}"
        lines.append(f"| {one.step:,} | {sizes} | {one.objects:,} | {one.files} | {one.threads} |")
    fields = ("resident", "tensors", "tensor_bytes", "objects", "files", "threads")
    slopes = [growth_per_step(samples, field) * 1000 for field in fields]
    slopes[0], slopes[2] = slopes[0] / 2**20, slopes[2] / 2**20
    formats = ("+,.2f", "+,.2f", "+,.3f", "+,.1f", "+,.2f", "+,.2f")
    cells = " | ".join(format(slope, how) for slope, how in zip(slopes, formats, strict=True))
    lines.append(f"| growth per 1,000 steps, second half | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
