"""Uploads per second through HTTP, over images per second of the model alone on the same decoded images (Linux).

python benchmarks/server_uploads.py
python benchmarks/server_uploads.py --width 500 --height 375 --route /api/search --processes 2

`pfml serve` with efficientnet_lite0, whose weights need no network access, answers clients that keep their connections
and send a new upload as soon as the last one is answered. Turns of the server and of the model alone alternate, so that
other work on the machine slows down both. Clients and server share the cores.
"""

from __future__ import annotations

import argparse
import io
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy
import torch
from PIL import Image

from machine import environment
from pfml.memory import keep_freed_memory
from pfml.models import create_embedder
from pfml.models.embedder import Embedder
from pfml.search import ImageIndex, ModelIdentity
from pfml.serving.service import CPU_BATCH, Limits, Service
from server_process import ServerProcess
from server_requests import FORM_TYPE, form, request

__all__ = ["photograph", "raw_rate", "upload_rate"]

DIFFERENT = 16


def photograph(width: int, height: int, seed: int) -> bytes:
    """A JPEG with large shapes and some noise, as many bytes as a photograph of its size has."""
    random = numpy.random.default_rng(seed)
    y, x = numpy.mgrid[:height, :width] / 37.0
    waves = [numpy.sin(x * random.uniform(0.3, 2) + k) * numpy.cos(y * random.uniform(0.3, 2) - k) for k in range(3)]
    levels = 128 + 80 * numpy.stack(waves, axis=-1) + random.normal(scale=6.0, size=(height, width, 3))
    out = io.BytesIO()
    Image.fromarray(levels.clip(0, 255).astype(numpy.uint8)).save(out, "JPEG", quality=85)
    return out.getvalue()


def raw_rate(embedder: Embedder, crops: torch.Tensor, seconds: float, cores: int) -> float:
    """Images per second of the model on decoded images: all cores for a batch or a core for each, the faster one."""
    return max(_rate(embedder, crops, seconds / 2, 1, cores), _rate(embedder, crops, seconds / 2, cores, 1))


def _rate(embedder: Embedder, crops: torch.Tensor, seconds: float, threads: int, cores: int) -> float:
    counts = [0] * threads
    began = time.perf_counter()

    def embed(number: int) -> None:
        torch.set_num_threads(cores)
        with torch.no_grad():
            while time.perf_counter() - began < seconds:
                embedder(crops)
                counts[number] += len(crops)

    running = [threading.Thread(target=embed, args=(number,)) for number in range(threads)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    return sum(counts) / (time.perf_counter() - began)


def upload_rate(port: int, requests: list[bytes], clients: int, seconds: float) -> tuple[float, int]:
    """Answers of 200 per second, and how many were something else."""
    counts, wrong = [0] * clients, [0] * clients
    until = time.perf_counter() + seconds

    def ask(number: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rb") as answers:
            turn = number
            while time.perf_counter() < until:
                connection.sendall(requests[turn % len(requests)])
                turn += 1
                status = answers.readline().split()[1]
                length = 0
                while (line := answers.readline()) not in (b"\r\n", b""):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                answers.read(length)
                counts[number] += status == b"200"
                wrong[number] += status != b"200"

    began = time.perf_counter()
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return sum(counts) / (time.perf_counter() - began), sum(wrong)


def main() -> None:
    """Print the rates of all turns, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=340)
    parser.add_argument("--height", type=int, default=256)
    parser.add_argument("--route", choices=("/api/embed", "/api/search"), default="/api/embed")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    contents = [photograph(options.width, options.height, seed) for seed in range(DIFFERENT)]
    binary = {"accept": "application/octet-stream"} if options.route == "/api/embed" else {}
    requests = [request("POST", options.route, form(one), content_type=FORM_TYPE, **binary) for one in contents]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        embedder = create_embedder("efficientnet_lite0", embedding_dim=512).eval()
        embedder.save(folder / "run")
        model = ModelIdentity.of(embedder)
        index = ImageIndex.create(folder / "run" / "index", model, embedder.embedding_dim)
        index.add(torch.randn(100, embedder.embedding_dim), [f"{k}.jpg" for k in range(100)], model=model)
        crops = torch.stack([_crop(embedder, one) for one in contents])[:CPU_BATCH]
        serving = ("--processes", str(options.processes), "--backend", "exact")
        with ServerProcess(folder / "run", folder / "server", *serving, threads=options.threads) as server:
            upload_rate(server.port, requests, options.clients, 3.0)
            raw_rate(embedder, crops, 2.0, options.threads)
            rates = []
            for _ in range(options.turns):
                raw = raw_rate(embedder, crops, 2 * options.seconds, options.threads)
                sent, wrong = upload_rate(server.port, requests, options.clients, options.seconds)
                rates.append((raw, sent))
                print(
                    f"model alone {raw:.1f} a second, uploads {sent:.1f}: {sent / raw:.3f}; not 200: {wrong}",
                    flush=True,
                )
            server.end()
    print(", ".join(f"{key} {value}" for key, value in environment().items()))
    size = f"{options.width} x {options.height}, {statistics.mean(map(len, contents)) / 1024:.0f} KiB"
    ratio = statistics.median(sent for _, sent in rates) / statistics.median(raw for raw, _ in rates)
    print(f"{options.route}, JPEG of {size}: {ratio:.3f} of the model alone (medians of {options.turns} turns)")


def _crop(embedder: Embedder, content: bytes) -> torch.Tensor:
    """The input of the model, made as the server makes it."""
    limits = Limits()
    serving = Service.__new__(Service)  # its decoding alone, without threads
    serving.limits = limits
    serving.gallery = type("OnlyModel", (), {"embedder": embedder})()
    return serving.cropped(serving.opened(content))


if __name__ == "__main__":
    main()
