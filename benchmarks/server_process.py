"""`pfml serve` in a process of its own, over glyphs, and what that process holds (Linux)."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from PIL import Image

from machine import resident_bytes
from pfml.data import draw_glyphs
from pfml.models import create_embedder
from pfml.search import ImageIndex, ModelIdentity, list_images, update_index

__all__ = ["Held", "ServerProcess", "write_gallery"]


def write_gallery(folder: Path, letters: str = "ABCDEFGHKLMN", copies: int = 2) -> Path:
    """An embedder that was not trained, with an index of 16 * `copies` images per glyph; the folder of the run."""
    glyphs = draw_glyphs(letters, copies=copies)
    for number, (pixels, label) in enumerate(zip(glyphs.images, glyphs.labels.tolist(), strict=True)):
        path = folder / "images" / glyphs.class_names[label] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(path)
    torch.manual_seed(0)
    embedder = create_embedder("convnet", embedding_dim=16, pooling="avg+max")
    run = folder / "run"
    embedder.save(run)
    index = ImageIndex.create(run / "index", ModelIdentity.of(embedder), embedder.embedding_dim)
    update_index(index, embedder, list_images(folder / "images"))
    return run


@dataclass(frozen=True)
class Held:
    """What the server holds at one moment.

    Args:
        seconds: Since the server was started.
        resident: Bytes of memory.
        files: Open file descriptors, connections among them.
        threads: Of the system.
        temporary: Files in its temporary folder.
    """

    seconds: float
    resident: int
    files: int
    threads: int
    temporary: int


class ServerProcess:
    """A server on a free port of this machine, for a block.

    Args:
        run: Folder of a run with an index.
        folder: An empty folder for its temporary files and for what it says.
        options: Of `pfml serve`.
        threads: Of torch.
    """

    def __init__(self, run: Path, folder: Path, *options: str, threads: int = 1) -> None:
        self.said = folder / "server.log"
        self.temporary = folder / "temporary"
        self.temporary.mkdir(parents=True)
        command = [sys.executable, "-m", "pfml", "serve", str(run), "--port", "0", "--map", "pca", *options]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TMPDIR": str(self.temporary)}
        self._began = time.monotonic()
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment)
        try:
            self.port = self._listening_port()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def held(self) -> Held:
        """What it holds now."""
        process = Path(f"/proc/{self.process.pid}")
        return Held(
            time.monotonic() - self._began,
            resident_bytes(self.process.pid),
            len(list((process / "fd").iterdir())),
            len(list((process / "task").iterdir())),
            sum(1 for path in self.temporary.rglob("*") if path.is_file()),
        )

    def end(self) -> int:
        """Interrupt it as Ctrl-C does; its exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(30)

    def _listening_port(self, patience: float = 120.0) -> int:
        """The port, once it answers; it is said a moment before."""
        while time.monotonic() - self._began < patience and self.process.poll() is None:
            found = re.search(r"http://127\.0\.0\.1:(\d+)/", self.said.read_text(errors="replace"))
            with socket.socket() as caller:
                if found and caller.connect_ex(("127.0.0.1", int(found[1]))) == 0:
                    return int(found[1])
            time.sleep(0.1)
        raise RuntimeError(f"pfml serve must listen within {patience:.0f} s, got: {self.said.read_text()[-2000:]}")
