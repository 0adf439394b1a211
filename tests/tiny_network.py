"""A network of a few hundred weights, for files that lie in the repository and in place of a large one."""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor, nn

from pfml.data import Preprocessing
from pfml.models.backbone import Backbone
from pfml.models.backbone_table import BACKBONES, SpecialBackbone

HALF = (0.5, 0.5, 0.5)


class TinyNet(Backbone):
    """Two convolutions."""

    num_features = 12

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 6, 5, stride=3), nn.ReLU(), nn.Conv2d(6, 12, 3, stride=2), nn.BatchNorm2d(12), nn.ReLU()
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


#: To be put into `BACKBONES` as "tiny".
TINY = SpecialBackbone(
    lambda image_size: TinyNet(), Preprocessing(resize=32, crop=32, mean=HALF, std=HALF), default_weights="none"
)


@contextmanager
def small_pretrained():
    """In place of efficientnet_lite0 this network, with weights as if the package held them."""
    with torch.random.fork_rng():
        torch.manual_seed(3)  # a head of the ladder improves it
        weights = TinyNet().state_dict()
    small = replace(BACKBONES["efficientnet_lite0"], build=TINY.build)
    in_package = mock.patch("pfml.models.weights._from_package", return_value=weights)
    with mock.patch.dict(BACKBONES, efficientnet_lite0=small), in_package:
        yield
