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
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from pfml.data.resampling import PixelBuffer
from pfml.data.transfer import send
from pfml.data.windows import INTERPOLATIONS, Windows

__all__ = ["COLUMNS", "across", "down", "resample_fused", "unavailable"]

#: What a row of the geometry says of its crop, in this order; `fused_crops` fills it in.
COLUMNS = (
    "offset", "height", "width", "start_y", "start_x", "extent_y", "extent_x",
    "first_y", "first_x", "end_y", "end_x", "flipped", "place",
)  # fmt: skip
WIDTH = tl.constexpr(len(COLUMNS))
OFFSET, HEIGHT, SIDE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
#: of y; the same of x is the next
START, EXTENT, FIRST, END = tl.constexpr(3), tl.constexpr(5), tl.constexpr(7), tl.constexpr(9)
FLIPPED, PLACE = tl.constexpr(11), tl.constexpr(12)


@triton.jit
def _reach(crop, ticks, AXIS: tl.constexpr, SIZE: tl.constexpr, RADIUS: tl.constexpr):
    """For output pixels `ticks`: first source pixel in the filter, its distance, the next ones' steps; how many."""
    step = tl.load(crop + EXTENT + AXIS) / SIZE
    stretch = tl.maximum(step, 1.0)
    center = tl.load(crop + START + AXIS) + (ticks + 0.5) * step
    nearest = tl.ceil(center - RADIUS * stretch - 0.5)
    count = (2 * RADIUS * stretch).to(tl.int32) + 1
    return nearest.to(tl.int32), (nearest + 0.5 - center) / stretch, 1.0 / stretch, count


@triton.jit
def _weight(distance, RADIUS: tl.constexpr):
    """The triangle, or Keys' cubic with a = -1/2."""
    distance = tl.abs(distance)
    if RADIUS == 1:
        return tl.maximum(1.0 - distance, 0.0)
    near = (1.5 * distance - 2.5) * distance * distance + 1.0
    far = ((-0.5 * distance + 2.5) * distance - 4.0) * distance + 2.0
    return tl.where(distance < 1.0, near, tl.where(distance < 2.0, far, 0.0))


