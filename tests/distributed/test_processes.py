"""Real processes: what is left of them when one dies or fails, and what torchrun makes of it."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from rank_program import printed_by, run_rank
from torch.distributed import TCPStore

from pfml.runs.folder import RunFolder
from processes import CONTEXT
from runs import outcome, training

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def port():
    """That of a store that this process keeps for the ranks, as torchrun does."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def started(out, fault, port, *, size=2):
    """Ranks without torchrun, so that nobody but themselves ends them."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    ranks = [
        CONTEXT.Process(target=run_rank, args=(out, fault, {**common, "RANK": str(rank)}), daemon=True)
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    return ranks


def ended(out, ranks):
    """What each rank has printed, after all have ended."""
    for rank in ranks:
        rank.join(120)
        assert rank.exitcode is not None, "a rank waits for one that is gone"
    return [printed_by(out, rank).read_text() for rank in range(len(ranks))]


def wait_for(path):
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.05)


def test_a_rank_that_dies_ends_the_others_with_its_name_and_the_run_resumes_from_its_checkpoint(tmp_path, port):
    out = tmp_path / "run"
    ranks = started(out, "stall", port)
    wait_for(tmp_path / "run.stalls")
    ranks[1].kill()
    texts = ended(out, ranks)
    assert ranks[0].exitcode == 1
    assert "FailedElsewhereError: rank 1 of 2 no longer answers" in texts[0]
    assert outcome(out)[1]["step"] == 4  # the end of the first epoch

    training(None, out, {}, resume=True)
    training(None, tmp_path / "whole", {})
    weights, expected = (outcome(folder)[0]["embedder/head.linear.weight"] for folder in (out, tmp_path / "whole"))
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_an_error_of_one_rank_is_told_by_all(tmp_path, port):
    ranks = started(tmp_path / "run", "raise", port)
    texts = ended(tmp_path / "run", ranks)
    assert [rank.exitcode for rank in ranks] == [1, 1]
    assert "RuntimeError: this rank has run out of memory" in texts[1]
    assert "FailedElsewhereError: rank 1 failed: this rank has run out of memory" in texts[0]


def torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


GLYPHS = {
    "data.name": "glyphs",
    "model.backbone": "convnet",
    "model.embedding_dim": 16,
    "loss.options.proxies_per_class": 2,
    "batch.size": 40,
    "epochs": 1,
    "warm_up_epochs": 0,
    "checkpoint_every": 2,
    "device": "cpu",
}


def train_command(out, **changes):
    options = {**GLYPHS, **changes}
    return ["-m", "pfml", "train", *(f"--{name}={value}" for name, value in options.items()), f"--out={out}"]


def children(parent):
    """The processes that a process has started."""
    found = subprocess.run(["pgrep", "-P", str(parent)], capture_output=True, text=True, check=False).stdout.split()
    return [int(number) for number in found]


@pytest.mark.slow
def test_torchrun_starts_the_command_anew_after_a_kill_and_it_ends_with_the_same_bits(tmp_path):
    for name in ("whole", "killed"):
        agent = torchrun("--max-restarts", "1", *train_command(tmp_path / name))
        if name == "killed":
            wait_for(tmp_path / name / "checkpoints" / "last.json")
            os.kill(children(agent.pid)[-1], signal.SIGKILL)
        text = agent.communicate(timeout=300)[0]
        assert agent.returncode == 0, text
        assert text.count("on 2 ranks") == (1 if name == "whole" else 2)
    whole, killed = (outcome(tmp_path / name)[0] for name in ("whole", "killed"))
    assert all(torch.equal(value, killed[name]) for name, value in whole.items())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_torchrun_stops_all_ranks_at_one_step_with_one_checkpoint(tmp_path, number):
    agent = torchrun(*train_command(tmp_path / "run"))
    wait_for(tmp_path / "run" / "checkpoints" / "last.json")
    agent.send_signal(number)
    text = agent.communicate(timeout=60)[0]
    step = outcome(tmp_path / "run")[1]["step"]
    assert text.count(f"stopped at step {step}, state saved; resume with: pfml train --resume") == 1
    resumed = torchrun("-m", "pfml", "train", "--resume", str(tmp_path / "run"))
    assert "last epoch, epoch 1" in resumed.communicate(timeout=300)[0]


@pytest.mark.slow
def test_a_run_that_does_not_trust_every_label_is_that_of_one_process(tmp_path):
    # a tame field and small steps: roundings, which differ, hardly grow
    changes = {
        "loss.name": "pfml-log", "loss.options.trust": 0.9, "batch.size": 560, "optimizer.lr": 1e-4,
        "optimizer.proxy_lr": 1e-3, "log_every": 1,
    }  # fmt: skip
    alone = [sys.executable, *train_command(tmp_path / "one", **changes)]
    agents = [
        torchrun(*train_command(tmp_path / "ranks", **changes)),
        subprocess.Popen(alone, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True),
    ]
    for agent in agents:
        text = agent.communicate(timeout=300)[0]
        assert agent.returncode == 0, text
    (tensors, state), (expected, expected_state) = (outcome(tmp_path / name) for name in ("ranks", "one"))
    assert state["step"] == expected_state["step"] > 4
    losses, expected_losses = (
        [entry["loss"] for entry in RunFolder(tmp_path / name).entries("step")] for name in ("ranks", "one")
    )
    assert losses[:5] == pytest.approx(expected_losses[:5], rel=1e-5)
    # later a sample may lie so near to the bound of trust that its rounding decides: for a step it is in one field only
    for name, value in expected.items():
        if name.startswith("embedder/"):
            torch.testing.assert_close(tensors[name], value, rtol=1e-3, atol=3e-4)
