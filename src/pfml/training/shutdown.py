"""Ctrl-C, SIGTERM and SIGHUP as shutdown requests: finish the step, save, stop.

A run takes them as a request (`stop_wish`). What is between runs, or is no run, ends at once (`interruptible`).
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupted", "StopWish", "interruptible", "stop_wish"]

#: Signals that ask to stop; closing a terminal, or losing its connection, sends SIGHUP.
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interrupted(KeyboardInterrupt):
    """The run was stopped by a signal, after its state was saved."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number


class StopWish:
    """Whether someone asked to stop, by which signal, and when."""

    def __init__(self) -> None:
        self.asked = False
        self.signal = int(signal.SIGINT)
        self.since = 0.0

    @property
    def number(self) -> int:
        """The signal that asked; 0 if none did."""
        return self.signal if self.asked else 0


@contextmanager
def stop_wish(*, echo_seconds: float = 0.0) -> Iterator[StopWish]:
    """Within the block SIGINT, SIGTERM and SIGHUP are a wish; a second one interrupts at once.

    Within `echo_seconds` of the first it is the same wish: torchrun and a terminal may both pass it on.

    Python delivers signals to the main thread only, so elsewhere the wish is never asked for.
    """
    wish = StopWish()

    def on_signal(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not wish.asked:
            wish.asked, wish.signal, wish.since = True, number, now
        elif now - wish.since >= echo_seconds:
            raise KeyboardInterrupt

    with _handled(on_signal):
        yield wish


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Within the block a signal raises Interrupted with `message` at once, unless a run in it takes it as a wish."""

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
