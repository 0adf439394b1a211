"""BatchNorm folded into convolutions: the same model with fewer layers."""

import pytest
import torch
from torch import nn

from pfml.models import create_embedder
from pfml.models.inference import folded


def with_statistics(model):
    """BatchNorm that is far from its start, as after training."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2.0, generator=generator)
            module.weight.data.uniform_(0.5, 2.0, generator=generator)
            module.bias.data.normal_(generator=generator)
    return model


@pytest.mark.parametrize("backbone", ["convnet", "efficientnet_lite0", "resnet50_he"])
def test_a_folded_model_gives_the_same_embeddings_without_batch_norm(backbone):
    embedder = with_statistics(create_embedder(backbone, weights="none", embedding_dim=8)).eval()
    images = torch.rand(2, 3, 32, 32)
    made = folded(embedder, images)
    with torch.no_grad():
        torch.testing.assert_close(made(images), embedder(images), atol=1e-5, rtol=1e-4)
    if backbone != "convnet":  # whose BatchNorm follows its pooling
        assert not any(isinstance(module, nn.BatchNorm2d) for module in made.modules())
    assert any(isinstance(module, nn.BatchNorm2d) for module in embedder.modules()), "the original is left alone"
    assert not any(parameter.requires_grad for parameter in made.parameters())


def test_batch_norm_before_a_convolution_stays():
    model = with_statistics(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1))).eval()
    images = torch.rand(2, 3, 5, 5)
    made = folded(model, images)
    assert isinstance(made[0], nn.BatchNorm2d)
    torch.testing.assert_close(made(images), model(images))


class Shortcut(nn.Module):
    """What a convolution gives is used beside its BatchNorm too."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

    def forward(self, images):
        maps = self.conv(images)
        return maps + self.bn(maps)


def test_a_convolution_that_is_used_twice_is_refused():
    with pytest.raises(ValueError, match="cannot be folded here"):
        folded(with_statistics(Shortcut()).eval(), torch.rand(2, 3, 5, 5))
