"""Decoding in bounded memory, small images before large ones."""

import asyncio
import threading

import pytest

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")

from pfml.serving.decode_queue import DecodeQueue, PixelBudget
from pfml.serving.workers import BusyError


def peak_of(costs, most, threads=4):
    """The most pixels that were decoded at a time, and the results, of tasks with these costs."""
    budget = PixelBudget(most)
    queue = DecodeQueue(budget, threads=threads, most=1000)
    lock, pause = threading.Lock(), threading.Event()
    now = peak = 0

    def decode(cost):
        nonlocal now, peak
        with lock:
            now += cost
            peak = max(peak, now)
        pause.wait(0.005)
        with lock:
            now -= cost
        return cost

    def scale(cost):
        with budget.taken(cost):
            return decode(cost)

    async def all_of_them():
        half = len(costs) // 2
        sent = [queue.run(cost, decode, cost) for cost in costs[:half]]
        scaled = [asyncio.to_thread(scale, cost) for cost in costs[half:]]
        return await asyncio.gather(*sent, *scaled)

    results = asyncio.run(all_of_them())
    queue.close()
    return peak, results


@pytest.mark.parametrize("threads", [1, 4])
def test_all_decodes_together_stay_within_the_budget(threads):
    costs = [1 + (37 * k) % 60 for k in range(80)]
    peak, results = peak_of(costs, 100, threads)
    assert results == costs
    assert 60 <= peak <= 100


def test_an_image_larger_than_the_budget_is_decoded_alone():
    peak, results = peak_of([500, 10, 10, 500, 10, 10], 100)
    assert results == [500, 10, 10, 500, 10, 10]
    assert peak == 500


class Held:
    """Tasks that keep threads busy until `go`."""

    def __init__(self):
        self.go = threading.Event()
        self.started = []

    def __call__(self):
        self.started.append(threading.current_thread())
        assert self.go.wait(60)

    async def wait_for(self, threads):
        """Wait until so many threads are busy."""
        while len(self.started) < threads:
            await asyncio.sleep(0.005)


async def queued(queue, *tasks):
    """Futures of tasks (pixels, function, ...), all of which have joined the queue."""
    futures = [asyncio.ensure_future(queue.run(*task)) for task in tasks]
    await asyncio.sleep(0)  # each runs until it waits for its result
    return futures


def test_small_images_do_not_wait_behind_large_ones():
    million = 1_000_000
    queue = DecodeQueue(PixelBudget(24 * million), threads=1, most=100)
    held, order = Held(), []

    async def all_of_them():
        first = await queued(queue, (1, held))
        await held.wait_for(1)
        costs = [16 * million] * 5 + [million // 3, 12 * million]
        sent = await queued(queue, *((cost, order.append, cost) for cost in costs))
        held.go.set()
        await asyncio.gather(*first, *sent)

    asyncio.run(all_of_them())
    assert order == [million // 3, 12 * million] + [16 * million] * 5
    queue.close()


def test_a_small_image_passes_while_a_large_one_is_decoded():
    million = 1_000_000
    queue = DecodeQueue(PixelBudget(24 * million), threads=2, most=100)
    held = Held()

    async def all_of_them():
        large = await queued(queue, *[(16 * million, held)] * 4)
        await held.wait_for(1)
        small = await asyncio.wait_for(queue.run(million, lambda: "decoded"), 60)
        assert len(held.started) == 1
        held.go.set()
        await asyncio.gather(*large)
        return small

    assert asyncio.run(all_of_them()) == "decoded"
    queue.close()


def test_a_large_image_that_has_waited_long_comes_first(monkeypatch):
    monkeypatch.setattr("pfml.serving.decode_queue.PENALTY_PER_PIXEL", 1e-9)
    million = 1_000_000
    queue = DecodeQueue(PixelBudget(24 * million), threads=1, most=100)
    held, order = Held(), []

    async def all_of_them():
        first = await queued(queue, (1, held))
        await held.wait_for(1)
        large = await queued(queue, (16 * million, order.append, "large"))
        await asyncio.sleep(0.1)  # longer than its penalty
        small = await queued(queue, (million, order.append, "small"))
        held.go.set()
        await asyncio.gather(*first, *large, *small)

    asyncio.run(all_of_them())
    assert order == ["large", "small"]
    queue.close()


def test_errors_reach_the_request_and_free_its_slot():
    budget = PixelBudget(10)
    queue = DecodeQueue(budget, threads=1, most=1)

    async def twice():
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await queue.run(10, lambda: 1 // 0)
        held = Held()
        [first] = await queued(queue, (10, held))
        with pytest.raises(BusyError):
            await queue.run(1, int)
        held.go.set()
        await first
        return await queue.run(10, int)

    assert asyncio.run(twice()) == 0
    queue.close()


def test_closing_ends_the_threads_and_cancels_waiting_tasks():
    before = set(threading.enumerate())
    queue = DecodeQueue(PixelBudget(10), threads=2, most=10)
    held, own = Held(), set(threading.enumerate()) - before

    async def asked():
        running = await queued(queue, (5, held), (5, held))
        await held.wait_for(2)
        [waiting] = await queued(queue, (5, int))
        queue.close()
        held.go.set()
        await asyncio.gather(*running)
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(asked())
    for thread in own:
        thread.join(60)
    assert [thread.is_alive() for thread in own] == [False, False]
