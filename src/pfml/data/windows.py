"""Where the crops of a batch lie in their images.

A window is an interval [start, start + extent) per axis, in source pixels. Output pixel k of `size` has its center at

    c_k = start + (k + 1/2) * extent / size,

and its value is the mean of the source pixels j in [lower, upper) with weights

    w_kj = filter((j + 1/2 - c_k) / max(extent / size, 1)),

the antialiased bilinear (triangle) or bicubic (a = -1/2) filter of torch and PIL. `RandomResizedCrop` is
start = lower, extent = upper - lower; `Resize` + `CenterCrop` has the whole image in [lower, upper) and the window
within it. `pfml.data.resampling` computes the crops.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["INTERPOLATIONS", "Windows"]

#: interpolation -> radius of its filter, in output pixels when shrinking and in source pixels otherwise
INTERPOLATIONS: dict[str, float] = {"bilinear": 1.0, "bicubic": 2.0}


@dataclass(frozen=True, eq=False)
class Windows:
    """Where each of B crops lies in its image.

    Args:
        indices: (B,) int64, the image of each crop.
        start: (B, 2) float64, y and x of the window's corner in source pixels.
        extent: (B, 2) float64, height and width of the window in source pixels.
        lower: (B, 2) int64, first source row and column that the filter may read.
        upper: (B, 2) int64, end (exclusive) of the rows and columns that the filter may read.
        flipped: (B,) bool, whether the crop is mirrored left to right.
        size: Height and width of each crop in output pixels.
        interpolation: "bilinear" or "bicubic".
    """

    indices: Tensor
    start: Tensor
    extent: Tensor
    lower: Tensor
    upper: Tensor
    flipped: Tensor
    size: int
    interpolation: str = "bilinear"

    def __post_init__(self) -> None:
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(f"interpolation must be one of {tuple(INTERPOLATIONS)}, got {self.interpolation!r}")
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")
        count = len(self.indices)
        for name, dtype, shape in (
            ("indices", torch.int64, (count,)),
            ("start", torch.float64, (count, 2)),
            ("extent", torch.float64, (count, 2)),
            ("lower", torch.int64, (count, 2)),
            ("upper", torch.int64, (count, 2)),
            ("flipped", torch.bool, (count,)),
        ):
            value = getattr(self, name)
            if value.dtype != dtype or value.shape != shape or value.device.type != "cpu":
                raise ValueError(
                    f"{name} must be {dtype} of shape {shape} on the CPU, "
                    f"got {value.dtype} of shape {tuple(value.shape)} on {value.device}"
                )

    def __len__(self) -> int:
        return len(self.indices)

    def rows(self, chosen: Tensor | slice) -> Windows:
        """The crops at `chosen`, in that order."""
        names = ("indices", "start", "extent", "lower", "upper", "flipped")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})

    def footprint(self) -> tuple[Tensor, Tensor]:
        """First and end (exclusive) of the source rows and columns that have a weight, each (B, 2) int64."""
        support = INTERPOLATIONS[self.interpolation] * (self.extent / self.size).clamp(min=1.0)
        first = (self.start - support).floor().to(torch.int64)
        end = (self.start + self.extent + support).ceil().to(torch.int64)
        return torch.maximum(first, self.lower), torch.minimum(end, self.upper)

    @property
    def is_copy(self) -> bool:
        """Whether every output pixel is a source pixel: nothing to interpolate."""
        return bool(
            (self.extent == self.size).all()
            and (self.start == self.start.round()).all()
            and (self.start >= self.lower).all()
            and (self.start + self.extent <= self.upper).all()
        )
