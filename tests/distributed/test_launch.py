"""What torchrun tells a process."""

from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore

from pfml.cli.console import create_console
from pfml.cli.train import _with_suggestions, is_restarted, train
from pfml.distributed import Ranks, World, open_world
from pfml.distributed.launch import FailedElsewhereError, Launch, _guarded, decided_by_first
from pfml.runs.config_files import write_config
from pfml.suggest.folder import Prepared
from pfml.suggest.suggestion import Suggestion
from pfml.training import DataConfig, LossConfig, RunConfig

ALL = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.fixture
def environment(monkeypatch):
    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    for name in (*ALL, "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    return put


@pytest.fixture
def store(monkeypatch):
    """What torchrun keeps for all ranks and starts; here they are all in this process."""
    kept = HashStore()
    monkeypatch.setattr("pfml.distributed.launch.rendezvous_store", lambda launch: kept)
    return kept


def test_a_process_that_nobody_launched_is_alone(environment):
    environment(RANK="2", WORLD_SIZE="4")  # left over by something else
    assert Launch.of_process() == Launch()
    with open_world(torch.device("cpu")) as world:
        assert type(world) is World
        assert (world.rank, world.size, world.is_first, world.shard(7)) == (0, 1, True, slice(0, 7))


def test_what_torchrun_says_is_read(environment):
    environment(**ALL)
    assert Launch.of_process() == Launch(rank=2, size=4, local_rank=1)
    environment(TORCHELASTIC_RESTART_COUNT="1", TORCHELASTIC_MAX_RESTARTS="3", TORCHELASTIC_USE_AGENT_STORE="True")
    assert Launch.of_process() == Launch(2, 4, 1, restarts=1, may_restart=True, by_agent=True)


def test_one_rank_alone_needs_no_process_group(environment):
    environment(**{**ALL, "RANK": "0", "WORLD_SIZE": "1"})
    with open_world(torch.device("cpu")) as world:
        assert not isinstance(world, Ranks)


@pytest.mark.parametrize(("name", "value"), [("RANK", "x"), ("RANK", "4"), ("WORLD_SIZE", "-1")])
def test_numbers_that_are_none_are_named(environment, name, value):
    environment(**{**ALL, name: value})
    with pytest.raises(ValueError, match=name):
        Launch.of_process()


def test_a_gpu_must_not_be_named_for_all_ranks(environment):
    environment(**ALL)
    with pytest.raises(ValueError, match="device must be cuda or cpu, got cuda:0"), open_world(torch.device("cuda:0")):
        pass


def test_each_rank_needs_a_gpu(environment, monkeypatch):
    environment(**ALL)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ValueError, match="this machine has 1: start as many"), open_world(torch.device("cuda")):
        pass


def test_a_restart_goes_on_with_the_run_that_it_has_begun_and_with_no_other(tmp_path):
    config, again = RunConfig(data=DataConfig("glyphs")), Launch(size=2, restarts=1, may_restart=True)
    assert not is_restarted(config, tmp_path, again)  # it died before it began
    write_config(tmp_path / "config.yaml", config)
    assert is_restarted(config, tmp_path, again)
    assert not is_restarted(config, tmp_path, replace(again, restarts=0))
    with pytest.raises(ValueError, match="another configuration"):
        is_restarted(replace(config, loss=LossConfig("cpml")), tmp_path, again)


def test_a_run_that_may_be_restarted_needs_a_name():
    with pytest.raises(ValueError, match="--out"):
        is_restarted(RunConfig(), None, Launch(size=2, may_restart=True))
    assert not is_restarted(RunConfig(), None, Launch(size=2))


def test_the_first_words_are_those_of_the_first_rank_at_the_first_start(store):
    words = iter(["three", "four"])
    launches = [Launch(rank, 2, restarts=start, by_agent=True) for start in (0, 1) for rank in (0, 1)]
    assert [decided_by_first("epochs", lambda: next(words), launch) for launch in launches] == ["three"] * 4
    assert decided_by_first("crops", lambda: next(words), launches[0]) == "four"


def test_a_process_that_nobody_launched_speaks_for_itself():
    assert [decided_by_first("epochs", lambda word=word: word, Launch()) for word in ("three", "four")] == [
        "three",
        "four",
    ]


def test_a_first_rank_that_ends_before_it_has_spoken_is_named(store, monkeypatch):
    monkeypatch.setattr("pfml.distributed.launch.LONGEST_WAIT", timedelta(seconds=0.1))
    with pytest.raises(FailedElsewhereError, match="rank 0 has ended before it could say how many epochs"):
        decided_by_first("how many epochs", str, Launch(1, 2, by_agent=True))


def test_a_restart_does_not_go_on_with_a_run_that_was_there_before(store, tmp_path):
    config = RunConfig(data=DataConfig("glyphs"))
    ranks = [Launch(rank, 2, may_restart=True, by_agent=True) for rank in (0, 1)]
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    write_config(old / "config.yaml", config)
    for out in (old, new):
        assert not any(is_restarted(config, out, launch) for launch in ranks)
    write_config(new / "config.yaml", config)  # by this run
    again = [replace(launch, restarts=1) for launch in ranks]
    assert [is_restarted(config, new, launch) for launch in again] == [True, True]
    assert [is_restarted(config, old, launch) for launch in again] == [False, False]


def test_what_is_suggested_is_the_same_on_all_ranks_and_at_all_starts(environment, store, monkeypatch, tmp_path):
    epochs = iter(range(5, 100))  # as many as fit into the time, which nobody measures twice alike

    def suggested(*_, **__):
        return Suggestion(RunConfig(epochs=next(epochs)), {"epochs": "as many as fit"})

    monkeypatch.setattr("pfml.suggest.folder.suggest_for_folder", suggested)
    config = RunConfig(data=DataConfig(str(tmp_path)), seed=1)
    for start in ("0", "1"):
        for rank in ("0", "1"):
            environment(**{**ALL, "RANK": rank, "WORLD_SIZE": "2"})
            environment(TORCHELASTIC_RESTART_COUNT=start, TORCHELASTIC_USE_AGENT_STORE="True")
            assert _with_suggestions(config, {"seed"}, create_console(), Prepared()) == replace(config, epochs=5)


@pytest.mark.parametrize(("error", "reason"), [(ValueError("no images"), "no images"), (KeyboardInterrupt(), "Keyb")])
def test_the_others_are_told_why_a_rank_fails_also_by_an_error_without_a_text(error, reason):
    heartbeat = mock.Mock(reason=None)
    block = _guarded(mock.Mock(rank=1), heartbeat)
    next(block)
    with pytest.raises(type(error)):
        block.throw(error)
    assert heartbeat.report.call_args.args[0].startswith(f"rank 1 failed: {reason}")


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_run_that_was_not_begun_is_not_one_to_go_on_with(monkeypatch, tmp_path, is_begun):
    def lost(device):
        raise FailedElsewhereError("rank 1 of 2 has not come")

    monkeypatch.setattr("pfml.distributed.launch.open_world", lost)
    if is_begun:
        write_config(tmp_path / "config.yaml", RunConfig())
    for out in (tmp_path, None):
        with pytest.raises(SystemExit) as ended:
            train(RunConfig(device="cpu"), out=out)
        assert ("--resume" in str(ended.value)) == (is_begun and out is not None)
