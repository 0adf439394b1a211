"""What may happen to finished crops: rotation, RandAugment, color jitter, grayscale, random erasing.

They are torchvision's `transforms.v2`, on the device of the crops. Their random numbers are a function of the seed, the
step and the position of a crop in its batch, so that a resumed run and any number of ranks draw the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pfml.data.preprocessing import Augmentation
from pfml.data.seeding import generator_for

__all__ = ["transform_crops"]


def transform_crops(crops: Tensor, augmentation: Augmentation, seed: int, step: int, first: int = 0) -> Tensor:
    """The crops (B, 3, size, size) in [0, 1], each transformed by itself; the same tensor if all transforms are off.

    Args:
        crops: Of a batch, or of a rank's part of it.
        augmentation: Which transforms, and how strong.
        seed: Of the run.
        step: Of the run.
        first: Position of the first crop in the whole batch.
    """
    if not augmentation.transforms_crops:
        return crops
    transform = _transform(augmentation)
    with torch.random.fork_rng([]):  # torchvision draws from torch's own generator, which stays as it was
        for row in range(len(crops)):
            torch.set_rng_state(generator_for(seed, "transforms", (step << 20) + first + row).get_state())
            crops[row] = transform(crops[row])
    return crops.clamp_(0.0, 1.0)


@cache
def _transform(augmentation: Augmentation) -> Callable[[Tensor], Tensor]:
    """All transforms that are on, in the order in which timm applies them."""
    from torchvision.transforms import v2

    parts: list[Any] = []
    if augmentation.rotation:
        bilinear = v2.InterpolationMode.BILINEAR
        parts.append(v2.RandomRotation(augmentation.rotation, interpolation=bilinear, fill=0.5))
    if augmentation.rand_augment:
        parts.append(v2.RandAugment(augmentation.rand_augment, augmentation.rand_augment_magnitude, fill=0.5))
    if any(augmentation.color_jitter):
        parts.append(v2.ColorJitter(*augmentation.color_jitter))
    if augmentation.grayscale:
        parts.append(v2.RandomGrayscale(augmentation.grayscale))
    if augmentation.erasing:
        parts.append(v2.RandomErasing(augmentation.erasing, value=0.5))
    return v2.Compose(parts)
