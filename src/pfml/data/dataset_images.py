"""Images that Python gives: those of a torch `Dataset` or of a split of Hugging Face `datasets`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pfml.data.image_file import ImageError, rgb_pixels

__all__ = ["DatasetImages"]


class DatasetImages:
    """The images of a dataset, asked for one by one; it must give the same one each time.

    Args:
        dataset: Anything with `len(dataset)` and `dataset[k]`.
        image: Of its items, which one is the image: the position in a tuple, or the key of a dictionary.
        positions: Which of its items, in which order; None for all.
    """

    def __init__(self, dataset: Any, image: int | str, positions: Tensor | None = None) -> None:
        self.dataset, self.image = dataset, image
        self.positions = torch.arange(len(dataset)) if positions is None else positions
        self._lock = Lock()  # a dataset may hold a file open, which two threads must not read at once

    def __len__(self) -> int:
        return len(self.positions)

    def __repr__(self) -> str:
        return f"DatasetImages({len(self):,} of {type(self.dataset).__name__})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=Lock())

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.read, range(len(self)))

    def name_of(self, index: int) -> str:
        """What to call an image in messages."""
        return f"{type(self.dataset).__name__}[{int(self.positions[index])}]"

    def read(self, index: int) -> Tensor:
        """Image `index`, uint8 (3, height, width), or an ImageError."""
        try:
            with self._lock:
                item = self.dataset[int(self.positions[index])]
            return to_pixels(item[self.image])
        except Exception as error:  # whatever a dataset of someone's own raises
            reason = str(error) if isinstance(error, UnusableImageError) else f"{type(error).__name__}: {error}"
            raise ImageError(self.name_of(index), reason) from error

    def subset(self, indices: Tensor) -> DatasetImages:
        """The images at `indices`, in that order."""
        return DatasetImages(self.dataset, self.image, self.positions[indices])

    def joined(self, others: DatasetImages) -> DatasetImages:
        """These images and then `others`, of the same dataset or of two."""
        if others.dataset is self.dataset and others.image == self.image:
            return DatasetImages(self.dataset, self.image, torch.cat([self.positions, others.positions]))
        return DatasetImages(_Chain((self, others)), 0)

    def fingerprint(self) -> str:
        """A digest of which images these are: by what the dataset says of itself, and by position."""
        itself = getattr(self.dataset, "_fingerprint", "")  # of Hugging Face's, which changes with the content
        known = f"{type(self.dataset).__name__} {len(self.dataset)} {itself} {self.positions.tolist()}"
        return hashlib.sha256(known.encode()).hexdigest()


class UnusableImageError(ValueError):
    """An image is there, and cannot be used as it is."""


class _Chain:
    """The images of several datasets, one after the other."""

    def __init__(self, parts: Sequence[DatasetImages]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, index: int) -> tuple[Tensor]:
        for part in self.parts:
            if index < len(part):
                return (part.read(index),)
            index -= len(part)
        raise IndexError(index)


def to_pixels(image: Any) -> Tensor:
    """The image as uint8 (3, height, width).

    It may be a PIL image, an array (height, width, 3) or (height, width), or a tensor (3, height, width) or (1, height,
    width). Floats must lie in [0, 1], as torchvision's `ToTensor` makes them.
    """
    from PIL import Image

    if isinstance(image, Mapping) and (image.get("bytes") or image.get("path")):  # Hugging Face's, not decoded
        from pfml.data.image_file import opened_image

        with opened_image(image["bytes"] or image["path"]) as opened:
            return rgb_pixels(opened)
    if isinstance(image, Image.Image):
        return rgb_pixels(image)
    if isinstance(image, np.ndarray):
        array = image if image.ndim == 3 else image[:, :, None] if image.ndim == 2 else image
        image = torch.from_numpy(np.ascontiguousarray(array)).permute(2, 0, 1) if array.ndim == 3 else array
    if not isinstance(image, Tensor):
        raise UnusableImageError(f"an image must be a PIL image, an array or a tensor, got {type(image).__name__}")
    if image.ndim != 3 or image.shape[0] not in (1, 3) or not image.numel():
        raise UnusableImageError(
            f"an image must be (3, height, width), or (height, width, 3) as an array, got {tuple(image.shape)}"
        )
    if image.is_floating_point():
        low, high = float(image.min()), float(image.max())
        if not (low >= -1e-3 and high <= 1 + 1e-3):
            raise UnusableImageError(
                f"an image of floats must lie in [0, 1], got {low:.3g} to {high:.3g}: leave out the normalization of "
                f"the dataset; an embedder normalizes by itself"
            )
        image = (image * 255).round().clamp(0, 255)
    elif image.dtype != torch.uint8:
        raise UnusableImageError(f"an image must be uint8, or floats in [0, 1], got {image.dtype}")
    return image.to(torch.uint8).expand(3, -1, -1).contiguous().cpu()
