"""Ctrl-C, SIGTERM and SIGHUP as shutdown requests: finish the step, save, stop.

A run catches them (`catch_shutdown_requests`) and stops after the current step. Code between runs is interrupted at
once (`interruptible`).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupted", "ShutdownRequest", "catch_shutdown_requests", "interruptible"]

#: Signals that request a shutdown; closing a terminal, or losing its connection, sends SIGHUP.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interrupted(KeyboardInterrupt):
    """The run was stopped by a signal, after its state was saved."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number


class ShutdownRequest:
    """Whether a shutdown was requested, by which signal, and when."""

    def __init__(self) -> None:
        self.received = False
        self.signal = int(signal.SIGINT)
        self.since = 0.0

    @property
    def number(self) -> int:
        """The signal that requested it; 0 if none did."""
        return self.signal if self.received else 0


@contextmanager
def catch_shutdown_requests(*, echo_seconds: float = 0.0) -> Iterator[ShutdownRequest]:
    """Within the block SIGINT, SIGTERM and SIGHUP only set the request; a second signal interrupts at once.

    A signal within `echo_seconds` of the first is the same request: torchrun and a terminal may both pass it on.

    Python delivers signals to the main thread only: in other threads the request is never received.
    """
    request = ShutdownRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not request.received:
            request.received, request.signal, request.since = True, number, now
        elif now - request.since >= echo_seconds:
            raise KeyboardInterrupt

    with _handled(on_signal):
        yield request


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Within the block a signal raises Interrupted with `message` at once, unless a run within it catches it."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Interrupted(message, number)

    with _handled(on_signal):
        yield


@contextmanager
def _handled(on_signal: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """The handler of all of `SIGNALS` within the block; in the main thread only, as Python has it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {}
    for number in SIGNALS:
        # nohup starts a program that ignores SIGHUP, and means it
        if number == getattr(signal, "SIGHUP", None) and signal.getsignal(number) == signal.SIG_IGN:
            continue
        before[number] = signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
