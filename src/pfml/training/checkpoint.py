"""Checkpoints: one safetensors file, and a manifest that names it and its sha256.

A checkpoint exists from the moment its manifest `last.json` is renamed into place. The tensors lie in a file of a
fresh name that is complete before that, so whatever interrupts a save leaves the previous checkpoint whole, and at most
one file that the next save removes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from pfml.files import DamagedFileError, load_tensors, refuse_non_finite, save_tensors, write_atomically

__all__ = ["load_checkpoint", "pack_optimizer", "part", "save_checkpoint", "unpack_optimizer"]

FORMAT = 1
MANIFEST = "last.json"


def save_checkpoint(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Make `tensors` and `state` (anything that JSON can hold) the checkpoint of `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"step-{state['step']:08d}-{uuid4().hex[:8]}.safetensors"
    content = {"format": FORMAT, "tensors": name, "sha256": save_tensors(folder / name, tensors), "state": state}
    manifest = {"sha256": _digest(content), "content": content}
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    for stale in [*folder.glob("step-*.safetensors"), *folder.glob(".*.partial")]:
        if stale.name != name:
            stale.unlink(missing_ok=True)


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and state of the checkpoint in `folder`, after checking both checksums and every number."""
    path = folder / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be a checkpoint's manifest, but there is no such file: nothing to resume")
    try:
        manifest = json.loads(path.read_bytes())
        content = manifest["content"]
        intact = manifest["sha256"] == _digest(content)
    except (ValueError, KeyError, TypeError):
        raise DamagedFileError(f"{path} must be a checkpoint's manifest, got something that cannot be read") from None
    if not intact:
        raise DamagedFileError(f"{path} was changed after it was written; restore it from a copy")
    if content["format"] != FORMAT:
        raise DamagedFileError(f"{path} must have format {FORMAT}, got {content['format']}: use the pfml that wrote it")
    tensors = load_tensors(folder / content["tensors"], content["sha256"])
    refuse_non_finite(tensors, folder / content["tensors"])
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


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
