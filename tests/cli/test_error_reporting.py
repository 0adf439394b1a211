"""Errors of commands on several ranks: here the ranks are threads, and their store lies in this process."""

import os
import signal
import threading
import time
from unittest import mock

import pytest
from torch.distributed import HashStore

from pfml.cli import main
from pfml.cli.error_reporting import report_once
from pfml.distributed.launch import Launch

TORCHRUN = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def reported(errors, monkeypatch):
    """What ranks report that end with these errors, None for one that continues; by rank."""
    store, written = HashStore(), [[] for _ in errors]
    failing = [f"error of rank {rank}" for rank, text in enumerate(errors) if text is not None]

    def wait(is_done):  # the time is up as soon as all ranks that fail have said so, however slow they are
        while not is_done() and not (None in errors and store.check(failing)):
            time.sleep(0.01)

    monkeypatch.setattr("pfml.cli.error_reporting._wait", wait)
    threads = [
        threading.Thread(target=report_once, args=(text, Launch(rank, len(errors)), store, written[rank].append))
        for rank, text in enumerate(errors)
        if text is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return written


def test_an_error_of_all_ranks_is_reported_once(monkeypatch):
    assert reported(["no images"] * 3, monkeypatch) == [["no images"], [], []]


def test_an_error_of_one_rank_names_it(monkeypatch):
    assert reported([None, None, "no images"], monkeypatch) == [[], [], ["rank 2: no images"]]
    assert reported(["no images", None], monkeypatch) == [["rank 0: no images"], []]


def test_different_errors_are_all_reported(monkeypatch):
    texts = ["no images", "no disk", "no images", None]
    expected = [["rank 0: no images (and 1 more of 4 ranks)"], ["rank 1: no disk"], [], []]
    assert reported(texts, monkeypatch) == expected


def test_an_error_that_names_a_rank_itself_is_left_as_it_is(monkeypatch):
    gone = "rank 1 failed: no disk"
    assert reported([gone, "no disk", gone], monkeypatch) == [[gone], ["rank 1: no disk"], []]


def test_a_rank_does_not_wait_forever_for_one_that_continues(monkeypatch):
    monkeypatch.setattr("pfml.cli.error_reporting.WAIT_SECONDS", 0.1)
    written = []
    report_once("no images", Launch(1, 2), HashStore(), written.append)
    assert written == ["rank 1: no images"]


def test_ranks_without_a_store_report_for_themselves():
    written = []
    report_once("no images", Launch(1, 2), None, written.append)
    assert written == ["rank 1: no images"]


def test_a_rank_reports_at_once_when_torchrun_ends_it(monkeypatch):
    monkeypatch.setattr("pfml.cli.error_reporting.WAIT_SECONDS", 600.0)
    written, before = [], signal.getsignal(signal.SIGTERM)

    def end():
        while signal.getsignal(signal.SIGTERM) is before:  # the rank does not catch it yet
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    torchrun = threading.Thread(target=end)
    torchrun.start()
    report_once("no images", Launch(1, 2), HashStore(), written.append)
    torchrun.join()
    assert written == ["rank 1: no images"]


@pytest.fixture
def launched(monkeypatch):
    """Makes this process a rank of two; the store that both have."""
    store = HashStore()
    monkeypatch.setattr("pfml.distributed.launch.rendezvous_store", lambda launch: store)
    monkeypatch.setattr("pfml.cli.error_reporting.WAIT_SECONDS", 0.2)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    return store


MISTAKES = [
    (["train", "--resume=nowhere"], 1, "no such folder: nowhere"),
    (["train", "--config=nothing"], 2, "is neither a file nor a configuration"),
    (["train", "--data.name=glyphs", "--epoch=3"], 2, "did you mean 'epochs'"),
    (["calibrate", "run"], 1, "2 processes cannot share its work"),
]


@pytest.mark.parametrize(("arguments", "status", "message"), MISTAKES)
def test_a_command_reports_a_mistake_on_its_first_rank_only(
    launched, monkeypatch, capsys, tmp_path, arguments, status, message
):
    monkeypatch.chdir(tmp_path)
    printed = []
    for rank in ("1", "0", "1"):  # the first rank 1 only leaves its error there
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == status
        printed.append(capsys.readouterr().err)
    assert "error: rank 1: " in printed[0]  # nobody else had failed by then
    assert message in printed[1]
    assert "rank" not in printed[1]
    assert printed[2] == ""


def test_an_interruption_is_reported_by_the_first_rank(launched, monkeypatch, capsys):
    monkeypatch.setattr("pfml.cli.refuse_ranks", mock.Mock(side_effect=KeyboardInterrupt))
    for rank, expected in (("0", "pfml train: interrupted\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            main(["train"])
        assert capsys.readouterr().err == expected
