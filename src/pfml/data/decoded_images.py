"""Images that have been decoded once, into memory or onto the GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from pfml.data.decoding import Track, collect, read_rgb, shrink
from pfml.data.fused_crops import resample_fused, unavailable
from pfml.data.pinned_memory import to_device
from pfml.data.resampling import PixelBuffer, resample, resample_batch
from pfml.data.windows import Windows
from pfml.memory import return_freed_memory

__all__ = ["DecodedImages", "decode"]


class DecodedImages:
    """An image source whose pixels lie in one buffer.

    Args:
        pixels: In memory (crops are made on the CPU), or on `device` (crops are made there).
        device: Where crops are delivered.
        workers: Threads that make the crops of a batch on the CPU.
        description: What was decoded to where, in words.
    """

    def __init__(
        self, pixels: PixelBuffer, *, device: torch.device | str = "cpu", workers: int = 2, description: str = ""
    ) -> None:
        self.pixels = pixels
        self.device = torch.device(device)
        self.workers = workers
        self.description = description or f"{len(pixels):,} images in memory"

    def __len__(self) -> int:
        return len(self.pixels)

    def __repr__(self) -> str:
        return f"DecodedImages({self.description})"

    @property
    def sizes(self) -> Tensor:
        """Height and width of each image, (N, 2) int64."""
        return self.pixels.sizes

    @property
    def execution(self) -> str:
        """How crops are made: "fused" by Triton or "batched" by torch on a GPU, "image by image" in memory."""
        device = self.pixels.data.device
        if device.type == "cpu":
            return "image by image"
        return "fused" if unavailable(device) is None else "batched"

    def crops(self, plan: Iterable[Windows]) -> Iterator[Tensor]:
        """(B, 3, size, size) float32 RGB in [0, 1] on the device, for each item of the plan, in its order."""
        execution = self.execution
        if execution != "image by image":
            make = resample_fused if execution == "fused" else resample_batch
            yield from (make(self.pixels, windows) for windows in plan)
            return
        # one thread is no pool: torch's own threads share an image then
        with ThreadPoolExecutor(max(self.workers, 1)) as pool:
            for windows in plan:
                if windows.is_copy:
                    crops = resample_batch(self.pixels, windows)
                else:
                    crops = resample(self.pixels.image, windows, pool=pool if self.workers > 1 else None)
                yield to_device(crops, self.device)


def decode(
    paths: tuple[Path, ...],
    sizes: Tensor,
    short_side: int | None,
    workers: int,
    track: Track | None,
    kept: dict[Path, Tensor] | None = None,
) -> PixelBuffer:
    """All files decoded into one buffer in memory.

    Args:
        paths: The files.
        sizes: (N, 2), their heights and widths after shrinking, as their headers have them.
        short_side: See `pfml.data.decoding.shrink`.
        workers: Threads.
        track: Shows the progress.
        kept: File -> its pixels, of files that have been decoded before; what need not be shrunk becomes a view of the
            buffer, so that it is in memory once.

    Raises:
        UnreadableImagesError: Once, for all files that cannot be read.
    """
    lengths = 3 * sizes.prod(1)
    buffer = PixelBuffer(torch.empty(int(lengths.sum()), dtype=torch.uint8), lengths.cumsum(0) - lengths, sizes)

    expected = [tuple(size) for size in sizes.tolist()]

    def fill(index: int) -> None:
        path = paths[index]
        image = read_rgb(path, short_side) if kept is None else shrink(kept[path], short_side)
        if tuple(image.shape[1:]) != expected[index]:
            raise RuntimeError(f"{path} has changed while it was being read, or its header is wrong")
        copy = buffer.image(index)
        copy.numpy()[:] = image.numpy()  # torch would wake all its threads for each image
        if kept is not None and image is kept[path]:
            kept[path] = copy

    for _ in collect(range(len(paths)), fill, workers, track, "decoding images"):
        pass
    if kept is not None:
        return_freed_memory()
    return buffer
