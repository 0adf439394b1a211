"""The service: what requests share, that is the gallery, worker threads, caches and limits."""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pfml.data.resampling import resample
from pfml.serving.added_images import AddedImages
from pfml.serving.audit_queue import AuditQueue
from pfml.serving.decode_queue import DecodeQueue, PixelBudget
from pfml.serving.embedding_map import MapMaker, chosen_method
from pfml.serving.gallery import Gallery
from pfml.serving.images import Crop, Thumbnails, Upload, opened_file, opened_upload
from pfml.serving.metrics import Metrics
from pfml.serving.workers import Admission, DynamicBatcher, Workers
from pfml.terminal import readable

__all__ = ["Limits", "Service", "UnknownNameError", "Uploads"]

#: Images per batch of the model on a GPU, and on a CPU, where layers of more images do not fit into the caches: by
#: `benchmarks/server_uploads.py`, a batch of 16 takes 1.6 times as long for an image.
BATCH, CPU_BATCH = 16, 4
#: The key of an upload.
UPLOAD_KEY = re.compile(r"[\w-]{16}", re.ASCII)
FORGOTTEN = "this upload is no longer kept: send the image again"


class UnknownNameError(KeyError):
    """A request names something that does not exist."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True)
class Limits:
    """Limits of requests.

    Args:
        upload_bytes: Bytes of an upload.
        upload_pixels: Pixels of an upload.
        decoded_pixels: Pixels that are decoded of an upload: a larger JPEG is decoded at a fraction of its size, still
            more than the model needs; a larger image of another format is refused.
        pixels_at_a_time: Pixels that all threads decode together, for uploads and thumbnails; each takes about 20
            bytes of memory.
        waiting: Searches by upload that may run or wait; more get 503.
        waiting_bytes: Bytes that their uploads may hold in memory together; more get 503.
        images: Images of one request, where it may have several.
    """

    upload_bytes: int = 10 * 2**20
    upload_pixels: int = 40_000_000
    decoded_pixels: int = 16_000_000
    pixels_at_a_time: int = 24_000_000
    waiting: int = 128
    waiting_bytes: int = 128 * 2**20
    images: int = 16

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def request_bytes(self) -> int:
        """Bytes of all images of one request."""
        return 4 * self.upload_bytes


class Uploads:
    """The embeddings of the latest uploads, by random keys.

    Args:
        most: How many are kept.
        folder: Where all processes of a server keep them; None for the memory of this one.
    """

    def __init__(self, most: int = 256, folder: Path | None = None) -> None:
        self.most = most
        self.folder = folder
        self._lock = threading.Lock()
        self._vectors: OrderedDict[str, Tensor] = OrderedDict()

    def add(self, vector: Tensor) -> str:
        """Keep an embedding; returns its key."""
        name = secrets.token_urlsafe(12)
        if self.folder is not None:
            self._write(self.folder, name, vector)
            return name
        with self._lock:
            self._vectors[name] = vector
            if len(self._vectors) > self.most:
                self._vectors.popitem(last=False)
        return name

    def get(self, name: str) -> Tensor:
        """The embedding of a key; UnknownNameError (404) if it is no longer kept."""
        if self.folder is not None:
            if (found := self._read(self.folder, name)) is None:
                raise UnknownNameError(FORGOTTEN)
            return found
        with self._lock:
            if name not in self._vectors:
                raise UnknownNameError(FORGOTTEN)
            self._vectors.move_to_end(name)
            return self._vectors[name]

    def _write(self, folder: Path, name: str, vector: Tensor) -> None:
        partial = folder / f".{name}"
        partial.write_bytes(vector.contiguous().numpy().tobytes())
        partial.rename(folder / name)
        kept = [(found.stat().st_mtime_ns, found.path) for found in os.scandir(folder) if found.name[0] != "."]
        for _, path in sorted(kept)[: max(len(kept) - self.most, 0)]:
            Path(path).unlink(missing_ok=True)

    @staticmethod
    def _read(folder: Path, name: str) -> Tensor | None:
        if not UPLOAD_KEY.fullmatch(name):
            return None
        try:
            content = bytearray((folder / name).read_bytes())
            os.utime(folder / name)
        except OSError:
            return None
        return torch.frombuffer(content, dtype=torch.float32)


class Service:
    """A gallery with the workers, caches and limits to serve it.

    Args:
        gallery: The run and its index.
        limits: Of requests.
        map_method: The projection of the map, see `chosen_method`.
        map_points: Images on the map; of a larger index, a subsample. None for as many as the method is quick for.
        add_to: The folder of images that are added by requests; None if none may be.
        uploads: Where all processes of a server keep the embeddings of uploads; None for memory.
    """

    def __init__(
        self,
        gallery: Gallery,
        *,
        limits: Limits | None = None,
        map_method: str = "auto",
        map_points: int | None = None,
        add_to: Path | None = None,
        uploads: Path | None = None,
    ) -> None:
        self.gallery = gallery
        self.metrics = Metrics()
        self.additions = None if add_to is None else AddedImages(add_to, gallery)
        self.limits = limits or Limits()
        self.maps = MapMaker(gallery, gallery.run / "serve", *chosen_method(map_method, len(gallery.index), map_points))
        self.audit = AuditQueue(gallery)
        budget = PixelBudget(self.limits.pixels_at_a_time)
        self.thumbnails = Thumbnails(budget=budget)
        self.uploads = Uploads(folder=uploads)
        self.searches_by_upload = Admission(self.limits.waiting)
        self.upload_bytes = Admission(self.limits.waiting_bytes, "bytes of uploads")
        self._cores = torch.get_num_threads()
        self.decoding = DecodeQueue(budget, threads=2, most=self.limits.waiting, prepare=_use_one_core)
        #: Under load a core for each batch: the cores of one batch would wait for one another in every layer, and for
        #: whoever decodes meanwhile.
        on_cpu = next(gallery.embedder.parameters()).device.type == "cpu"
        size, threads = (CPU_BATCH, self._cores) if on_cpu else (BATCH, 1)
        self.embedding: DynamicBatcher[Tensor, Tensor] = DynamicBatcher(
            "embedding", self._embedded, size, threads=threads
        )
        self.searching = Workers("search", threads=2, most=2 * self.limits.waiting)
        #: one at a time: the index has one writer
        self.writing = Workers("writing", threads=1, most=self.limits.waiting)
        #: of thumbnails
        self.scaling = Workers("thumbnails", threads=2, most=512)

    def close(self) -> None:
        """End the threads."""
        self.embedding.close()
        self.decoding.close()
        self.searching.close()
        self.writing.close()
        self.scaling.close()

    async def embedded(self, content: bytes, part: Crop | None = None) -> Tensor:
        """The embedding (D,) of an upload, or of a part of it; BusyError if too many wait."""
        with self.searches_by_upload.held():
            upload = await self.decoding.run(0, self.opened, content)
            crop = await self.decoding.run(upload.cost, self.cropped, *((upload,) if part is None else (upload, part)))
            return await self.embedding.run(crop)

    async def embedded_file(self, path: str, part: Crop) -> Tensor:
        """The embedding (D,) of a part of an indexed image; BusyError if too many wait."""
        with self.searches_by_upload.held():
            upload = await self.decoding.run(0, opened_file, path)
            crop = await self.decoding.run(upload.cost, self.cropped, upload, part)
            return await self.embedding.run(crop)

    def opened(self, content: bytes) -> Upload:
        """An upload, by its header: whether it is accepted, and how many pixels are decoded."""
        return opened_upload(
            content,
            most_pixels=self.limits.upload_pixels,
            decoded_pixels=self.limits.decoded_pixels,
            short_side=2 * self.gallery.embedder.preprocessing.resize,
        )

    def cropped(self, upload: Upload, part: Crop | None = None) -> Tensor:
        """The input of the model for an upload, (3, crop, crop): small, so that many may wait.

        A part of an image is taken as an image of its own.
        """
        pixels = upload.pixels(part)
        windows = self.gallery.embedder.preprocessing.windows(torch.arange(1), torch.tensor([pixels.shape[1:]]))
        return resample(lambda _: pixels, windows)[0]

    def _embedded(self, crops: list[Tensor]) -> list[Tensor]:
        embedder = self.gallery.embedder
        self.metrics.batches.observe(len(crops))
        torch.set_num_threads(self._cores if self.embedding.is_idle else 1)  # of this thread alone
        with torch.no_grad():
            points: Tensor = embedder(torch.stack(crops).to(next(embedder.parameters()).device))
        return list(points.cpu())

    def read_metrics(self) -> None:
        """Set the gauges of the metrics."""
        queues = {
            "decoding": len(self.decoding),
            "embedding": len(self.embedding),
            "search": len(self.searching),
            "writing": len(self.writing),
            "thumbnails": len(self.scaling),
        }
        self.metrics.read(queues, self.gallery.index.generation, len(self.gallery.index))

    def vector_of(self, image: int) -> Tensor:
        """The embedding (D,) of an indexed image."""
        try:
            return self.gallery.index.vectors([image])[0]
        except (KeyError, OverflowError):  # numbers beyond 64 bits are not ids either
            raise UnknownNameError(f"the index has no image {image}") from None

    def class_named(self, name: str) -> str:
        """The class of the index or of the training set that responses call `name`."""
        known = {readable(one): one for one in (*self.gallery.index.class_counts(), *self.gallery.trained_classes)}
        if name not in known or not name:
            raise UnknownNameError(f"the run and its index have no class {name!r}")
        return known[name]

    def indexed_as(self, path: str) -> int | None:
        """The id of an image in the index, by its path; None if it is not indexed."""
        entry = self.gallery.index.find(str(Path(path).absolute()))
        return None if entry is None else entry.id


def _use_one_core() -> None:
    """Let torch use one core in this thread."""
    torch.set_num_threads(1)
