"""Reliability items 24 to 28 for what pfml and pytorch-metric-learning save and read, by the same faults."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch import nn

from reliability_subjects import Outcome

__all__ = ["OURS", "THEIRS", "Saver", "archives", "damages", "disk_full", "images_of_pfml", "images_of_timm", "kills"]

SIZE = 500_000


def save_ours(folder: Path, number: int, size: int = SIZE) -> None:
    """pfml's checkpoint."""
    from pfml.runs.checkpoint import save_checkpoint

    save_checkpoint(folder, {"weight": torch.full((size,), float(number))}, {"step": number})


def read_ours(folder: Path) -> float:
    from pfml.runs.checkpoint import load_checkpoint

    return float(load_checkpoint(folder)[0]["weight"].max())


def save_theirs(folder: Path, number: int, size: int = SIZE) -> None:
    """The function by which the trainers and hooks of pytorch-metric-learning save."""
    from pytorch_metric_learning.utils.common_functions import save_model

    model = nn.ParameterDict({"weight": torch.full((size,), float(number))})
    save_model(model, str(folder / "model.pth"))


def read_theirs(folder: Path) -> float:
    from pytorch_metric_learning.utils.common_functions import load_model

    model = nn.ParameterDict({"weight": torch.zeros(_stored_size(folder))})
    load_model(model, str(folder / "model.pth"), torch.device("cpu"))
    return float(model["weight"].detach().max())


def _stored_size(folder: Path) -> int:
    return int((folder / "size").read_text()) if (folder / "size").exists() else SIZE


@dataclass(frozen=True)
class Saver:
    """How a library saves and reads; `pattern` finds the file with the weights."""

    save: Callable[..., None]
    read: Callable[[Path], float]
    pattern: str


OURS = Saver(save_ours, read_ours, "*.safetensors")
THEIRS = Saver(save_theirs, read_theirs, "*.pth")


def _save_for_ever(saver: Saver, folder: Path, started: Any) -> None:
    torch.set_num_threads(1)
    number = 1
    started.set()
    while True:
        saver.save(folder, number)
        number += 1


def kills(saver: Saver, trials: int) -> Outcome:
    """kill -9 at random moments of saving; how often nothing can be read afterwards."""
    context, delays, unreadable = get_context("fork"), random.Random(0), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saver.save(folder, 0)
        start = time.perf_counter()
        saver.save(folder, 0)
        one_save = time.perf_counter() - start
        for _ in range(trials):
            started = context.Event()
            writer = context.Process(target=_save_for_ever, args=(saver, folder, started))
            writer.start()
            started.wait()
            time.sleep(delays.uniform(0, 4 * one_save))
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
            try:
                saver.read(folder)
            except Exception:  # whatever a library says about a torn file
                unreadable += 1
                saver.save(folder, 0)
    return Outcome(unreadable == 0, f"{unreadable} of {trials} unreadable")


def disk_full(saver: Saver) -> Outcome:
    """A tmpfs of 1 MiB with a small save on it, and a large one on top."""
    with tempfile.TemporaryDirectory() as name:
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", name]
        if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
            return Outcome(False, "not run: a small file system needs root")
        try:
            folder = Path(name)
            (folder / "size").write_text("1000")
            saver.save(folder, 1, 1000)
            raised = "no error"
            try:
                saver.save(folder, 2, SIZE)
            except Exception as error:
                raised = type(error).__name__ if isinstance(error, OSError) else f"{type(error).__name__}, no OSError"
            try:
                intact = saver.read(folder) == 1
            except Exception:
                intact = False
        finally:
            subprocess.run(["umount", name], check=True)
    said = f"{raised}, the old one {'intact' if intact else 'lost'}"
    return Outcome(intact and raised == "OSError", said)


