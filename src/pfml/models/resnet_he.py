"""ResNet-50 as He et al. trained it, whose weights Keras ships."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pfml.models.backbone import Backbone

__all__ = ["ResNet50He"]

#: blocks and inner channels of each stage; a block gives four times as many
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
#: Keras' value; torchvision has 1e-5
EPSILON = 1.001e-5


class ResNet50He(Backbone):
    """(B, 3, 224, 224) -> (B, 2048, 7, 7), with torchvision's parameter names.

    Two things are not torchvision's, and weights trained with them load without error, but do worse, if they are
    missed: stage 2, 3 and 4 halve the image in the first 1x1 convolution of their first block (not in the 3x3), and
    BatchNorm has eps 1.001e-5.
    """

    num_features = 2048
    published_weights = (
        "the caffe-style ResNet-50 that He et al. trained on ImageNet, which Keras ships as its ResNet50, as a "
        ".safetensors file with torchvision's parameter names and Keras' preprocessing folded into conv1, see "
        "docs/TRAINING.md (torchvision's own ResNet-50 is another model)"
    )

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64, eps=EPSILON)
        channels = 64
        for number, (blocks, inner) in enumerate(STAGES, start=1):
            stride = 1 if number == 1 else 2
            stage = [Bottleneck(channels, inner, stride), *(Bottleneck(4 * inner, inner) for _ in range(blocks - 1))]
            self.add_module(f"layer{number}", nn.Sequential(*stage))
            channels = 4 * inner

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(self.bn1(self.conv1(images)), inplace=True)
        features = F.max_pool2d(features, 3, 2, padding=1)
        for number in range(1, len(STAGES) + 1):
            features = self.get_submodule(f"layer{number}")(features)
        return features


class Bottleneck(nn.Module):
    """1x1 (which strides), 3x3, 1x1, added to the input."""

    def __init__(self, channels: int, inner: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, inner, 1, stride=stride, bias=False)
        self.bn1 = nn.BatchNorm2d(inner, eps=EPSILON)
        self.conv2 = nn.Conv2d(inner, inner, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner, eps=EPSILON)
        self.conv3 = nn.Conv2d(inner, 4 * inner, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * inner, eps=EPSILON)
        self.downsample: nn.Module = nn.Identity()
        if channels != 4 * inner:
            shortcut = nn.Conv2d(channels, 4 * inner, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * inner, eps=EPSILON))

    def forward(self, features: Tensor) -> Tensor:
        inner = F.relu(self.bn1(self.conv1(features)), inplace=True)
        inner = F.relu(self.bn2(self.conv2(inner)), inplace=True)
        return F.relu(self.bn3(self.conv3(inner)) + self.downsample(features), inplace=True)
