"""EfficientNet-Lite0 (Google, 2020), the backbone whose ImageNet weights come with a package.

It is timm's `tf_efficientnet_lite0`, to the bit and by the names of its parameters. It is written out here since
importing timm takes longer than all else that `pfml search` of one image does (docs/PERFORMANCE.md).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pfml.models.backbone import Backbone

__all__ = ["EfficientNetLite0"]

#: blocks, kernel, stride of the first block, expansion and channels of each stage
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM, FEATURES = 32, 1280
#: TensorFlow's value
EPSILON = 1e-3


class EfficientNetLite0(Backbone):
    """(B, 3, 224, 224) -> (B, 1280, 7, 7)."""

    num_features = FEATURES
    timm_name = "tf_efficientnet_lite0"

    def __init__(self) -> None:
        super().__init__()
        self.network = _Network()  # by the name that a model of timm's has in stored models

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.network(images)
        return features

    def weight_root(self) -> nn.Module:
        return self.network

    def parameter_layers(self) -> list[list[nn.Parameter]]:
        network = self.network
        blocks = [block for stage in network.blocks.children() for block in stage.children()]
        layers: list[tuple[nn.Module, ...]] = [(network.conv_stem, network.bn1), *((block,) for block in blocks)]
        layers[-1] += (network.conv_head, network.bn2)
        return [[parameter for part in layer for parameter in part.parameters()] for layer in layers]


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_stem = _Convolution(3, STEM, 3, stride=2)
        self.bn1 = _norm(STEM)
        stages, channels = [], STEM
        for count, kernel, stride, expansion, width in STAGES:
            blocks: list[nn.Module] = []
            for number in range(count):
                step = stride if number == 0 else 1
                blocks.append(
                    _Separable(channels, width, kernel, step)
                    if expansion == 1
                    else _InvertedResidual(channels, width, kernel, step, expansion)
                )
                channels = width
            stages.append(nn.Sequential(*blocks))
        self.blocks = nn.Sequential(*stages)
        self.conv_head = _Convolution(channels, FEATURES, 1)
        self.bn2 = _norm(FEATURES)

    def forward(self, images: Tensor) -> Tensor:
        features = self.blocks(_active(self.bn1(self.conv_stem(images))))
        return _active(self.bn2(self.conv_head(features)))


class _Separable(nn.Module):
    """A convolution of each channel by itself, then 1x1."""

    def __init__(self, channels: int, width: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv_dw = _Convolution(channels, channels, kernel, stride=stride, groups=channels)
        self.bn1 = _norm(channels)
        self.conv_pw = _Convolution(channels, width, 1)
        self.bn2 = _norm(width)
        self.is_residual = stride == 1 and channels == width

    def forward(self, features: Tensor) -> Tensor:
        inner = self.bn2(self.conv_pw(_active(self.bn1(self.conv_dw(features)))))
        return inner + features if self.is_residual else inner


class _InvertedResidual(nn.Module):
    """1x1 to more channels, a convolution of each by itself, 1x1 to fewer; added to the input if it is as large."""

    def __init__(self, channels: int, width: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = channels * expansion
        self.conv_pw = _Convolution(channels, inner, 1)
        self.bn1 = _norm(inner)
        self.conv_dw = _Convolution(inner, inner, kernel, stride=stride, groups=inner)
        self.bn2 = _norm(inner)
        self.conv_pwl = _Convolution(inner, width, 1)
        self.bn3 = _norm(width)
        self.is_residual = stride == 1 and channels == width

    def forward(self, features: Tensor) -> Tensor:
        inner = _active(self.bn1(self.conv_pw(features)))
        inner = self.bn3(self.conv_pwl(_active(self.bn2(self.conv_dw(inner)))))
        return inner + features if self.is_residual else inner


class _Convolution(nn.Conv2d):
    """A convolution without bias, padded as by TensorFlow: what is odd, at the right and at the bottom."""

    def __init__(self, channels: int, width: int, kernel: int, *, stride: int = 1, groups: int = 1) -> None:
        super().__init__(
            channels, width, kernel, stride=stride, padding=kernel // 2 if stride == 1 else 0, groups=groups, bias=False
        )
        nn.init.normal_(self.weight, std=(2.0 * groups / (kernel * kernel * width)) ** 0.5)

    def forward(self, features: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        if stride > 1:
            height, width = (max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in features.shape[2:])
            features = F.pad(features, (width // 2, width - width // 2, height // 2, height - height // 2))
        return super().forward(features)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=EPSILON)


def _active(features: Tensor) -> Tensor:
    return F.relu6(features, inplace=True)
