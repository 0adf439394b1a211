"""Images of requests and responses: uploads, which are not trusted, and thumbnails of indexed images."""

from __future__ import annotations

import io
import re
import threading
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from pfml.data.image_file import (
    FORMATS,
    UPLOAD_FORMATS,
    ImageError,
    TooLargeError,
    UnknownFormatError,
    opened_image,
    rgb_image,
    rgb_pixels,
)
from pfml.serving.decode_queue import PixelBudget

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["BadUploadError", "Crop", "Thumbnails", "Upload", "decoded_upload", "opened_file", "opened_upload"]

#: The longer side of thumbnails, in pixels.
SIZES = {"thumbnail": 224, "large": 896, "full": 8192}
#: Pixels of a crop on a side.
SMALLEST_CROP = 8
#: The tag of EXIF that says how an image is shown.
ORIENTATION = 0x0112
#: Pixels that are decoded at a time for thumbnails, without a budget that is shared with uploads.
THUMBNAIL_PIXELS = 90_000_000
#: Limit of pixels times scans of a progressive JPEG, as a multiple of the most pixels of an upload.
MOST_SCANS = 25
#: The marker of a segment of a JPEG; compressed data has none.
JPEG_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])", re.DOTALL)
START_OF_IMAGE, START_OF_SCAN, END_OF_IMAGE = b"\xd8", b"\xda", b"\xd9"


