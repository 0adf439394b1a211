"""Products in true float32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["full_precision"]


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products in true float32, whatever autocast and the precision switches for products say outside."""
    # The switches of each backend: torch's older, common one refuses to be read once allow_tf32 has been set.
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    outside = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False), torch.no_grad():
            yield
    finally:
        for switch, precision in zip(switches, outside, strict=True):
            switch.fp32_precision = precision
