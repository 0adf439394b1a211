"""What happens to an image before the backbone: evaluation geometry, normalization, and training crops."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from pfml.data.windows import INTERPOLATIONS, Windows
from pfml.typos import did_you_mean

__all__ = ["Augmentation", "Preprocessing"]

CHANNEL_ORDERS = ("rgb", "bgr")
#: pixels of a resized side; far more than any backbone sees, and few enough to fit into memory
LONGEST_SIDE = 4096
#: the least and largest value of white
SCALES = (1e-6, 1e6)
#: the largest value that black and white may be normalized to: it must be finite in half precision, too
LARGEST_VALUE = 1e4
#: the least difference between black and white, normalized: below it all images are alike
LEAST_CONTRAST = 1e-4
#: tries of RandomResizedCrop before it takes the center, as in torchvision
CROP_TRIES = 10


@dataclass(frozen=True)
class Preprocessing:
    """Resize, center crop and normalization; it travels with the model.

    Values by which no image would become finite, different numbers are refused: a file may have been changed.

    Args:
        resize: Length of the short side before the center crop. Images whose short side has this length already are
            not resized, so `resize=32, crop=32` leaves 32-pixel images as they are.
        crop: Side of the square crop that the backbone sees.
        interpolation: "bilinear" or "bicubic", antialiased.
        mean: Subtracted per channel, in the backbone's scale and channel order.
        std: Divided by per channel, in the backbone's scale.
        channel_order: "rgb", or "bgr" for networks that came from Caffe.
        value_scale: The backbone's value of white: 1, or 255.
    """

    resize: int = 256
    crop: int = 224
    interpolation: str = "bilinear"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    channel_order: str = "rgb"
    value_scale: float = 1.0

    def __post_init__(self) -> None:
        for name, side in (("resize", self.resize), ("crop", self.crop)):
            if not isinstance(side, int) or isinstance(side, bool) or side < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {side!r}")
            if side > LONGEST_SIDE:
                raise ValueError(f"{name} must be at most {LONGEST_SIDE} pixels, got {side}")
        if self.crop > self.resize:
            raise ValueError(f"crop must not exceed resize, got crop={self.crop} and resize={self.resize}")
        for name, choice, choices in (
            ("interpolation", self.interpolation, tuple(INTERPOLATIONS)),
            ("channel_order", self.channel_order, CHANNEL_ORDERS),
        ):
            if choice not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {choice!r}")
        for name in ("mean", "std"):
            values = tuple(float(value) for value in getattr(self, name))
            if len(values) != 3 or not all(map(math.isfinite, values)):
                raise ValueError(f"{name} must be three finite numbers, one per channel, got {values}")
            object.__setattr__(self, name, values)
        if min(self.std) <= 0:
            raise ValueError(f"std must be positive, got {self.std}")
        if not SCALES[0] <= self.value_scale <= SCALES[1]:
            raise ValueError(f"value_scale must lie in [{SCALES[0]:g}, {SCALES[1]:g}], got {self.value_scale}")
        self._require_usable_values()

    def _require_usable_values(self) -> None:
        for mean, std in zip(self.mean, self.std, strict=True):
            largest = max(abs(mean), abs(self.value_scale - mean)) / std
            if largest > LARGEST_VALUE or self.value_scale / std < LEAST_CONTRAST:
                raise ValueError(
                    f"mean and std must bring pixels to at most {LARGEST_VALUE:g} with a contrast of at least "
                    f"{LEAST_CONTRAST:g}, got mean {mean:g} and std {std:g} for a white of {self.value_scale:g}"
                )

    def normalize(self, images: Tensor) -> Tensor:
        """The input of the backbone, from RGB images (B, 3, H, W): floats in [0, 1], or uint8."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images must be of shape (batch, 3, height, width), got {tuple(images.shape)}")
        if images.dtype == torch.uint8:
            images = images.float() / 255.0
        elif not images.is_floating_point():
            raise TypeError(f"images must be floats in [0, 1] or uint8, got {images.dtype}")
        if self.channel_order == "bgr":
            images = images.flip(1)
        if self.value_scale != 1.0:
            images = images * self.value_scale
        return (images - _per_channel(self.mean, images)) / _per_channel(self.std, images)

    def windows(self, indices: Tensor, sizes: Tensor) -> Windows:
        """Resize + CenterCrop of images `indices`, as torchvision computes them.

        Args:
            indices: (B,) int64.
            sizes: (N, 2), heights and widths of ALL images (`source.sizes`), of which `indices` takes its own.
        """
        size = _sizes_of(indices, sizes)
        short = size.amin(1, keepdim=True)
        # int(resize * long / short): the quotient of two integers below 2**53, so the floor is exact
        resized = (self.resize * size).div(short, rounding_mode="floor")
        offset = ((resized - self.crop) / 2.0).round()  # half to even, like Python's round
        step = size.double() / resized
        return Windows(
            indices=indices,
            start=offset.double() * step,
            extent=self.crop * step,
            lower=torch.zeros_like(size),
            upper=size,
            flipped=torch.zeros(len(indices), dtype=torch.bool),
            size=self.crop,
            interpolation=self.interpolation,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Preprocessing:
        """The inverse of `to_dict`; keys that are left out have their default."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                hint = did_you_mean(name, known) or f"; the keys are {', '.join(known)}"
                raise ValueError(f"{name!r} is no key of a Preprocessing{hint}")
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**plain)


@dataclass(frozen=True)
class Augmentation:
    """Random crops and flips of training images, torchvision's RandomResizedCrop and RandomHorizontalFlip, and more.

    What follows `random_crop` changes finished crops (`pfml.data.crop_transforms`) and is off by default: the methods
    of the literature are compared without it.

    Args:
        scale: Least and largest area of a crop, as a part of the image's area; drawn uniformly.
        ratio: Least and largest width / height of a crop; drawn log-uniformly.
        flip: Probability that a crop is mirrored left to right.
        random_crop: Without it, training images are cropped as test images are, for small sets such as glyphs.
        color_jitter: Largest change of brightness, contrast and saturation, as factors, and of hue, as a part of the
            color circle (at most 0.5).
        grayscale: Probability that a crop loses its color.
        rotation: Largest angle, in degrees, to either side; corners are filled with gray.
        rand_augment: How many transforms of RandAugment's list each crop gets.
        rand_augment_magnitude: Their strength, 0 to 30.
        erasing: Probability that a rectangle of 2 to 33 % of a crop turns gray.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    random_crop: bool = True
    color_jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    grayscale: float = 0.0
    rotation: float = 0.0
    rand_augment: int = 0
    rand_augment_magnitude: int = 9
    erasing: float = 0.0

    def __post_init__(self) -> None:
        for name in ("scale", "ratio"):
            bounds = tuple(float(bound) for bound in getattr(self, name))
            if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1] < math.inf:
                raise ValueError(f"{name} must be two positive numbers, the smaller first, got {bounds}")
            object.__setattr__(self, name, bounds)
        if self.scale[1] > 1:
            raise ValueError(f"scale must not exceed 1, the whole image, got {self.scale}")
        for name in ("flip", "grayscale", "erasing"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a probability in [0, 1], got {getattr(self, name)}")
        self._check_transforms()
        if not isinstance(self.random_crop, bool):
            raise TypeError(f"random_crop must be True or False, got {self.random_crop!r}")

    def _check_transforms(self) -> None:
        jitter = tuple(float(part) for part in self.color_jitter)
        if len(jitter) != 4 or not all(0 <= part < math.inf for part in jitter) or jitter[3] > 0.5:
            raise ValueError(
                f"color_jitter must be brightness, contrast, saturation, hue, none negative and hue at most 0.5, "
                f"got {jitter}"
            )
        object.__setattr__(self, "color_jitter", jitter)
        if not 0 <= self.rotation <= 180:
            raise ValueError(f"rotation must lie in [0, 180] degrees, got {self.rotation}")
        for name, most in (("rand_augment", 14), ("rand_augment_magnitude", 30)):
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= most:
                raise ValueError(f"{name} must be an integer from 0 to {most}, got {number!r}")

    @property
    def transforms_crops(self) -> bool:
        """Whether finished crops are changed."""
        return any((*self.color_jitter, self.grayscale, self.rotation, self.rand_augment, self.erasing))

    def windows(
        self, indices: Tensor, sizes: Tensor, preprocessing: Preprocessing, generator: torch.Generator
    ) -> Windows:
        """Random windows of images `indices`, a function of the CPU generator's state.

        Args:
            indices: (B,) int64.
            sizes: (N, 2), heights and widths of ALL images (`source.sizes`), of which `indices` takes its own.
            preprocessing: Gives size and interpolation of the crops.
            generator: See `pfml.data.seeding.generator_for`.
        """
        # all draws at once, whatever is used of them: flips are the same with and without random crops
        draws = torch.rand(len(indices), 2 * CROP_TRIES + 3, generator=generator, dtype=torch.float64)
        flipped = draws[:, 0] < self.flip
        if not self.random_crop:
            return replace(preprocessing.windows(indices, sizes), flipped=flipped)
        corner, extent = self._boxes(_sizes_of(indices, sizes), draws[:, 1:])
        return Windows(
            indices=indices,
            start=corner,
            extent=extent,
            lower=corner.to(torch.int64),
            upper=(corner + extent).to(torch.int64),
            flipped=flipped,
            size=preprocessing.crop,
            interpolation=preprocessing.interpolation,
        )

    def _boxes(self, size: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
        """Corners and extents, (B, 2) whole float64 each, of the first of ten tries that fits, else of the center."""
        size = size.double()  # once: between integers and floats, every operation would convert
        areas, shapes = draws[:, 2:].view(-1, 2, CROP_TRIES).unbind(1)
        area = size.prod(1, keepdim=True) * (self.scale[0] + (self.scale[1] - self.scale[0]) * areas)
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        ratio = torch.exp(low + (high - low) * shapes)
        tries = torch.stack([area / ratio, area * ratio], dim=1).sqrt_().round_()  # (B, 2, tries)
        fits = ((tries > 0) & (tries <= size[:, :, None])).all(1)
        first = fits.to(torch.uint8).argmax(1, keepdim=True)  # argmax gives the first of equals
        extent = tries.gather(2, first[:, None].expand(-1, 2, 1))[:, :, 0]
        corner = (draws[:, :2] * (size - extent + 1)).floor_()
        found = fits.gather(1, first)
        if not found.all():
            extent = torch.where(found, extent, self._largest_box(size))
            corner = torch.where(found, corner, ((size - extent) / 2).floor_())
        return corner, extent

    def _largest_box(self, size: Tensor) -> Tensor:
        """The largest extent of an allowed ratio, (B, 2) whole float64."""
        height, width = size.unbind(1)
        whole = width / height
        tallest = torch.where(whole < self.ratio[0], (width / self.ratio[0]).round(), height)
        widest = torch.where(whole > self.ratio[1], (height * self.ratio[1]).round(), width)
        return torch.stack([tallest, widest], dim=1).clamp(min=1)


def _sizes_of(indices: Tensor, sizes: Tensor) -> Tensor:
    """The sizes of images `indices`, (B, 2) int64."""
    if sizes.ndim != 2 or sizes.shape[1] != 2:
        raise ValueError(f"sizes must be of shape (images, 2), heights and widths, got {tuple(sizes.shape)}")
    if len(indices) and not (int(indices.min()) >= 0 and int(indices.max()) < len(sizes)):
        raise ValueError(
            f"indices must lie in [0, {len(sizes)}), the images in sizes, "
            f"got {int(indices.min())} to {int(indices.max())}"
        )
    return sizes[indices].to(torch.int64)


def _per_channel(values: tuple[float, float, float], like: Tensor) -> Tensor:
    """(3, 1, 1) on the device of `like`; filled there, since copying it would wait for the device at every step."""
    return torch.stack([like.new_full((1, 1), value) for value in values])
