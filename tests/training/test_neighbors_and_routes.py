"""Training with batches of neighboring classes, with a relational layer and with routers."""

import pytest
import torch

from pfml.data import NeighborBatches
from pfml.methods import METHODS, LossConfig
from pfml.runs.checkpoint import load_checkpoint
from pfml.training import BatchConfig, train
from pfml.training.loop import Training
from small_data import InterruptAt, few_glyphs, small_config, small_embedder

NEIGHBORS = BatchConfig(size=32, samples_per_class=4, neighbors=1)


def checkpoint(folder):
    return load_checkpoint(folder / "checkpoints")[0]


def test_a_run_with_neighboring_classes_resumes_bit_equal(tmp_path, monkeypatch):
    config = small_config(epochs=2, loss=LossConfig("htl"), batch=NEIGHBORS)
    drawn = []
    batches = NeighborBatches.batches

    def noted(self, epoch):
        drawn.append((epoch, self.nearest.clone(), found := batches(self, epoch)))
        return found

    monkeypatch.setattr(NeighborBatches, "batches", noted)

    def run(out, **options):
        torch.manual_seed(1)
        train(few_glyphs(), small_embedder(), config, out=tmp_path / out, **options)

    run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("broken", monitor=InterruptAt(6))  # in the second epoch, whose tree is that of its start
    run("broken", resume=True)
    (first, second), again = drawn[:2], drawn[-1]
    assert not torch.equal(first[1], second[1])  # what is near follows training
    assert again[0] == second[0] == 1
    assert torch.equal(again[1], second[1])
    assert all(torch.equal(one, other) for one, other in zip(again[2], second[2], strict=True))
    whole, broken = checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "broken")
    assert whole["loss/nodes"].any()
    for key in whole:
        assert torch.equal(whole[key], broken[key]), key


def test_neighbors_need_a_loss_that_knows_them(tmp_path):
    with pytest.raises(
        ValueError, match=r"batch\.neighbors needs a loss that knows which classes are near, such as htl"
    ):
        train(few_glyphs(), small_embedder(), small_config(batch=NEIGHBORS), out=tmp_path / "run")


@pytest.mark.parametrize("batch", [(32, 4, 2), (32, 0, 1), (32, 4, -1)])
def test_neighbors_must_fill_the_batch(batch):
    size, per_class, neighbors = batch
    with pytest.raises(ValueError, match=r"batch\.neighbors must be >= 0"):
        BatchConfig(size, per_class, neighbors=neighbors)


@pytest.mark.parametrize(("method", "needs"), [("drml-pa", "model.relations"), ("dfml-pa", "model.sub_blocks")])
def test_an_embedder_without_what_the_loss_needs_is_refused(tmp_path, method, needs):
    with pytest.raises(ValueError, match=needs):
        train(few_glyphs(), small_embedder(), small_config(loss=LossConfig(method)), out=tmp_path / "run")


@pytest.mark.parametrize("method", ["drml-pa", "dfml-pa"])
def test_mini_batches_are_the_same_step_as_the_whole_batch(tmp_path, method):
    """Gradients arrive at backbone, layer, routers and loss through both ways alike, without BatchNorm's statistics."""
    states = []
    for size in (None, 16):
        torch.manual_seed(1)
        batch = BatchConfig(size=32, samples_per_class=4, mini_batch_size=size)
        config = small_config(epochs=1, batch_norm="freeze-statistics", batch=batch, loss=LossConfig(method))
        train(few_glyphs(), small_embedder(**METHODS[method].model), config, out=tmp_path / str(size))
        states.append(checkpoint(tmp_path / str(size)))
    for key, value in states[0].items():
        if key.startswith(("embedder/", "loss/")) and value.is_floating_point():
            torch.testing.assert_close(states[1][key], value, rtol=1e-3, atol=2e-4, msg=key)


def test_routers_train_in_the_warm_up_and_the_network_does_not(tmp_path, monkeypatch):
    before = small_embedder(sub_blocks=3)
    start = {name: value.clone() for name, value in before.state_dict().items()}
    config = small_config(epochs=1, warm_up_epochs=1, batch_norm="freeze", loss=LossConfig("dfml-pa"))
    monkeypatch.setattr(Training, "finish", lambda self: {})
    train(few_glyphs(), before, config, out=tmp_path / "run")
    moved = {name for name, value in before.state_dict().items() if not torch.equal(value, start[name])}
    assert moved == {"head.linear.weight", "head.linear.bias", "backbone.routers.0.weight", "backbone.routers.1.weight"}
