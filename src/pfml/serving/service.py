"""What requests share: the gallery, the threads, the caches, and the limits."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pfml.data.resampling import resample
from pfml.plots.maps import Method
from pfml.serving.audit_queue import AuditQueue
from pfml.serving.decode_queue import DecodeQueue, PixelBudget
from pfml.serving.embedding_map import MapMaker
from pfml.serving.gallery import Gallery
from pfml.serving.images import Thumbnails, Upload, opened_upload
from pfml.serving.workers import Batches, ByteBudget, Turnstile, Workers
from pfml.terminal import readable

__all__ = ["Limits", "Service", "UnknownNameError", "Uploads", "shown"]


#: Images in the network at a time.
BATCH = 16


class UnknownNameError(KeyError):
    """A request names something that is not there."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Limits:
    """How much a request may ask for.

    Args:
        upload_bytes: Of an image that is sent.
        upload_pixels: Of it.
        decoded_pixels: That are decoded of it at most: a JPEG of more is decoded at a fraction of its sides, which is
            still more than the network sees; an image of another format is refused.
        pixels_at_a_time: That all threads decode together, uploads and pictures; each takes about 20 bytes of memory.
        waiting: Searches by upload that may wait; more are answered with 503.
        waiting_bytes: That their files may have together in memory; beyond, too.
    """

    upload_bytes: int = 10 * 2**20
    upload_pixels: int = 40_000_000
    decoded_pixels: int = 16_000_000
    pixels_at_a_time: int = 24_000_000
    waiting: int = 128
    waiting_bytes: int = 128 * 2**20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


class Uploads:
    """The embeddings of the latest uploads, by names that cannot be guessed."""

    def __init__(self, most: int = 256) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._vectors: OrderedDict[str, Tensor] = OrderedDict()

    def add(self, vector: Tensor) -> str:
        """Keep an embedding; returns its name."""
        name = secrets.token_urlsafe(12)
        with self._lock:
            self._vectors[name] = vector
            if len(self._vectors) > self.most:
                self._vectors.popitem(last=False)
        return name

    def get(self, name: str) -> Tensor:
        """The embedding of this name."""
        with self._lock:
            if name not in self._vectors:
                raise UnknownNameError("this upload is no longer held: send the image again")
            self._vectors.move_to_end(name)
            return self._vectors[name]


class Service:
    """A gallery and what it takes to serve it.

    Args:
        gallery: What is served.
        limits: Of requests.
        map_method: How the map is made.
        map_points: Images on the map; of a larger index, a sample.
    """

    def __init__(
        self, gallery: Gallery, *, limits: Limits | None = None, map_method: Method = "tsne", map_points: int = 5000
    ) -> None:
        self.gallery = gallery
        self.limits = limits or Limits()
        self.maps = MapMaker(gallery, gallery.run / "serve", map_method, map_points)
        self.audit = AuditQueue(gallery.run, gallery.trained_classes)
        budget = PixelBudget(self.limits.pixels_at_a_time)
        self.thumbnails = Thumbnails(budget=budget)
        self.uploads = Uploads()
        self.turnstile = Turnstile(self.limits.waiting)
        self.bodies = ByteBudget(self.limits.waiting_bytes)
        self.decoding = DecodeQueue(budget, threads=2, most=self.limits.waiting)
        #: one network, one thread: torch itself uses the cores
        self.embedding: Batches[Tensor, Tensor] = Batches("embedding", self._embedded, BATCH)
        self.searching = Workers("search", threads=2, most=2 * self.limits.waiting)
        self.drawing = Workers("pictures", threads=2, most=512)

    def close(self) -> None:
        """End the threads."""
        self.embedding.close()
        self.decoding.close()
        for workers in (self.searching, self.drawing):
            workers.close()

    async def embedded(self, content: bytes) -> Tensor:
        """The embedding (D,) of an image that was sent; BusyError if too many are under way."""
        with self.turnstile.passed():
            upload = await self.decoding.run(0, self.opened, content)
            crop = await self.decoding.run(upload.cost, self.cropped, upload)
            return await self.embedding.run(crop)

    def opened(self, content: bytes) -> Upload:
        """An image that was sent, by its header: whether it is taken, and what it costs to decode it."""
        return opened_upload(
            content,
            most_pixels=self.limits.upload_pixels,
            decoded_pixels=self.limits.decoded_pixels,
            short_side=2 * self.gallery.embedder.preprocessing.resize,
        )

    def cropped(self, upload: Upload) -> Tensor:
        """What the network sees of an image that was sent, (3, crop, crop): small, so that many may wait."""
        pixels = upload.pixels()
        windows = self.gallery.embedder.preprocessing.windows(torch.arange(1), torch.tensor([pixels.shape[1:]]))
        return resample(lambda _: pixels, windows)[0]

    def _embedded(self, crops: list[Tensor]) -> list[Tensor]:
        embedder = self.gallery.embedder
        with torch.no_grad():
            points: Tensor = embedder(torch.stack(crops).to(next(embedder.parameters()).device))
        return list(points.cpu())

    def vector_of(self, image: int) -> Tensor:
        """The embedding (D,) of an indexed image."""
        try:
            return self.gallery.index.vectors([image])[0]
        except (KeyError, OverflowError):  # numbers beyond 64 bits are no ids either
            raise UnknownNameError(f"the index has no image {image}") from None

    def class_named(self, name: str) -> str:
        """The class of the index or of the training set that is shown as `name`."""
        known = {shown(one): one for one in (*self.gallery.index.class_counts(), *self.gallery.trained_classes)}
        if name not in known or not name:
            raise UnknownNameError(f"the run and its index have no class {name!r}")
        return known[name]

    def indexed_as(self, path: str) -> int | None:
        """The id of a training image in the index, by its path; None if it is not there."""
        entry = self.gallery.index.find(str(Path(path).absolute()))
        return None if entry is None else entry.id


def shown(text: str) -> str:
    """The text as it can be sent: bytes of a file name that are no UTF-8 are escaped, as everywhere."""
    return readable(text)
