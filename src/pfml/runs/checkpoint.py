"""Checkpoints: all that a run needs to resume, and the model of the epoch that validation chose."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from pfml.storage.files import DamagedFileError
from pfml.storage.manifest import Format
from pfml.storage.sealed_tensors import read_sealed_tensors, write_sealed_tensors

__all__ = [
    "CheckpointWriter",
    "by_prefix",
    "has_checkpoint",
    "has_chosen_epoch",
    "load_checkpoint",
    "load_chosen_epoch",
    "save_checkpoint",
    "save_chosen_epoch",
]

CHECKPOINT = Format("checkpoint", 1, "start a new run")
CHOSEN_EPOCH = Format("chosen epoch", 1, "start a new run")


def save_checkpoint(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Make `tensors` and `state` (anything that JSON can hold) the checkpoint of `folder`."""
    write_sealed_tensors(folder, "last", tensors, {"state": state}, CHECKPOINT)


class CheckpointWriter:
    """Saves checkpoints, in the background while a GPU keeps training; all are written when the block is left.

    Args:
        folder: Where the checkpoint lies.
        in_background: Whether `save` returns once all tensors are copied to memory. A later error is raised by the next
            `save`, or at the end of the block.
    """

    def __init__(self, folder: Path, *, in_background: bool) -> None:
        self.folder = folder
        self._pool = ThreadPoolExecutor(1) if in_background else None
        self._pending: Future[None] | None = None

    def save(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Make `tensors` and `state` the checkpoint; see `save_checkpoint`."""
        self.wait()
        if self._pool is None:
            save_checkpoint(self.folder, tensors, state)
            return
        snapshot = {name: _snapshot(tensor) for name, tensor in tensors.items()}
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        self._pending = self._pool.submit(save_checkpoint, self.folder, snapshot, copy.deepcopy(state))

    def wait(self) -> None:
        """Return once the last checkpoint is on disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait()


def _snapshot(tensor: Tensor) -> Tensor:
    """A copy in memory that later steps do not change; of a GPU tensor it is still being made when this returns."""
    return tensor.detach().to("cpu", non_blocking=True) if tensor.is_cuda else tensor.detach().clone()


def has_checkpoint(folder: Path) -> bool:
    """Whether there is a checkpoint to resume from."""
    return (folder / "last.json").is_file()


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and state of the checkpoint in `folder`, after comparing both checksums."""
    if not has_checkpoint(folder):
        raise FileNotFoundError(f"{folder} must hold a checkpoint (last.json), but there is none")
    content, tensors = read_sealed_tensors(folder, "last", CHECKPOINT)
    if not isinstance(content.get("state"), dict):
        raise DamagedFileError(f"{folder / 'last.json'} must hold the state of a run, got {content.get('state')!r}")
    return tensors, content["state"]


def by_prefix(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, named without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def save_chosen_epoch(folder: Path, epoch: int, tensors: dict[str, Tensor], *, also: Collection[int] = ()) -> None:
    """Save embedder and loss of `epoch` in `folder`, and of epochs saved before keep only those in `also`."""
    write_sealed_tensors(folder, _name(epoch), tensors, {"epoch": epoch}, CHOSEN_EPOCH)
    for file in folder.glob("chosen-*"):
        found = re.match(r"chosen-(\d+)[.-]", file.name)
        if found and int(found[1]) not in {epoch, *also}:
            file.unlink(missing_ok=True)


def has_chosen_epoch(folder: Path, epoch: int) -> bool:
    """Whether `folder` holds embedder and loss of `epoch`."""
    return (folder / f"{_name(epoch)}.json").is_file()


def load_chosen_epoch(folder: Path, epoch: int) -> dict[str, Tensor]:
    """Embedder and loss of `epoch`; a damaged file is refused by name."""
    return read_sealed_tensors(folder, _name(epoch), CHOSEN_EPOCH)[1]


def _name(epoch: int) -> str:
    return f"chosen-{epoch}"
