"""Where and how a run computes: device, precision, determinism, random numbers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from pfml.runs.config import TrainConfig

__all__ = ["compiled", "compiles", "precision", "reading_lag", "reproducible", "resolve_device", "seeded"]

#: Steps from which compiling pays: it takes about a minute, and a step of ResNet-50 on an H200 falls from 32 to 15 ms
#: by it.
COMPILED_FROM = 5_000


def resolve_device(name: str) -> torch.device:
    """The device called `name`; "auto" is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but torch finds no GPU: use --device cpu")
    return device


def precision(name: str) -> torch.dtype | None:
    """The floating-point type of autocast; None for no autocast."""
    return None if name == "none" else getattr(torch, name)


def compiles(config: TrainConfig, device: torch.device, steps: int) -> bool:
    """Whether a run of so many steps compiles its model."""
    if isinstance(config.compile, bool):
        return config.compile
    return device.type == "cuda" and not config.deterministic and steps >= COMPILED_FROM


def compiled(network: nn.Module, device: torch.device) -> Callable[[Tensor], Tensor]:
    """The network's forward pass, compiled; on a GPU it and its backward pass are CUDA graphs.

    Without these, an H200 waits for Python, which launches a ResNet-50's kernels more slowly than they run. Each size
    of images is compiled for itself: code for all sizes takes minutes to compile, where a second network has another.
    """
    if device.type != "cuda":
        return torch.compile(network, dynamic=False)
    graphs = torch.compile(network, mode="reduce-overhead", dynamic=False)

    def outputs(pixels: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return graphs(pixels).clone()  # the next step writes where this one has left its results

    return outputs


def reading_lag(config: TrainConfig, device: torch.device) -> int:
    """How many steps later the loss of a step is read back: one on a GPU, which avoids a synchronization.

    A scaler (float16) decides about each step by itself, and an optimizer without a fused kernel cannot be held back by
    the device: their steps are read back at once, before the update.
    """
    from pfml.training.optimizer import OPTIMIZERS  # not needed by who asks for a device

    can_hold = config.autocast != "float16" and OPTIMIZERS[config.optimizer.name].is_fused
    return int(device.type == "cuda" and can_hold)


@contextmanager
def reproducible(deterministic: bool) -> Iterator[None]:
    """Deterministic algorithms if asked for; the settings of the process are restored afterwards."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs for it, read on its first use
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.backends.cudnn.benchmark = benchmark


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's generators seeded within the block, and as they were after it."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):  # named, since torch warns of all of several GPUs
        torch.manual_seed(seed)
        yield
