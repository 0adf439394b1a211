"""Threads that do the work of requests, and say no when too much of it waits."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, TypeVar

__all__ = ["Batches", "BusyError", "ByteBudget", "Turnstile", "Workers"]

#: Seconds that a thread has to end.
ENDING = 5.0

Arguments = ParamSpec("Arguments")
Item = TypeVar("Item")
Result = TypeVar("Result")


class BusyError(RuntimeError):
    """More work waits than is taken on; to be tried again in a moment."""


class Turnstile:
    """Lets so many requests in at a time, and refuses the next.

    Args:
        most: How many.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._inside = 0

    @contextmanager
    def passed(self) -> Iterator[None]:
        """Inside for the block; BusyError if it is full."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Count one in; BusyError if it is full."""
        with self._lock:
            if self._inside >= self.most:
                raise BusyError(f"the server is busy with {self._inside} requests: try again in a moment")
            self._inside += 1

    def leave(self) -> None:
        """Count one out."""
        with self._lock:
            self._inside -= 1


class ByteBudget:
    """Bytes that requests may hold while they wait, all together.

    Args:
        most: How many. A request of more is let in alone.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._held = 0

    @contextmanager
    def held(self, size: int) -> Iterator[None]:
        """So many more are held within the block; BusyError if that is too many."""
        with self._lock:
            if self._held and self._held + size > self.most:
                raise BusyError(f"the server holds {self._held:,} bytes of images that wait: try again in a moment")
            self._held += size
        try:
            yield
        finally:
            with self._lock:
                self._held -= size


class Batches(Generic[Item, Result]):
    """One thread that takes all items which wait, up to a number, and works on them together.

    Args:
        name: Of the thread.
        function: Results of some items, in their order.
        most: Items at a time.
    """

    def __init__(self, name: str, function: Callable[[list[Item]], Sequence[Result]], most: int) -> None:
        self.function = function
        self.most = most
        self._waiting: queue.SimpleQueue[tuple[Item, Future[Result]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"pfml {name}", daemon=True)
        self._thread.start()

    async def run(self, item: Item) -> Result:
        """The result of an item."""
        future: Future[Result] = Future()
        self._waiting.put((item, future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the thread after what waits, and wait for that a while.

        A thread that is still within torch when Python ends makes the whole process abort.
        """
        self._waiting.put(None)
        self._thread.join(ENDING)

    def _work(self) -> None:
        while (first := self._waiting.get()) is not None:
            batch, is_last = [first], False
            while len(batch) < self.most and not self._waiting.empty():
                following = self._waiting.get()
                if following is None:
                    is_last = True
                    break
                batch.append(following)
            self._answer([(item, future) for item, future in batch if future.set_running_or_notify_cancel()])
            if is_last:
                return

    def _answer(self, batch: list[tuple[Item, Future[Result]]]) -> None:
        try:
            results = self.function([item for item, _ in batch]) if batch else []
        except Exception as error:  # whoever waits is told
            for _, future in batch:
                future.set_exception(error)
            return
        for (_, future), result in zip(batch, results, strict=True):
            future.set_result(result)


class Workers:
    """A few threads with a bounded queue.

    Args:
        name: Of the threads.
        threads: How many work at a time.
        most: Tasks that may be under way or waiting.
    """

    def __init__(self, name: str, *, threads: int, most: int) -> None:
        self._turnstile = Turnstile(most)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=f"pfml {name}")

    async def run(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs
    ) -> Result:
        """function(...) in a thread; BusyError if too many wait."""
        self._turnstile.enter()
        future = self._executor.submit(function, *args, **options)
        # not when the caller goes away: its task may still be at work
        future.add_done_callback(self._leave)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the threads; what waits is not begun."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _leave(self, _: Future[Any]) -> None:
        self._turnstile.leave()
