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

    def draw(cost):
        with budget.taken(cost):
            return decode(cost)

    async def all_of_them():
        half = len(costs) // 2
        sent = [queue.run(cost, decode, cost) for cost in costs[:half]]
        drawn = [asyncio.to_thread(draw, cost) for cost in costs[half:]]
        return await asyncio.gather(*sent, *drawn)

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


def finished(queue, costs, *, hold):
    """The order in which tasks that all wait at once end; `hold` keeps the threads busy until they do."""
    order, go = [], threading.Event()

    async def all_of_them():
        held = [asyncio.ensure_future(queue.run(cost, go.wait, 10)) for cost in hold]
        await asyncio.sleep(0.05)
        sent = [asyncio.ensure_future(queue.run(cost, order.append, cost)) for cost in costs]
        await asyncio.sleep(0.05)
        go.set()
        await asyncio.gather(*held, *sent)

    asyncio.run(all_of_them())
    return order


def test_small_images_do_not_wait_behind_large_ones():
    million = 1_000_000
    queue = DecodeQueue(PixelBudget(24 * million), threads=1, most=100)
    order = finished(queue, [16 * million] * 5 + [million // 3, 12 * million], hold=[1])
    assert order == [million // 3, 12 * million] + [16 * million] * 5
    queue.close()


def test_a_small_image_passes_while_a_large_one_is_decoded():
    million = 1_000_000
    queue = DecodeQueue(PixelBudget(24 * million), threads=2, most=100)
    go = threading.Event()

    async def all_of_them():
        large = [asyncio.ensure_future(queue.run(16 * million, go.wait, 10)) for _ in range(4)]
        await asyncio.sleep(0.05)
        small = await asyncio.wait_for(queue.run(million, lambda: "decoded"), 5)
        go.set()
        await asyncio.gather(*large)
        return small

    assert asyncio.run(all_of_them()) == "decoded"
    queue.close()


def test_a_large_image_that_has_waited_long_comes_first(monkeypatch):
    monkeypatch.setattr("pfml.serving.decode_queue.PENALTY_PER_PIXEL", 1e-9)
    million = 1_000_000
    queue = DecodeQueue(PixelBudget(24 * million), threads=1, most=100)
    go, order = threading.Event(), []

    async def all_of_them():
        held = asyncio.ensure_future(queue.run(1, go.wait, 10))
        large = asyncio.ensure_future(queue.run(16 * million, order.append, "large"))
        await asyncio.sleep(0.1)
        small = asyncio.ensure_future(queue.run(million, order.append, "small"))
        await asyncio.sleep(0.05)
        go.set()
        await asyncio.gather(held, large, small)

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
        first = asyncio.ensure_future(queue.run(10, threading.Event().wait, 0.1))
        await asyncio.sleep(0.02)
        with pytest.raises(BusyError):
            await queue.run(1, int)
        await first
        return await queue.run(10, int)

    assert asyncio.run(twice()) == 0
    queue.close()


def test_closing_ends_the_threads_and_cancels_waiting_tasks():
    before = set(threading.enumerate())
    queue = DecodeQueue(PixelBudget(10), threads=2, most=10)
    go, own = threading.Event(), set(threading.enumerate()) - before

    async def asked():
        running = [asyncio.ensure_future(queue.run(5, go.wait, 10)) for _ in range(2)]
        await asyncio.sleep(0.05)
        waiting = asyncio.ensure_future(queue.run(5, int))
        await asyncio.sleep(0.05)
        queue.close()
        go.set()
        await asyncio.gather(*running)
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(asked())
    for thread in own:
        thread.join(5)
    assert [thread.is_alive() for thread in own] == [False, False]
