"""Checkpoints: all that a run needs to go on, as a bundle of tensors and plain values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfml.bundles import read_bundle, write_bundle

__all__ = ["has_checkpoint", "load_checkpoint", "pack_optimizer", "part", "save_checkpoint", "unpack_optimizer"]


def save_checkpoint(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Make `tensors` and `state` (anything that JSON can hold) the checkpoint of `folder`."""
    write_bundle(folder, "last", tensors, {"state": state})


def has_checkpoint(folder: Path) -> bool:
    """Whether there is something to go on from."""
    return (folder / "last.json").is_file()


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and state of the checkpoint in `folder`, after comparing both checksums."""
    if not has_checkpoint(folder):
        raise FileNotFoundError(f"{folder} must hold a checkpoint (last.json), but there is none")
    content, tensors = read_bundle(folder, "last")
    return tensors, content["state"]


def pack_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's moments as "parameter number/moment" -> tensor; learning rates follow from the schedule."""
    state = optimizer.state_dict()["state"]
    return {f"{number}/{name}": value for number, moments in state.items() for name, value in moments.items()}


def unpack_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Give the optimiser back what `pack_optimizer` took."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, name = key.split("/", 1)
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, named without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