@triton.jit
def across(
    pixels, geometry, workspace,
    SIZE: tl.constexpr, RADIUS: tl.constexpr, ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr,
):  # fmt: skip
    """workspace[place + channel * rows + y, k] = sum_j w_kj pixels[channel, first_y + y, j], for the rows needed."""
    num_blocks: tl.constexpr = (SIZE + COLUMN_BLOCK - 1) // COLUMN_BLOCK
    crop = geometry + (tl.program_id(0) // num_blocks).to(tl.int64) * WIDTH
    first_y = tl.load(crop + FIRST).to(tl.int32)
    num_rows = tl.load(crop + END).to(tl.int32) - first_y
    if tl.program_id(1) * ROW_BLOCK < 3 * num_rows:
        height, width = tl.load(crop + HEIGHT).to(tl.int64), tl.load(crop + SIDE).to(tl.int64)
        first, end = tl.load(crop + FIRST + 1).to(tl.int32), tl.load(crop + END + 1).to(tl.int32)
        rows = tl.program_id(1) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)  # of all three channels
        columns = (tl.program_id(0) % num_blocks) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
        ticks = tl.minimum(columns, SIZE - 1)
        ticks = tl.where(tl.load(crop + FLIPPED) > 0, SIZE - 1 - ticks, ticks)
        source_rows = (rows // num_rows) * height + first_y + rows % num_rows
        sources = pixels + tl.load(crop + OFFSET).to(tl.int64) + source_rows * width
        nearest, distance, step, count = _reach(crop, ticks.to(tl.float64), 1, SIZE, RADIUS)
        inside = (rows < 3 * num_rows)[:, None] & (columns < SIZE)[None, :]
        total = tl.zeros((COLUMN_BLOCK,), dtype=tl.float64)
        sums = tl.zeros((ROW_BLOCK, COLUMN_BLOCK), dtype=tl.float32)
        for k in range(count):
            source = nearest + k
            counts = (source >= first) & (source < end)
            weight = tl.where(counts, _weight(distance + k * step, RADIUS), 0.0)
            value = tl.load(sources[:, None] + source[None, :], mask=inside & counts[None, :], other=0)
            sums += weight.to(tl.float32)[None, :] * value.to(tl.float32)
            total += weight
        sums = sums * (1.0 / total).to(tl.float32)[None, :]
        places = (tl.load(crop + PLACE).to(tl.int64) + rows) * SIZE
        tl.store(workspace + places[:, None] + columns[None, :], sums, mask=inside)


@triton.jit
def down(
    workspace, geometry, crops,
    SIZE: tl.constexpr, RADIUS: tl.constexpr, ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr,
):  # fmt: skip
    """crops[channel, k, x] = sum_j w_kj workspace[place + channel * rows + j - first_y, x] / 255, in [0, 1]."""
    num_blocks: tl.constexpr = (3 * SIZE + COLUMN_BLOCK - 1) // COLUMN_BLOCK
    image = (tl.program_id(0) // num_blocks).to(tl.int64)
    crop = geometry + image * WIDTH
    first, end = tl.load(crop + FIRST).to(tl.int32), tl.load(crop + END).to(tl.int32)
    rows = tl.program_id(1) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    columns = (tl.program_id(0) % num_blocks) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)  # of all three channels
    channels, x = columns // SIZE, columns % SIZE
    places = tl.load(crop + PLACE).to(tl.int64) + channels * (end - first)
    sources = workspace + places * SIZE + x
    ticks = tl.minimum(rows, SIZE - 1)
    nearest, distance, step, count = _reach(crop, ticks.to(tl.float64), 0, SIZE, RADIUS)
    inside = (rows < SIZE)[:, None] & (columns < 3 * SIZE)[None, :]
    total = tl.zeros((ROW_BLOCK,), dtype=tl.float64)
    sums = tl.zeros((ROW_BLOCK, COLUMN_BLOCK), dtype=tl.float32)
    for k in range(count):
        source = nearest + k
        counts = (source >= first) & (source < end)
        weight = tl.where(counts, _weight(distance + k * step, RADIUS), 0.0)
        line = (source - first).to(tl.int64) * SIZE
        value = tl.load(sources[None, :] + line[:, None], mask=inside & counts[:, None], other=0.0)
        sums += weight.to(tl.float32)[:, None] * value
        total += weight
    sums = tl.div_rn(sums * (1.0 / total).to(tl.float32)[:, None], 255.0)
    # the rounding of sums may leave [0, 1] by a digit, and the cubic filter by more
    every: tl.constexpr = tl.PropagateNan.ALL
    sums = tl.minimum(tl.maximum(sums, 0.0, propagate_nan=every), 1.0, propagate_nan=every)
    lines = ((image * 3 + channels) * SIZE)[None, :] + rows[:, None]
    tl.store(crops + lines * SIZE + x[None, :], sums, mask=inside)


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
    from pfml.data import fused_crops as crop_kernels

    size = windows.size
    crops = torch.empty(len(windows), 3, size, size, device=device, dtype=torch.float32)
    table, heights = _geometry(pixels, windows)
    parts = list(_parts(heights, workspace_values // (3 * size)))
    for part in parts:
        table[part, -1] = 3 * (heights[part].cumsum() - heights[part])
    geometry = send(torch.from_numpy(table), device)
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
    """One row of `crop_kernels.COLUMNS` per crop, without its place; and the source rows that each needs, (B,).

    In float64, which has digits for any offset. By numpy, which takes a third of torch's time for arrays of this size.
    """
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


def _parts(heights: Numbers, room: int) -> Iterator[slice]:
    """Consecutive crops whose source rows fit the room; one at least."""
    ends = heights.cumsum()
    begin = before = 0
    while begin < len(heights):
        stop = max(int(np.searchsorted(ends, before + room, side="right")), begin + 1)
        yield slice(begin, stop)
        begin, before = stop, int(ends[stop - 1])


def _blocks(length: int, block: int) -> int:
    return -(-length // block)
