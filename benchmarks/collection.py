"""Collections larger than memory: what `pfml embed` and an index take, and what kills and processes change.

python benchmarks/collection.py memory    peak memory of embedding 1 x and 8 x as many images, folder and archive
python benchmarks/collection.py kills     20 kills (SIGKILL) at random moments, then the rest: are the files the same?
python benchmarks/collection.py shards    4 processes at once against one process: are the vectors the same?
python benchmarks/collection.py search    memory of writing, opening, searching an index of 1 x and 8 x as many vectors

Images are noise of 40 x 40 pixels, the model is an untrained convnet of 64 dimensions. Every command runs in a process
of its own. Memory of embedding is the peak of its resident set (VmHWM of /proc). Memory of an index is the peak of
anonymous memory (RssAnon of /proc, polled every few milliseconds) above what there was before, because mapped files
count as resident, too, though the system takes their pages back whenever it needs them.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
from PIL import Image

from pfml.models import create_embedder
from pfml.search import ImageIndex, ModelIdentity
from pfml.storage.embeddings import open_embeddings

TIMES = 8
SHARD = 256
MODEL = ModelIdentity("0" * 64, "random vectors")
MIB = 2**20
#: What the system counts for a child begins with the memory of its parent, so the child asks for its own.
PROGRAM = """
import re, sys
from pfml.cli import main
main(sys.argv[1:])
print(re.search(r"VmHWM:.*", open("/proc/self/status").read())[0])
"""


def write_images(folder: Path, count: int) -> Path:
    """A folder of `count` images, in folders of a thousand."""
    noise = numpy.random.default_rng(0)
    for number in range(count):
        path = folder / f"{number // 1000:03d}" / f"{number:06d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 256, (40, 40, 3), dtype=numpy.uint8)).save(path)
    return folder


def started(root: Path, images: Path, out: str, *options: str) -> subprocess.Popen[bytes]:
    """`pfml embed`, in a process of its own that ends by saying its peak memory."""
    command = [sys.executable, "-c", PROGRAM, "embed", str(root / "model"), str(images), f"--out={root / out}"]
    return subprocess.Popen([*command, *options], stdout=subprocess.PIPE)


def peak_of(process: subprocess.Popen[bytes]) -> float:
    """MiB that a process had in memory at most, once it has ended well."""
    said, _ = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"pfml embed ended with status {process.returncode}")
    return int(said.split()[-2]) / 1024


def measure_memory(root: Path, images: int) -> None:
    """Print the peak memory of embedding 1 x and 8 x as many images."""
    folders = {times: write_images(root / f"{times}", times * images) for times in (1, TIMES)}
    for kind, out, options in (("folder", "out", [f"--shard-images={SHARD}"]), ("archive", "out.npz", [])):
        peaks = {times: peak_of(started(root, each, f"{times}-{out}", *options)) for times, each in folders.items()}
        ratio = peaks[TIMES] / peaks[1]
        sizes = f"{images:,} images {peaks[1]:.0f} MiB, {TIMES * images:,} images {peaks[TIMES]:.0f} MiB"
        print(f"{kind}: {sizes}: {ratio:.3f} x")


def files_of(folder: Path) -> dict[str, bytes]:
    """Name -> content of all files but the lock, which holds the number of a process."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def measure_kills(root: Path, images: int) -> None:
    """Print how often resuming after a kill gave the files of an uninterrupted run."""
    folder, moments, same, done = write_images(root / "images", images), random.Random(0), 0, []
    options = (f"--shard-images={images // 16}",)
    peak_of(started(root, folder, "whole", *options))
    expected = files_of(root / "whole")
    for trial in range(20):
        killed, until = root / f"killed-{trial}", moments.randrange(16)
        writer = started(root, folder, killed.name, *options)
        while writer.poll() is None and (not killed.exists() or len(list(killed.glob("shard-*"))) < until):
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.2))
        writer.kill()
        writer.communicate()
        done.append(len(list(killed.glob("shard-*"))))
        peak_of(started(root, folder, killed.name, *options))
        same += files_of(killed) == expected
    print(f"{same} of 20 trials: all {len(expected)} files are, byte by byte, those of an uninterrupted run")
    print(f"finished shards at the kill, of {len(expected) - 1}: {sorted(done)}")


def measure_shards(root: Path, images: int) -> None:
    """Print how far the vectors of four processes are from those of one process."""
    folder = write_images(root / "images", images)
    peak_of(started(root, folder, "whole", f"--shard-images={SHARD}"))
    for process in [started(root, folder, "shards", f"--shard={k}/4", f"--shard-images={SHARD}") for k in range(1, 5)]:
        peak_of(process)
    whole, shards = open_embeddings(root / "whole"), open_embeddings(root / "shards")
    same = whole.paths == shards.paths
    difference = float((whole.vectors(whole.paths) - shards.vectors(whole.paths)).abs().max())
    sizes = f"{len(shards):,} images by 4 processes, {len(whole):,} in one"
    print(f"{sizes}: same paths {same}, largest difference {difference:g}")


def anonymous() -> float:
    """MiB of memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/status must tell RssAnon, and does not")


def peak_during(function: Callable[[], object]) -> float:
    """MiB of anonymous memory at most while `function` runs."""
    peak, done = anonymous(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    function()
    done.set()
    watcher.join()
    return peak


def write_once(folder: Path, entries: int, dimension: int) -> None:
    """Print the memory of writing an index, in this process."""
    begin = anonymous()

    def write() -> None:
        index = ImageIndex.create(folder, MODEL, dimension)
        for first in range(0, entries, 4096):
            points = torch.randn(min(4096, entries - first), dimension)
            index.add(points, [f"/photos/{first + k:09d}.jpg" for k in range(len(points))], model=MODEL)

    print(
        f"{entries:,} vectors of {4 * entries * dimension / MIB:,.0f} MiB: writing {peak_during(write) - begin:.0f} MiB"
    )


def search_once(folder: Path, entries: int, dimension: int) -> None:
    """Print the memory of opening and searching an index, in this process."""
    begin = anonymous()
    index: list[ImageIndex] = []
    opening = peak_during(lambda: index.append(ImageIndex.open(folder))) - begin
    queries = torch.randn(100, dimension, generator=torch.Generator().manual_seed(1))
    searching = peak_during(lambda: index[0].search(queries, 10, model=MODEL)) - begin
    print(f"{entries:,} vectors: opening {opening:.0f} MiB, searching {searching:.0f} MiB")


def measure_index(root: Path, entries: int, dimension: int) -> None:
    """Print the memory of an index of 1 x and 8 x as many vectors."""
    for times in (1, TIMES):
        for what in ("write-once", "search-once"):
            options = [f"--folder={root / f'index-{times}'}", f"--entries={times * entries}"]
            subprocess.run([sys.executable, __file__, what, *options, f"--dimension={dimension}"], check=True)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["memory", "kills", "shards", "search", "write-once", "search-once"])
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--entries", type=int, default=50_000)
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--folder", type=Path, help="of an index; for write-once and search-once")
    asked = parser.parse_args()
    if asked.what in ("write-once", "search-once"):
        step = write_once if asked.what == "write-once" else search_once
        step(asked.folder, asked.entries, asked.dimension)
        return
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        torch.manual_seed(0)
        create_embedder("convnet", embedding_dim=64).save(root / "model")
        if asked.what == "search":
            measure_index(root, asked.entries, asked.dimension)
        else:
            measures = {"memory": measure_memory, "kills": measure_kills, "shards": measure_shards}
            measures[asked.what](root, asked.images)


if __name__ == "__main__":
    main()
