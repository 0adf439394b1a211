"""Image files as pixels, and the check that every file of a set can be read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pfml.data.dataset_images import DatasetImages
from pfml.data.image_file import ImageError, opened_image, rgb_image, rgb_pixels
from pfml.data.image_set import ImageSet, RetrievalData

__all__ = [
    "ImageError",
    "Track",
    "UnreadableImagesError",
    "check_data",
    "check_images",
    "decode_files",
    "listing_all_unreadable",
    "read_rgb",
    "read_size",
    "shrink",
]

#: called as track(iterable, description, total): gives the items of the iterable and shows how far it has come
Track = Callable[[Iterable[Any], str, int], Iterable[Any]]

Item = TypeVar("Item")
Result = TypeVar("Result")

#: unreadable files that an error lists by name
LISTED = 20
#: bytes of decoded images that a check keeps, so that a small set is opened once
KEPT_BYTES = 2 * 2**30
#: files from which the size of all is estimated
ESTIMATED_FROM = 16


class UnreadableImagesError(ValueError):
    """Some images of a set cannot be read; the message lists them."""

    def __init__(self, failures: list[ImageError], total: int) -> None:
        super().__init__(failures, total)
        self.failures = failures
        self.total = total

    def __str__(self) -> str:
        listed = [f"  {failure}" for failure in self.failures[:LISTED]]
        if len(self.failures) > LISTED:
            listed.append(f"  ... and {len(self.failures) - LISTED} more")
        count = f"{len(self.failures):,} of {self.total:,} images cannot be read"
        return "\n".join([f"{count}; restore these files, or take them out of the set:", *listed])


def read_rgb(path: Path | str, short_side: int | None = None) -> Tensor:
    """The image in a file, uint8 (3, height, width), or an ImageError.

    Colors are converted by `pfml.data.image_file.rgb_pixels`, as in the loaders of the literature. The orientation in
    EXIF is not applied, because the published results were computed without it; that of a HEIC photograph is, since it
    is part of the format. Of an animation, the first frame is read.

    Args:
        path: Of the file.
        short_side: See `shrink`.
    """
    with opened_image(path) as image:
        return shrink(rgb_pixels(image), short_side)


def read_size(path: Path | str) -> tuple[int, int]:
    """Height and width by the header of a file, without decoding it, or an ImageError."""
    with opened_image(path) as image:
        return image.height, image.width


def shrink(image: Tensor, short_side: int | None) -> Tensor:
    """The image (3, height, width) uint8 with its short side brought down to `short_side`, if it is longer.

    Antialiased bilinear, rounded to uint8. Crops of the result approximate crops of the image itself: they have been
    filtered twice, and crops that would have been smaller than `short_side` are less sharp.
    """
    height, width = shrunk_size((image.shape[1], image.shape[2]), short_side)
    if (height, width) == tuple(image.shape[1:]):
        return image
    return F.interpolate(image[None], size=(height, width), mode="bilinear", align_corners=False, antialias=True)[0]


def shrunk_size(size: tuple[int, int], short_side: int | None) -> tuple[int, int]:
    """Height and width after `shrink`."""
    short = min(size)
    if short_side is None or short <= short_side:
        return size
    height, width = (side * short_side // short for side in size)
    return height, width


def check_images(images: ImageSet, workers: int = 2, track: Track | None = None) -> Tensor:
    """Heights and widths (N, 2) of all images, after decoding each of them to the end.

    Raises:
        UnreadableImagesError: Once, for all files that cannot be read. None is ever skipped or replaced.
    """
    if isinstance(images.images, Tensor):
        return torch.tensor([images.images.shape[2:]]).expand(len(images), 2)
    if isinstance(images.images, DatasetImages):
        return read_dataset_images(images.images, None, workers, track)[0]
    sizes = collect(images.images, _checked_size, workers, track, "checking images")
    return torch.tensor(list(sizes), dtype=torch.int64).reshape(-1, 2)


def read_dataset_images(
    images: DatasetImages,
    short_side: int | None = None,
    workers: int = 2,
    track: Track | None = None,
    limit: float = 0.0,
) -> tuple[Tensor, list[Tensor] | None]:
    """Heights and widths (N, 2) of the images of a dataset, and the images, if all fit into `limit` bytes.

    The dataset is asked for each of them once.

    Raises:
        UnreadableImagesError: Once, for all that it does not give.
    """
    sizes: list[tuple[int, ...]] = []
    kept: list[Tensor] = []
    held = 0

    def pixels(index: int) -> Tensor:
        return shrink(images.read(index), short_side)

    for image in collect(range(len(images)), pixels, workers, track, "reading the dataset"):
        sizes.append(tuple(image.shape[1:]))
        held += image.numel()
        if held <= limit:
            kept.append(image)
        else:
            kept.clear()
    return torch.tensor(sizes, dtype=torch.int64).reshape(-1, 2), kept if held <= limit else None


def check_data(data: RetrievalData, workers: int = 2, track: Track | None = None) -> None:
    """Decode every file of all parts of `data` once.

    Raises:
        UnreadableImagesError: Once, for all files of all parts that cannot be read.
    """
    of_files = [part.images for part in data.parts.values() if isinstance(part.images, tuple)]
    files = tuple(dict.fromkeys(path for paths in of_files for path in paths))
    for _ in collect(files, _checked_size, workers, track, "checking images"):
        pass


def decode_files(
    files: Sequence[Path], workers: int = 2, track: Track | None = None, limit: int = KEPT_BYTES
) -> tuple[dict[Path, Tensor], list[ImageError]]:
    """The pixels of all files that can be read, and the errors of the others; each file is opened once.

    Pixels are kept if all of them fit into `limit` bytes. Otherwise there are none, and files are checked only.
    """
    pixels: dict[Path, Tensor] = {}
    failures: list[ImageError] = []
    is_kept, held = True, 0

    def attempt(path: Path) -> Tensor | ImageError | None:
        try:
            if is_kept:
                return read_rgb(path)
            _checked_size(path)
        except ImageError as error:
            return error
        return None

    results: Iterable[Tensor | ImageError | None] = in_threads(attempt, files, workers)
    if track is not None:
        results = track(results, "checking images", len(files))
    for number, (path, result) in enumerate(zip(files, results, strict=True), start=1):
        if isinstance(result, ImageError):
            failures.append(result)
        elif result is not None and is_kept:
            held += result.numel()
            pixels[path] = result
            # after a few files the size of all is known well enough
            is_kept = held <= limit and (number < ESTIMATED_FROM or held / number * len(files) <= limit)
            if not is_kept:
                pixels.clear()
    return pixels, failures


@contextmanager
def listing_all_unreadable(data: RetrievalData, workers: int = 2, track: Track | None = None) -> Iterator[None]:
    """Within the block, the error that files of one part cannot be read becomes that of the files of all parts."""
    try:
        yield
    except UnreadableImagesError:
        check_data(data, workers, track)
        raise


def collect(
    items: Sequence[Item], function: Callable[[Item], Result], workers: int, track: Track | None, description: str
) -> Iterator[Result]:
    """function(item) for all items, in order; every ImageError is kept for one UnreadableImagesError at the end."""

    def attempt(item: Item) -> Result | ImageError:
        try:
            return function(item)
        except ImageError as error:
            return error

    results: Iterable[Result | ImageError] = in_threads(attempt, items, workers)
    if track is not None:
        results = track(results, description, len(items))
    failures: list[ImageError] = []
    for result in results:
        if isinstance(result, ImageError):
            failures.append(result)
        elif not failures:  # what follows a failure is only read for further failures
            yield result
    if failures:
        raise UnreadableImagesError(failures, len(items))


def in_threads(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """function(item) for all items, in order, computed a few items ahead by threads (Pillow frees the interpreter)."""
    if workers <= 1:
        yield from map(function, items)
        return
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) >= 4 * workers:  # no more: decoded images that wait for the consumer take memory
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _checked_size(path: Path) -> tuple[int, int]:
    """Height and width of the image in a file, which has been decoded to its end, or an ImageError."""
    with opened_image(path) as image:
        width, height = image.size
        image.draft(None, (1, 1))  # of a JPEG, all is read, but only an eighth of the rows and columns is computed
        rgb_image(image).load()
        return height, width
