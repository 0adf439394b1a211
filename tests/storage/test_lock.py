"""Locks end with their process, name their owner, and say when they wait."""

import logging
import os
import threading
import time

import pytest

from pfml.storage.lock import LockedError, WriterLock, claim, locked_file, locked_folder
from processes import CONTEXT


def hold(folder, holding):
    with WriterLock(folder).held():
        holding.set()
        time.sleep(600)


def test_a_lock_names_its_owner_and_ends_with_its_process(tmp_path):
    holding = CONTEXT.Event()
    other = CONTEXT.Process(target=hold, args=(tmp_path, holding))
    other.start()
    assert holding.wait(60)
    with pytest.raises(LockedError, match=f"one writer at a time, but process {other.pid} on "):
        WriterLock(tmp_path).held().__enter__()
    other.kill()
    other.join()
    with WriterLock(tmp_path).held() as is_outermost:
        assert is_outermost


def test_shared_locks_keep_out_only_who_wants_it_alone(tmp_path):
    first, second = (WriterLock(tmp_path, shared=True) for _ in range(2))
    with first.held(), second.held(), pytest.raises(LockedError):
        WriterLock(tmp_path).held().__enter__()
    with WriterLock(tmp_path).held(), pytest.raises(LockedError):
        WriterLock(tmp_path, shared=True).held().__enter__()


def test_a_folder_that_is_held_or_gone_is_not_free_and_gets_no_file(tmp_path):
    with locked_folder(tmp_path) as first, locked_folder(tmp_path) as second:
        assert (first, second) == (True, False)
    with locked_folder(tmp_path) as again, locked_folder(tmp_path / "gone") as gone:
        assert (again, gone) == (True, False)
    assert list(tmp_path.iterdir()) == []


def test_a_long_wait_is_logged_with_the_file(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("pfml.storage.lock.PATIENCE", 0.02)
    path = tmp_path / "results.jsonl"
    first, second = (os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    done = threading.Event()

    def write():
        with locked_file(path, second):
            done.set()

    with caplog.at_level(logging.WARNING, "pfml.storage.lock"):
        with locked_file(path, first):
            waiting = threading.Thread(target=write)
            waiting.start()
            end = time.monotonic() + 120
            while not caplog.records:  # it has waited longer than its patience
                assert time.monotonic() < end
                time.sleep(0.005)
            assert not done.is_set()
        waiting.join()
    assert done.is_set()
    assert [record.getMessage() for record in caplog.records] == [
        f"waiting for {path}, which another process is writing"
    ]
    os.close(first)
    os.close(second)


@pytest.mark.parametrize("lock", [lambda folder: WriterLock(folder).held(), lambda folder: claim(folder / "one.lock")])
def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, lock):
    def no_locks(*_, **__):
        raise OSError(38, "no locks")

    monkeypatch.setattr("pfml.storage.lock.lock_descriptor", no_locks)
    with pytest.raises(OSError, match="must lie where files can be locked"):
        lock(tmp_path).__enter__()
    with locked_folder(tmp_path) as held:
        assert held is None
