"""The numbers of each step, read without making the device wait for them.

A number that is read waits for all work on the device, and the device then waits for the next work. So on a GPU the
loss and the norm of the gradient of a step are copied to memory behind its work, and read while the next step is under
way. The device itself holds back an update that is not finite, through `Watch.hold`. On a CPU each step is read at
once, before its update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pfml.losses.checks import DeferredCheck

__all__ = ["Batch", "Outcome", "Watch"]


@dataclass(frozen=True, eq=False)
class Batch:
    """Which step of the run a batch is for, and its images."""

    step: int
    epoch: int
    position: int
    indices: Tensor


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a step came to.

    Attributes:
        loss: Before the update.
        norm: Of the gradient.
        held: Whether something was not finite; the device has then left out the update.
        checks: Deferred checks of the loss that have something to tell.
        terms: What the loss is made of, by name, if it tells that.
    """

    batch: Batch
    loss: float
    norm: float
    held: bool
    checks: tuple[DeferredCheck, ...]
    terms: dict[str, float] = field(default_factory=dict)


class Watch:
    """Takes each step's numbers from the device, and gives them back when they are there.

    Args:
        device: Where the steps are computed.
        lag: How many steps later they are read: 0 or 1.
    """

    def __init__(self, device: torch.device, *, lag: int) -> None:
        if lag not in (0, 1):
            raise ValueError(f"lag must be 0 or 1, got {lag}")
        self.lag = lag
        #: 1.0 while the update of the last step that was added must not happen, else 0.0; on the device
        self.hold = torch.zeros((), device=device)
        self._under_way: deque[_Reading] = deque()

    def add(
        self,
        batch: Batch,
        loss: Tensor,
        norm: Tensor,
        checks: Sequence[DeferredCheck] = (),
        terms: Mapping[str, Tensor] | None = None,
    ) -> list[Outcome]:
        """Take the numbers of a step, to be called between its gradient and its update; the outcomes known by now."""
        terms = terms or {}
        numbers = torch.stack([loss.detach().double(), norm.detach().double()])
        is_bad = torch.stack([~torch.isfinite(numbers).all(), *(check.is_bad for check in checks)]).any()
        self.hold.copy_(is_bad)
        flags = torch.stack([is_bad, *(check.is_worth_a_look for check in checks)]).double()
        parts = [one.detach().double().reshape(1) for one in terms.values()]
        read = torch.cat([numbers, flags, *parts])
        self._under_way.append(_Reading(batch, read, tuple(checks), tuple(terms)))
        return [self._under_way.popleft().outcome() for _ in range(len(self._under_way) - self.lag)]

    def flush(self) -> list[Outcome]:
        """All outcomes that are still under way, after waiting for them."""
        outcomes = [reading.outcome() for reading in self._under_way]
        self._under_way.clear()
        return outcomes


class _Reading:
    """A copy to memory that is under way."""

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
        """What was copied, after waiting for it."""
        if self.copied is not None:
            self.copied.synchronize()
        loss, norm, held, *told = self.numbers.tolist()
        told, parts = told[: len(self.checks)], told[len(self.checks) :]
        checks = tuple(check for check, tells in zip(self.checks, told, strict=True) if tells)
        return Outcome(self.batch, loss, norm, bool(held), checks, dict(zip(self.terms, parts, strict=True)))
