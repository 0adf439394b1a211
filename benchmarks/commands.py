"""How long people wait for commands: their start, `pfml index`, and the first batch of `pfml train --data FOLDER`.

python benchmarks/commands.py start      --help, import pfml, pfml search of one image, beside import torch
python benchmarks/commands.py index      images of an index per second, beside the network alone
python benchmarks/commands.py train      from the command to the first batch, of a folder of images

Images are JPEG files of 500 x 375 pixels (`photos.py`), the model is efficientnet_lite0 at 224 pixels. Commands are
processes of their own. Seconds depend on the machine; processor seconds are disturbed least by others on it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from machine import OthersClock
from pfml.memory import keep_freed_memory
from pfml.models import Embedder, create_embedder
from pfml.search import ImageIndex, ModelIdentity, list_images, update_index
from photos import class_folders, photographs

__all__ = ["first_batch", "index_rates", "main", "start_times"]

BACKBONE = "efficientnet_lite0"
PFML = (sys.executable, "-m", "pfml")
#: Images of a forward pass of `pfml index` on a CPU.
BATCH = 32


def _model(weights: str = "none") -> Embedder:
    torch.manual_seed(0)
    return create_embedder(BACKBONE, weights=weights, embedding_dim=None).eval()


# --- start


def start_times(folder: Path, rounds: int) -> dict[str, tuple[float, float]]:
    """Command -> medians of seconds and of processor seconds, of `rounds` turns after one to warm up."""
    run, photo = folder / "run", photographs(folder / "photos", 12)
    embedder = _model()
    embedder.save(run)
    index = ImageIndex.create(run / "index", ModelIdentity.of(embedder), embedder.embedding_dim)
    update_index(index, embedder, list_images(folder / "photos"))
    commands = {
        "import torch": (sys.executable, "-c", "import torch"),
        "import pfml": (sys.executable, "-c", "import pfml"),
        "from pfml import PotentialFieldLoss": (sys.executable, "-c", "from pfml import PotentialFieldLoss"),
        "pfml --help": (*PFML, "--help"),
        "pfml train --help": (*PFML, "train", "--help"),
        "pfml search, one image": (*PFML, "search", str(run), str(photo[0]), "--device", "cpu"),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for turn in range(rounds + 1):
        for name, command in commands.items():
            times = _timed(command)
            if turn:
                found[name].append(times)
    return {
        name: (statistics.median(wall for wall, _ in times), statistics.median(own for _, own in times))
        for name, times in found.items()
    }


def _timed(command: Sequence[str]) -> tuple[float, float]:
    """Seconds and processor seconds of a command that succeeds."""
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, os.times()
    return wall, after.children_user + after.children_system - before.children_user - before.children_system


# --- index


def index_rates(
    folder: Path, images: int, rounds: int, root: Path | None = None
) -> dict[str, list[tuple[float, float]]]:
    """What is done to each image -> its seconds and processor seconds in each turn.

    The network alone gets random numbers in batches as large; `pfml index` reads, decodes, embeds and writes.
    """
    keep_freed_memory()  # as `pfml index` does
    photographs(folder / "photos", images, root)
    embedder, listing = _model(), list_images(folder / "photos")
    model = ModelIdentity.of(embedder)

    def network() -> None:
        side = embedder.preprocessing.crop
        pixels = torch.rand(BATCH, 3, side, side)
        with torch.inference_mode():
            for done in range(0, images, BATCH):
                embedder(pixels[: images - done])

    def whole(turn: int) -> None:
        index = ImageIndex.create(folder / f"index-{turn}", model, embedder.embedding_dim)
        update_index(index, embedder, listing)

    times: dict[str, list[tuple[float, float]]] = {"network alone": [], "pfml index": []}
    for turn in range(rounds + 1):
        for name, work in (("network alone", network), ("pfml index", lambda: whole(turn))):  # noqa: B023
            found = _measured(work)
            if turn:  # the first turn warms up
                times[name].append((found[0] / images, found[1] / images))
    return times


def _measured(work: Callable[[], object]) -> tuple[float, float]:
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


# --- train

#: Run in place of `pfml`: it notes when things happen first, and ends the command at the first batch.
OBSERVED = """
import json, os, sys, time
START, FILE = float(sys.argv[1]), sys.argv[2]
seen = {}

