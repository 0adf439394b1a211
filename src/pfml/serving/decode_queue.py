"""Decoding in bounded memory: a budget of pixels, and a priority queue in which small images come first.

A file of a few bytes may hold millions of pixels. So work is counted in pixels and not in requests: all threads that
decode share one budget, and a larger image gets a later turn. An ordinary photograph does not wait behind any number
of images that were made large on purpose. No executor of the standard library or of anyio has weights, so this is ours.
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

from pfml.serving.workers import Admission

__all__ = ["DecodeQueue", "PixelBudget"]

#: Penalty in seconds for each pixel, added to the time of arrival: 32 seconds for 16 megapixels. A large image that
#: has waited longer than its penalty comes first.
PENALTY_PER_PIXEL = 2e-6

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class PixelBudget:
    """A bound on the pixels that all threads decode at a time.

    Args:
        most: The bound. A larger image is decoded while no other one is.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.changed = threading.Condition()
        self._taken = 0
        self._waiting = 0

    @contextmanager
    def taken(self, pixels: int) -> Iterator[None]:
        """Hold `pixels` within the block, after waiting until they are free."""
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
        """Take the pixels if they are free and no thread waits; the caller holds `changed`."""
        if self._waiting or not self._is_free(pixels):
            return False
        self._taken += min(pixels, self.most)
        return True

    def give_back(self, pixels: int) -> None:
        """Release the pixels of `try_take`."""
        with self.changed:
            self._taken -= min(pixels, self.most)
            self.changed.notify_all()

    def _is_free(self, pixels: int) -> bool:
        return self._taken + min(pixels, self.most) <= self.most


class DecodeQueue:
    """A few threads that decode uploads, small images before large ones.

    Args:
        budget: Shared by all threads that decode.
        threads: How many work at a time.
        most: Tasks that may run or wait.
        prepare: Called in each thread before its first task.
    """

    def __init__(
        self, budget: PixelBudget, *, threads: int, most: int, prepare: Callable[[], object] | None = None
    ) -> None:
        self.budget = budget
        self._prepare = prepare
        self._admission = Admission(most)
        self._numbers = itertools.count()
        self._tasks: list[tuple[float, int, int, Callable[[], Any], Future[Any]]] = []
        self._is_closed = False
        for number in range(threads):
            threading.Thread(target=self._work, name=f"pfml decoding_{number}", daemon=True).start()

    def __len__(self) -> int:
        """Tasks that run or wait."""
        return self._admission.amount

    async def run(
        self, pixels: int, function: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs
    ) -> Result:
        """function(...) in a thread, which decodes `pixels`; BusyError if too many wait."""
        self._admission.acquire()
        future: Future[Result] = Future()
        # not when the request is cancelled: its task may still run
        future.add_done_callback(lambda _: self._admission.release())
        with self.budget.changed:
            if self._is_closed:
                future.cancel()
            turn = time.monotonic() + PENALTY_PER_PIXEL * pixels
            task = turn, next(self._numbers), pixels, lambda: function(*args, **options), future
            heapq.heappush(self._tasks, task)
            self.budget.changed.notify_all()
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the threads; waiting tasks are cancelled."""
        with self.budget.changed:
            self._is_closed = True
            waiting = [task[-1] for task in self._tasks]
            self._tasks.clear()
            self.budget.changed.notify_all()
        for future in waiting:
            future.cancel()

    def _work(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while (task := self._next()) is not None:
            pixels, call, future = task
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(call())
            except BaseException as error:  # the request gets it
                future.set_exception(error)
            finally:
                self.budget.give_back(pixels)
            del task, call, future  # else the image would stay in memory until the next one

    def _next(self) -> tuple[int, Callable[[], Any], Future[Any]] | None:
        """The next task, with its pixels taken; None after `close`."""
        with self.budget.changed:
            self.budget.changed.wait_for(
                lambda: self._is_closed or (bool(self._tasks) and self.budget.try_take(self._tasks[0][2]))
            )
            if self._is_closed:
                return None
            _, _, pixels, call, future = heapq.heappop(self._tasks)
            return pixels, call, future
