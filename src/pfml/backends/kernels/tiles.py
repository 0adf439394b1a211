"""Pairs of different classes, tile by tile, from products of split-precision points."""

from __future__ import annotations

import triton
import triton.language as tl

from pfml.backends.kernels.laws import over, pair
from pfml.backends.kernels.points import source_weight

__all__ = ["gather", "index", "interact", "screen"]

#: r of a pair that does not count; farther than any that does (`laws.LARGEST` ends every interaction before).
FAR = tl.constexpr(1e19)


@triton.jit
def screen(
    rows, columns, flags, num_column_blocks, padded, reach, slack, weights,
    SYMMETRIC: tl.constexpr, EVERYWHERE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Flag the tiles that may hold an acting pair of different classes; by symmetry, only those above the diagonal."""
    block_row, block_column = tl.program_id(1), tl.program_id(0)
    found = 0
    if (block_column >= block_row) | (not SYMMETRIC):
        row = block_row * BLOCK + tl.arange(0, BLOCK)
        column = block_column * BLOCK + tl.arange(0, BLOCK)
        some = weights.proxies_on_proxies != 0.0
        if weights.proxies_on_proxies == 0.0:  # then a sample must be there
            kind = tl.maximum(tl.max(tl.load(rows.kinds + row), 0), tl.max(tl.load(columns.kinds + column), 0))
            some = kind == 1
        if some:
            row_square, column_square = tl.load(rows.squares + row)[:, None], tl.load(columns.squares + column)[None, :]
            if EVERYWHERE:
                near = row_square + column_square >= 0.0
            else:
                product = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
                steps = tl.arange(0, CHUNK)
                left = rows.high + row[:, None].to(tl.int64) * padded + steps[None, :]
                right = columns.high + column[:, None].to(tl.int64) * padded + steps[None, :]
                for k in range(0, padded, CHUNK):
                    product = tl.dot(tl.load(left + k), tl.trans(tl.load(right + k)), product)
                farthest = reach * tl.load(rows.scale) + slack
                near = (row_square - product) + (column_square - product) < farthest * farthest
            if tl.max(tl.max(near.to(tl.int32), 1), 0) > 0:
                other_class = tl.load(rows.labels + row)[:, None] != tl.load(columns.labels + column)[None, :]
                a, b = tl.load(rows.kinds + row)[:, None], tl.load(columns.kinds + column)[None, :]
                weight = tl.abs(source_weight(a, b, weights))
                weight += tl.abs(source_weight(b, a, weights))
                acting = near & other_class & (weight > 0.0)
                found = tl.max(tl.max(acting.to(tl.int32), 1), 0)
    tl.store(flags + block_row * num_column_blocks + block_column, found.to(tl.int8))


@triton.jit
def index(flags, slots, tiles, count, num_flags, num_column_blocks, SYMMETRIC: tl.constexpr, AT_ONCE: tl.constexpr):
    """Number the flagged tiles: slots[tile] = number or -1, tiles[number] = tile; below the diagonal by symmetry."""
    before = 0
    for first in range(0, num_flags, AT_ONCE):
        tile = first + tl.arange(0, AT_ONCE)
        inside = tile < num_flags
        flag = tl.load(flags + tile, mask=inside, other=0).to(tl.int32)
        number = before + tl.cumsum(flag, 0) - flag
        before += tl.sum(flag, 0)
        active = inside & (flag != 0)
        tl.store(tiles + number, tile, mask=active)
        if SYMMETRIC:
            row, column = tile // num_column_blocks, tile % num_column_blocks
            upper = inside & (column >= row)
            mirrored = column * num_column_blocks + row
            tl.store(slots + tile, tl.where(active, number, -1), mask=upper)
            tl.store(slots + mirrored, tl.where(active, number, -1), mask=upper)
        else:
            tl.store(slots + tile, tl.where(active, number, -1), mask=inside)
    tl.store(count, before)


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
    rows, columns, tiles, pulls, first, num_column_blocks, padded, weights, numbers, flat_below, near,
    LAW: tl.constexpr, ATTRACTS: tl.constexpr, GRADIENT: tl.constexpr, ALIKE: tl.constexpr, SYMMETRIC: tl.constexpr,
    TWICE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Energies and pulls (slope over the scaled r, times what the pair weighs) of one tile, from number `first` on.

    A tile with pairs so close that a product has lost their digits, or with pulls of too different sizes for two
    float16 numbers, is taken off the list, and marked -2. ALIKE: all kinds of pairs weigh 1. TWICE: pulls are stored in
    units of the largest of their row, and once more (`back`) in units of the largest of their column.
    """
    here = tl.program_id(0)
    if first + here < tl.load(tiles.size):
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
            matrix = here.to(tl.int64) * (BLOCK * BLOCK) + within[:, None] * BLOCK + within[None, :]
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
    rows, columns, slots, row_stride, column_stride, pulls, sums, gradient, first, num_tiles, num_column_blocks, padded,
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
    for begin in range(0, num_column_blocks, AT_ONCE):
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
