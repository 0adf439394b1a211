"""The field's Triton kernels. `fused` launches them.

    prepare            positions, in a high and a low half-precision part; squared norms of the high, and the rest
    screen             which tiles hold a pair of different classes within reach, from products of the high parts
    index              a list of these tiles
    interact           their pairs, at float32 accuracy: energies, and how strongly they pull
    gather             for each charge, the energies and forces of its tiles
    interact_closely   the tiles with pairs so close that a product has lost their digits, from differences
    finish             the pairs of each class, from differences; gradients at positions -> at the points as given

Every row of every result has one owner, which adds up in a fixed order. So there are no atomic additions, and equal
inputs give equal bits.

A pair function knows the laws that ship by number (LAWS). Other laws are refused by name before a launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "ATTRACTION", "LAWS", "REPULSION", "finish", "gather", "index", "interact", "interact_closely", "prepare", "screen",
]  # fmt: skip

#: law by (class name, bounded) -> number that the kernels know it by
LAWS = {"PowerLaw": 0, "LogarithmicLaw": 1, "ContrastiveLaw": 2, "ContrastiveLaw, mirrored": 3}
ATTRACTION, REPULSION = 0, 1
#: r of a pair that does not count; farther than any that does (`fused` lets every interaction stop before).
FAR = tl.constexpr(1e19)
#: What differences of scaled positions are multiplied by: then squares of all but the smallest are ordinary numbers.
MAGNIFIED = tl.constexpr(2.0**48)


@triton.jit
def _pair(r, alpha, edge, core, offset, start, stop, LAW: tl.constexpr, ROLE: tl.constexpr):
    """Energy and slope of pairs at distance r, as `pfml.field.Interaction` has them."""
    outside = tl.maximum(r, core)
    inside_edge = outside < edge
    if LAW == 0:
        reached = tl.where(inside_edge == (ROLE == 0), edge, outside)
        power = tl.exp2(-alpha * tl.log2(reached))
        potential = -power if ROLE == 0 else power
        slope = alpha * power / outside
        slope = slope if ROLE == 0 else -slope
    elif LAW == 1:
        reached = tl.where(inside_edge == (ROLE == 0), edge, outside)
        logarithm = tl.log2(reached) * 0.6931471805599453
        potential = logarithm if ROLE == 0 else -logarithm
        slope = 1.0 / outside if ROLE == 0 else -1.0 / outside
    else:
        if ROLE == 0:
            reached = tl.where(inside_edge, edge, outside)
            potential = reached * reached
            slope = 2.0 * outside
        elif LAW == 2:
            gap = tl.maximum(edge - outside, 0.0)
            potential = gap * gap
            slope = -2.0 * gap
        else:
            reached = tl.where(inside_edge, outside, edge)
            potential = -reached * reached
            slope = -2.0 * outside
    flat = inside_edge if ROLE == 0 else outside >= edge
    slope = tl.where(flat, 0.0, slope)
    energy = potential + slope * (r - outside) - offset
    acts = (r >= start) & (r < stop)
    return tl.where(acts, energy, 0.0), tl.where(acts, slope, 0.0)


@triton.jit
def _over(slope, r):
    """slope / r; 0 at r = 0, where there is no direction."""
    return tl.where(r > 0, slope / tl.where(r > 0, r, 1.0), 0.0)


@triton.jit
def _source_weight(anchor, source, on_samples, proxies_on_samples, samples_on_proxies, on_proxies):
    """How much a source counts at an anchor; 1: a sample, 0: a proxy, below: padding."""
    at_sample = tl.where(source == 1, on_samples, proxies_on_samples)
    at_proxy = tl.where(source == 1, samples_on_proxies, on_proxies)
    return tl.where((anchor < 0) | (source < 0), 0.0, tl.where(anchor == 1, at_sample, at_proxy))


@triton.jit
def _exact(samples, proxies, charges, inverses, columns, inside, num_samples, dims):
    """Positions of charges in float64; charges, inverses, columns and inside must broadcast together."""
    of_sample = charges + 0 * columns < num_samples
    at_sample = samples + charges.to(tl.int64) * dims + columns
    at_proxy = proxies + (charges - num_samples).to(tl.int64) * dims + columns
    point = tl.load(at_sample, mask=inside & of_sample, other=0.0)
    point += tl.load(at_proxy, mask=inside & (of_sample == False), other=0.0)  # noqa: E712  (a tensor)
    return point.to(tl.float64) * inverses


@triton.jit
def prepare(
    samples, proxies, sample_labels, proxy_labels, given_slopes, order, scale,
    high, low, squares, rests, inverses, labels, kinds, charges, slopes,
    num_samples, num_charges, num_rows, padded, dims,
    ORDERED: tl.constexpr, SLOPES: tl.constexpr, SAMPLES_ON_SPHERE: tl.constexpr, PROXIES_ON_SPHERE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Fill row k with charge order[k]; rows from `num_rows` on, and those of a negative charge, are padding."""
    row = tl.program_id(0)
    charge = tl.load(order + row, mask=row < num_rows, other=-1).to(tl.int32) if ORDERED else row
    used = (row < num_rows) & (charge >= 0)
    charge = tl.where(used, charge, 0)
    columns = tl.arange(0, WIDTH)
    of_sample = charge < num_samples
    point = _exact(samples, proxies, charge, 1.0, columns, columns < tl.where(used, dims, 0), num_samples, dims)
    square = tl.sum(point * point, 0)
    norm = tl.sqrt(square)
    inverse = tl.where(norm > 0, 1.0 / tl.where(norm > 0, norm, 1.0), 1.0)
    on_sphere = tl.where(of_sample, SAMPLES_ON_SPHERE, PROXIES_ON_SPHERE)
    inverse = tl.where(on_sphere, inverse, 1.0)
    unit = tl.load(scale).to(tl.float64)
    scaled = point * inverse * unit
    rounded = (tl.floor(scaled * 32.0 + 0.5) * 0.03125).to(tl.float32).to(tl.float16)
    place = row.to(tl.int64) * padded + columns
    tl.store(high + place, rounded, mask=columns < padded)
    left = (scaled - rounded.to(tl.float64)).to(tl.float32).to(tl.float16)
    tl.store(low + place, left, mask=columns < padded)
    h, rest = rounded.to(tl.float64), left.to(tl.float64)
    tl.store(squares + row, tl.sum(h * h, 0).to(tl.float32))  # exact, as the products are
    tl.store(rests + row, tl.sum((2.0 * h + rest) * rest, 0).to(tl.float32))
    tl.store(inverses + row, inverse)
    label = tl.load(sample_labels + charge, mask=used & of_sample, other=0)
    label += tl.load(proxy_labels + charge - num_samples, mask=used & (of_sample == False), other=0)  # noqa: E712
    tl.store(labels + row, label)
    tl.store(kinds + row, tl.where(used, of_sample.to(tl.int32), -1))
    tl.store(charges + row, charge)
    if SLOPES:
        for channel in tl.static_range(2):
            slope = tl.load(given_slopes + channel * num_charges + charge, mask=used, other=0.0)
            tl.store(slopes + channel * tl.num_programs(0) + row, slope)


