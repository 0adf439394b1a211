"""What torchrun tells a process."""

from dataclasses import replace

import pytest
import torch

from pfml.cli.train import is_restarted
from pfml.distributed import Ranks, World, open_world
from pfml.distributed.launch import Launch
from pfml.training import DataConfig, LossConfig, RunConfig
from pfml.training.config_files import write_config

ALL = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.fixture
def environment(monkeypatch):
    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    for name in (*ALL, "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    return put


def test_a_process_that_nobody_launched_is_alone(environment):
    environment(RANK="2", WORLD_SIZE="4")  # left over by something else
    assert Launch.of_process() == Launch()
    with open_world(torch.device("cpu")) as world:
        assert type(world) is World
        assert (world.rank, world.size, world.is_first, world.part(7)) == (0, 1, True, slice(0, 7))


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
