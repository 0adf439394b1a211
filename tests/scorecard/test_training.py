"""Reliability test 23: a run that was interrupted ends as one that was not."""

from functools import cache

import pytest
import torch

from pfml.data import with_validation
from pfml.runs.checkpoint import load_checkpoint
from pfml.runs.folder import RunFolder
from pfml.training import BatchConfig, LossConfig, train
from small_data import InterruptAt, letters, small_config, small_embedder


def run(out, *, resume=False, monitor=None, data=None, dropout=0.0, **changes):
    torch.manual_seed(1)
    embedder = small_embedder()
    embedder.backbone.layers.append(torch.nn.Dropout(dropout))
    return train(embedder, data or letters(), small_config(**changes), out=out, resume=resume, monitor=monitor)


def assert_equal_runs(first, second):
    """Weights, proxies, moments, generators, history and log, to the last bit; only times may differ."""
    (tensors, state), (other_tensors, other_state) = (
        load_checkpoint(folder / "checkpoints") for folder in (first, second)
    )
    for entry in (*state["history"], *other_state["history"]):
        del entry["images_per_second"]
    assert state == other_state
    assert tensors.keys() == other_tensors.keys()
    for name in tensors:
        assert torch.equal(tensors[name], other_tensors[name]), name
    logs = ([(e["step"], e["loss"]) for e in RunFolder(folder).entries("step")] for folder in (first, second))
    assert len({tuple(log) for log in logs}) == 1


CASES = {
    "pfml": {},
    "proxy anchor": {"loss": LossConfig("proxy-anchor")},
    "random batches": {"batch": BatchConfig(32, 0)},
    "warm-up": {"warm_up_epochs": 1, "batch_norm": "freeze"},
    "proxies from samples": {"loss": LossConfig("pfml", {"proxies_per_class": 2, "proxy_init": "samples"})},
    "dropout": {"dropout": 0.5},
    "float16": {"autocast": "float16"},
}


#: The first and the last step, both sides of an evaluation, one between; float16 is slow on a CPU.
STEPS = [
    *((case, step) for case in CASES if case != "float16" for step in (1, 3, 4, 7, 8)),
    pytest.param("float16", 4, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Case -> folder of a run that was not interrupted, made once."""

    @cache
    def folder(case):
        run(made := tmp_path_factory.mktemp("whole"), **CASES[case])
        return made

    return folder


@pytest.mark.parametrize(("case", "step"), STEPS)
def test_23_a_run_interrupted_at_any_step_ends_as_one_that_was_not(tmp_path, whole, case, step):
    with pytest.raises(KeyboardInterrupt, match=f"stopped at step {step}, state saved"):
        run(tmp_path / "broken", monitor=InterruptAt(step), **CASES[case])
    run(tmp_path / "broken", resume=True, **CASES[case])
    assert_equal_runs(whole(case), tmp_path / "broken")


def test_23_a_run_interrupted_again_and_again_ends_as_one_that_was_not(tmp_path):
    data = with_validation(letters(), "half")
    changes = {"data": data, "batch": BatchConfig(16, 4), "epochs": 3}
    run(tmp_path / "whole", **changes)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", monitor=InterruptAt(2), **changes)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "broken", resume=True, monitor=InterruptAt(3), **changes)
    run(tmp_path / "broken", resume=True, **changes)
    assert_equal_runs(tmp_path / "whole", tmp_path / "broken")
