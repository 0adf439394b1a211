"""A convnet that trains in minutes on a CPU, for small images such as glyphs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pfml.models.backbone import Backbone

__all__ = ["SmallConvNet"]

CHANNELS = (24, 48, 96)


class SmallConvNet(Backbone):
    """Three 3x3 convolutions of 24, 48 and 96 channels with BatchNorm and ReLU, the first two max-pooled by 2.

    (B, 3, 32, 32) -> (B, 96, 8, 8); 53 thousand parameters. It pools before BatchNorm, which then has a quarter of
    the work.
    """

    num_features = CHANNELS[-1]

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for after in CHANNELS:
            layers.append(nn.Conv2d(before, after, 3, padding=1, bias=False))  # BatchNorm has the bias
            if after != CHANNELS[-1]:
                layers.append(nn.MaxPool2d(2))
            layers += [nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
            before = after
        # channels last is faster on a CPU, max-pooling above all
        self.layers = nn.Sequential(*layers).to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)