class BadUploadError(ValueError):
    """An upload that is refused; `status` is the HTTP status of the response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Crop:
    """A part of an image as it is shown, in fractions of its width and height.

    Args:
        x: The left edge.
        y: The upper edge.
        width: Above 0.
        height: Above 0.
    """

    x: float
    y: float
    width: float
    height: float

    def __post_init__(self) -> None:
        ends = (self.x + self.width, self.y + self.height)
        if not (min(self.x, self.y) >= 0 and max(ends) <= 1 + 1e-6 and min(self.width, self.height) > 0):
            raise ValueError(f"a crop must lie within the image, 0 to 1, and not be empty, got {astuple(self)}")

    def stored(self, orientation: int) -> Crop:
        """This crop of the image as it is stored, before its EXIF orientation (1 to 8) is applied."""
        x, y, width, height = self.x, self.y, self.width, self.height
        if orientation in (2, 3, 6, 7):  # shown from right to left
            x = 1 - x - width
        if orientation in (3, 4, 7, 8):  # shown from bottom to top
            y = 1 - y - height
        x, y = max(x, 0.0), max(y, 0.0)
        return Crop(y, x, height, width) if orientation in (5, 6, 7, 8) else Crop(x, y, width, height)

    def of(self, pixels: Tensor) -> Tensor:
        """The part of pixels (3, height, width); BadUploadError (422) if it is too small to be an image."""
        height, width = pixels.shape[1:]
        left, top = int(self.x * width), int(self.y * height)
        right, bottom = (round((self.x + self.width) * width), round((self.y + self.height) * height))
        if min(right - left, bottom - top) < SMALLEST_CROP:
            raise BadUploadError(
                422, f"a crop must have at least {SMALLEST_CROP} pixels on a side, got {right - left} x {bottom - top}"
            )
        return pixels[:, top:bottom, left:right]


@dataclass(frozen=True, eq=False)
class Upload:
    """An upload that was accepted by its header, or an indexed file.

    Args:
        content: The file, or where it lies.
        cost: Pixels that decoding needs memory for.
        draft: Least width and height at which a JPEG is decoded; None for its full size.
    """

    content: bytes | Path
    cost: int
    draft: tuple[int, int] | None = None

    def pixels(self, crop: Crop | None = None) -> Tensor:
        """The pixels, uint8 (3, height, width), of a part or of all; BadUploadError if the file is damaged."""
        formats = UPLOAD_FORMATS if isinstance(self.content, bytes) else FORMATS
        try:
            with opened_image(self.content, formats=formats, name="the upload") as image:
                if self.draft is not None:
                    image.draft("RGB", self.draft)
                pixels = rgb_pixels(image)
                # after decoding, which turns a TIFF by itself
                orientation = int(image.getexif().get(ORIENTATION) or 1) if crop is not None else 1
            return pixels if crop is None else crop.stored(orientation).of(pixels)
        except ImageError as error:
            raise BadUploadError(422, f"the upload must be a whole image, got a damaged one: {error.reason}") from None


def opened_file(path: str) -> Upload:
    """An indexed file, by its header; BadUploadError (404) if it is gone."""
    try:
        with opened_image(Path(path)) as image:
            return Upload(Path(path), image.width * image.height)
    except ImageError:
        raise BadUploadError(404, "the file of this image is missing or cannot be read: index again") from None


def decoded_upload(
    content: bytes, *, most_pixels: int, decoded_pixels: int | None = None, short_side: int = 512
) -> Tensor:
    """The pixels of an upload, uint8 (3, height, width); see `opened_upload`."""
    upload = opened_upload(content, most_pixels=most_pixels, decoded_pixels=decoded_pixels, short_side=short_side)
    return upload.pixels()


def opened_upload(
    content: bytes, *, most_pixels: int, decoded_pixels: int | None = None, short_side: int = 512
) -> Upload:
    """Check an upload by its header, before any pixel is decoded.

    The orientation in EXIF is not applied, as in the index.

    Args:
        content: The file.
        most_pixels: Largest number of pixels.
        decoded_pixels: Pixels that may be decoded, None for all: a larger JPEG is decoded at a half, a quarter or an
            eighth of its size; a larger image of another format is refused.
        short_side: Least short side of a JPEG that is decoded at a fraction.

    Raises:
        BadUploadError: With the status and the message of the response.
    """
    if not content:
        raise BadUploadError(400, "the upload must be an image, got an empty file")
    known = ", ".join(UPLOAD_FORMATS)
    try:
        with opened_image(content, formats=UPLOAD_FORMATS, name="the upload") as image:
            return _admitted(image, content, most_pixels, min(decoded_pixels or most_pixels, most_pixels), short_side)
    except UnknownFormatError:
        raise BadUploadError(415, f"the upload must be an image ({known}), got a file of another kind") from None
    except TooLargeError as error:
        message = f"an image must have at most {most_pixels:,} pixels, and not be a strip: the upload {error.reason}"
        raise BadUploadError(413, message) from None
    except ImageError as error:
        if isinstance(error.__cause__, BadUploadError):
            raise error.__cause__ from None
        raise BadUploadError(
            422, f"the upload must be a whole image, got one that cannot be read: {error.reason}"
        ) from None


def _admitted(image: Image.Image, content: bytes, most: int, decoded: int, short_side: int) -> Upload:
    """The upload, if its format and size are accepted."""
    size = f"{image.width} x {image.height}"
    pixels = image.width * image.height
    if pixels > most:
        raise BadUploadError(413, f"an image must have at most {most:,} pixels, got {size}")
    # a JPEG of a phone may hold a second view (MPO); the first one is the photograph
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise BadUploadError(415, "the upload must be one image, got an animation or several pages")
    if image.mode == "F":
        raise BadUploadError(415, "pixels must be whole numbers, got floating-point ones")
    is_jpeg = image.format in ("JPEG", "MPO")
    is_progressive = bool(image.info.get("progressive"))
    if is_progressive and pixels * _scans(content) > MOST_SCANS * most:
        raise BadUploadError(413, f"a JPEG of {size} pixels must come in fewer scans, got {_scans(content):,}")
    # the decoder holds all coefficients of a progressive JPEG at once, at any fraction
    held = 2 * pixels // 5 if is_progressive else 0
    if pixels <= decoded:
        return Upload(content, pixels + held)
    draft = (short_side, short_side)
    if is_jpeg:
        image.draft("RGB", draft)
    if not is_jpeg or image.width * image.height > decoded:
        kind = image.format
        raise BadUploadError(
            413,
            f"a {kind} must have at most {decoded:,} pixels, got {size}: a JPEG may have {most:,}, or make it smaller",
        )
    return Upload(content, image.width * image.height + held, draft)


def _scans(content: bytes) -> int:
    """The number of scans of a JPEG."""
    at, scans = 0, 0
    while (found := JPEG_MARKER.search(content, at)) is not None and found[1] != END_OF_IMAGE:
        at = found.end()
        if found[1] != START_OF_IMAGE:
            scans += found[1] == START_OF_SCAN
            at += int.from_bytes(content[at : at + 2], "big")
    return scans


class Thumbnails:
    """Thumbnails of files as JPEG, with a cache of the latest ones.

    Args:
        most_bytes: Size of the cache.
        budget: Pixels that are decoded at a time.
    """

    def __init__(self, most_bytes: int = 2**26, budget: PixelBudget | None = None) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self.budget = budget or PixelBudget(THUMBNAIL_PIXELS)
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[int, str], bytes] = OrderedDict()

    def get(self, image: int, path: str, size: str) -> bytes:
        """The thumbnail of an image by its id; ImageError if its file cannot be read."""
        key = image, size
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
        made = _jpeg(Path(path), SIZES[size], self.budget)
        with self._lock:
            if key not in self._held:
                self._held[key] = made
                self.held_bytes += len(made)
            while self.held_bytes > self.most_bytes:
                _, dropped = self._held.popitem(last=False)
                self.held_bytes -= len(dropped)
        return made


def _jpeg(path: Path, longest: int, budget: PixelBudget) -> bytes:
    from PIL import Image, ImageOps

    with ExitStack() as held:
        image = held.enter_context(opened_image(path))
        image.draft("RGB", (2 * longest, 2 * longest))  # decodes a large JPEG at a fraction of its size
        held.enter_context(budget.taken(image.width * image.height))
        shown = rgb_image(ImageOps.exif_transpose(image))
        if max(shown.size) < 64:  # tiny images are enlarged by whole pixels: browsers would blur them
            factor = -(-96 // max(shown.size))
            shown = shown.resize((shown.width * factor, shown.height * factor), Image.Resampling.NEAREST)
        shown.thumbnail((longest, longest))
        out = io.BytesIO()
        shown.save(out, "JPEG", quality=85)
        return out.getvalue()
