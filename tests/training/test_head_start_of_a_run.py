"""Where the embedding layer of a run starts."""

import pytest
import torch

from pfml.evaluation import embed
from pfml.models import create_embedder
from pfml.models.head_init import draw_head, initialize_head
from pfml.runs.checkpoint import load_checkpoint
from pfml.training import train
from small_data import InterruptAt, few_glyphs, small_config, small_embedder


@pytest.mark.parametrize("start", ["principal", "whitened"])
def test_a_run_starts_its_head_from_the_features_of_its_training_images(tmp_path, monkeypatch, start):
    seen = []
    monkeypatch.setattr("pfml.training.loop.Training.train_epoch", lambda self: seen.append(self) or _end(self))
    monkeypatch.setattr("pfml.training.loop.Training.finish", lambda self: {})
    torch.manual_seed(1)
    train(few_glyphs(), small_embedder(), small_config(head_start=start), out=tmp_path / "run")
    torch.manual_seed(1)
    expected = small_embedder()
    features = embed(expected, few_glyphs().train, features=True)
    assert features.shape == (len(few_glyphs().train), expected.head.num_features)
    torch.testing.assert_close(features, inputs_of_the_layer(expected))
    initialize_head(expected.head, start, features, few_glyphs().train.labels)
    torch.testing.assert_close(seen[0].embedder.head.linear.weight, expected.head.linear.weight)
    torch.testing.assert_close(seen[0].embedder.head.linear.bias, expected.head.linear.bias)


def test_a_uniform_head_is_torch_s_own_and_a_function_of_the_seed(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("pfml.training.loop.Training.train_epoch", lambda self: seen.append(self) or _end(self))
    monkeypatch.setattr("pfml.training.loop.Training.finish", lambda self: {})
    for number, seed in enumerate((0, 0, 1)):
        torch.manual_seed(number)
        config = small_config(head_start="uniform", seed=seed)
        train(few_glyphs(), small_embedder(), config, out=tmp_path / f"run{number}")
    first, second, third = (training.embedder.head.linear for training in seen)
    usual = torch.nn.Linear(first.in_features, first.out_features)
    for mine, theirs in zip(first.parameters(), usual.parameters(), strict=True):
        bound = first.in_features**-0.5
        assert mine.abs().max() <= bound
        assert mine.std().item() == pytest.approx(theirs.std().item(), rel=0.6)
    assert torch.equal(first.weight, second.weight)
    assert not torch.equal(first.weight, third.weight)
    bare = create_embedder("convnet", embedding_dim=None)
    with pytest.raises(ValueError, match="head_start='uniform' needs a head with a linear layer"):
        train(few_glyphs(), bare, small_config(head_start="uniform"), out=tmp_path / "bare")


def test_an_orthogonal_head_has_rows_of_length_1_at_right_angles_and_no_bias():
    wide, narrow = (create_embedder("convnet", embedding_dim=dims).head for dims in (8, 512))
    for head in (wide, narrow):
        draw_head(head, "orthogonal", generator=torch.Generator().manual_seed(0))
        assert head.linear.bias.abs().max() == 0
    torch.testing.assert_close(wide.linear.weight @ wide.linear.weight.T, torch.eye(8))
    torch.testing.assert_close(narrow.linear.weight.T @ narrow.linear.weight, torch.eye(narrow.num_features))
    first = wide.linear.weight.clone()
    draw_head(wide, "orthogonal", generator=torch.Generator().manual_seed(0))
    assert torch.equal(wide.linear.weight, first)


def _end(training):
    training.state.epoch = training.config.epochs


def inputs_of_the_layer(embedder):
    """What the linear layer gets for the training images."""
    caught = []
    handle = embedder.head.linear.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0].clone()))
    embed(embedder, few_glyphs().train)
    handle.remove()
    return torch.cat(caught)


def test_a_resumed_run_does_not_start_its_head_again(tmp_path):
    def trained(name, **options):
        torch.manual_seed(1)
        train(few_glyphs(), small_embedder(), small_config(head_start="whitened"), out=tmp_path / name, **options)
        return load_checkpoint(tmp_path / name / "checkpoints")[0]["embedder/head.linear.weight"]

    with pytest.raises(KeyboardInterrupt):
        trained("parts", monitor=InterruptAt(3))
    assert torch.equal(trained("parts", resume=True), trained("whole"))


def test_a_start_that_nobody_knows_is_refused():
    with pytest.raises(
        ValueError, match="head_start must be one of random, uniform, orthogonal, principal, whitened, got 'whiten'"
    ):
        small_config(head_start="whiten")


def test_a_head_that_cannot_start_so_is_refused_before_the_first_step(tmp_path):
    config = small_config(head_start="whitened")
    with pytest.raises(ValueError, match=r"head_start='whitened' needs a head with a linear layer"):
        train(few_glyphs(), create_embedder("convnet", embedding_dim=None), config, out=tmp_path / "run")
