"""The Triton kernels of crops. `fused_crops` launches them.

    across   along the rows of each image: what its window needs of them, into a workspace
    down     along the columns of the workspace: the crops

Each kernel computes the weights of `pfml.data.windows` as it goes, in float64: they are few, and positions in a large
image leave float32 no digits for them. Sums are float32. Where nothing is to be interpolated, weights are exactly 0 and
1, and the crop is an exact copy.

A program owns the values that it writes and adds up in a fixed order, so equal inputs give equal bits. What changes
from batch to batch is read from a tensor or is the grid's, and not an argument, which Triton might compile for again.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["COLUMNS", "across", "down"]

#: What a row of the geometry says of its crop, in this order; `fused_crops` fills it in.
COLUMNS = (
    "offset", "height", "width", "start_y", "start_x", "extent_y", "extent_x",
    "first_y", "first_x", "end_y", "end_x", "flipped", "workspace_row",
)  # fmt: skip
WIDTH = tl.constexpr(len(COLUMNS))
OFFSET, HEIGHT, SIDE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
#: of y; the same of x is the next
START, EXTENT, FIRST, END = tl.constexpr(3), tl.constexpr(5), tl.constexpr(7), tl.constexpr(9)
FLIPPED, WORKSPACE_ROW = tl.constexpr(11), tl.constexpr(12)


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
    """workspace[first + channel * rows + y, k] = sum_j w_kj pixels[channel, first_y + y, j], for the rows needed."""
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
        offsets = (tl.load(crop + WORKSPACE_ROW).to(tl.int64) + rows) * SIZE
        tl.store(workspace + offsets[:, None] + columns[None, :], sums, mask=inside)


@triton.jit
def down(
    workspace, geometry, crops,
    SIZE: tl.constexpr, RADIUS: tl.constexpr, ROW_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr,
):  # fmt: skip
    """crops[channel, k, x] = sum_j w_kj workspace[first + channel * rows + j - first_y, x] / 255, in [0, 1]."""
    num_blocks: tl.constexpr = (3 * SIZE + COLUMN_BLOCK - 1) // COLUMN_BLOCK
    image = (tl.program_id(0) // num_blocks).to(tl.int64)
    crop = geometry + image * WIDTH
    first, end = tl.load(crop + FIRST).to(tl.int32), tl.load(crop + END).to(tl.int32)
    rows = tl.program_id(1) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    columns = (tl.program_id(0) % num_blocks) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)  # of all three channels
    channels, x = columns // SIZE, columns % SIZE
    first_rows = tl.load(crop + WORKSPACE_ROW).to(tl.int64) + channels * (end - first)
    sources = workspace + first_rows * SIZE + x
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