@triton.jit
def screen(
    row_high, row_squares, row_labels, row_kinds, column_high, column_squares, column_labels, column_kinds,
    flags, scale, num_column_blocks, padded, reach, slack,
    on_samples, proxies_on_samples, samples_on_proxies, on_proxies,
    SYMMETRIC: tl.constexpr, EVERYWHERE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Flag the tiles that may hold an acting pair of different classes; by symmetry, only those above the diagonal."""
    block_row, block_column = tl.program_id(1), tl.program_id(0)
    found = 0
    if (block_column >= block_row) | (not SYMMETRIC):
        rows = block_row * BLOCK + tl.arange(0, BLOCK)
        columns = block_column * BLOCK + tl.arange(0, BLOCK)
        some = on_proxies != 0.0
        if on_proxies == 0.0:  # then a sample must be there
            kind = tl.maximum(tl.max(tl.load(row_kinds + rows), 0), tl.max(tl.load(column_kinds + columns), 0))
            some = kind == 1
        if some:
            row_square, column_square = tl.load(row_squares + rows)[:, None], tl.load(column_squares + columns)[None, :]
            if EVERYWHERE:
                near = row_square + column_square >= 0.0
            else:
                product = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
                steps = tl.arange(0, CHUNK)
                left = row_high + rows[:, None].to(tl.int64) * padded + steps[None, :]
                right = column_high + columns[:, None].to(tl.int64) * padded + steps[None, :]
                for k in range(0, padded, CHUNK):
                    product = tl.dot(tl.load(left + k), tl.trans(tl.load(right + k)), product)
                farthest = reach * tl.load(scale) + slack
                near = (row_square - product) + (column_square - product) < farthest * farthest
            if tl.max(tl.max(near.to(tl.int32), 1), 0) > 0:
                other_class = tl.load(row_labels + rows)[:, None] != tl.load(column_labels + columns)[None, :]
                a, b = tl.load(row_kinds + rows)[:, None], tl.load(column_kinds + columns)[None, :]
                weight = tl.abs(_source_weight(a, b, on_samples, proxies_on_samples, samples_on_proxies, on_proxies))
                weight += tl.abs(_source_weight(b, a, on_samples, proxies_on_samples, samples_on_proxies, on_proxies))
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
def _store_halves(high, low, value):
    rounded = value.to(tl.float16)
    tl.store(high, rounded)
    tl.store(low, (value - rounded.to(tl.float32)).to(tl.float16))


@triton.jit
def interact(
    row_high, row_low, row_squares, row_rests, row_labels, row_kinds, row_slopes,
    column_high, column_low, column_squares, column_rests, column_labels, column_kinds, column_slopes,
    tiles, count, slots, pulls_high, pulls_low, back_high, back_low, row_sizes, column_sizes,
    row_sums, column_sums, row_pulls, column_pulls, scale, first, num_column_blocks, padded,
    on_samples, proxies_on_samples, samples_on_proxies, on_proxies,
    alpha, edge, core, offset, start, stop, flat_below, near,
    LAW: tl.constexpr, ROLE: tl.constexpr, GRADIENT: tl.constexpr, ALIKE: tl.constexpr, SYMMETRIC: tl.constexpr,
    TWICE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Energies and pulls (slope over the scaled r, times what the pair weighs) of one tile, from number `first` on.

    A tile with pairs so close that a product has lost their digits, or with pulls of too different sizes for two
    float16 numbers, is taken off the list, and marked -2. ALIKE: all kinds of pairs weigh 1. TWICE: pulls are stored in
    units of the largest of their row, and once more (`back`) in units of the largest of their column.
    """
    here = tl.program_id(0)
    if first + here < tl.load(count):
        tile = tl.load(tiles + first + here)
        block_row, block_column = tile // num_column_blocks, tile % num_column_blocks
        within = tl.arange(0, BLOCK)
        rows, columns = block_row * BLOCK + within, block_column * BLOCK + within
        steps = tl.arange(0, CHUNK)
        left = rows[:, None].to(tl.int64) * padded + steps[None, :]
        right = columns[:, None].to(tl.int64) * padded + steps[None, :]
        product = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)  # exact
        rest = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)  # small
        for k in range(0, padded, CHUNK):
            a_high, a_low = tl.load(row_high + left + k), tl.load(row_low + left + k)
            b_high, b_low = tl.trans(tl.load(column_high + right + k)), tl.trans(tl.load(column_low + right + k))
            product = tl.dot(a_high, b_high, product)
            rest = tl.dot(a_high, b_low, rest)
            rest = tl.dot(a_low, b_high, rest)
            rest = tl.dot(a_low, b_low, rest)
        unit = tl.load(scale)
        product = (
            tl.load(row_squares + rows)[:, None] - product + (tl.load(column_squares + columns)[None, :] - product)
        )
        rest = tl.load(row_rests + rows)[:, None] + tl.load(column_rests + columns)[None, :] - 2.0 * rest
        scaled = tl.sqrt(tl.maximum(product + rest, 0.0))  # r times unit, whose square need not be a float32 number

        counts = tl.load(row_labels + rows)[:, None] != tl.load(column_labels + columns)[None, :]
        row_kind, column_kind = tl.load(row_kinds + rows), tl.load(column_kinds + columns)
        if ALIKE:
            counts = counts & (row_kind >= 0)[:, None] & (column_kind >= 0)[None, :]
        else:
            a, b = row_kind[:, None], column_kind[None, :]
            weight = _source_weight(a, b, on_samples, proxies_on_samples, samples_on_proxies, on_proxies)
            back = _source_weight(b, a, on_samples, proxies_on_samples, samples_on_proxies, on_proxies)
            counts = counts & ((weight != 0.0) | (back != 0.0))
        r = tl.where(counts, scaled / unit, FAR)
        good = tl.min(tl.min(tl.where(counts & (r >= flat_below), scaled, FAR), 1), 0) >= near

        energy, slope = _pair(r, alpha, edge, core, offset, start, stop, LAW, ROLE)
        pull = _over(slope, scaled)
        place = here * BLOCK + within
        tl.store(row_sums + place, tl.sum(energy if ALIKE else energy * weight, 1))
        tl.store(column_sums + place, tl.sum(energy if ALIKE else energy * back, 0))
        if GRADIENT:
            row_slope, column_slope = tl.load(row_slopes + rows), tl.load(column_slopes + columns)
            if ALIKE:
                pull = pull * (row_slope[:, None] + column_slope[None, :])
            else:
                pull = pull * (weight * row_slope[:, None] + back * column_slope[None, :])
            tl.store(row_pulls + place, tl.sum(pull, 1))
            tl.store(column_pulls + place, tl.sum(pull, 0))
            strength = tl.abs(pull)
            row_size, column_size = tl.max(strength, 1), tl.max(strength, 0)
            matrix = here.to(tl.int64) * (BLOCK * BLOCK) + within[:, None] * BLOCK + within[None, :]
            if TWICE:
                row_size, column_size = _unit_of(row_size), _unit_of(column_size)
                _store_halves(pulls_high + matrix, pulls_low + matrix, pull / row_size[:, None])
                _store_halves(back_high + matrix, back_low + matrix, pull / column_size[None, :])
            else:
                most = tl.max(row_size, 0)
                least = tl.min(tl.where(row_size > 0, row_size, most), 0)
                least = tl.minimum(least, tl.min(tl.where(column_size > 0, column_size, most), 0))
                good = good & (least * 16777216.0 >= most)
                row_size = _unit_of(tl.maximum(row_size, most))
                column_size = _unit_of(tl.maximum(column_size, most))
                _store_halves(pulls_high + matrix, pulls_low + matrix, pull / row_size[:, None])
            tl.store(row_sizes + place, row_size)
            tl.store(column_sizes + place, column_size)
        if not good:
            tl.store(slots + tile, -2)
            if SYMMETRIC:
                tl.store(slots + block_column * num_column_blocks + block_row, -2)


