"""What is probed, what is seen, and the memory of a million classes in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Outcome", "Subject", "every", "is_finite", "million_classes", "relative", "said"]


@dataclass(frozen=True)
class Subject:
    """A loss under test.

    Args:
        name: As the table calls it.
        make: num_classes, embedding_dim -> the loss.
        code: The same as a Python expression of `classes` and `dim`, for a process of its own.
        has_classes: Whether it is told the number of classes.
    """

    name: str
    make: Callable[[int, int], nn.Module]
    code: str
    has_classes: bool = True


@dataclass(frozen=True)
class Outcome:
    """Whether the stated behavior was seen, and what was seen."""

    passed: bool
    seen: str


def is_finite(*tensors: Tensor) -> bool:
    """Whether all numbers of all tensors are."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def every(*outcomes: Outcome) -> Outcome:
    """Passes if all do; tells the first that does not."""
    return next((one for one in outcomes if not one.passed), outcomes[-1])


def said(error: Exception) -> str:
    """The beginning of an error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:60]}"


def relative(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|, by norms."""
    scale = expected.double().norm().item()
    return (got.double() - expected.double()).norm().item() / (scale or 1.0)


MILLION = """
import torch, pfml
import pytorch_metric_learning.losses as losses
classes, dim = {classes}, {dim}
torch.manual_seed(0)
loss = {code}
points, labels = torch.randn(64, dim, requires_grad=True), torch.randint(0, classes, (64,))
size, classes = classes, 10
({code})(points, labels % 10).backward()
rows = next(iter(loss.parameters()))
open("/proc/self/clear_refs", "w").write("5")
status = lambda key: next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) * 1024
before = status("VmRSS")
loss(points, labels).backward()
print((status("VmHWM") - before) / rows.nbytes)
"""


def million_classes(subject: Subject) -> Outcome:
    """Memory that a step with a million classes takes, as a multiple of the proxies."""
    if not subject.has_classes:
        return Outcome(True, "is not told the number of classes")
    classes, dim = 1_000_000, 128
    code = MILLION.format(classes=classes, dim=dim, code=subject.code)
    returning = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}  # what is freed goes back, so that the peak is real
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=returning)
    if result.returncode:
        return Outcome(False, " ".join(result.stderr.splitlines()[-1:])[:60])
    ratio, tiles = float(result.stdout), 64 * 2**20 / (classes * dim * 4)
    return Outcome(ratio <= 1.2 + tiles, f"{ratio:.1f} x the proxies")
