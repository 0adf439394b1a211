"""A loss that asks for mixed crops: the loop makes them, and hands over what they are made of."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from pfml.data.mixed_crops import mix_crops
from pfml.data.seeding import generator_for
from pfml.methods import LossConfig
from pfml.runs.checkpoint import load_checkpoint
from pfml.training import BatchConfig, train
from pfml.training.loss_inputs import LossInputs
from small_data import InterruptAt, few_glyphs, small_config, small_embedder


class Recorder(nn.Module):
    """A loss that keeps what it is called with."""

    mixing = "cutmix"

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, embeddings, labels, **inputs):
        self.calls.append((embeddings, labels, inputs))
        return embeddings.square().mean() + inputs["mixed"].square().mean()


def hse(**changes):
    return small_config(epochs=1, loss=LossConfig("proxy-anchor-hse"), **changes)


def weights(folder):
    return load_checkpoint(folder / "checkpoints")[0]


def run(out, config, **options):
    torch.manual_seed(1)
    return train(few_glyphs(), small_embedder(), config, out=out, **options)


def test_the_loss_gets_the_embeddings_of_mixed_crops_with_the_classes_and_shares_of_both(tmp_path):
    loss = Recorder()
    run(tmp_path / "run", small_config(epochs=1, loss=LossConfig()), loss=loss)
    for embeddings, labels, inputs in loss.calls:
        assert inputs.keys() == {"mixed", "partner_labels", "shares"}
        assert inputs["mixed"].shape == embeddings.shape
        torch.testing.assert_close(inputs["mixed"].norm(dim=1), torch.ones(len(labels)))
        assert (inputs["partner_labels"] != labels).all()
        assert ((inputs["shares"] >= 0) & (inputs["shares"] <= 1)).all()
    assert len({tuple(inputs["shares"].tolist()) for _, _, inputs in loss.calls}) == len(loss.calls)


def test_mixed_embeddings_are_those_of_the_mixed_crops():
    embedder, labels = small_embedder().eval(), torch.arange(6) % 3
    inputs = LossInputs(embedder, Recorder())
    images = torch.rand(6, 3, 16, 16)
    crops = inputs.crops(images, labels, generator_for(0, "mixing", 0))
    expected = mix_crops(images, labels, "cutmix", generator_for(0, "mixing", 0))
    assert torch.equal(crops.passed, torch.cat([images, expected.crops]))
    embeddings, others = inputs.of(inputs.network(crops.passed), crops, labels)
    torch.testing.assert_close(embeddings, embedder(images))
    torch.testing.assert_close(others["mixed"], embedder(expected.crops))
    assert torch.equal(others["partner_labels"], labels[expected.partners])


def test_a_loss_that_does_not_ask_gets_no_mixed_crops():
    images = torch.rand(6, 3, 16, 16)
    crops = LossInputs(small_embedder(), nn.Module()).crops(images, torch.arange(6), generator_for(0, "mixing", 0))
    assert crops.mixed is None
    assert crops.passed is crops.own


def test_a_resumed_run_mixes_as_an_uninterrupted_one(tmp_path):
    run(tmp_path / "whole", hse())
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", hse(), monitor=InterruptAt(2))
    run(tmp_path / "broken", hse(), resume=True)
    whole, broken = weights(tmp_path / "whole"), weights(tmp_path / "broken")
    assert all(torch.equal(whole[key], broken[key]) for key in whole)


def test_mini_batches_make_the_same_step(tmp_path):
    config = hse(batch_norm="freeze")
    whole = run(tmp_path / "whole", config)
    pieces = run(tmp_path / "pieces", replace(config, batch=replace(config.batch, mini_batch_size=10)))
    assert pieces["last"]["loss"] == pytest.approx(whole["last"]["loss"], rel=1e-4)


def test_features_of_a_frozen_backbone_cannot_be_mixed(tmp_path):
    with pytest.raises(ValueError, match="only images can be mixed"):
        run(tmp_path / "run", hse(freeze="trunk", batch=BatchConfig(32, 4)))
