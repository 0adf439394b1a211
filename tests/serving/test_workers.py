"""The threads that do the work of requests."""

import asyncio
import threading
import time

import pytest

from pfml.serving.workers import Batches, BusyError, Turnstile


def test_closing_waits_for_what_is_under_way():
    begun = threading.Event()

    def slowly(items):
        begun.set()
        time.sleep(0.3)
        return [2 * item for item in items]

    batches = Batches("test", slowly, most=4)

    async def ask_and_close():
        asked = asyncio.ensure_future(batches.run(21))
        await asyncio.to_thread(begun.wait, 10)
        batches.close()
        assert "pfml test" not in {thread.name for thread in threading.enumerate()}
        return await asked

    assert asyncio.run(ask_and_close()) == 42


def test_a_turnstile_refuses_one_too_many_and_lets_in_again():
    turnstile = Turnstile(1)
    with turnstile.passed(), pytest.raises(BusyError, match="busy with 1 requests"), turnstile.passed():
        pass
    with turnstile.passed():
        pass
