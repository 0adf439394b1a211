"""Files that are embedded once: many of them by a network whose convolutions carry BatchNorm."""

from unittest import mock

import pytest
import torch
from PIL import Image
from torch import nn

from pfml.models import create_embedder
from pfml.search import embedding
from pfml.search.embedding import embed_files


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, generator = tmp_path_factory.mktemp("images"), torch.Generator().manual_seed(0)
    paths = [str(folder / f"{k}.png") for k in range(5)]
    for path in paths:
        pixels = torch.randint(0, 256, (40, 50, 3), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(path)
    return paths


@pytest.fixture(scope="module")
def embedder():
    torch.manual_seed(0)
    made = create_embedder("efficientnet_lite0", weights="none", embedding_dim=None, image_size=32)
    for layer in made.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(std=0.1)
            layer.running_var.uniform_(0.5, 2.0)
    return made.eval()


def passes_of_batch_norm(embedder, files):
    """What `embed_files` finds, and how often a BatchNorm was passed in float32."""
    forward, seen = nn.BatchNorm2d.forward, []
    with mock.patch.object(nn.BatchNorm2d, "forward", lambda self, x: seen.append(x.dtype) or forward(self, x)):
        found = embed_files(embedder, files, batch_size=2, workers=1)
    return found.vectors, seen.count(torch.float32)


def test_many_files_are_embedded_without_batch_norm_and_within_rounding(embedder, files, monkeypatch):
    few, passes = passes_of_batch_norm(embedder, files)
    assert passes > 0
    monkeypatch.setattr(embedding, "FOLDED_FROM", len(files))
    before = [parameter.clone() for parameter in embedder.parameters()]
    many, passes = passes_of_batch_norm(embedder, files)
    assert passes == 0
    torch.testing.assert_close(many, few, rtol=0, atol=1e-5)
    assert all(map(torch.equal, before, embedder.parameters()))


def test_a_network_that_cannot_be_folded_embeds_as_it_is(embedder, files, monkeypatch):
    expected = embed_files(embedder, files, batch_size=2, workers=1).vectors
    monkeypatch.setattr(embedding, "FOLDED_FROM", 1)
    monkeypatch.setattr(embedding, "folded", mock.Mock(side_effect=ValueError("used twice")))
    assert torch.equal(embed_files(embedder, files, batch_size=2, workers=1).vectors, expected)