@triton.jit
def _times_positions(
    total, pulls_high, pulls_low, high, low, columns, matrix, size, first_dim, padded,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, MIRRORED: tl.constexpr,
):  # fmt: skip
    """total + pulls @ positions in some of the dimensions, for one tile or for its mirror image."""
    within, steps, dims = tl.arange(0, BLOCK), tl.arange(0, CHUNK), first_dim + tl.arange(0, WIDTH)
    part = tl.zeros((BLOCK, WIDTH), dtype=tl.float32)
    for k in range(0, BLOCK, CHUNK):
        if MIRRORED:
            place = matrix + (k + steps[None, :]) * BLOCK + within[:, None]
        else:
            place = matrix + within[:, None] * BLOCK + k + steps[None, :]
        there = (columns + k + steps)[:, None].to(tl.int64) * padded + dims[None, :]
        inside = dims[None, :] < padded
        a_high, a_low = tl.load(pulls_high + place), tl.load(pulls_low + place)
        b_high, b_low = tl.load(high + there, mask=inside, other=0.0), tl.load(low + there, mask=inside, other=0.0)
        part = tl.dot(a_high, b_high, part)
        part = tl.dot(a_high, b_low, part)
        part = tl.dot(a_low, b_high, part)
    return total + part * size[:, None]


