"""Features in place of images: what a frozen backbone gives for them, computed once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from pfml.data.windows import Windows

__all__ = ["CachedFeatures"]


class CachedFeatures:
    """An image source that gives features (B, F) for crops; where a crop lies makes no difference to it.

    Args:
        features: (N, F) float32, on the device of training.
        sizes: (N, 2) int64, heights and widths of the images.
    """

    def __init__(self, features: Tensor, sizes: Tensor) -> None:
        self.features, self.sizes, self.device = features, sizes, features.device
        self.description = f"features of {len(features):,} images, computed once"

    def __len__(self) -> int:
        return len(self.features)

    def crops(self, plan: Iterable[Windows]) -> Iterator[Tensor]:
        """Features (B, F) for each item of the plan, in its order."""
        return (torch.index_select(self.features, 0, windows.indices.to(self.device)) for windows in plan)
