import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from pfml.experiments.store import ResultsStore, TornLineWarning
from processes import CONTEXT
from records import record


def test_what_is_appended_is_read_back_in_order(tmp_path):
    store = ResultsStore(tmp_path / "new folder" / "results.jsonl")
    assert store.records() == []
    records = [record(seed=seed, settings={"noise": 0.2}, device="Gerät") for seed in range(3)]
    for one in records:
        store.append(one)
    assert store.records() == records
    assert store.path.read_text(encoding="utf-8").count("\n") == 3


COUNT = 25


def append_many(path, commit, together):
    together.wait()
    for number in range(COUNT):
        ResultsStore(path).append(record(seed=number, commit=commit, error="x" * 5000))


def test_several_processes_append_at_once_and_no_line_is_lost_or_torn(tmp_path):
    path, together = tmp_path / "results.jsonl", CONTEXT.Barrier(3)
    processes = [CONTEXT.Process(target=append_many, args=(path, str(number), together)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    found = [(one["commit"], one["seed"]) for one in ResultsStore(path).records()]
    assert sorted(found) == sorted((str(number), seed) for number in range(3) for seed in range(COUNT))


def test_several_threads_append_at_once(tmp_path):
    store = ResultsStore(tmp_path / "results.jsonl")
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda seed: store.append(record(seed=seed)), range(60)))
    assert sorted(one["seed"] for one in store.records()) == list(range(60))


def test_a_torn_last_line_is_ignored_with_a_remark_and_cut_off_by_the_next_append(tmp_path):
    store = ResultsStore(tmp_path / "results.jsonl")
    store.append(record(seed=1))
    whole = store.path.read_bytes()
    store.path.write_bytes(whole + whole[: len(whole) // 2])
    with pytest.warns(TornLineWarning, match="line 2 is not whole and was ignored"):
        assert [one["seed"] for one in store.records()] == [1]
    with pytest.warns(TornLineWarning, match="cut off"):
        store.append(record(seed=2))
    assert [one["seed"] for one in store.records()] == [1, 2]


def test_a_torn_line_longer_than_a_block_is_cut_off(tmp_path):
    store = ResultsStore(tmp_path / "results.jsonl")
    store.append(record(seed=1))
    with open(store.path, "ab") as file:
        file.write(b'{"error": "' + b"x" * 200_000)
    with pytest.warns(TornLineWarning):
        store.append(record(seed=2))
    assert [one["seed"] for one in store.records()] == [1, 2]


def test_a_store_that_is_nothing_but_a_torn_line_starts_again(tmp_path):
    store = ResultsStore(tmp_path / "results.jsonl")
    store.path.write_bytes(b'{"experiment": "retr')
    with pytest.warns(TornLineWarning):
        assert store.records() == []
    with pytest.warns(TornLineWarning):
        store.append(record())
    assert len(store.records()) == 1


def test_a_bad_line_in_the_middle_does_not_hide_the_others(tmp_path):
    store = ResultsStore(tmp_path / "results.jsonl")
    store.append(record(seed=1))
    with open(store.path, "a") as file:
        file.write('{"half": \n[1, 2]\n\n{"experiment": "retrieval"}\n')
    store.append(record(seed=2))
    with pytest.warns(TornLineWarning) as remarks:
        assert [one["seed"] for one in store.records()] == [1, 2]
    assert [str(one.message).split(": ")[1].split(" is")[0] for one in remarks] == ["line 2", "line 3", "line 5"]


def test_a_full_disk_leaves_the_store_as_it_was(tmp_path, monkeypatch):
    store = ResultsStore(tmp_path / "results.jsonl")
    store.append(record(seed=1))
    before = store.path.read_bytes()

    def full(descriptor, content):
        os.write(descriptor, content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pfml.experiments.store._write_all", full)
    with pytest.raises(OSError, match="No space left"):
        store.append(record(seed=2))
    assert store.path.read_bytes() == before


def test_finished_keys_are_those_of_runs_that_are_done(tmp_path):
    store = ResultsStore(tmp_path / "results.jsonl")
    store.append(record(key="a", status="failed", results={}, error="RuntimeError: no"))
    store.append(record(key="b"))
    store.append(record(key="c", experiment="noise"))
    store.append(record(key="d", status="failed", results={}))
    store.append(record(key="d"))
    assert store.finished_keys() == {"b", "c", "d"}
    assert store.finished_keys("noise") == {"c"}
    assert store.experiments() == ["retrieval", "noise"]


def test_numbers_that_are_not_finite_become_null(tmp_path):
    store = ResultsStore(tmp_path / "results.jsonl")
    store.append(record(results={"last": {"recall_at_1": float("nan")}}))
    assert json.loads(store.path.read_text(), parse_constant=pytest.fail)["results"]["last"]["recall_at_1"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": "0"}, "seed of a record must be int, got '0'"),
        ({"dim": True}, "dim of a record must be int, got True"),
        ({"error": 3}, "error of a record must be str | None, got 3"),
        ({"status": "finished"}, "status must be 'done' or 'failed', got 'finished'"),
        ({"results": {"last": None}}, "must have results of its last epoch"),
        ({"color": "red"}, "unknown ['color']"),
    ],
)
def test_a_record_of_another_form_is_refused_and_not_written(tmp_path, changes, message):
    store = ResultsStore(tmp_path / "results.jsonl")
    with pytest.raises((ValueError, TypeError)) as error:
        store.append(record(**changes))
    assert message in str(error.value)
    assert not store.path.exists()


def test_a_record_must_be_complete(tmp_path):
    incomplete = record()
    del incomplete["versions"]
    with pytest.raises(ValueError, match=r"missing \['versions'\]"):
        ResultsStore(tmp_path / "results.jsonl").append(incomplete)


def test_a_record_of_another_format_is_refused_and_named(tmp_path):
    store = ResultsStore(tmp_path / "results.jsonl")
    store.append(record(format=1))
    with pytest.raises(ValueError, match="a record must have format 1, got 2"):
        store.append(record(format=2))
    assert [one["format"] for one in store.records()] == [1]
