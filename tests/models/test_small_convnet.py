"""The small convnet."""

from __future__ import annotations

import torch

from pfml.models.small_convnet import SmallConvNet


def test_32_pixels_become_a_map_of_96_channels_and_8_by_8() -> None:
    assert SmallConvNet()(torch.rand(2, 3, 32, 32)).shape == (2, 96, 8, 8)


def test_it_is_three_convolutions_of_24_48_and_96_channels_with_batch_norm() -> None:
    shapes = [tuple(p.shape) for p in SmallConvNet().parameters() if p.ndim == 4]
    assert shapes == [(24, 3, 3, 3), (48, 24, 3, 3), (96, 48, 3, 3)]
    assert sum(p.numel() for p in SmallConvNet().parameters()) == 648 + 10_368 + 41_472 + 2 * (24 + 48 + 96)


def test_every_parameter_gets_a_gradient() -> None:
    backbone = SmallConvNet()
    (backbone(torch.rand(4, 3, 32, 32)) ** 2).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in backbone.parameters())


def test_the_first_two_layers_are_max_pooled() -> None:
    pools = [layer for layer in SmallConvNet().layers if isinstance(layer, torch.nn.MaxPool2d)]
    assert len(pools) == 2
    assert all(layer.stride == (1, 1) for layer in SmallConvNet().layers if isinstance(layer, torch.nn.Conv2d))
