"""Worker threads with bounded queues."""

import asyncio
import threading
import time

import pytest

from pfml.serving.workers import Admission, BusyError, DynamicBatcher, Workers


def test_closing_waits_for_the_running_batch():
    begun = threading.Event()

    def slowly(items):
        begun.set()
        time.sleep(0.1)
        return [2 * item for item in items]

    batcher = DynamicBatcher("test", slowly, most=4)

    async def ask_and_close():
        asked = asyncio.ensure_future(batcher.run(21))
        await asyncio.to_thread(begun.wait, 60)
        batcher.close()
        assert "pfml test" not in {thread.name for thread in threading.enumerate()}
        return await asked

    assert asyncio.run(ask_and_close()) == 42


def test_admission_refuses_one_too_many_and_admits_again():
    admission = Admission(1)
    with admission.held(), pytest.raises(BusyError, match="busy with 1 requests"), admission.held():
        pass
    with admission.held():
        pass


def test_admission_by_bytes_admits_a_large_request_alone():
    admission = Admission(10, "bytes of uploads")
    with admission.held(30), pytest.raises(BusyError, match="busy with 30 bytes of uploads"):
        admission.acquire(1)
    with admission.held(4), admission.held(6), pytest.raises(BusyError), admission.held(1):
        pass


def test_workers_run_a_few_calls_at_a_time_and_refuse_what_exceeds_their_queue():
    workers, go, lock = Workers("test", threads=2, most=5), threading.Event(), threading.Lock()
    running = peak = 0

    def call(number):
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        go.wait(60)
        with lock:
            running -= 1
        return number

    async def ask():
        calls = [asyncio.ensure_future(workers.run(call, number)) for number in range(5)]
        while running < 2:  # both threads work
            await asyncio.sleep(0.005)
        with pytest.raises(BusyError, match="busy with 5 requests"):
            await workers.run(call, 5)
        go.set()
        return [*await asyncio.gather(*calls), await workers.run(call, number=6)]

    assert asyncio.run(ask()) == [0, 1, 2, 3, 4, 6]
    assert peak == 2
    assert asyncio.run(workers.run(call, 7)) == 7, "another event loop"


def test_an_error_in_a_worker_reaches_the_request_and_frees_its_slot():
    workers = Workers("test", threads=1, most=1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            asyncio.run(workers.run(lambda: 1 // 0))
