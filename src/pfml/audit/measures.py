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

#: Side of a thumbnail, and short side at which sharpness is measured.
THUMBNAIL, SHORT_SIDE = 16, 192
#: Kind of fault -> what it says.
QUALITY_FAULTS = {
    "dark": "mean luminance",
    "bright": "mean luminance",
    "blurred": "variance of the Laplacian",
    "oddly shaped": "longer side over shorter side",
}
#: Robust standard deviations from the median of the set from which on an image is unusual.
UNUSUAL = 3.5
#: Mean luminance in [0, 1] below or above which an image is dark or bright; sides from which on it is oddly shaped.
DARK, BRIGHT, ELONGATED = 0.15, 0.88, 2.5
#: Variance of the Laplacian, of luminance in [0, 1], below which an image may be blurred.
BLURRED = 1e-3


@dataclass(frozen=True, eq=False)
class ImageMeasures:
    """Measures of n images.

    Args:
        luminance: (n,) mean, in [0, 1].
        sharpness: (n,) variance of the Laplacian of the luminance, at a short side of at most 192 pixels.
        elongation: (n,) longer side over shorter side.
        thumbnails: (n, 16, 16) luminance in [0, 1] of the whole image, squeezed into a square.
    """

    luminance: Tensor
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
    values = torch.stack(rows) if rows else torch.empty(0, 3 + THUMBNAIL**2)
    return ImageMeasures(values[:, 0], values[:, 1], values[:, 2], values[:, 3:].unflatten(1, (THUMBNAIL, THUMBNAIL)))


def _measured(pixels: Tensor) -> Tensor:
    """Luminance, sharpness, elongation and the thumbnail of one image, (3 + 16 * 16,)."""
    height, width = pixels.shape[1:]
    weights = torch.tensor([0.299, 0.587, 0.114])
    gray = (pixels.float() * weights[:, None, None]).sum(dim=0)[None, None] / 255
    scale = min(SHORT_SIDE / min(height, width), 1.0)
    small = gray if scale == 1 else _resized(gray, max(round(height * scale), 1), max(round(width * scale), 1))
    kernel = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])[None, None]
    edges = F.conv2d(small, kernel) if min(small.shape[2:]) > 2 else torch.zeros(1)
    numbers = torch.stack([gray.mean(), edges.var(correction=0), torch.tensor(max(height, width) / min(height, width))])
    return torch.cat([numbers, _resized(small, THUMBNAIL, THUMBNAIL).flatten()])


def _resized(gray: Tensor, height: int, width: int) -> Tensor:
    return F.interpolate(gray, size=(height, width), mode="bilinear", align_corners=False, antialias=True)


def quality_faults(measures: ImageMeasures) -> list[QualityFault]:
    """The images that are dark, bright, blurred or oddly shaped: by themselves, and unlike the others of the set."""
    light, sharp, long = measures.luminance.double(), measures.sharpness.double(), measures.elongation.double()
    unlike_light, unlike_sharp = robust_deviation(light), robust_deviation(sharp.clamp(min=1e-9).log())
    unlike_shape = robust_deviation(long.log())
    chosen = {
        "dark": (light, (light < DARK) & (unlike_light < -UNUSUAL)),
        "bright": (light, (light > BRIGHT) & (unlike_light > UNUSUAL)),
        "blurred": (sharp, (sharp < BLURRED) & (unlike_sharp < -UNUSUAL) & (light > DARK)),  # in the dark all is smooth
        "oddly shaped": (long, (long > ELONGATED) & (unlike_shape > UNUSUAL)),
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
