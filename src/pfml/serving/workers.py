"""Worker threads of the server, with bounded queues: beyond a bound a request gets BusyError (503) at once.

The threads are ours: anyio's CapacityLimiter has no bound on what waits, and on a busy machine its 90th percentile of a
search was 1.3 times as long.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Generic, ParamSpec, TypeVar

__all__ = ["Admission", "BusyError", "DynamicBatcher", "Workers"]

#: Seconds that `DynamicBatcher.close` waits for its thread.
CLOSE_SECONDS = 5.0

Arguments = ParamSpec("Arguments")
Item = TypeVar("Item")
Result = TypeVar("Result")


class BusyError(RuntimeError):
    """The queue is full: try again in a moment."""


class Admission:
    """A bound on what requests hold at a time, in requests or in bytes; beyond it BusyError.

    Args:
        most: The bound. A single request of more is admitted while nothing else is held.
        unit: What is counted, for the message.
    """

    def __init__(self, most: int, unit: str = "requests") -> None:
        self.most = most
        self.unit = unit
        self._lock = threading.Lock()
        self._held = 0

    @property
    def amount(self) -> int:
        """What is held now."""
        return self._held

    @contextmanager
    def held(self, amount: int = 1) -> Iterator[None]:
        """Hold `amount` within the block."""
        self.acquire(amount)
        try:
            yield
        finally:
            self.release(amount)

    def acquire(self, amount: int = 1) -> None:
        """Hold `amount` until `release`, from any thread."""
        with self._lock:
            if self._held and self._held + amount > self.most:
                raise BusyError(f"the server is busy with {self._held:,} {self.unit}: try again in a moment")
            self._held += amount

    def release(self, amount: int = 1) -> None:
        """End an `acquire`."""
        with self._lock:
            self._held -= amount


class Workers:
    """A few threads with a bounded queue.

    Args:
        name: Of the threads.
        threads: How many work at a time.
        most: Calls that may run or wait.
        prepare: Called in each thread before its first call.
    """

    def __init__(self, name: str, *, threads: int, most: int, prepare: Callable[[], object] | None = None) -> None:
        self._admission = Admission(most)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=f"pfml {name}", initializer=prepare)

    def __len__(self) -> int:
        """Calls that run or wait."""
        return self._admission.amount

    async def run(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs
    ) -> Result:
        """function(...) in a thread; BusyError if too many wait."""
        self._admission.acquire()
        future = self._executor.submit(function, *args, **options)
        # not when the request is cancelled: its call may still run
        future.add_done_callback(lambda _: self._admission.release())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the threads; waiting calls are cancelled."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class DynamicBatcher(Generic[Item, Result]):
    """Threads of which each processes what waits in one batch, up to a size.

    Args:
        name: Of the threads.
        function: Results of a batch, in its order.
        most: Size of a batch.
        threads: How many batches are processed at a time.
    """

    def __init__(
        self, name: str, function: Callable[[list[Item]], Sequence[Result]], most: int, threads: int = 1
    ) -> None:
        self.function = function
        self.most = most
        self._waiting: queue.SimpleQueue[tuple[Item, Future[Result]] | None] = queue.SimpleQueue()
        self._busy = Admission(threads)
        names = (f"pfml {name}_{number}" for number in range(threads))
        self._threads = [threading.Thread(target=self._work, name=one, daemon=True) for one in names]
        for thread in self._threads:
            thread.start()

    @property
    def is_idle(self) -> bool:
        """Whether one batch is processed at most, and nothing waits."""
        return self._busy.amount <= 1 and self._waiting.empty()

    def __len__(self) -> int:
        """Items that wait."""
        return self._waiting.qsize()

    async def run(self, item: Item) -> Result:
        """The result of an item."""
        future: Future[Result] = Future()
        self._waiting.put((item, future))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the threads after the items that wait, and wait for them.

        A thread that is still within torch when Python exits would abort the process.
        """
        for _ in self._threads:
            self._waiting.put(None)
        until = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))

    def _work(self) -> None:
        while (first := self._waiting.get()) is not None:
            batch, is_last = [first], False
            with self._busy.held():
                with suppress(queue.Empty):
                    while len(batch) < self.most and not is_last:
                        following = self._waiting.get_nowait()
                        if following is None:
                            is_last = True
                        else:
                            batch.append(following)
                self._process([(item, future) for item, future in batch if future.set_running_or_notify_cancel()])
            if is_last:
                return

    def _process(self, batch: list[tuple[Item, Future[Result]]]) -> None:
        try:
            results = self.function([item for item, _ in batch]) if batch else []
        except Exception as error:  # every request of the batch gets it
            for _, future in batch:
                future.set_exception(error)
            return
        for (_, future), result in zip(batch, results, strict=True):
            future.set_result(result)
