"""Asynchronous readback: the loss and the gradient norm of each step, read without a device synchronization.

On a GPU the numbers of a step are copied to pinned memory behind its kernels, and read one step later. The device
itself skips an update that is not finite (`Readback.hold`). On a CPU each step is read at once, before its update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pfml.losses.checks import DeferredCheck

__all__ = ["Batch", "Outcome", "Readback"]


@dataclass(frozen=True, eq=False)
class Batch:
    """Which step of the run a batch is for, and its images."""

    step: int
    epoch: int
    position: int
    indices: Tensor


@dataclass(frozen=True, eq=False)
class Outcome:
    """The numbers of a finished step.

    Attributes:
        loss: Before the update.
        norm: Of the gradient.
        held: Whether something was not finite; the device has then skipped the update.
        checks: Deferred checks of the loss that found something.
        terms: The terms of the loss by name, if it reports them.
    """

    batch: Batch
    loss: float
    norm: float
    held: bool
    checks: tuple[DeferredCheck, ...]
    terms: dict[str, float] = field(default_factory=dict)


class Readback:
    """Copies each step's numbers from the device, and returns them once they have arrived.

    Args:
        device: Where the steps are computed.
        lag: How many steps later they are read: 0 or 1.
    """

    def __init__(self, device: torch.device, *, lag: int) -> None:
        if lag not in (0, 1):
            raise ValueError(f"lag must be 0 or 1, got {lag}")
        self.lag = lag
        #: 1.0 while the update of the last added step must be skipped, else 0.0; on the device
        self.hold = torch.zeros((), device=device)
        self._pending: deque[_Reading] = deque()

    def add(
        self,
        batch: Batch,
        loss: Tensor,
        norm: Tensor,
        checks: Sequence[DeferredCheck] = (),
        terms: Mapping[str, Tensor] | None = None,
    ) -> list[Outcome]:
        """Add a step, between its gradient and its update; the outcomes of all steps that have arrived."""
        terms = terms or {}
        numbers = torch.stack([loss.detach().double(), norm.detach().double()])
        is_bad = torch.stack([~torch.isfinite(numbers).all(), *(check.is_bad for check in checks)]).any()
        self.hold.copy_(is_bad)
        flags = torch.stack([is_bad, *(check.is_worth_a_look for check in checks)]).double()
        parts = [one.detach().double().reshape(1) for one in terms.values()]
        read = torch.cat([numbers, flags, *parts])
        self._pending.append(_Reading(batch, read, tuple(checks), tuple(terms)))
        return [self._pending.popleft().outcome() for _ in range(len(self._pending) - self.lag)]

    def flush(self) -> list[Outcome]:
        """All outcomes that are still pending, after waiting for them."""
        outcomes = [reading.outcome() for reading in self._pending]
        self._pending.clear()
        return outcomes


class _Reading:
    """A pending copy to memory."""

    def __init__(
        self, batch: Batch, numbers: Tensor, checks: tuple[DeferredCheck, ...], terms: tuple[str, ...]
    ) -> None:
        self.batch = batch
        self.checks = checks
        self.terms = terms
        self.copied: torch.cuda.Event | None = None
        self.numbers = numbers
        if numbers.is_cuda:
            self.numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record(torch.cuda.current_stream(numbers.device))

    def outcome(self) -> Outcome:
        """What was copied, after waiting for the copy."""
        if self.copied is not None:
            self.copied.synchronize()
        loss, norm, held, *told = self.numbers.tolist()
        told, parts = told[: len(self.checks)], told[len(self.checks) :]
        checks = tuple(check for check, tells in zip(self.checks, told, strict=True) if tells)
        return Outcome(self.batch, loss, norm, bool(held), checks, dict(zip(self.terms, parts, strict=True)))
