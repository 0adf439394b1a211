"""Decoding in bounded memory: how many pixels are decoded at a time, and whose turn it is.

A file of a few bytes may hold many millions of pixels. So work is counted in pixels and not in requests: all threads
that decode share one budget, and an image waits the longer for its turn the larger it is. An ordinary photograph does
not wait behind any number of images that were made to be large.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from pfml.serving.workers import Turnstile

__all__ = ["DecodeQueue", "PixelBudget"]

#: Seconds later that an image counts as having arrived, for each of its pixels: 16 megapixels, 32 seconds. Whoever has
#: waited longer than that comes first, however large.
LATER_PER_PIXEL = 2e-6

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class PixelBudget:
    """How many pixels all threads together may be decoding.

    Args:
        most: That many. An image of more is decoded while no other one is.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.changed = threading.Condition()
        self._taken = 0
        self._waiting = 0

    @contextmanager
    def taken(self, pixels: int) -> Iterator[None]:
        """Within the block the pixels are this thread's; it waits until there are so many."""
        with self.changed:
            self._waiting += 1
            try:
                self.changed.wait_for(lambda: self._is_free(pixels))
            finally:
                self._waiting -= 1
            self._taken += min(pixels, self.most)
        try:
            yield
        finally:
            self.give_back(pixels)

    def try_take(self, pixels: int) -> bool:
        """Take the pixels if they are free and nobody waits for any; the caller holds `changed`."""
        if self._waiting or not self._is_free(pixels):
            return False
        self._taken += min(pixels, self.most)
        return True

    def give_back(self, pixels: int) -> None:
        """End what `try_take` began."""
        with self.changed:
            self._taken -= min(pixels, self.most)
            self.changed.notify_all()

    def _is_free(self, pixels: int) -> bool:
        return self._taken + min(pixels, self.most) <= self.most


class DecodeQueue:
    """A few threads that decode what was sent, small images before large ones.

    Args:
        budget: Of all decoding threads together.
        threads: How many work at a time.
        most: Tasks that may be under way or waiting.
    """

    def __init__(self, budget: PixelBudget, *, threads: int, most: int) -> None:
        self.budget = budget
        self._turnstile = Turnstile(most)
        self._numbers = itertools.count()
        self._tasks: list[tuple[float, int, int, Callable[[], Any], Future[Any]]] = []
        self._is_closed = False
        for number in range(threads):
            threading.Thread(target=self._work, name=f"pfml decoding_{number}", daemon=True).start()

    async def run(
        self, pixels: int, function: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs
    ) -> Result:
        """function(...) in a thread, which decodes so many pixels; BusyError if too many wait."""
        self._turnstile.enter()
        future: Future[Result] = Future()
        # not when the caller goes away: its task may still be at work
        future.add_done_callback(lambda _: self._turnstile.leave())
        with self.budget.changed:
            if self._is_closed:
                future.cancel()
            turn = time.monotonic() + LATER_PER_PIXEL * pixels
            task = turn, next(self._numbers), pixels, lambda: function(*args, **options), future
            heapq.heappush(self._tasks, task)
            self.budget.changed.notify_all()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the threads; what waits is not begun."""
        with self.budget.changed:
            self._is_closed = True
            waiting = [task[-1] for task in self._tasks]
            self._tasks.clear()
            self.budget.changed.notify_all()
        for future in waiting:
            future.cancel()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            pixels, call, future = task
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(call())
            except BaseException as error:  # whoever waits is told
                future.set_exception(error)
            finally:
                self.budget.give_back(pixels)
            del task, call, future  # else the image would be held until the next one comes

    def _next(self) -> tuple[int, Callable[[], Any], Future[Any]] | None:
        """The task whose turn it is, with its pixels taken; None when there is no more to do."""
        with self.budget.changed:
            self.budget.changed.wait_for(
                lambda: self._is_closed or (bool(self._tasks) and self.budget.try_take(self._tasks[0][2]))
            )
            if self._is_closed:
                return None
            _, _, pixels, call, future = heapq.heappop(self._tasks)
            return pixels, call, future
