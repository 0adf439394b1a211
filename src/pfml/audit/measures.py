"""What pixels say without a model: brightness, sharpness and shape of each image, and a small gray thumbnail."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pfml.data import ImageSet
from pfml.data.decoding import Track, in_threads, read_rgb

__all__ = ["QUALITY_FAULTS", "ImageMeasures", "QualityFault", "image_measures", "quality_faults", "robust_deviation"]

#: Side of a thumbnail, and short side at which luminance and sharpness are measured.
THUMBNAIL, SHORT_SIDE = 16, 192
#: Kind of fault -> what it says.
QUALITY_FAULTS = {
    "dark": "99th percentile of luminance",
    "bright": "5th percentile of luminance",
    "blurred": "variance of the Laplacian over mean squared gradient",
    "oddly shaped": "longer side over shorter side",
}
#: Robust standard deviations from the median of the set from which on an image is unusual.
UNUSUAL = 3.5
#: Luminance in [0, 1] that 99 % of a dark image are below and 95 % of a bright one above.
DARK, BRIGHT = 0.4, 0.65
#: Sides from which on an image is oddly shaped, and sharpness below which it may be blurred.
ELONGATED, BLURRED = 2.5, 1.0
#: Mean squared gradient below which an image has no edges at all.
PLAIN = 1e-8


@dataclass(frozen=True, eq=False)
class ImageMeasures:
    """Measures of n images.

    Args:
        highlights: (n,) 99th percentile of luminance in [0, 1], at a short side of at most 192 pixels.
        shadows: (n,) 5th percentile of it.
        sharpness: (n,) variance of its Laplacian over its mean squared gradient: how fine the edges are, whatever their
            contrast. White noise has 5, a blurred image less than 1.
        elongation: (n,) longer side over shorter side.
        thumbnails: (n, 16, 16) luminance in [0, 1] of the whole image, squeezed into a square.
    """

    highlights: Tensor
    shadows: Tensor
    sharpness: Tensor
    elongation: Tensor
    thumbnails: Tensor


@dataclass(frozen=True)
class QualityFault:
    """An image that is unusual by its pixels.

    Args:
        index: Its position.
        kind: One of `QUALITY_FAULTS`.
        value: The measure.
        usual: The median of the set.
    """

    index: int
    kind: str
    value: float
    usual: float


def image_measures(images: ImageSet, *, track: Track | None = None, workers: int = 2) -> ImageMeasures:
    """The measures of all images; every file is decoded unless its pixels are there already."""
    known = images.pixels or {}

    def measured(image: Tensor | Path) -> Tensor:
        pixels = image if isinstance(image, Tensor) else known.get(image)
        return _measured(read_rgb(image) if pixels is None else pixels)  # type: ignore[arg-type]

    results = in_threads(measured, images.images, workers)
    rows = list(results if track is None else track(results, "measuring images", len(images)))
    values = torch.stack(rows) if rows else torch.empty(0, 4 + THUMBNAIL**2)
    highlights, shadows, sharpness, elongation = values[:, :4].unbind(1)
    thumbnails = values[:, 4:].unflatten(1, (THUMBNAIL, THUMBNAIL))
    return ImageMeasures(highlights, shadows, sharpness, elongation, thumbnails)


def _measured(pixels: Tensor) -> Tensor:
    """Highlights, shadows, sharpness, elongation and the thumbnail of one image, (4 + 16 * 16,)."""
    height, width = pixels.shape[1:]
    weights = torch.tensor([0.299, 0.587, 0.114])
    gray = (pixels.float() * weights[:, None, None]).sum(dim=0)[None, None] / 255
    scale = min(SHORT_SIDE / min(height, width), 1.0)
    small = gray if scale == 1 else _resized(gray, max(round(height * scale), 1), max(round(width * scale), 1))
    ordered = small.flatten().sort().values
    highlights, shadows = (ordered[round(share * (len(ordered) - 1))] for share in (0.99, 0.05))
    elongation = torch.tensor(max(height, width) / min(height, width))
    numbers = torch.stack([highlights, shadows, _sharpness(small[0, 0]), elongation])
    return torch.cat([numbers, _resized(small, THUMBNAIL, THUMBNAIL).flatten()])


def _sharpness(gray: Tensor) -> Tensor:
    """Variance of the Laplacian over mean squared gradient; 0 without edges."""
    if min(gray.shape) < 3:
        return torch.zeros(())
    gradient = gray.diff(dim=0).square().mean() + gray.diff(dim=1).square().mean()
    inner = gray[1:-1, 1:-1]
    laplacian = gray[:-2, 1:-1] + gray[2:, 1:-1] + gray[1:-1, :-2] + gray[1:-1, 2:] - 4 * inner
    return laplacian.var(correction=0) / gradient if gradient > PLAIN else torch.zeros(())


def _resized(gray: Tensor, height: int, width: int) -> Tensor:
    return F.interpolate(gray, size=(height, width), mode="bilinear", align_corners=False, antialias=True)


def quality_faults(measures: ImageMeasures) -> list[QualityFault]:
    """The images that are dark, bright, blurred or oddly shaped: by themselves, and unlike the others of the set."""
    bright, dark, sharp, long = (
        each.double() for each in (measures.shadows, measures.highlights, measures.sharpness, measures.elongation)
    )
    chosen = {
        "dark": (dark, (dark < DARK) & (robust_deviation(dark) < -UNUSUAL)),
        "bright": (bright, (bright > BRIGHT) & (robust_deviation(bright) > UNUSUAL)),
        "blurred": (sharp, (sharp < BLURRED) & (robust_deviation(sharp.clamp(min=1e-3).log()) < -UNUSUAL)),
        "oddly shaped": (long, (long > ELONGATED) & (robust_deviation(long.log()) > UNUSUAL)),
    }
    return [
        QualityFault(k, kind, float(values[k]), float(values.median()))
        for kind, (values, is_fault) in chosen.items()
        for k in is_fault.nonzero()[:, 0].tolist()
    ]


def robust_deviation(values: Tensor) -> Tensor:
    """How many robust standard deviations (1.4826 times the median absolute one) each value is above the median."""
    if not len(values):
        return values
    apart = values - values.median()
    return apart / (1.4826 * apart.abs().median()).clamp(min=1e-6)
