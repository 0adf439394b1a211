"""Pictures in both directions: uploads that may be anything, and thumbnails of indexed images."""

from __future__ import annotations

import io
import threading
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

__all__ = ["FORMATS", "BadUploadError", "Thumbnails", "decoded_upload"]

#: Formats that an upload may have: no others of Pillow's decoders are tried.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
#: The longer side of pictures that are sent, in pixels.
SIZES = {"thumbnail": 224, "large": 896}


class BadUploadError(ValueError):
    """An upload that is no image to search by; `status` is the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def decoded_upload(content: bytes, *, most_pixels: int) -> Tensor:
    """The image that was sent, uint8 (3, height, width).

    The size is compared before any pixel is decoded. The orientation in EXIF is not applied, as in the index.
    """
    from PIL import Image, UnidentifiedImageError

    if not content:
        raise BadUploadError(400, "the upload must be an image, got an empty file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is lower
            image = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        known = ", ".join(FORMATS)
        raise BadUploadError(415, f"the upload must be an image ({known}), got a file of another kind") from None
    except Image.DecompressionBombError:
        raise BadUploadError(413, f"an image must have at most {most_pixels:,} pixels, got far more") from None
    except Exception as error:  # a broken header makes Pillow's plugins raise errors of nearly any type
        raise BadUploadError(422, f"the upload must be a whole image, got one that cannot be read: {error}") from None
    with image:
        if image.width * image.height > most_pixels:
            size = f"{image.width} x {image.height}"
            raise BadUploadError(413, f"an image must have at most {most_pixels:,} pixels, got {size}")
        try:
            # a JPEG of a phone may carry a second view of the same moment (MPO); the first one is the photograph
            if image.format != "MPO" and getattr(image, "is_animated", False):
                raise BadUploadError(415, "the upload must be one picture, got an animation or several pages")
            return _rgb(image)
        except BadUploadError:
            raise
        except Exception as error:
            raise BadUploadError(422, f"the upload must be a whole image, got a damaged one: {error}") from None


def _rgb(image: Any) -> Tensor:
    from PIL import Image

    if image.mode == "F":
        raise BadUploadError(415, "pixels must be whole numbers, got floating-point ones")
    if image.mode.startswith("I"):  # greyscale of 16 bits keeps its upper 8, as in the index
        values = numpy.asarray(image).astype(numpy.int64).clip(0, 65535)
        image = Image.fromarray((values >> 8).astype(numpy.uint8))
    return torch.from_numpy(numpy.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


class Thumbnails:
    """JPEG pictures of files, made on demand; the latest ones stay in memory, up to a number of bytes."""

    def __init__(self, most_bytes: int = 2**26) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[int, str], bytes] = OrderedDict()

    def get(self, image: int, path: str, size: str) -> bytes:
        """The picture of the image with that id; OSError or ValueError if its file cannot be read."""
        key = image, size
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        made = _jpeg(Path(path), SIZES[size])
        with self._lock:
            if key not in self._held:
                self._held[key] = made
                self.held_bytes += len(made)
            while self.held_bytes > self.most_bytes:
                _, dropped = self._held.popitem(last=False)
                self.held_bytes -= len(dropped)
        return made


def _jpeg(path: Path, longest: int) -> bytes:
    from PIL import Image, ImageOps

    with Image.open(path) as image:
        image.draft("RGB", (2 * longest, 2 * longest))  # decodes a large JPEG at a fraction of its size
        shown = ImageOps.exif_transpose(image)
        if shown.mode.startswith("I"):
            shown = Image.fromarray((numpy.asarray(shown).clip(0, 65535) >> 8).astype(numpy.uint8))
        shown = shown.convert("RGB")
    if max(shown.size) < 64:  # tiny pictures in whole pixels: browsers would blur them
        factor = -(-96 // max(shown.size))
        shown = shown.resize((shown.width * factor, shown.height * factor), Image.Resampling.NEAREST)
    shown.thumbnail((longest, longest))
    out = io.BytesIO()
    shown.save(out, "JPEG", quality=85)
    return out.getvalue()