def note(what):
    if what not in seen:
        seen[what] = time.time() - START, sum(os.times()[:4])
        with open(FILE, "w") as file:
            json.dump(seen, file)

note("python")
from pfml import cli
from pfml.models.embedder import Embedder
from pfml.training import progress

remark, save = progress.ProgressMonitor.remark, Embedder.save

def tracked(self, items, description, total):
    for item in items:
        note(f"{description} ({total})")
        yield item
        if description == "embedding" and "model" in seen:
            os._exit(0)

def remarked(self, text):
    note("first sentence")
    return remark(self, text)

def saved(self, *arguments, **options):
    found = save(self, *arguments, **options)
    note("model")
    return found

def stepped(self, *arguments):
    note("first batch")
    os._exit(0)

progress.ProgressMonitor.track, progress.ProgressMonitor.remark = tracked, remarked
Embedder.save, progress.ProgressMonitor.step = saved, stepped
cli.main(sys.argv[3:])
"""


def first_batch(folder: Path, data: Path, options: Sequence[str]) -> dict[str, tuple[float, float]]:
    """What happened first in `pfml train --data DATA` -> seconds since the command, processor seconds of it."""
    noted = folder / "noted.json"
    out = tempfile.mkdtemp(dir=folder) + "/run"
    arguments = ["train", "--data", str(data), "--out", out, "--device", "cpu", *options]
    command = [sys.executable, "-c", OBSERVED, str(time.time()), str(noted), *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, tuple[float, float]] = json.loads(noted.read_text())
    return found


# --- all


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("start", "index", "train"))
    parser.add_argument("--images", type=int, default=256, help="of the index, or of the folder to train with")
    parser.add_argument("--classes", type=int, default=200, help="of that folder")
    parser.add_argument("--data.root", dest="root", type=Path, help="CUB-200-2011; without it, images are noise")
    parser.add_argument("--rounds", type=int, default=5, help="turns, of which the median counts")
    parser.add_argument("--folder", type=Path, help="where images are kept for the next time")
    parser.add_argument("options", nargs="*", help="after --: further options of pfml train")
    given = parser.parse_intermixed_args(arguments)
    console, others = Console(width=None if sys.stdout.isatty() else 120), OthersClock()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        if given.what == "start":
            _show_start(console, start_times(Path(temporary), given.rounds))
        elif given.what == "index":
            _show_index(console, index_rates(folder, given.images, given.rounds, given.root))
        else:
            photos = photographs(folder / f"photos-{given.images}", given.images, given.root)
            data = class_folders(folder / f"classes-{given.images}", photos, given.classes)
            table = Table("what happens first", "seconds", "processor seconds")
            for what, (wall, processor) in first_batch(Path(temporary), data, given.options).items():
                table.add_row(what, f"{wall:.1f}", f"{processor:.1f}")
            console.print(table)
    console.print(f"{others.cores_busy():.1f} cores were busy elsewhere, or in other processes of this benchmark")
    return 0


def _show_start(console: Console, found: dict[str, tuple[float, float]]) -> None:
    table = Table("command", "seconds", "processor seconds")
    for name, (wall, processor) in found.items():
        table.add_row(name, f"{wall:.2f}", f"{processor:.2f}")
    console.print(table)


def _show_index(console: Console, times: dict[str, list[tuple[float, float]]]) -> None:
    table = Table("", "ms per image", "core ms per image", "share of the network")
    medians = {name: [statistics.median(each) for each in zip(*pairs, strict=True)] for name, pairs in times.items()}
    reference = medians["network alone"][0]
    for name, (wall, processor) in medians.items():
        table.add_row(name, f"{1e3 * wall:.1f}", f"{1e3 * processor:.1f}", f"{reference / wall:.0%}")
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())
