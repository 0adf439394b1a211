"""The crops of `Windows` on a GPU in two launches: `resample_fused`.

The same crops as `pfml.data.resampling` makes, by other means: the geometry of the batch travels to the device as one
small tensor, and the kernels of `crop_kernels` compute weights from it as they go, along rows first and then along
columns. The hundred operations of `resample_batch` take a CPU longer to launch than the device needs for them.

Memory: a workspace of (rows needed, size) float32 per channel, at most WORKSPACE values at a time, or one image.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pfml.data.pinned_memory import to_device
from pfml.data.resampling import PixelBuffer
from pfml.data.windows import INTERPOLATIONS, Windows

__all__ = ["resample_fused", "unavailable"]

Numbers = NDArray[Any]

#: float32 values between the two launches (256 MiB); batches that need more are cut
WORKSPACE = 2**26
#: the workspace is allocated in multiples of this many values (8 MiB), so that batches of like sizes reuse its memory
GRAIN = 2**21

INSTALLED = find_spec("triton") is not None
#: Whether Triton runs its kernels in Python, on a CPU: for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: Rows and columns that one program computes, and its warps.
ACROSS = DOWN = (32, 64)
WARPS = 4


def unavailable(device: torch.device) -> str | None:
    """Why crops of pixels on `device` cannot be made here, in words; None if they can."""
    if device.type != "cuda" and not INTERPRETED:
        return f"fused crops need pixels on a CUDA device, got {device}: use resample_batch"
    if not INSTALLED:
        return "fused crops need the package triton: pip install triton, or use resample_batch"
    return None


def resample_fused(pixels: PixelBuffer, windows: Windows, *, workspace_values: int = WORKSPACE) -> Tensor:
    """All crops of `windows`, (B, 3, size, size) float32 in [0, 1] on the device of `pixels`, without a wait for it."""
    device = pixels.data.device
    reason = unavailable(device)
    if reason is not None:
        raise ValueError(reason)
    from pfml.data import crop_kernels

    size = windows.size
    crops = torch.empty(len(windows), 3, size, size, device=device, dtype=torch.float32)
    table, heights = _geometry(pixels, windows)
    parts = list(_parts(heights, workspace_values // (3 * size)))
    for part in parts:
        table[part, -1] = 3 * (heights[part].cumsum() - heights[part])
    geometry = to_device(torch.from_numpy(table), device)
    settings = {"SIZE": size, "RADIUS": int(INTERPOLATIONS[windows.interpolation]), "num_warps": WARPS}
    with torch.cuda.device_of(crops):
        for part in parts:
            count, rows, tallest = part.stop - part.start, int(heights[part].sum()), int(heights[part].max())
            workspace = crops.new_empty(_blocks(3 * rows * size, GRAIN) * GRAIN)
            grid = (count * _blocks(size, ACROSS[1]), _blocks(3 * max(tallest, 1), ACROSS[0]))
            crop_kernels.across[grid](
                pixels.data, geometry[part], workspace, ROW_BLOCK=ACROSS[0], COLUMN_BLOCK=ACROSS[1], **settings
            )
            grid = (count * _blocks(3 * size, DOWN[1]), _blocks(size, DOWN[0]))
            crop_kernels.down[grid](
                workspace, geometry[part], crops[part], ROW_BLOCK=DOWN[0], COLUMN_BLOCK=DOWN[1], **settings
            )
    return crops


def _geometry(pixels: PixelBuffer, windows: Windows) -> tuple[Numbers, Numbers]:
    """One row of `crop_kernels.COLUMNS` per crop, but for `workspace_row`; and the source rows that each needs, (B,).

    In float64, which has digits for any offset. By numpy, which takes a third of torch's time for arrays of this size.
    """
    from pfml.data.crop_kernels import COLUMNS

    indices, lower, upper = (part.numpy() for part in (windows.indices, windows.lower, windows.upper))
    first, end = (part.numpy() for part in windows.footprint())
    sizes = pixels.sizes.numpy()[indices]
    # the kernels read where they are told to: nothing beyond an image
    if (lower < 0).any() or (upper > sizes).any():
        row = int(((lower < 0) | (upper > sizes)).any(1).argmax())
        raise ValueError(
            f"windows must lie in their images, got rows and columns from {lower[row].tolist()} "
            f"to {upper[row].tolist()} of an image of size {sizes[row].tolist()} at index {row}"
        )
    table = np.empty((len(windows), len(COLUMNS)))
    table[:, 0] = pixels.offsets.numpy()[indices]
    for column, part in enumerate((sizes, windows.start.numpy(), windows.extent.numpy(), first, end)):
        table[:, 1 + 2 * column : 3 + 2 * column] = part
    table[:, 11] = windows.flipped.numpy()
    return table, np.maximum(end[:, 0] - first[:, 0], 0)


def _parts(heights: Numbers, most_rows: int) -> Iterator[slice]:
    """Consecutive crops whose source rows are at most `most_rows` together; one at least."""
    ends = heights.cumsum()
    begin = before = 0
    while begin < len(heights):
        stop = max(int(np.searchsorted(ends, before + most_rows, side="right")), begin + 1)
        yield slice(begin, stop)
        begin, before = stop, int(ends[stop - 1])


def _blocks(length: int, block: int) -> int:
    return -(-length // block)
