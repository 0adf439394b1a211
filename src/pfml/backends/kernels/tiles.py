"""Pairs of different classes, tile by tile, from products of split-precision points."""

from __future__ import annotations

import triton
import triton.language as tl

from pfml.backends.kernels.laws import over, pair
from pfml.backends.kernels.points import source_weight

__all__ = ["gather", "index", "interact", "screen"]

#: r of a pair that does not count; farther than any that does (`laws.LARGEST` ends every interaction before).
FAR = tl.constexpr(1e19)
#: No two positions are so far apart (2 * LONGEST at most).
FARTHEST = tl.constexpr(256.0)
#: Bound of the rounding errors in what `screen` compares.
ROUNDING = tl.constexpr(2.0**-4)


@triton.jit
def screen(
    rows, columns, flags, num_tiles, num_row_blocks, num_column_blocks, padded, reach, weights,
    SYMMETRIC: tl.constexpr, EVERYWHERE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Flag the tiles that may hold an acting pair of different classes; flags must be zero before.

    A program has up to `num_tiles` tiles of the same rows, and takes BLOCK / PARTS columns at a time. WHOLE: the rows
    stay in shared memory, and CHUNK is all dimensions. By symmetry a block of rows has half of all blocks as columns:
    those that come next, from itself on and around the end.

    Let y = steps * quantized, and a = reach / 2 + errors. Two positions within reach have |y_i - y_j| < a_i + a_j, or

        y_i y_j + a_i a_j > b_i + b_j,    b = (|y|^2 - a^2) / 2.

    The product of integers is exact. Positions are no longer than 126 and errors below 23, so |y| < 149 and a < 151.
    All numbers are below 2^17, so float32 rounds each by 2^-8 at most. 13 are rounded: |y|^2, a^2 and their difference,
    twice; the product, as float32 and times each step; a_i a_j; three sums. Together that is less than ROUNDING. What
    is rounded in a itself is covered, too: `reach` and errors come a millionth too large.
    """
    block_row, first = tl.program_id(0), tl.program_id(1) * num_tiles
    origin, end = 0, num_column_blocks
    if SYMMETRIC:  # of two blocks that are opposite each other, one has the tile
        opposite = (num_row_blocks % 2 == 0) & (block_row < num_row_blocks // 2)
        origin, end = block_row, (num_row_blocks + 1) // 2 + opposite.to(tl.int32)
    row = block_row * BLOCK + tl.arange(0, BLOCK)
    row_kind = tl.load(rows.kinds + row)
    if weights.proxies_on_proxies == 0.0:  # then a sample must be there
        kind = tl.max(row_kind, 0)
        for number in range(first, tl.minimum(first + num_tiles, end)):
            column = (origin + number) % num_column_blocks * BLOCK + tl.arange(0, BLOCK)
            kind = tl.maximum(kind, tl.max(tl.load(columns.kinds + column), 0))
        end = tl.where(kind == 1, end, first)
    within, steps = tl.arange(0, BLOCK // PARTS), tl.arange(0, CHUNK)
    left = rows.quantized + row[:, None].to(tl.int64) * padded + steps[None, :]
    there = within[:, None] * padded + steps[None, :]
    if WHOLE:
        kept = tl.load(left)
    half = 0.5 * tl.minimum(reach * tl.load(rows.scale), FARTHEST)
    row_reach, row_step = half + tl.load(rows.errors + row), tl.load(rows.steps + row)
    row_least = 0.5 * (tl.load(rows.quantized_squares + row) - row_reach * row_reach) - ROUNDING
    for part in range(first * PARTS, tl.minimum(first + num_tiles, end) * PARTS):
        block_column = origin + part // PARTS
        block_column -= tl.where(block_column < num_column_blocks, 0, num_column_blocks)
        first_column = block_column * BLOCK + part % PARTS * (BLOCK // PARTS)
        column = first_column + within
        some = part >= 0
        if not EVERYWHERE:
            column_reach, column_step = half + tl.load(columns.errors + column), tl.load(columns.steps + column)
            column_least = 0.5 * (tl.load(columns.quantized_squares + column) - column_reach * column_reach)
            right = columns.quantized + first_column.to(tl.int64) * padded + there
            product = tl.zeros((BLOCK, BLOCK // PARTS), dtype=tl.int32)
            if WHOLE:
                product = tl.dot(kept, tl.trans(tl.load(right)), product, out_dtype=tl.int32)
            else:
                for k in range(0, padded, CHUNK):
                    product = tl.dot(tl.load(left + k), tl.trans(tl.load(right + k)), product, out_dtype=tl.int32)
            close = product.to(tl.float32) * column_step[None, :] * row_step[:, None] - column_least[None, :]
            close += row_reach[:, None] * column_reach[None, :]
            some = tl.max((tl.max(close, 1) > row_least).to(tl.int32), 0) > 0
        if some:
            acting = tl.load(rows.labels + row)[:, None] != tl.load(columns.labels + column)[None, :]
            a, b = row_kind[:, None], tl.load(columns.kinds + column)[None, :]
            weight = tl.abs(source_weight(a, b, weights))
            weight += tl.abs(source_weight(b, a, weights))
            acting = acting & (weight > 0.0)
            if not EVERYWHERE:
                acting = acting & (close > row_least[:, None])
            found = tl.max(tl.max(acting.to(tl.int32), 1), 0)
            if SYMMETRIC:
                tile = tl.minimum(block_row, block_column) * num_column_blocks + tl.maximum(block_row, block_column)
            else:
                tile = block_row * num_column_blocks + block_column
            tl.store(flags + tile, 1, mask=found > 0)


@triton.jit
def index(
    flags, slots, tiles, count, num_flags, num_column_blocks,
    SYMMETRIC: tl.constexpr, AT_ONCE: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Number the flagged tiles: slots[tile] = number or -1, tiles[number] = tile; below the diagonal by symmetry.

    A program numbers AT_ONCE tiles. It counts the flags of all before it by itself, COUNTED at a time.
    """
    begin = tl.program_id(0) * AT_ONCE
    counted = tl.arange(0, COUNTED)
    counts = tl.zeros((COUNTED,), dtype=tl.int32)
    for first in range(0, begin, COUNTED):
        counts += tl.load(flags + first + counted, mask=first + counted < begin, other=0).to(tl.int32)
    before = tl.sum(counts, 0)
    tile = begin + tl.arange(0, AT_ONCE)
    inside = tile < num_flags
    flag = tl.load(flags + tile, mask=inside, other=0).to(tl.int32)
    number = before + tl.cumsum(flag, 0) - flag
    active = inside & (flag != 0)
    tl.store(tiles + number, tile, mask=active)
    slot = tl.where(active, number, -1)
    if SYMMETRIC:
        row, column = tile // num_column_blocks, tile % num_column_blocks
        upper = inside & (column >= row)
        tl.store(slots + tile, slot, mask=upper)
        tl.store(slots + column * num_column_blocks + row, slot, mask=upper)
    else:
        tl.store(slots + tile, slot, mask=inside)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(count, before + tl.sum(flag, 0))


@triton.jit
def _unit_of(largest):
    """The unit in which `largest` is 2^14, which float16 has room for."""
    return tl.where(largest > 0, largest, 1.0) * (1.0 / 16384)


@triton.jit
def _store_split(high, low, value):
    """Store a value as two float16 numbers."""
    rounded = value.to(tl.float16)
    tl.store(high, rounded)
    tl.store(low, (value - rounded.to(tl.float32)).to(tl.float16))


@triton.jit
def interact(
    rows, columns, tiles, pulls, first, num_tiles, num_column_blocks, padded, weights, numbers, flat_below, near,
    LAW: tl.constexpr, ATTRACTS: tl.constexpr, GRADIENT: tl.constexpr, ALIKE: tl.constexpr, SYMMETRIC: tl.constexpr,
    TWICE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Energies and pulls (slope over the scaled r, times what the pair weighs) of tiles number `first` and following.

    A tile with pairs so close that a product has lost their digits, or with pulls of too different sizes for two
    float16 numbers, is taken off the list, and marked -2. ALIKE: all kinds of pairs weigh 1. TWICE: pulls are stored in
    units of the largest of their row, and once more (`back`) in units of the largest of their column.
    """
    for here in range(tl.program_id(0), tl.minimum(tl.load(tiles.size) - first, num_tiles), tl.num_programs(0)):
        tile = tl.load(tiles.listed + first + here)
        block_row, block_column = tile // num_column_blocks, tile % num_column_blocks
        within = tl.arange(0, BLOCK)
        row, column = block_row * BLOCK + within, block_column * BLOCK + within
        steps = tl.arange(0, CHUNK)
        left = row[:, None].to(tl.int64) * padded + steps[None, :]
        right = column[:, None].to(tl.int64) * padded + steps[None, :]
        product = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)  # exact
        rest = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)  # small
        for k in range(0, padded, CHUNK):
            a_high, a_low = tl.load(rows.high + left + k), tl.load(rows.low + left + k)
            b_high, b_low = tl.trans(tl.load(columns.high + right + k)), tl.trans(tl.load(columns.low + right + k))
            product = tl.dot(a_high, b_high, product)
            rest = tl.dot(a_high, b_low, rest)
            rest = tl.dot(a_low, b_high, rest)
            rest = tl.dot(a_low, b_low, rest)
        unit = tl.load(rows.scale)
        product = (
            tl.load(rows.squares + row)[:, None] - product + (tl.load(columns.squares + column)[None, :] - product)
        )
        rest = tl.load(rows.rests + row)[:, None] + tl.load(columns.rests + column)[None, :] - 2.0 * rest
        scaled = tl.sqrt(tl.maximum(product + rest, 0.0))  # r times unit, whose square need not be a float32 number

        counts = tl.load(rows.labels + row)[:, None] != tl.load(columns.labels + column)[None, :]
        row_kind, column_kind = tl.load(rows.kinds + row), tl.load(columns.kinds + column)
        if ALIKE:
            counts = counts & (row_kind >= 0)[:, None] & (column_kind >= 0)[None, :]
        else:
            a, b = row_kind[:, None], column_kind[None, :]
            weight = source_weight(a, b, weights)
            back = source_weight(b, a, weights)
            counts = counts & ((weight != 0.0) | (back != 0.0))
        r = tl.where(counts, scaled / unit, FAR)
        good = tl.min(tl.min(tl.where(counts & (r >= flat_below), scaled, FAR), 1), 0) >= near

        energy, slope = pair(r, numbers, LAW, ATTRACTS)
        pull = over(slope, scaled)
        offsets = here * BLOCK + within
        tl.store(pulls.row_sums + offsets, tl.sum(energy if ALIKE else energy * weight, 1))
        tl.store(pulls.column_sums + offsets, tl.sum(energy if ALIKE else energy * back, 0))
        if GRADIENT:
            row_slope, column_slope = tl.load(rows.slopes + row), tl.load(columns.slopes + column)
            if ALIKE:
                pull = pull * (row_slope[:, None] + column_slope[None, :])
            else:
                pull = pull * (weight * row_slope[:, None] + back * column_slope[None, :])
            tl.store(pulls.row_pulls + offsets, tl.sum(pull, 1))
            tl.store(pulls.column_pulls + offsets, tl.sum(pull, 0))
            strength = tl.abs(pull)
            row_size, column_size = tl.max(strength, 1), tl.max(strength, 0)
            matrix = here * (BLOCK * BLOCK) + within[:, None] * BLOCK + within[None, :]
            if TWICE:
                row_size, column_size = _unit_of(row_size), _unit_of(column_size)
                _store_split(pulls.high + matrix, pulls.low + matrix, pull / row_size[:, None])
                _store_split(pulls.back_high + matrix, pulls.back_low + matrix, pull / column_size[None, :])
            else:
                most = tl.max(row_size, 0)
                least = tl.min(tl.where(row_size > 0, row_size, most), 0)
                least = tl.minimum(least, tl.min(tl.where(column_size > 0, column_size, most), 0))
                good = good & (least * 16777216.0 >= most)
                row_size = _unit_of(tl.maximum(row_size, most))
                column_size = _unit_of(tl.maximum(column_size, most))
                _store_split(pulls.high + matrix, pulls.low + matrix, pull / row_size[:, None])
            tl.store(pulls.row_sizes + offsets, row_size)
            tl.store(pulls.column_sizes + offsets, column_size)
        if not good:
            tl.store(tiles.slots + tile, -2)
            if SYMMETRIC:
                tl.store(tiles.slots + block_column * num_column_blocks + block_row, -2)


@triton.jit
def _times_positions(
    total, pulls_high, pulls_low, columns, first_column, matrix, size, first_dim, padded,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, MIRRORED: tl.constexpr,
):  # fmt: skip
    """total + pulls @ positions in some of the dimensions, for one tile or for its mirror image."""
    within, steps, dims = tl.arange(0, BLOCK), tl.arange(0, CHUNK), first_dim + tl.arange(0, WIDTH)
    part = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
    for k in range(0, BLOCK, CHUNK):
        if MIRRORED:
            offsets = matrix + (k + steps[None, :]) * BLOCK + within[:, None]
        else:
            offsets = matrix + within[:, None] * BLOCK + k + steps[None, :]
        there = (first_column + k + steps)[:, None].to(tl.int64) * padded + dims[None, :]
        inside = dims[None, :] < padded
        a_high, a_low = tl.load(pulls_high + offsets), tl.load(pulls_low + offsets)
        b_high, b_low = (
            tl.load(columns.high + there, mask=inside, other=0.0),
            tl.load(columns.low + there, mask=inside, other=0.0),
        )
        part = tl.dot(a_high, b_high, part)
        part = tl.dot(a_high, b_low, part)
        part = tl.dot(a_low, b_high, part)
    return total + part * size[:, None]


@triton.jit
def gather(
    rows, columns, slots, row_stride, column_stride, count, pulls, sums, gradient, first, num_tiles, num_column_blocks,
    padded,
    GRADIENT: tl.constexpr, SYMMETRIC: tl.constexpr, MIRRORED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    CHUNK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Add what the columns do to the BLOCK rows of a program, over the tiles number `first` to `first` + num_tiles.

    MIRRORED: the rows are the columns of `interact`. SYMMETRIC: below the diagonal they are.
    """
    block_row, first_dim = tl.program_id(0), tl.program_id(1) * WIDTH
    within = tl.arange(0, BLOCK)
    row_slots = slots + block_row * row_stride
    sum_here = tl.zeros((BLOCK,), dtype=tl.float64)
    pull_here = tl.zeros((BLOCK,), dtype=tl.float32)
    total = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
    any_tile = 0
    searched = tl.where(first < tl.load(count), num_column_blocks, 0)  # a round without tiles ends at once
    for begin in range(0, searched, AT_ONCE):
        many = begin + tl.arange(0, AT_ONCE)
        number = tl.load(row_slots + many * column_stride, mask=many < num_column_blocks, other=-1) - first
        if tl.max(((number >= 0) & (number < num_tiles)).to(tl.int32), 0) > 0:
            any_tile = 1
            for block_column in range(begin, tl.minimum(begin + AT_ONCE, num_column_blocks)):
                tile = tl.load(row_slots + block_column * column_stride) - first
                if (tile >= 0) & (tile < num_tiles):
                    first_column = block_column * BLOCK
                    offsets = tile * BLOCK + within
                    matrix = tile.to(tl.int64) * (BLOCK * BLOCK)
                    below = MIRRORED | (SYMMETRIC & (block_column < block_row))
                    if below:
                        sum_here += tl.load(pulls.column_sums + offsets).to(tl.float64)
                        if GRADIENT:
                            pull_here += tl.load(pulls.column_pulls + offsets)
                            size = tl.load(pulls.column_sizes + offsets)
                            total = _times_positions(
                                total, pulls.back_high, pulls.back_low, columns, first_column, matrix, size,
                                first_dim, padded, BLOCK, WIDTH, CHUNK, True,
                            )  # fmt: skip
                    else:
                        sum_here += tl.load(pulls.row_sums + offsets).to(tl.float64)
                        if GRADIENT:
                            pull_here += tl.load(pulls.row_pulls + offsets)
                            size = tl.load(pulls.row_sizes + offsets)
                            total = _times_positions(
                                total, pulls.high, pulls.low, columns, first_column, matrix, size,
                                first_dim, padded, BLOCK, WIDTH, CHUNK, False,
                            )  # fmt: skip
    if any_tile > 0:
        row = block_row * BLOCK + within
        if tl.program_id(1) == 0:
            tl.store(sums + row, tl.load(sums + row) + sum_here)
        if GRADIENT:
            dims = first_dim + tl.arange(0, WIDTH)
            inside = dims[None, :] < padded
            there = row[:, None].to(tl.int64) * padded + dims[None, :]
            position = tl.load(rows.high + there, mask=inside, other=0.0).to(tl.float32)
            position += tl.load(rows.low + there, mask=inside, other=0.0).to(tl.float32)
            force = pull_here[:, None] * position - total
            before = tl.load(gradient + there, mask=inside, other=0.0)
            tl.store(gradient + there, before + force, mask=inside)