@triton.jit
def gather(
    row_high, row_low, column_high, column_low,
    slots, row_stride, column_stride, pulls_high, pulls_low, back_high, back_low, row_sizes, column_sizes,
    row_sums, column_sums, row_pulls, column_pulls, sums, gradient, first, num_tiles, num_column_blocks, padded,
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
                    columns = block_column * BLOCK
                    place = tile * BLOCK + within
                    matrix = tile.to(tl.int64) * (BLOCK * BLOCK)
                    below = MIRRORED | (SYMMETRIC & (block_column < block_row))
                    if below:
                        sum_here += tl.load(column_sums + place).to(tl.float64)
                        if GRADIENT:
                            pull_here += tl.load(column_pulls + place)
                            size = tl.load(column_sizes + place)
                            total = _times_positions(
                                total, back_high, back_low, column_high, column_low, columns, matrix, size,
                                first_dim, padded, BLOCK, WIDTH, CHUNK, True,
                            )  # fmt: skip
                    else:
                        sum_here += tl.load(row_sums + place).to(tl.float64)
                        if GRADIENT:
                            pull_here += tl.load(row_pulls + place)
                            size = tl.load(row_sizes + place)
                            total = _times_positions(
                                total, pulls_high, pulls_low, column_high, column_low, columns, matrix, size,
                                first_dim, padded, BLOCK, WIDTH, CHUNK, False,
                            )  # fmt: skip
    if any_tile > 0:
        rows = block_row * BLOCK + within
        if tl.program_id(1) == 0:
            tl.store(sums + rows, tl.load(sums + rows) + sum_here)
        if GRADIENT:
            dims = first_dim + tl.arange(0, WIDTH)
            inside = dims[None, :] < padded
            there = rows[:, None].to(tl.int64) * padded + dims[None, :]
            position = tl.load(row_high + there, mask=inside, other=0.0).to(tl.float32)
            position += tl.load(row_low + there, mask=inside, other=0.0).to(tl.float32)
            force = pull_here[:, None] * position - total
            before = tl.load(gradient + there, mask=inside, other=0.0)
            tl.store(gradient + there, before + force, mask=inside)


@triton.jit
def _differences(
    samples, proxies, row_charge, row_inverse, column_charge, column_inverse, unit, k, num_samples, dims,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """CHUNK components, from k on, of the differences of all pairs times `unit`, (rows, columns, CHUNK).

    They are rounded only now, and `unit` is so large that float32 has room for their squares.
    """
    steps = k + tl.arange(0, CHUNK)[None, :]
    inside = steps < dims
    x = _exact(samples, proxies, row_charge[:, None], row_inverse[:, None], steps, inside, num_samples, dims)
    y = _exact(samples, proxies, column_charge[:, None], column_inverse[:, None], steps, inside, num_samples, dims)
    return ((x[:, None, :] - y[None, :, :]) * unit).to(tl.float32)


@triton.jit
def interact_closely(
    samples, proxies, row_charges, row_inverses, row_labels, row_kinds, row_slopes,
    column_charges, column_inverses, column_labels, column_kinds, column_slopes,
    slots, row_stride, column_stride, sums, gradient, scale, num_samples, num_column_blocks, padded, dims,
    on_samples, proxies_on_samples, samples_on_proxies, on_proxies,
    alpha, edge, core, offset, start, stop,
    LAW: tl.constexpr, ROLE: tl.constexpr, GRADIENT: tl.constexpr, AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Add what the columns of the tiles that are marked -2 do to ROWS rows, all from differences."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_slots = slots + tl.program_id(0) * ROWS // BLOCK * row_stride
    unit = tl.load(scale).to(tl.float64) * MAGNIFIED  # scaled positions are shorter than 2^7
    for first in range(0, num_column_blocks, AT_ONCE):
        many = first + tl.arange(0, AT_ONCE)
        number = tl.load(row_slots + many * column_stride, mask=many < num_column_blocks, other=-1)
        if tl.min(number, 0) == -2:
            row_charge, row_inverse = tl.load(row_charges + rows), tl.load(row_inverses + rows)
            row_label, row_kind = tl.load(row_labels + rows), tl.load(row_kinds + rows)
            row_slope = tl.load(row_slopes + rows) if GRADIENT else 0.0
            for block in range(first, tl.minimum(first + AT_ONCE, num_column_blocks)):
                if tl.load(row_slots + block * column_stride) == -2:
                    for begin in range(block * BLOCK, (block + 1) * BLOCK, COLUMNS):
                        columns = begin + tl.arange(0, COLUMNS)
                        column_charge, column_inverse = (
                            tl.load(column_charges + columns),
                            tl.load(column_inverses + columns),
                        )
                        other_class = row_label[:, None] != tl.load(column_labels + columns)[None, :]
                        a, b = row_kind[:, None], tl.load(column_kinds + columns)[None, :]
                        weight = _source_weight(a, b, on_samples, proxies_on_samples, samples_on_proxies, on_proxies)
                        weight = tl.where(other_class, weight, 0.0)
                        r2 = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
                        for k in range(0, dims, CHUNK):
                            difference = _differences(
                                samples, proxies, row_charge, row_inverse, column_charge, column_inverse, unit, k,
                                num_samples, dims, CHUNK,
                            )  # fmt: skip
                            r2 += tl.sum(difference * difference, 2)
                        far = tl.sqrt(r2)
                        r = (far.to(tl.float64) / unit).to(tl.float32)
                        energy, slope = _pair(r, alpha, edge, core, offset, start, stop, LAW, ROLE)
                        own = tl.load(sums + rows)
                        tl.store(sums + rows, own + tl.sum(energy * weight, 1).to(tl.float64))
                        if GRADIENT:
                            back = _source_weight(b, a, on_samples, proxies_on_samples, samples_on_proxies, on_proxies)
                            back = tl.where(other_class, back, 0.0) * tl.load(column_slopes + columns)[None, :]
                            pull = slope * (weight * row_slope[:, None] + back)
                            shrunk = _over(1.0, far)
                            for k in range(0, dims, CHUNK):
                                difference = _differences(
                                    samples, proxies, row_charge, row_inverse, column_charge, column_inverse, unit, k,
                                    num_samples, dims, CHUNK,
                                )  # fmt: skip
                                steps = k + tl.arange(0, CHUNK)[None, :]
                                place = gradient + rows[:, None].to(tl.int64) * padded + steps
                                before = tl.load(place, mask=steps < dims, other=0.0)
                                force = tl.sum(pull[:, :, None] * (difference * shrunk[:, :, None]), 1)
                                tl.store(place, before + force, mask=steps < dims)


@triton.jit
def finish(
    samples, proxies, charges, inverses, kinds, own_slopes, classes, by_class, found, gradient,
    sums, sample_gradient, proxy_gradient, num_samples, num_charges, padded, dims,
    on_samples, proxies_on_samples, samples_on_proxies, on_proxies,
    alpha, edge, core, offset, start, stop,
    LAW: tl.constexpr, ROLE: tl.constexpr, GRADIENT: tl.constexpr, ATTRACTS: tl.constexpr,
    SAMPLES_ON_SPHERE: tl.constexpr, PROXIES_ON_SPHERE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Collect what acts on one charge: other classes from `found` and `gradient`, its own class from differences."""
    here = tl.program_id(0)
    row = tl.load(by_class + here) if ATTRACTS else here
    charge = tl.load(charges + row)
    columns = tl.arange(0, WIDTH)
    inside = columns < dims
    inverse = tl.load(inverses + row)
    position = _exact(samples, proxies, charge, inverse, columns, inside, num_samples, dims)

    own_sum = tl.full((), 0.0, tl.float64)
    other_sum = tl.load(found + row)
    force = tl.zeros((WIDTH,), dtype=tl.float32)
    if GRADIENT:
        force += tl.load(gradient + row.to(tl.int64) * padded + columns, mask=inside, other=0.0)
    if ATTRACTS:
        label = tl.load(classes + here)
        kind = tl.load(kinds + row)
        slope_here = tl.load(own_slopes + row) if GRADIENT else 0.0
        for direction in tl.static_range(-1, 2, 2):
            slot = here + direction
            inside_list = (slot >= 0) & (slot < num_charges)
            mated = inside_list & (tl.load(classes + slot, mask=inside_list, other=0) == label)
            while mated:
                mate = tl.load(by_class + slot)
                mate_charge, mate_kind = tl.load(charges + mate), tl.load(kinds + mate)
                there = _exact(
                    samples, proxies, mate_charge, tl.load(inverses + mate), columns, inside, num_samples, dims
                )
                difference = (position - there).to(tl.float32)
                r = tl.sqrt(tl.sum(difference * difference, 0))
                energy, slope = _pair(r, alpha, edge, core, offset, start, stop, LAW, ROLE)
                slope = _over(slope, r)
                weight = _source_weight(kind, mate_kind, on_samples, proxies_on_samples, samples_on_proxies, on_proxies)
                own_sum += (energy * weight).to(tl.float64)
                if GRADIENT:
                    back = _source_weight(
                        mate_kind, kind, on_samples, proxies_on_samples, samples_on_proxies, on_proxies
                    )
                    force += difference * (slope * (weight * slope_here + back * tl.load(own_slopes + mate)))
                slot += direction
                inside_list = (slot >= 0) & (slot < num_charges)
                mated = inside_list & (tl.load(classes + slot, mask=inside_list, other=0) == label)
    tl.store(sums + charge, own_sum)
    tl.store(sums + num_charges + charge, other_sum)

    if GRADIENT:
        if tl.where(charge < num_samples, SAMPLES_ON_SPHERE, PROXIES_ON_SPHERE):
            tangential = force.to(tl.float64)
            tangential -= tl.sum(tangential * position, 0) * position
            force = (tangential * inverse).to(tl.float32)
        if charge < num_samples:
            tl.store(sample_gradient + charge.to(tl.int64) * dims + columns, force, mask=inside)
        else:
            tl.store(proxy_gradient + (charge - num_samples).to(tl.int64) * dims + columns, force, mask=inside)
