"""The last rung: a training of the whole model on a part of the images, by the loop of any run."""

from __future__ import annotations

import pytest
import torch

from pfml.ladder import fine_tuning
from pfml.ladder.fine_tuning import FineTuning, fine_tuning_config
from pfml.methods import LossConfig
from pfml.models import create_embedder
from pfml.runs.config import RunConfig
from pfml.training.progress import Monitor
from small_data import few_glyphs

pytestmark = pytest.mark.usefixtures("one_thread")

LOSS = LossConfig("pfml-log", {"proxies_per_class": 1, "proxy_init": "kmeans"})


@pytest.fixture
def few_steps(monkeypatch):
    monkeypatch.setitem(fine_tuning.STEPS, "cpu", 3)


def tuned(folder, *, monitor=None, scale=1.0, positions=None):
    images = few_glyphs().train
    positions = torch.arange(0, len(images), 2) if positions is None else positions
    torch.manual_seed(0)
    embedder = create_embedder("convnet", embedding_dim=8).eval()
    tuning = FineTuning(
        RunConfig(device="cpu", effort="hours"), images, folder, lambda *_: LOSS, monitor or Monitor(), scale
    )
    return tuning(positions, "part 1", embedder, embedder.encode(images.images[positions]))


@pytest.mark.usefixtures("few_steps")
def test_the_whole_model_moves_a_little_and_is_evaluated_on_nothing(tmp_path):
    torch.manual_seed(0)
    start = create_embedder("convnet", embedding_dim=8).state_dict()
    after = tuned(tmp_path)
    for name, value in after.state_dict().items():
        if "running" in name or "num_batches" in name:
            assert torch.equal(value, start[name])
        else:
            assert not torch.equal(value, start[name])
            assert torch.allclose(value, start[name], atol=1e-3)
    assert not after.training
    assert (tmp_path / "part-1" / "results.json").is_file()


@pytest.mark.usefixtures("few_steps")
def test_a_training_that_was_interrupted_resumes_and_ends_alike(tmp_path):
    class Stop(Monitor):
        def step(self, *arguments):
            raise KeyboardInterrupt

    whole = tuned(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        tuned(tmp_path / "stopped", monitor=Stop())
    again = tuned(tmp_path / "stopped")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_the_plan_follows_from_labels_and_device_alone():
    labels = torch.arange(40).repeat_interleave(6)
    plan = fine_tuning_config(labels, LOSS, RunConfig(device="cpu"))
    assert (plan.batch.size, plan.batch.samples_per_class, plan.batch.per_epoch, plan.epochs) == (32, 4, 150, 1)
    few = fine_tuning_config(torch.tensor([0, 0, 1, 1, 2, 2]), LOSS, RunConfig(device="cpu"))
    assert (few.batch.size, few.batch.samples_per_class) == (6, 2)
    assert fine_tuning_config(labels, LOSS, RunConfig(device="cpu"), steps=7).batch.per_epoch == 7
