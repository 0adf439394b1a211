"""Where crops come from: images decoded into memory or onto the GPU, or read from their files again and again."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pfml.data.dataset_images import DatasetImages
from pfml.data.decoded_images import DecodedImages, decode
from pfml.data.decoding import (
    Track,
    UnreadableImagesError,
    check_images,
    collect,
    read_dataset_images,
    read_size,
    shrink,
    shrunk_size,
)
from pfml.data.file_images import FileImages
from pfml.data.image_set import ImageSet
from pfml.data.pixel_cache import PixelCache
from pfml.data.resampling import PixelBuffer
from pfml.data.windows import Windows

__all__ = ["STORAGES", "ImageSource", "open_images"]

STORAGES = ("auto", "memory", "device", "files")
GIB = 2**30


class ImageSource(Protocol):
    """Gives crops of images, wherever they lie."""

    device: torch.device
    description: str

    @property
    def sizes(self) -> Tensor:
        """Height and width of each image, (N, 2) int64."""

    def __len__(self) -> int: ...

    def crops(self, plan: Iterable[Windows]) -> Iterator[Tensor]:
        """(B, 3, size, size) float32 RGB in [0, 1] on the device, for each item of the plan, in its order."""


def open_images(
    images: ImageSet,
    *,
    device: torch.device | str = "cpu",
    storage: str = "auto",
    budget_gib: float = 8.0,
    workers: int = 2,
    short_side: int | None = None,
    cache: Path | None = None,
    track: Track | None = None,
) -> ImageSource:
    """An image source; every file has been read once when it is returned. `source.description` tells what it is.

    Args:
        images: Files or pixels.
        device: Where crops are delivered.
        storage: "memory" (decoded once into RAM), "device" (decoded once into GPU memory, where crops are made too),
            "files" (decoded for every crop by worker processes), or "auto": the first of "device", "memory" and
            "files" that is possible: "device" on a GPU if the set fits the budget and half of the free GPU memory,
            "memory" if it fits the budget.
        budget_gib: Memory that decoded images may take, in GiB, with "auto" and "memory".
        workers: Threads that decode and crop; with "files", processes.
        short_side: Shrink images whose short side is longer to this length when they are decoded. This saves memory,
            and is an approximation: crops come out of the smaller image.
        cache: A folder for decoded images, so that the next run need not decode them.
        track: Shows the progress, as track(iterable, description, total).

    Raises:
        UnreadableImagesError: Once, for all files that cannot be read.
        ValueError: If the set does not fit where `storage` wants it.
    """
    device = torch.device(device)
    _check_options(device, storage, budget_gib, workers, short_side)
    if isinstance(images.images, Tensor):
        if storage == "files" or cache is not None:
            raise ValueError("these images are pixels, not files: they need neither storage='files' nor a cache")
        pixels = PixelBuffer.of_pixels(_shrunk_pixels(images.images, short_side))
        storage, reason = _resolved_storage(storage, pixels.data.numel(), device, budget_gib, may_stay_files=False)
        return _decoded(pixels, storage, device, workers, reason)
    if isinstance(images.images, DatasetImages):
        return _of_dataset(images.images, device, storage, budget_gib, workers, short_side, cache, track)

    stored = None if cache is None else PixelCache(cache, images.images, short_side)
    usable = stored is not None and _usable(stored)
    kept = _kept(images)  # by a check: no file need be opened again
    sizes = stored.sizes() if usable and stored is not None else _sizes(images, kept, short_side, workers, track)
    storage, reason = _resolved_storage(storage, int(3 * sizes.prod(1).sum()), device, budget_gib, may_stay_files=True)
    if storage == "files":
        if kept is None:
            check_images(images, max(workers, 1), track)
        reason += "" if cache is None else "; the cache is not used"
        description = f"{len(images):,} images read from files by {workers} worker processes{reason}"
        return FileImages(
            images.images, sizes, device=device, workers=workers, short_side=short_side, description=description
        )
    loaded = stored.load() if usable and stored is not None else None
    if usable and loaded is None and stored is not None:
        warnings.warn(f"the cache {stored.folder} is rebuilt: its pixels are damaged or just replaced", stacklevel=2)
    pixels = loaded or decode(images.images, sizes, short_side, workers, track, kept)
    if stored is not None and loaded is None:
        stored.store(pixels)
    return _decoded(pixels, storage, device, workers, reason, "read from a cache" if loaded else "decoded")


def _of_dataset(
    images: DatasetImages,
    device: torch.device,
    storage: str,
    budget_gib: float,
    workers: int,
    short_side: int | None,
    cache: Path | None,
    track: Track | None,
) -> ImageSource:
    if cache is not None:
        raise ValueError("these images come from a dataset, which has no files: leave out storage.cache")
    limit = {"files": 0.0, "device": math.inf}.get(storage, budget_gib * GIB)
    sizes, pixels = read_dataset_images(images, short_side, max(workers, 1), track, limit)
    storage, reason = _resolved_storage(storage, int(3 * sizes.prod(1).sum()), device, budget_gib, may_stay_files=True)
    if storage == "files":
        description = f"{len(images):,} images read from their dataset by {workers} worker processes{reason}"
        return FileImages(images, sizes, device=device, workers=workers, short_side=short_side, description=description)
    assert pixels is not None  # what is not in the budget stays in the dataset, or was refused
    return _decoded(PixelBuffer.of_images(pixels), storage, device, workers, reason, "decoded")


def _kept(images: ImageSet) -> dict[Path, Tensor] | None:
    """The pixels of all files, if they were kept when the files were checked."""
    kept = images.pixels
    assert isinstance(images.images, tuple)
    return kept if kept is not None and all(path in kept for path in images.images) else None


def _sizes(
    images: ImageSet,
    kept: dict[Path, Tensor] | None,
    short_side: int | None,
    workers: int,
    track: Track | None,
) -> Tensor:
    """Heights and widths by the headers of the files, or of the pixels that are kept, after shrinking."""
    assert isinstance(images.images, tuple)
    headers: list[tuple[int, int]]
    try:
        if kept is not None:
            headers = [(kept[path].shape[1], kept[path].shape[2]) for path in images.images]
        else:
            headers = list(collect(images.images, read_size, workers, track, "reading image sizes"))
    except UnreadableImagesError:
        check_images(images, max(workers, 1), track)  # so that files with a good header alone are listed as well
        raise
    return torch.tensor([shrunk_size(size, short_side) for size in headers], dtype=torch.int64).reshape(-1, 2)


def _check_options(device: torch.device, storage: str, budget_gib: float, workers: int, short_side: int | None) -> None:
    if storage not in STORAGES:
        raise ValueError(f"storage must be one of {STORAGES}, got {storage!r}")
    if storage == "device" and device.type != "cuda":
        raise ValueError(f"storage='device' needs a CUDA device, got {device}; use storage='memory'")
    if not budget_gib >= 0:
        raise ValueError(f"budget_gib must not be negative, got {budget_gib}")
    if workers < 0:
        raise ValueError(f"workers must not be negative, got {workers}")
    if short_side is not None and short_side < 1:
        raise ValueError(f"short_side must be at least 1, got {short_side}")


def _resolved_storage(
    storage: str, needed: int, device: torch.device, budget_gib: float, *, may_stay_files: bool
) -> tuple[str, str]:
    """Where `needed` bytes of decoded images go ("device", "memory" or "files"), and why, if there was a choice."""
    in_budget = needed <= budget_gib * GIB
    size = f"{needed / GIB:.3g} GiB decoded"
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    if storage == "device" and needed > free:
        raise ValueError(f"the images take {size}, and {free / GIB:.3g} GiB are free on {device}; use storage='auto'")
    if storage == "memory" and not in_budget:
        raise ValueError(
            f"the images take {size}, more than budget_gib={budget_gib:g}; raise budget_gib, "
            f"shrink them with short_side, or use storage='files'"
        )
    if storage != "auto":
        return storage, ""
    if device.type == "cuda" and in_budget and needed <= free / 2:
        return "device", ""
    if in_budget or not may_stay_files:
        full = device.type == "cuda" and in_budget
        return "memory", f" (half of the free memory of {device} is less)" if full else ""
    return "files", f", since they take {size}, more than budget_gib={budget_gib:g}"


def _decoded(
    pixels: PixelBuffer, storage: str, device: torch.device, workers: int, reason: str, verb: str = "held"
) -> DecodedImages:
    where = f"memory of {device}" if storage == "device" else "memory"
    into = f"{verb} in {where}" if verb == "held" else f"{verb} into {where}"
    description = f"{len(pixels):,} images {into}, {pixels.data.numel() / GIB:.3g} GiB{reason}"
    pixels = pixels.to(device) if storage == "device" else pixels
    return DecodedImages(pixels, device=device, workers=workers, description=description)


def _usable(cache: PixelCache) -> bool:
    """Whether the cache can be loaded; says why if there is one and it cannot."""
    cache.remove_left_over()
    if not cache.exists():
        return False
    mismatch = cache.mismatch()
    if mismatch is not None:
        warnings.warn(f"the cache {cache.folder} is rebuilt: {mismatch}", stacklevel=3)
    return mismatch is None


def _shrunk_pixels(pixels: Tensor, short_side: int | None) -> Tensor:
    if short_side is None or min(pixels.shape[2:]) <= short_side:
        return pixels
    return torch.stack([shrink(image, short_side) for image in pixels])
