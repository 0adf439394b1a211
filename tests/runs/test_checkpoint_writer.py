"""Checkpoints that are written while training goes on, and moments in the memory format of their parameters."""

import threading

import pytest
import torch

import pfml.runs.checkpoint as checkpoint
from pfml.runs.checkpoint import CheckpointWriter, load_checkpoint
from pfml.training import OptimizerConfig, train
from pfml.training.optimizer import create_optimizer, pack_optimizer, unpack_optimizer
from small_data import InterruptAt, letters, small_config, small_embedder


def test_what_changes_after_a_save_is_not_in_the_checkpoint(tmp_path, monkeypatch):
    go, original = threading.Event(), checkpoint.save_checkpoint

    def slow(*arguments):
        assert go.wait(30)
        original(*arguments)

    monkeypatch.setattr(checkpoint, "save_checkpoint", slow)
    weights, state = torch.zeros(3), {"history": [1]}
    with CheckpointWriter(tmp_path, in_background=True) as writer:
        writer.save({"weights": weights}, state)
        weights.fill_(7)
        state["history"].append(2)
        go.set()
    tensors, stored = load_checkpoint(tmp_path)
    assert torch.equal(tensors["weights"], torch.zeros(3))
    assert stored == {"history": [1]}


def test_what_goes_wrong_in_the_background_is_raised_by_the_next_save_or_the_end(tmp_path):
    writer = CheckpointWriter(tmp_path, in_background=True)
    writer.save({"weights": torch.tensor([torch.nan])}, {})
    with pytest.raises(ValueError, match="must be finite"):
        writer.save({"weights": torch.zeros(1)}, {})
    writer.save({"weights": torch.zeros(1)}, {})
    writer.save({"weights": torch.tensor([torch.inf])}, {})
    with pytest.raises(ValueError, match="must be finite"), writer:
        pass
    assert torch.equal(load_checkpoint(tmp_path)[0]["weights"], torch.zeros(1))


def test_a_run_that_writes_in_the_background_can_be_interrupted_and_goes_on(tmp_path, monkeypatch):
    def run(out, **options):
        torch.manual_seed(1)
        train(small_embedder(), letters(), small_config(checkpoint_every=1), out=tmp_path / out, **options)

    run("whole")
    in_background = lambda folder, **_: CheckpointWriter(folder, in_background=True)  # noqa: E731
    monkeypatch.setattr("pfml.training.loop.CheckpointWriter", in_background)
    with pytest.raises(KeyboardInterrupt, match="stopped at step 3, state saved"):
        run("broken", monitor=InterruptAt(3))
    assert load_checkpoint(tmp_path / "broken" / "checkpoints")[1]["step"] == 3
    run("broken", resume=True)
    whole, broken = (load_checkpoint(tmp_path / name / "checkpoints")[0] for name in ("whole", "broken"))
    assert all(torch.equal(value, broken[name]) for name, value in whole.items())


@pytest.mark.parametrize("fused", [False, True])
def test_moments_take_the_memory_format_of_the_parameters_they_are_restored_for(fused):
    images, loss = torch.rand(2, 3, 32, 32), torch.nn.Linear(8, 1)

    def trained(memory_format, moments=None):
        torch.manual_seed(0)
        embedder = small_embedder().to(memory_format=memory_format)
        optimizer = create_optimizer(OptimizerConfig(), embedder, loss, fused=fused)
        if moments is not None:
            unpack_optimizer(optimizer, moments)
        optimizer.zero_grad()
        loss(embedder(images)).sum().backward()
        optimizer.step()
        return embedder, optimizer

    stored = pack_optimizer(trained(torch.contiguous_format)[1])
    stored = {name: value.contiguous() for name, value in stored.items()}
    embedder, optimizer = trained(torch.channels_last, stored)
    for parameter in embedder.parameters():
        for name, value in optimizer.state[parameter].items():
            assert name == "step" or value.stride() == parameter.stride()
