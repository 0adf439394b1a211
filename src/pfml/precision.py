"""Products in true float32."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["full_precision"]


_inside = 0
_outside: list[str] = []
_lock = threading.Lock()


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products in true float32, whatever autocast and the precision switches for products say outside.

    The switches belong to the whole process: they are set by the first thread that comes in, and put back by the last
    one that leaves.
    """
    _enter()
    try:
        with torch.autocast(device.type, enabled=False), torch.no_grad():
            yield
    finally:
        _leave()


def _switches() -> tuple[Any, ...]:
    # Those of each backend: torch's older, common one refuses to be read once allow_tf32 has been set.
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def _enter() -> None:
    global _inside, _outside
    with _lock:
        if _inside == 0:
            _outside = [switch.fp32_precision for switch in _switches()]
            for switch in _switches():
                switch.fp32_precision = "ieee"
        _inside += 1


def _leave() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if _inside == 0:
            for switch, precision in zip(_switches(), _outside, strict=True):
                switch.fp32_precision = precision
