"""Reliability test 23: a run that was interrupted ends as one that was not."""

from functools import partial

import pytest
import torch

from pfml.data import with_validation
from pfml.runs.checkpoint import load_checkpoint
from pfml.runs.folder import RunFolder
from pfml.training import BatchConfig, LossConfig, train
from small_data import few_glyphs, interrupted_repeatedly, small_config, small_embedder


def run(out, *, resume=False, monitor=None, data=None, dropout=0.0, **changes):
    torch.manual_seed(1)
    embedder = small_embedder()
    embedder.backbone.layers.append(torch.nn.Dropout(dropout))
    return train(data or few_glyphs(), embedder, small_config(**changes), out=out, resume=resume, monitor=monitor)


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


#: Steps between interruptions: at the first and the last step, on both sides of an evaluation, and one between.
COUNTS, STOPPED = (1, 2, 1, 3, 1), [1, 3, 4, 7, 8]
SLOW = pytest.param("float16", marks=pytest.mark.slow)  # on a CPU


@pytest.mark.parametrize("case", [*(case for case in CASES if case != "float16"), SLOW])
def test_23_a_run_interrupted_at_any_step_ends_as_one_that_was_not(tmp_path, case):
    """One run is stopped at each of these steps: what any resume loses is missing at the end."""
    run(tmp_path / "whole", **CASES[case])
    stopped = interrupted_repeatedly(partial(run, tmp_path / "broken", **CASES[case]), COUNTS)
    assert stopped == STOPPED
    assert_equal_runs(tmp_path / "whole", tmp_path / "broken")


def test_23_a_run_with_validation_interrupted_again_and_again_ends_as_one_that_was_not(tmp_path):
    changes = {"data": with_validation(few_glyphs(), "half"), "batch": BatchConfig(16, 4), "epochs": 3}
    run(tmp_path / "whole", **changes)
    interrupted_repeatedly(partial(run, tmp_path / "broken", **changes), (2, 3, 3, 3))
    assert_equal_runs(tmp_path / "whole", tmp_path / "broken")
