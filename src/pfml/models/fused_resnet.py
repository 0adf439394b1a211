"""The forward pass of a ResNet50He whose BatchNorm is folded: bias, sum and ReLU inside of cuDNN's convolutions.

For inference only, since the fused convolutions have no gradient. `python benchmarks/gpu.py --sections teachers`
measures what it gains on a GPU.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfml.models.resnet_he import STAGES, Bottleneck, ResNet50He

__all__ = ["fuse"]


def fuse(backbone: nn.Module) -> None:
    """Replace the forward passes of a ResNet50He and its blocks.

    Args:
        backbone: As `pfml.models.batch_norm_folding.folded` leaves it: each convolution has a bias.
    """
    assert isinstance(backbone, ResNet50He)
    backbone.forward = partial(_backbone, backbone)  # type: ignore[method-assign]
    for block in backbone.modules():
        if isinstance(block, Bottleneck):
            block.forward = partial(_block, block)  # type: ignore[method-assign]


def _backbone(backbone: ResNet50He, images: Tensor) -> Tensor:
    features = F.relu(backbone.conv1(images), inplace=True)  # of three channels, which few fused kernels take
    features = F.max_pool2d(features, 3, 2, padding=1)
    for number in range(1, len(STAGES) + 1):
        features = backbone.get_submodule(f"layer{number}")(features)
    return features


def _block(block: Bottleneck, features: Tensor) -> Tensor:
    inner = _convolution_relu(block.conv2, _convolution_relu(block.conv1, features))
    return _convolution_relu(block.conv3, inner, block.downsample(features))


def _convolution_relu(layer: nn.Conv2d, features: Tensor, added: Tensor | None = None) -> Tensor:
    """relu(layer(features) + added), one kernel on a GPU."""
    assert layer.bias is not None
    if not features.is_cuda:
        result = layer(features)
        return F.relu(result if added is None else result + added)
    assert not isinstance(layer.padding, str)
    stride, padding, dilation, groups = layer.stride, layer.padding, layer.dilation, layer.groups
    if added is None:
        return torch.cudnn_convolution_relu(features, layer.weight, layer.bias, stride, padding, dilation, groups)
    return torch.cudnn_convolution_add_relu(
        features, layer.weight, added, 1.0, layer.bias, stride, padding, dilation, groups
    )
