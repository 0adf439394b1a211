"""Ctrl-C as a wish: finish the step, save, stop."""

from __future__ import annotations

import signal
import threading
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
    """Whether someone asked to stop."""

    def __init__(self) -> None:
        self.asked = False
        self.signal = int(signal.SIGINT)


@contextmanager
def stop_wish() -> Iterator[StopWish]:
    """Within the block SIGINT and SIGTERM set `asked`; a second one interrupts at once.

    Python delivers signals to the main thread only, so elsewhere the wish is never asked for.
    """
    wish = StopWish()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if wish.asked:
            raise KeyboardInterrupt
        wish.asked, wish.signal = True, number

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
