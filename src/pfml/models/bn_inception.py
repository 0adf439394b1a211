"""BN-Inception: Inception with batch normalization (Ioffe and Szegedy 2015), in the variant that Caffe made common.

Most of deep metric learning's tables have rows for it, and timm does not. Parameters are named as in the published
weight file `bn_inception-52deb4733.pth`, so that it loads (its vectors have a leading dimension of size 1, which
`pfml.models.weights` removes). It takes BGR images of range 0 to 255, less (104, 117, 128).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfml.models.backbone import Backbone

__all__ = ["INCEPTIONS", "BNInception", "Inception", "branch_names"]


class Inception(NamedTuple):
    """The channels of one module: 1x1; 1x1 then 3x3; 1x1 then 3x3 twice; pooling then 1x1.

    A module without the first branch halves the image: its 3x3 branches end in a stride of 2, and its pooled input is
    passed on as it is.
    """

    name: str
    single: int | None
    triple: tuple[int, int]
    double: tuple[int, int]
    pool: str
    projection: int | None


INCEPTIONS = (
    Inception("3a", 64, (64, 64), (64, 96), "avg", 32),
    Inception("3b", 64, (64, 96), (64, 96), "avg", 64),
    Inception("3c", None, (128, 160), (64, 96), "max", None),
    Inception("4a", 224, (64, 96), (96, 128), "avg", 128),
    Inception("4b", 192, (96, 128), (96, 128), "avg", 128),
    Inception("4c", 160, (128, 160), (128, 160), "avg", 128),
    Inception("4d", 96, (128, 192), (160, 192), "avg", 128),
    Inception("4e", None, (128, 192), (192, 256), "max", None),
    Inception("5a", 352, (192, 320), (160, 224), "avg", 128),
    Inception("5b", 352, (192, 320), (192, 224), "max", 128),
)


class BNInception(Backbone):
    """(B, 3, 224, 224) -> (B, 1024, 7, 7).

    BatchNorm has momentum 0.9, as in the published PyTorch definition: a running statistic is nine tenths the last
    batch. (In Caffe's convention 0.9 is the share of the old value.) It matters only if statistics are trained.
    """

    num_features = 1024
    published_weights = "bn_inception-52deb4733.pth, the weights that Caffe made common, as published for PyTorch"

    def __init__(self) -> None:
        super().__init__()
        self._add_convolution("conv1_7x7_s2", 3, 64, 7, stride=2)
        self._add_convolution("conv2_3x3_reduce", 64, 64, 1)
        self._add_convolution("conv2_3x3", 64, 192, 3)
        channels = 192
        for module in INCEPTIONS:
            channels = self._add_inception(module, channels)
        assert channels == self.num_features

    def forward(self, images: Tensor) -> Tensor:
        features = self.stem(images)
        for module in INCEPTIONS:
            features = self.inception(module, features)
        return features

    def stem(self, images: Tensor) -> Tensor:
        """The input of the first module, (B, 192, height / 8, width / 8)."""
        features = F.max_pool2d(self._convolve("conv1_7x7_s2", images), 3, 2, ceil_mode=True)
        features = self._convolve("conv2_3x3", self._convolve("conv2_3x3_reduce", features))
        return F.max_pool2d(features, 3, 2, ceil_mode=True)

    def inception(self, module: Inception, features: Tensor) -> Tensor:
        """The output of a module: its branches side by side."""
        *direct, projection = branch_names(module)
        parts = [self._chain(names, features) for names in direct]
        return torch.cat([*parts, self._chain(projection, self.pooled(module, features))], 1)

    def pooled(self, module: Inception, features: Tensor) -> Tensor:
        """The input of the last branch of a module."""
        if module.projection:
            pool = F.avg_pool2d if module.pool == "avg" else F.max_pool2d
            return pool(features, 3, 1, padding=1)
        if features.shape[-2] % 2 or features.shape[-1] % 2:
            raise ValueError(
                f"BN-Inception must halve maps of even height and width, got {tuple(features.shape[-2:])} at "
                f"inception_{module.name}; use an image size that is a multiple of 32, such as 224"
            )
        return F.max_pool2d(features, 3, 2, ceil_mode=True)

    def _add_inception(self, module: Inception, channels: int) -> int:
        """Add the convolutions of a module; its number of output channels."""
        prefix, stride = f"inception_{module.name}", 1 if module.single else 2
        if module.single:
            self._add_convolution(f"{prefix}_1x1", channels, module.single, 1)
        reduced, triple = module.triple
        self._add_convolution(f"{prefix}_3x3_reduce", channels, reduced, 1)
        self._add_convolution(f"{prefix}_3x3", reduced, triple, 3, stride=stride)
        reduced, double = module.double
        self._add_convolution(f"{prefix}_double_3x3_reduce", channels, reduced, 1)
        self._add_convolution(f"{prefix}_double_3x3_1", reduced, double, 3)
        self._add_convolution(f"{prefix}_double_3x3_2", double, double, 3, stride=stride)
        if module.projection:
            self._add_convolution(f"{prefix}_pool_proj", channels, module.projection, 1)
        return (module.single or 0) + triple + double + (module.projection or channels)

    def _chain(self, names: tuple[str, ...], features: Tensor) -> Tensor:
        for name in names:
            features = self._convolve(name, features)
        return features

    def _add_convolution(self, name: str, before: int, after: int, size: int, *, stride: int = 1) -> None:
        self.add_module(name, nn.Conv2d(before, after, size, stride=stride, padding=size // 2))
        self.add_module(f"{name}_bn", nn.BatchNorm2d(after, eps=1e-5, momentum=0.9))

    def _convolve(self, name: str, features: Tensor) -> Tensor:
        """Convolution, BatchNorm, ReLU."""
        features = self.get_submodule(name)(features)
        return F.relu(self.get_submodule(f"{name}_bn")(features), inplace=True)


def branch_names(module: Inception) -> list[tuple[str, ...]]:
    """The convolutions of each branch; the last branch sees the pooled input, and has none where that is passed on."""
    single = [("1x1",)] if module.single else []
    projection = ("pool_proj",) if module.projection else ()
    double = ("double_3x3_reduce", "double_3x3_1", "double_3x3_2")
    branches: list[tuple[str, ...]] = [*single, ("3x3_reduce", "3x3"), double, projection]
    return [tuple(f"inception_{module.name}_{name}" for name in names) for names in branches]
