"""Images that are read once, embedded and forgotten: no more than a few batches are in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from pfml.data.decoding import ImageError, in_threads, read_rgb
from pfml.data.resampling import resample
from pfml.data.transfer import send
from pfml.data.windows import Windows

__all__ = ["OnePass"]


class OnePass:
    """An image source (`pfml.data.sources.ImageSource`) that decodes files as they are asked for.

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
            yield send(crops, self.device)

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
