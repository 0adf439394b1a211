"""Images that are read once, embedded and forgotten: no more than a few batches are in memory."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pfml.data.decoding import ImageError, Track, in_threads, read_rgb, read_size
from pfml.data.pinned_memory import to_device
from pfml.data.resampling import resample
from pfml.data.windows import Windows
from pfml.evaluation.model_evaluation import embed
from pfml.models.embedder import Embedder
from pfml.models.factorized import FactorizedBackbone
from pfml.models.inference import folded
from pfml.models.own_network import OwnNetwork
from pfml.storage.file_state import FileState
from pfml.storage.files import SpecialFileError

__all__ = [
    "EmbeddedFiles",
    "Engine",
    "LocalEngine",
    "OnePass",
    "OpenedFiles",
    "described",
    "embed_files",
    "open_files",
]

#: Images from which it pays to fold BatchNorm into convolutions, which takes as long as embedding some hundred.
FOLDED_FROM = 512


@dataclass(frozen=True, eq=False)
class EmbeddedFiles:
    """Images that could be read, and those that could not.

    Args:
        paths: The former, in the order in which they were given.
        files: The state of each file before it was read.
        vectors: (n, D) on the CPU.
        failures: The latter.
    """

    paths: tuple[str, ...]
    files: tuple[FileState, ...]
    vectors: Tensor
    failures: tuple[ImageError, ...]


def embed_files(
    embedder: Embedder, paths: Sequence[str], *, batch_size: int, workers: int, track: Track | None = None
) -> EmbeddedFiles:
    """The embeddings of image files, of which no more than a few batches are in memory at a time.

    Args:
        embedder: On the device where it is to compute.
        paths: The files; those that cannot be read are noted.
        batch_size: Images that the model embeds at a time.
        workers: Threads that read files.
        track: Shows the progress, as track(iterable, description, total).
    """
    opened = open_files(paths, workers)
    device = next(embedder.parameters()).device
    images = OnePass(opened.paths, opened.sizes, device=device, workers=workers)
    points = embed(_for_many(embedder, len(images)), images, batch_size=batch_size, track=track).cpu()
    good = [k for k in range(len(opened.paths)) if k not in images.failures]
    return EmbeddedFiles(
        tuple(opened.paths[k] for k in good),
        tuple(opened.files[k] for k in good),
        points[good],
        (*opened.failures, *(images.failures[k] for k in sorted(images.failures))),
    )


@dataclass(frozen=True, eq=False)
class OpenedFiles:
    """Files whose header is that of an image, and those that have none.

    Args:
        paths: The former, in the order in which they were given.
        files: The state of each.
        sizes: (n, 2) int64, heights and widths by the headers.
        failures: The latter.
    """

    paths: tuple[str, ...]
    files: tuple[FileState, ...]
    sizes: Tensor
    failures: tuple[ImageError, ...]


def open_files(paths: Sequence[str], workers: int) -> OpenedFiles:
    """The states of files and the sizes of their images, which are not decoded yet."""
    opened: list[tuple[str, FileState, tuple[int, int]]] = []
    failures: list[ImageError] = []
    for path, looked in zip(paths, in_threads(_look, paths, workers), strict=True):
        if isinstance(looked, ImageError):
            failures.append(looked)
        else:
            opened.append((path, *looked))
    sizes = torch.tensor([size for *_, size in opened], dtype=torch.int64).reshape(-1, 2)
    return OpenedFiles(tuple(path for path, *_ in opened), tuple(file for _, file, _ in opened), sizes, tuple(failures))


class Engine(Protocol):
    """Where images are embedded: in this process, or in many."""

    def embed(
        self,
        embedder: Embedder,
        lists: Sequence[Sequence[str]],
        *,
        batch_size: int,
        workers: int,
        track: Track | None = None,
    ) -> Generator[tuple[int, EmbeddedFiles], None, None]:
        """The embeddings of each list of files, with the number of the list, in any order; see `embed_files`."""


@dataclass(frozen=True)
class LocalEngine:
    """Embeds in this process, one list after the other."""

    def embed(
        self,
        embedder: Embedder,
        lists: Sequence[Sequence[str]],
        *,
        batch_size: int,
        workers: int,
        track: Track | None = None,
    ) -> Generator[tuple[int, EmbeddedFiles], None, None]:
        """The embeddings of each list of files, in their order; see `Engine`."""
        for number, paths in enumerate(lists):
            label = f"embedding shard {number + 1:,} of {len(lists):,}" if len(lists) > 1 else "embedding"
            shown = None if track is None else described(track, label)
            yield number, embed_files(embedder, paths, batch_size=batch_size, workers=workers, track=shown)


def described(track: Track, description: str) -> Track:
    """`track` with this description in place of the one that it is called with."""

    def tracked(items: Iterable[Any], _: str, total: int) -> Iterable[Any]:
        return track(items, description, total)

    return tracked


def _for_many(embedder: Embedder, images: int) -> Embedder:
    """The embedder that is fastest for `images` images: many on a CPU get a copy with BatchNorm folded.

    Its embeddings differ by the rounding of float32, about as batches of another size do.
    """
    backbone, device = embedder.backbone, next(embedder.parameters()).device
    if device.type != "cpu" or images < FOLDED_FROM or isinstance(backbone, OwnNetwork | FactorizedBackbone):
        return embedder
    side = embedder.preprocessing.crop
    example = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    try:
        found = folded(embedder, example)
    except ValueError:  # a convolution's output is used twice
        return embedder
    assert isinstance(found, Embedder)
    return found


class OnePass:
    """An image source (`pfml.data.image_source.ImageSource`) that decodes files as they are asked for.

    A file that cannot be decoded is noted in `failures`, and a black image takes its place in the batch: the caller
    drops what became of it.

    Args:
        paths: The files.
        sizes: (N, 2) int64, heights and widths by the headers of the files.
        device: Where crops are delivered.
        workers: Threads, each of which makes whole batches.
    """

    def __init__(self, paths: Sequence[str], sizes: Tensor, *, device: torch.device, workers: int = 2) -> None:
        self.paths = paths
        self.sizes = sizes
        self.device = device
        self.workers = workers
        self.description = f"{len(paths):,} images read from files, once"
        self.failures: dict[int, ImageError] = {}

    def __len__(self) -> int:
        return len(self.sizes)

    def crops(self, plan: Iterable[Windows]) -> Iterator[Tensor]:
        """(B, 3, size, size) float32 RGB in [0, 1] on the device, for each item of the plan, in its order."""
        for crops in in_threads(lambda windows: resample(self._image, windows), plan, self.workers):
            yield to_device(crops, self.device)

    def _image(self, index: int) -> Tensor:
        height, width = self.sizes[index].tolist()
        try:
            image = read_rgb(self.paths[index])
            if tuple(image.shape[1:]) != (height, width):
                raise ImageError(self.paths[index], "has changed while it was being read, or its header is wrong")
            return image
        except ImageError as error:
            self.failures[index] = error
            return torch.zeros(3, height, width, dtype=torch.uint8)


def _look(path: str) -> tuple[FileState, tuple[int, int]] | ImageError:
    """The state of a file and the size of its image, by its header."""
    try:
        return FileState.of(path), read_size(path)
    except ImageError as error:
        return error
    except SpecialFileError as error:
        return ImageError(path, error.reason)
    except OSError as error:
        return ImageError(path, "does not exist" if isinstance(error, FileNotFoundError) else str(error))
