"""Signs of life, with a store in this process in place of torch's."""

import threading
import time

import pytest

from pfml.distributed.heartbeat import Heartbeat

QUICK = {"beat": 0.02, "patience": 0.3, "arrival": 0.3, "grace": 0.1}


class Shelf:
    """What is needed of a store."""

    def __init__(self):
        self.values, self.lock, self.is_gone = {}, threading.Lock(), False

    def _look(self):
        if self.is_gone:
            raise RuntimeError("Connection reset by peer\nwith frames of C++")

    def set(self, key, value):
        self._look()
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        self._look()
        return all(key in self.values for key in keys)

    def compare_set(self, key, expected, desired):
        self._look()
        with self.lock:
            return self.values.setdefault(key, desired.encode())


@pytest.fixture
def ended(monkeypatch):
    """The statuses with which a heartbeat would have ended this process."""
    statuses = []
    monkeypatch.setattr("os._exit", statuses.append)
    return statuses


def test_ranks_that_live_are_left_alone(ended):
    shelf = Shelf()
    with Heartbeat(shelf, 0, 2, **QUICK) as first, Heartbeat(shelf, 1, 2, **QUICK) as second:
        time.sleep(1)
        assert (first.reason, second.reason) == (None, None)
    assert ended == []


def test_a_rank_that_falls_silent_is_named_by_all_others(ended):
    shelf = Shelf()
    with Heartbeat(shelf, 0, 3, **QUICK) as first, Heartbeat(shelf, 2, 3, **QUICK) as third:
        with Heartbeat(shelf, 1, 3, **QUICK):
            time.sleep(0.2)
        assert first.explanation().startswith("rank 1 of 3 no longer answers, without a heartbeat for 0 s")
        assert third.explanation() == first.reason
    assert ended == []


def test_a_rank_that_never_came_is_named(ended):
    with Heartbeat(Shelf(), 0, 2, **QUICK) as heartbeat:
        assert heartbeat.explanation() == "rank 1 of 2 has not come within 0 s: was it started?"


def test_the_first_reason_is_that_of_all(ended):
    shelf = Shelf()
    with Heartbeat(shelf, 0, 2, **QUICK) as first, Heartbeat(shelf, 1, 2, **QUICK) as second:
        second.report("rank 1 failed: no memory")
        first.report("rank 0 failed: a message did not arrive")
        assert first.explanation() == second.explanation() == "rank 1 failed: no memory"


def test_whoever_keeps_the_store_is_named_if_it_is_gone(ended):
    shelf = Shelf()
    with Heartbeat(shelf, 1, 2, holder="torchrun", **QUICK) as heartbeat:
        shelf.is_gone = True
        expected = "torchrun no longer answers: the store of all ranks is gone (Connection reset by peer)"
        assert heartbeat.explanation() == expected
        heartbeat.report("anything")
        assert heartbeat.reason == expected


def test_a_rank_that_does_not_come_out_of_a_wait_is_ended_with_the_reason(ended, capsys):
    with Heartbeat(Shelf(), 0, 2, **QUICK):
        time.sleep(1)
    assert ended == [1]
    assert capsys.readouterr().err.startswith("rank 0 ends: rank 1 of 2 has not come")
