"""Heartbeats, with a store in this process instead of torch's and a clock that the test sets.

Ranks live as long as the clock moves in steps in which each of them has a heartbeat, however slow the machine is.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pfml.distributed.heartbeat import Heartbeat

PATIENCE, ARRIVAL, HASTE = 20.0, 300.0, 60.0


class Store:
    """What is needed of a store."""

    def __init__(self):
        self.values, self.lock, self.is_gone = {}, threading.Lock(), False

    def _require(self):
        if self.is_gone:
            raise RuntimeError("Connection reset by peer\nwith frames of C++")

    def set(self, key, value):
        self._require()
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        self._require()
        return all(key in self.values for key in keys)

    def compare_set(self, key, expected, desired):
        self._require()
        with self.lock:
            return self.values.setdefault(key, desired.encode())


def wait_until(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "what the test waits for did not come"
        time.sleep(0.005)


class Machine:
    """Ranks that share a store and a clock."""

    def __init__(self):
        self.store, self.now, self.living = Store(), 1000.0, []

    def rank(self, rank, size, **options):
        """A rank that lives until its block ends."""
        options = {"beat": 0.01, "patience": PATIENCE, "arrival": ARRIVAL, "grace": 600.0, **options}
        heartbeat = Heartbeat(self.store, rank, size, clock=lambda: self.now, **options)
        self.living.append(heartbeat)
        return heartbeat

    def pass_time(self, seconds, step=PATIENCE / 4):
        """Move the clock, and let every living rank beat and poll in each step; ends when one has a reason."""
        end = self.now + seconds
        while self.now < end and not any(each.reason for each in self.living):
            self.now += step
            before = [each._count for each in self.living]
            counts = list(zip(self.living, before, strict=True))
            wait_until(lambda: all(each._count > count + 2 or each.reason for each, count in counts))  # noqa: B023


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr("pfml.distributed.heartbeat.HASTE", HASTE)  # seconds of a real wait too
    return Machine()


@pytest.fixture
def ended(monkeypatch):
    """The statuses with which a heartbeat would have ended this process."""
    statuses = []
    monkeypatch.setattr("os._exit", statuses.append)
    return statuses


def test_ranks_that_live_are_left_alone(machine, ended):
    with machine.rank(0, 2) as first, machine.rank(1, 2) as second:
        machine.pass_time(3 * PATIENCE)
        assert (first.reason, second.reason) == (None, None)
    assert ended == []


def test_a_rank_that_falls_silent_is_named_by_all_others(machine, ended):
    with machine.rank(0, 3) as first, machine.rank(2, 3) as third:
        second = machine.rank(1, 3)
        with second:
            machine.pass_time(PATIENCE)
        machine.living.remove(second)
        machine.pass_time(0.9 * PATIENCE)
        assert (first.reason, third.reason) == (None, None)
        machine.pass_time(PATIENCE)
        assert first.explanation().startswith("rank 1 of 3 no longer answers, without a heartbeat for 2")
        assert third.explanation() == first.reason
    assert ended == []


def test_a_rank_is_given_up_sooner_after_a_message_has_failed(machine, ended):
    with ThreadPoolExecutor(1) as pool, machine.rank(0, 2, patience=1000.0) as first:
        machine.store.set("alive/1", "1")
        machine.pass_time(2 * HASTE)
        assert first.reason is None
        explanation = pool.submit(first.explanation)
        assert explanation.result(120).startswith("rank 1 of 2 no longer answers")
    assert ended == []


def test_a_rank_that_never_came_is_named(machine, ended):
    with machine.rank(0, 2) as heartbeat:
        machine.pass_time(0.9 * ARRIVAL, step=ARRIVAL / 10)
        assert heartbeat.reason is None
        machine.pass_time(ARRIVAL, step=ARRIVAL / 10)
        assert heartbeat.explanation() == "rank 1 of 2 has not come within 330 s: was it started?"


def test_the_first_reason_is_that_of_all(machine, ended):
    with machine.rank(0, 2) as first, machine.rank(1, 2) as second:
        second.report("rank 1 failed: no memory")
        first.report("rank 0 failed: a message did not arrive")
        assert first.explanation() == second.explanation() == "rank 1 failed: no memory"


def test_whoever_keeps_the_store_is_named_if_it_is_gone(machine, ended):
    with machine.rank(1, 2, holder="torchrun") as heartbeat:
        machine.store.is_gone = True
        expected = "torchrun no longer answers: the store of all ranks is gone (Connection reset by peer)"
        assert heartbeat.explanation() == expected
        heartbeat.report("anything")
        assert heartbeat.reason == expected


def test_a_rank_that_does_not_come_out_of_a_wait_is_ended_with_the_reason(machine, ended, capsys):
    with machine.rank(0, 2, grace=0.0):
        machine.pass_time(2 * ARRIVAL, step=ARRIVAL / 10)
        wait_until(lambda: ended)
    assert ended == [1]
    assert capsys.readouterr().err.startswith("rank 0 ends: rank 1 of 2 has not come")
