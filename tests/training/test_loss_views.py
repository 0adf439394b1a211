"""What a loss sees besides embeddings: another crop by a momentum network, features pooled otherwise."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import pfml
from pfml.data import Augmentation
from pfml.training import LossConfig, OptimizerConfig
from pfml.training.loss_inputs import Crops, LossInputs
from small_data import few_glyphs, small_config, small_embedder

STILL = Augmentation(random_crop=False, flip=0.0)


class Spread(nn.Module):
    """Pushes embeddings apart, and keeps all that it was called with."""

    def __init__(self, **asks):
        super().__init__()
        self.calls = []
        for name, value in asks.items():
            setattr(self, name, value)

    def forward(self, embeddings, labels, **inputs):
        self.calls.append({"embeddings": embeddings.detach(), "labels": labels, **inputs})
        return (embeddings @ embeddings.T).mean()


def calls(out, augmentation=STILL, **asks):
    torch.manual_seed(0)
    loss = Spread(**asks)
    sgd = OptimizerConfig("sgd", lr=1e-3)
    config = small_config(
        epochs=1, batch_norm="freeze-all", optimizer=sgd, loss=LossConfig(), augmentation=augmentation
    )
    pfml.train(few_glyphs(), small_embedder(), config, loss=loss, out=out)
    return loss.calls


@pytest.mark.parametrize(
    ("second", "augmentation", "differ"),
    [
        (False, Augmentation(), False),
        (True, STILL, False),  # the same images in the same order
        (True, Augmentation(), True),
        (True, replace(STILL, erasing=1.0), True),
        (False, replace(STILL, erasing=1.0), False),
    ],
)
def test_a_momentum_network_sees_the_same_crops_unless_the_loss_asks_for_others(second, augmentation, differ, tmp_path):
    """At the first step it is the network that trains."""
    first = calls(tmp_path, augmentation=augmentation, momentum=0.5, needs_second_crop=second)[0]
    distances = (first["followed"] - first["embeddings"]).norm(dim=1)
    assert (distances > 1e-3).all() if differ else (distances < 1e-5).all()


def test_second_crops_need_a_network_that_sees_them():
    assert LossInputs(small_embedder(), Spread(needs_second_crop=True)).crops_per_image == 1
    assert LossInputs(small_embedder(), Spread(needs_second_crop=True, momentum=0.5)).crops_per_image == 2


def test_second_crops_leave_the_images_of_a_batch_as_they_are(tmp_path):
    plain = calls(tmp_path / "plain")
    assert "followed" not in plain[0]
    other = calls(tmp_path / "other", momentum=0.5, needs_second_crop=True)
    assert [call["labels"].tolist() for call in plain] == [call["labels"].tolist() for call in other]


@pytest.mark.parametrize("pooling", [None, "avg+max", "max"])
def test_features_are_pooled_as_the_loss_asks_and_the_embedding_as_ever(pooling):
    embedder = small_embedder(pooling="avg").eval()
    images = torch.rand(3, 3, 16, 16)
    inputs = LossInputs(embedder, Spread(needs_features=True, feature_pooling=pooling))
    labels = torch.zeros(3, dtype=torch.int64)
    embeddings, others = inputs.of(inputs.network(images), Crops(images, images), labels)
    torch.testing.assert_close(embeddings, embedder(images))
    torch.testing.assert_close(others["features"], embedder.features(images, [pooling or "avg"]))
    cached = embedder.features(images)
    embeddings, others = inputs.of(inputs.network(cached), Crops(cached, cached), labels)
    torch.testing.assert_close(embeddings, embedder(images))
    torch.testing.assert_close(others["features"], cached)


def test_an_unknown_pooling_is_refused():
    with pytest.raises(ValueError, match="feature_pooling must be one of avg, max, .* got 'mean'"):
        LossInputs(small_embedder(), Spread(needs_features=True, feature_pooling="mean"))
