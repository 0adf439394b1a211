"""Files that are said to be images: which kinds are opened, and how large they may be.

Pillow opens files only here. It is told by name which formats to try: some of the others start
programs (PostScript, Ghostscript). Only regular files are read, since a named pipe would be waited for and a device
never ends. Size and shape are compared by the header, before a pixel is decoded.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from pfml.storage.files import SpecialFileError, open_regular

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "FORMATS",
    "UPLOAD_FORMATS",
    "ImageError",
    "TooLargeError",
    "UnknownFormatError",
    "known_formats",
    "opened_image",
    "rgb_pixels",
]

#: Pillow's names of the formats that are opened, all of them rasters; HEIF needs the package pillow-heif.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "HEIF", "BMP", "GIF", "TIFF", "JPEG2000", "PPM")
#: Those that may be sent to a server by strangers.
UPLOAD_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
#: By what the first box of a file says that it is HEIF, as those of phones are (HEIC).
HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
#: Rows or columns that an image may have: as many as a JPEG can. Every row takes time, however short it is.
LONGEST_SIDE = 65_535
#: How many times longer than wide an image may be; a backbone sees a square of it.
MOST_ELONGATED = 128


class ImageError(ValueError):
    """A file that cannot be read as an image."""

    def __init__(self, path: Path | str, reason: str = "") -> None:
        # a DataLoader makes the errors of its workers again from their text alone
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" if self.reason else str(self.path)


class UnknownFormatError(ImageError):
    """A file that is no image, or one of a kind that is not read."""


class TooLargeError(ImageError):
    """An image with too many pixels, or far too long for its width."""


@cache
def known_formats() -> tuple[str, ...]:
    """Those of `FORMATS` that the installed Pillow reads by itself."""
    from PIL import Image

    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN and name != "HEIF")


@contextmanager
def opened_image(
    source: Path | str | bytes, *, formats: Sequence[str] = FORMATS, name: str = "the image"
) -> Iterator[Image.Image]:
    """The image in a file or in its bytes, not decoded yet; every failure within the block is an ImageError.

    Args:
        source: Path of the file, or what is in it.
        formats: Those of `FORMATS` that are tried.
        name: What to call bytes in messages.
    """
    from PIL import Image, UnidentifiedImageError

    where = name if isinstance(source, bytes) else source
    try:
        with ExitStack() as held:
            file = io.BytesIO(source) if isinstance(source, bytes) else held.enter_context(open_regular(source))
            image = held.enter_context(_recognized(file, formats, where))
            _require_size(where, image.size)
            yield image
    except ImageError:
        raise
    except SpecialFileError as error:
        raise ImageError(where, error.reason) from None
    except FileNotFoundError:
        raise ImageError(where, "does not exist") from None
    except UnidentifiedImageError:
        is_empty = not source if isinstance(source, bytes) else Path(source).stat().st_size == 0
        if is_empty:
            raise ImageError(where, "is empty") from None
        raise UnknownFormatError(where, f"is not an image of a known format ({', '.join(formats)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        limit = Image.MAX_IMAGE_PIXELS or 0
        raise TooLargeError(where, f"has far more pixels than Pillow's limit {limit:,}") from None
    except Exception as error:  # a broken file makes Pillow's plugins raise errors of nearly any type
        raise ImageError(where, f"{type(error).__name__}: {error}") from error


def _recognized(file: BinaryIO, formats: Sequence[str], where: Path | str) -> Image.Image:
    """The image in an open file by its first bytes; Pillow's own list of formats stays as it is."""
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(file, formats=[name for name in known_formats() if name in formats])
    except UnidentifiedImageError:
        file.seek(0)
        head = file.read(12)
        file.seek(0)
        if "HEIF" not in formats or head[4:8] != b"ftyp" or head[8:] not in HEIF_BRANDS:
            raise
    try:
        from pillow_heif import HeifImageFile
    except ImportError:
        reason = "is a HEIC photograph, which needs a package: pip install pillow-heif"
        raise UnknownFormatError(where, reason) from None
    return HeifImageFile(file)


def rgb_pixels(image: Image.Image) -> Tensor:
    """The pixels of an opened image, uint8 (3, height, width).

    Pillow's `convert("RGB")`: grayscale is repeated, a palette looked up, CMYK converted, and transparency dropped
    rather than laid over a background. Grayscale of 16 bits keeps its upper 8 (`convert` would clip it to white).
    """
    # one copy out of Pillow's memory, and at once in the order of a tensor: a large image is there twice and not more
    return torch.from_numpy(np.ascontiguousarray(np.asarray(rgb_image(image)).transpose(2, 0, 1)))


def rgb_image(image: Any) -> Any:
    """The image in mode RGB; see `rgb_pixels`."""
    from PIL import Image

    if image.mode == "F":
        raise ValueError("pixels are floating-point numbers, which do not say how bright white is")
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError(f"grayscale values must lie in [0, 65535], got {values.min()} to {values.max()}")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")


def _require_size(where: Path | str, size: tuple[int, int]) -> None:
    """Raise TooLargeError unless width and height are such as an image may have."""
    from PIL import Image

    width, height = size
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and width * height > limit:
        # Pillow only warns up to twice this limit
        raise TooLargeError(where, f"has {width} x {height} pixels, more than Pillow's limit {limit:,}")
    if max(size) > LONGEST_SIDE:
        raise TooLargeError(where, f"has {width} x {height} pixels, more than {LONGEST_SIDE:,} on a side")
    if max(size) > MOST_ELONGATED * min(size):
        raise TooLargeError(where, f"has {width} x {height} pixels, more than {MOST_ELONGATED} times longer than wide")
