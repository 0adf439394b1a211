"""Ctrl-C as a wish: finish the step, save, stop."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupted", "StopWish", "stop_wish"]


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
    """Within the block SIGINT and SIGTERM are a wish; a second one interrupts at once.

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

    if threading.current_thread() is not threading.main_thread():
        yield wish
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, on_signal) for number in numbers]
    try:
        yield wish
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
