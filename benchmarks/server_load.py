"""Searches by id in a large index, by many clients at a time: latencies, errors, and memory over time (Linux).

python benchmarks/server_load.py --images 1000000 --seconds 600 --update
python benchmarks/server_load.py --folder load --make-only      # then: pfml index load/run ..., and the same without it

Every client keeps its connection, asks for the neighbors of a random image, and asks again when it is answered, or
after a pause (--pause): without one, the clients ask as much as the server can answer. With
--update another process writes to the index all the while: images are added, removed, and at the half of the time all
of it is compacted. Any answer but 200, and any broken connection, counts as an error. Clients and server share the
cores.
"""

from __future__ import annotations

import argparse
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

from machine import environment, resident_bytes
from pfml.models import create_embedder
from pfml.search import ImageIndex, ModelIdentity
from server_process import ServerProcess

__all__ = ["Clients", "write_large_gallery"]

CHUNK = 65_536
CLASSES = 2000
WRITER = """
import sys, time, torch
from pfml.search import ImageIndex
index, seconds = ImageIndex.open(sys.argv[1]), float(sys.argv[2])
began, number, is_compacted = time.monotonic(), 0, False
while time.monotonic() - began < seconds:
    paths = [f"/new/{number}/{k}.jpg" for k in range(64)]
    index.add(torch.randn(64, index.dimension), paths, ["new"] * 64, model=index.model)
    if number % 4 == 3:
        index.remove(paths=paths[:32])
    if not is_compacted and time.monotonic() - began > seconds / 2:
        index.compact()
        is_compacted = True
    number += 1
    time.sleep(1.0)
print(number)
"""


def write_large_gallery(folder: Path, images: int, dimension: int) -> Path:
    """An embedder with an index of so many vectors in clusters, one per class; their files do not exist."""
    run = folder / "run"
    torch.manual_seed(0)
    embedder = create_embedder("convnet", embedding_dim=dimension, pooling="avg+max")
    embedder.save(run)
    model = ModelIdentity.of(embedder)
    index = ImageIndex.create(run / "index", model, dimension)
    centers = torch.nn.functional.normalize(torch.randn(CLASSES, dimension))
    for first in range(0, images, CHUNK):
        count = min(CHUNK, images - first)
        labels = torch.randint(CLASSES, (count,))
        vectors = centers[labels] + 0.7 * torch.randn(count, dimension) / dimension**0.5
        paths = [f"/images/{label}/{first + k}.jpg" for k, label in enumerate(labels.tolist())]
        index.add(vectors, paths, [f"class {label}" for label in labels.tolist()], model=model)
    return run


class Clients:
    """Clients that search by id until a time, each in a thread.

    Args:
        port: Of the server.
        count: How many.
        images: Ids are drawn below this.
        until: On the clock `time.monotonic`.
        pause: Seconds between an answer and the next question of a client, on average.
    """

    def __init__(self, port: int, count: int, images: int, until: float, pause: float = 0.0) -> None:
        self.port = port
        self.pause = pause
        self.images = images
        self.until = until
        self.seconds: list[list[float]] = [[] for _ in range(count)]
        self.errors: list[str] = []
        self.threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(count)]
        for thread in self.threads:
            thread.start()

    def join(self) -> list[float]:
        """Wait for all; the seconds of each answer."""
        for thread in self.threads:
            thread.join()
        return [one for some in self.seconds for one in some]

    def _ask(self, number: int) -> None:
        ids = random.Random(number)
        while time.monotonic() < self.until:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 60) as connection:
                    self._converse(connection, ids, self.seconds[number])
            except (OSError, IndexError) as error:
                self.errors.append(repr(error))

    def _converse(self, connection: socket.socket, ids: random.Random, seconds: list[float]) -> None:
        with connection.makefile("rb") as answers:
            while time.monotonic() < self.until:
                began = time.perf_counter()
                target = f"/api/search?id={ids.randrange(self.images)}&k=24"
                connection.sendall(f"GET {target} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
                status, length, is_last = answers.readline().split()[1], 0, False
                while (line := answers.readline().lower()) not in (b"\r\n", b""):
                    length = int(line.split(b":")[1]) if line.startswith(b"content-length:") else length
                    is_last |= line.startswith(b"connection: close")
                answers.read(length)
                seconds.append(time.perf_counter() - began)
                if status != b"200":
                    self.errors.append(status.decode())
                if self.pause:
                    time.sleep(ids.uniform(0.0, 2.0 * self.pause))
                if is_last:
                    return


def main() -> None:
    """Print latencies, errors, and memory by quarters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the index is made, or was made before")
    parser.add_argument("--make-only", action="store_true")
    parser.add_argument("--images", type=int, default=1_000_000)
    parser.add_argument("--dimension", type=int, default=128)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between a client's questions, on average")
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        run = folder / "run"
        if not run.exists():
            run = write_large_gallery(folder, options.images, options.dimension)
        if not options.make_only:
            _measure(options, run, Path(temporary) / "server")


def _measure(options: argparse.Namespace, run: Path, folder: Path) -> None:
    serving = ("--backend", options.backend, "--processes", str(options.processes))
    with ServerProcess(run, folder, *serving, threads=options.threads) as server:
        Clients(server.port, options.clients, options.images, time.monotonic() + 5.0).join()
        if options.update:
            command = [sys.executable, "-c", WRITER, str(run / "index"), str(options.seconds)]
            writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        clients = Clients(
            server.port, options.clients, options.images, time.monotonic() + options.seconds, options.pause
        )
        memory = []
        while any(thread.is_alive() for thread in clients.threads):
            memory.append(sum(resident_bytes(pid) for pid in _tree(server.process.pid)))
            time.sleep(1.0)
        seconds = sorted(clients.join())
        writes = writer.communicate()[0].strip() if options.update else "0"
        server.end()
        said = server.said.read_text(errors="replace")
    p50, p99 = seconds[len(seconds) // 2], seconds[int(0.99 * len(seconds))]
    quarters = [memory[len(memory) * k // 4 : len(memory) * (k + 1) // 4] or memory[-1:] for k in range(4)]
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    index = f"{options.images:,} images of {options.dimension} dimensions, backend {options.backend}"
    print(f"{index}, {options.clients} clients, pause {options.pause} s, {options.processes} processes")
    print(f"{len(seconds):,} searches, {len(seconds) / options.seconds:.1f} a second, {len(clients.errors)} errors")
    print(f"p50 {1000 * p50:.1f} ms, p99 {1000 * p99:.1f} ms, longest {1000 * seconds[-1]:.0f} ms; {writes} updates")
    print("resident MiB, median of each quarter:", [round(sorted(some)[len(some) // 2] / 2**20) for some in quarters])
    print("first errors:", clients.errors[:5], "log:", [line for line in said.splitlines()[1:] if line][:5])


def _tree(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [one for child in (task / "children").read_text().split() for one in _tree(int(child))]
    except OSError:  # it has ended
        pass
    return found


if __name__ == "__main__":
    main()