class _Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def _flipped(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[len(content) // 2] ^= 1
    return bytes(changed)


def damages(saver: Saver) -> Outcome:
    """A flipped byte, a cut, a huge header, a pickle that runs code, and NaN weights; each must be refused by name."""
    wrong = []
    with tempfile.TemporaryDirectory() as name:
        folder, marker = Path(name) / "saves", Path(name) / "marker"
        folder.mkdir()
        saver.save(folder, 1)
        [file] = folder.glob(saver.pattern)
        whole = file.read_bytes()
        contents = {
            "flipped byte": _flipped(whole),
            "truncated": whole[: len(whole) // 2],
            "huge header": struct.pack("<Q", 2**62) + whole[8:],
            "pickle": pickle.dumps(_Payload(marker)),
        }
        for damage, content in contents.items():
            file.write_bytes(content)
            wrong += [f"{damage}: {fault}" for fault in _not_refused(saver, folder, file)]
            if marker.exists():
                wrong.append(f"{damage}: code was run")
                marker.rmdir()
    with tempfile.TemporaryDirectory() as name:
        try:
            saver.save(Path(name), float("nan"))
            wrong += [f"NaN weights: {fault}" for fault in _not_refused(saver, Path(name), Path("last"))]
        except ValueError:
            pass  # refused before it was written
    return Outcome(not wrong, "; ".join(wrong) or "all refused by name, no code run")


def _not_refused(saver: Saver, folder: Path, file: Path) -> Iterator[str]:
    try:
        saver.read(folder)
        yield "loaded"
    except Exception as error:
        if file.name not in str(error):
            yield f"{type(error).__name__} without a name"


@contextmanager
def _images() -> Iterator[Path]:
    """Two classes of images; of the first one, the second image is cut short and the third empty."""
    with tempfile.TemporaryDirectory() as name:
        for kind in ("a", "b"):
            (Path(name) / kind).mkdir()
            for k in range(3):
                pixels = numpy.random.default_rng(k).integers(0, 256, (40, 40, 3), dtype=numpy.uint8)
                Image.fromarray(pixels).save(Path(name) / kind / f"{k}.png")
        broken = Path(name) / "a" / "1.png"
        broken.write_bytes(broken.read_bytes()[:1000])
        (Path(name) / "a" / "2.png").write_bytes(b"")
        yield Path(name)


def images_of_pfml() -> Outcome:
    """What reading a truncated and an empty image gives."""
    from pfml.data.decoding import read_rgb

    with _images() as folder:
        return _answers("", folder, lambda number: read_rgb(folder / "a" / f"{number}.png"))


def images_of_timm() -> Outcome:
    """What timm's data set, which many use with pytorch-metric-learning, gives for the same."""
    from timm.data.dataset import ImageDataset

    with _images() as folder:
        data = ImageDataset(str(folder))
        return _answers("timm: ", folder, lambda number: data[number][0])


def _answers(who: str, folder: Path, read: Callable[[int], Any]) -> Outcome:
    wrong = []
    for number, broken in ((1, "truncated"), (2, "empty")):
        try:
            read(number)
            wrong.append(f"{broken}: silently another image")
        except Exception as error:
            if str(folder / "a" / f"{number}.png") not in str(error):
                wrong.append(f"{broken}: {type(error).__name__} without the path")
    return Outcome(not wrong, who + ("; ".join(wrong) or "errors with the path"))


def archives(extract: Callable[[Path, Path], None]) -> Outcome:
    """`../`, an absolute path and a zip bomb; each must be refused, with nothing written that was not asked for."""
    wrong = []
    entries = {"../evil": b"x", "/tmp/pfml-evil-file": b"x", "bomb": bytes(50_000_000)}
    for name, content in entries.items():
        with tempfile.TemporaryDirectory() as folder:
            path, target = Path(folder) / "evil.zip", Path(folder) / "deep" / "target"
            target.mkdir(parents=True)
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(name, content)
            try:
                extract(path, target)
                escaped = (Path(folder) / "deep" / "evil").exists() or Path("/tmp/pfml-evil-file").exists()
                wrong.append(f"{name}: unpacked {'outside' if escaped else 'inside'} the folder")
            except Exception as error:
                if path.name not in str(error):
                    wrong.append(f"{name}: {type(error).__name__} without a name")
            shutil.rmtree(target, ignore_errors=True)
    return Outcome(not wrong, "; ".join(wrong) or "all refused by name")
