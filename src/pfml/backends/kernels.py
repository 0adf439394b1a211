"""The field's Triton kernels. `fused` launches them.

    prepare     positions on the sphere, squared norms, a low-precision copy for the screen
    screen      which tiles hold a pair of different classes within reach, from products of the copy
    interact    those pairs, at float32 accuracy: sums and, with atomic additions, gradients
    attract     the pairs of each class, from differences: sums and gradients
    project     gradients at positions -> gradients at the points as given

A pair function knows the laws that ship by number (LAWS). Other laws are refused by name before a launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["ATTRACTION", "LAWS", "REPULSION", "attract", "interact", "prepare", "project", "screen"]

POWER, LOGARITHMIC, CONTRASTIVE, CONTRASTIVE_UNBOUNDED = (tl.constexpr(k) for k in range(4))
#: law by (class name, bounded) -> number that the kernels know it by
LAWS = {"PowerLaw": 0, "LogarithmicLaw": 1, "ContrastiveLaw": 2, "ContrastiveLaw, mirrored": 3}
ATTRACTION, REPULSION = 0, 1


@triton.jit
def _pair(r2, alpha, edge, core, offset, start, stop, LAW: tl.constexpr, ROLE: tl.constexpr):
    """Energy and slope / r of pairs at squared distance r2, as `pfml.field.Interaction` has them."""
    r = tl.sqrt(r2)
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
    direction = tl.where(r > 0, slope / tl.where(r > 0, r, 1.0), 0.0)
    return tl.where(acts, energy, 0.0), tl.where(acts, direction, 0.0)


@triton.jit
def _kind_weight(first_is_sample, second_is_sample, samples, mixed, proxies):
    """How much a pair counts, by what its ends are."""
    both = first_is_sample & second_is_sample
    neither = (first_is_sample | second_is_sample) == False  # noqa: E712  (a tensor)
    return tl.where(both, samples, tl.where(neither, proxies, mixed))


@triton.jit
def prepare(
    source, positions, rests, copy, squares, inverses, first, dims, ON_SPHERE: tl.constexpr, WIDTH: tl.constexpr
):
    """Row k of `source` to row first + k of the others; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    inside = columns < dims
    point = tl.load(source + row * dims + columns, mask=inside, other=0.0).to(tl.float64)
    inverse = 1.0
    if ON_SPHERE:
        norm = tl.sqrt(tl.sum(point * point, 0))
        inverse = tl.where(norm > 0, 1.0 / tl.where(norm > 0, norm, 1.0), 1.0)
        point = point * inverse
    position = point.to(tl.float32)
    place = (first + row) * dims + columns
    tl.store(positions + place, position, mask=inside)
    tl.store(rests + place, (point - position.to(tl.float64)).to(tl.float32), mask=inside)
    tl.store(copy + place, position.to(copy.dtype.element_ty), mask=inside)
    tl.store(squares + first + row, tl.sum(position * position, 0))
    tl.store(inverses + first + row, inverse)


@triton.jit
def screen(
    copy, squares, labels, is_sample, tiles, count, n, dims, limit, margin, samples, mixed, proxies,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """List the tiles of the upper triangle that may hold an acting pair of different classes."""
    block_row, block_column = tl.program_id(1), tl.program_id(0)
    if block_column >= block_row:
        rows = block_row * BLOCK + tl.arange(0, BLOCK)
        columns = block_column * BLOCK + tl.arange(0, BLOCK)
        product = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        steps = tl.arange(0, CHUNK)
        left = copy + rows[:, None].to(tl.int64) * dims + steps[None, :]
        right = copy + columns[None, :].to(tl.int64) * dims + steps[:, None]
        for k in range(0, dims, CHUNK):
            inside = steps < dims - k
            a = tl.load(left + k, mask=(rows[:, None] < n) & inside[None, :], other=0.0)
            b = tl.load(right + k, mask=(columns[None, :] < n) & inside[:, None], other=0.0)
            product += tl.dot(a, b)
        both = (rows[:, None] < columns[None, :]) & (columns[None, :] < n)
        row_squares = tl.load(squares + rows, mask=rows < n, other=0.0)
        column_squares = tl.load(squares + columns, mask=columns < n, other=0.0)
        total = row_squares[:, None] + column_squares[None, :]
        near = total - 2.0 * product < limit + margin * total
        row_labels = tl.load(labels + rows, mask=rows < n, other=-1)
        column_labels = tl.load(labels + columns, mask=columns < n, other=-2)
        other_class = row_labels[:, None] != column_labels[None, :]
        row_kinds = tl.load(is_sample + rows, mask=rows < n, other=0) != 0
        column_kinds = tl.load(is_sample + columns, mask=columns < n, other=0) != 0
        counts = _kind_weight(row_kinds[:, None], column_kinds[None, :], samples, mixed, proxies) != 0.0
        acting = (near & both & other_class & counts).to(tl.int32)
        if tl.sum(tl.sum(acting, 1), 0) > 0:
            slot = tl.atomic_add(count, 1)
            tl.store(tiles + slot, block_row * tl.num_programs(0) + block_column)


@triton.jit
def _differences(positions, rests, rows, columns, row_inside, column_inside, dims, k):
    """Component k of the differences of all pairs of a tile, to more digits than a float32 position has."""
    at_rows, at_columns = rows.to(tl.int64) * dims + k, columns.to(tl.int64) * dims + k
    x = tl.load(positions + at_rows, mask=row_inside, other=0.0)
    y = tl.load(positions + at_columns, mask=column_inside, other=0.0)
    x_rest = tl.load(rests + at_rows, mask=row_inside, other=0.0)
    y_rest = tl.load(rests + at_columns, mask=column_inside, other=0.0)
    return (x[:, None] - y[None, :]) + (x_rest[:, None] - y_rest[None, :])


@triton.jit
def interact(
    positions, rests, labels, is_sample, slopes, tiles, count, sums, gradient, n, dims, num_blocks,
    samples, mixed, proxies, alpha, edge, core, offset, start, stop, near,
    LAW: tl.constexpr, ROLE: tl.constexpr, GRADIENT: tl.constexpr, PRECISION: tl.constexpr,
    LISTED: tl.constexpr, SUB: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Add what pairs of different classes do to each other, tile by listed tile (BLOCK of a side, SUB^2 per tile)."""
    total = tl.load(count) * SUB * SUB
    for job in range(tl.program_id(0), total, tl.num_programs(0)):
        tile = tl.load(tiles + job // (SUB * SUB)) if LISTED else job // (SUB * SUB)
        part = job % (SUB * SUB)
        block_row = (tile // num_blocks) * SUB + part // SUB
        block_column = (tile % num_blocks) * SUB + part % SUB
        if block_column >= block_row:
            rows = block_row * BLOCK + tl.arange(0, BLOCK)
            columns = block_column * BLOCK + tl.arange(0, BLOCK)
            _interact_tile(
                positions, rests, labels, is_sample, slopes, sums, gradient, rows, columns, n, dims,
                samples, mixed, proxies, alpha, edge, core, offset, start, stop, near,
                LAW, ROLE, GRADIENT, PRECISION, BLOCK, CHUNK,
            )  # fmt: skip


@triton.jit
def _interact_tile(
    positions, rests, labels, is_sample, slopes, sums, gradient, rows, columns, n, dims,
    samples, mixed, proxies, alpha, edge, core, offset, start, stop, near,
    LAW: tl.constexpr, ROLE: tl.constexpr, GRADIENT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    steps = tl.arange(0, CHUNK)
    row_inside, column_inside = rows < n, columns < n
    left = positions + rows[:, None].to(tl.int64) * dims + steps[None, :]  # (BLOCK, CHUNK)
    right = positions + columns[:, None].to(tl.int64) * dims + steps[None, :]  # (BLOCK, CHUNK)
    # Relative to one point of the tile: where points are close, squares and products are small, and so is their error.
    middle = positions + tl.min(rows, 0).to(tl.int64) * dims + steps
    product = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    row_squares = tl.zeros((BLOCK,), dtype=tl.float32)
    column_squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in range(0, dims, CHUNK):
        inside = steps[None, :] < dims - k
        shift = tl.load(middle + k, mask=steps < dims - k, other=0.0)[None, :]
        a = tl.load(left + k, mask=row_inside[:, None] & inside, other=0.0) - shift
        b = tl.load(right + k, mask=column_inside[:, None] & inside, other=0.0) - shift
        row_squares += tl.sum(a * a, 1)
        column_squares += tl.sum(b * b, 1)
        product = tl.dot(a, tl.trans(b), product, input_precision=PRECISION)
    norms = row_squares[:, None] + column_squares[None, :]
    r2 = tl.maximum(norms - 2.0 * product, 0.0)

    row_labels = tl.load(labels + rows, mask=row_inside, other=-1)
    column_labels = tl.load(labels + columns, mask=column_inside, other=-1)
    counted = (rows[:, None] < columns[None, :]) & column_inside[None, :]
    counted = counted & (row_labels[:, None] != column_labels[None, :])
    row_kinds = tl.load(is_sample + rows, mask=row_inside, other=0) != 0
    column_kinds = tl.load(is_sample + columns, mask=column_inside, other=0) != 0
    weight = _kind_weight(row_kinds[:, None], column_kinds[None, :], samples, mixed, proxies)
    weight = tl.where(counted, weight, 0.0)

    close = ((r2 < near * norms) & (weight != 0.0)).to(tl.int32)
    delicate = tl.sum(tl.sum(close, 1), 0) > 0  # a product has lost the digits of close pairs
    if delicate:
        r2 = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        for k in range(dims):
            difference = _differences(positions, rests, rows, columns, row_inside, column_inside, dims, k)
            r2 += difference * difference

    energy, slope = _pair(r2, alpha, edge, core, offset, start, stop, LAW, ROLE)
    energy = energy * weight
    tl.atomic_add(sums + rows, tl.sum(energy, 1).to(tl.float64), mask=row_inside, sem="relaxed")
    tl.atomic_add(sums + columns, tl.sum(energy, 0).to(tl.float64), mask=column_inside, sem="relaxed")
    if GRADIENT:
        row_slopes = tl.load(slopes + rows, mask=row_inside, other=0.0)
        column_slopes = tl.load(slopes + columns, mask=column_inside, other=0.0)
        pull = slope * weight * (row_slopes[:, None] + column_slopes[None, :])
        row_pull, column_pull = tl.sum(pull, 1), tl.sum(pull, 0)
        back = tl.trans(pull)
        to_rows = gradient + rows[:, None].to(tl.int64) * dims + steps[None, :]
        to_columns = gradient + columns[:, None].to(tl.int64) * dims + steps[None, :]
        row_moves = row_inside & (tl.max(tl.abs(pull), 1) > 0.0)
        column_moves = column_inside & (tl.max(tl.abs(pull), 0) > 0.0)
        if delicate:
            for k in range(dims):
                difference = _differences(positions, rests, rows, columns, row_inside, column_inside, dims, k)
                force = pull * difference
                to_row = gradient + rows.to(tl.int64) * dims + k
                to_column = gradient + columns.to(tl.int64) * dims + k
                tl.atomic_add(to_row, tl.sum(force, 1), mask=row_moves, sem="relaxed")
                tl.atomic_add(to_column, -tl.sum(force, 0), mask=column_moves, sem="relaxed")
        else:
            for k in range(0, dims, CHUNK):
                inside = steps[None, :] < dims - k
                shift = tl.load(middle + k, mask=steps < dims - k, other=0.0)[None, :]
                a = tl.load(left + k, mask=row_inside[:, None] & inside, other=0.0) - shift
                b = tl.load(right + k, mask=column_inside[:, None] & inside, other=0.0) - shift
                on_rows = row_pull[:, None] * a - tl.dot(pull, b, input_precision=PRECISION)
                on_columns = column_pull[:, None] * b - tl.dot(back, a, input_precision=PRECISION)
                tl.atomic_add(to_rows + k, on_rows, mask=row_moves[:, None] & inside, sem="relaxed")
                tl.atomic_add(to_columns + k, on_columns, mask=column_moves[:, None] & inside, sem="relaxed")


@triton.jit
def attract(
    positions, rests, is_sample, slopes, by_class, begin, end, sums, gradient, dims,
    samples, mixed, proxies, alpha, edge, core, offset, start, stop,
    LAW: tl.constexpr, ROLE: tl.constexpr, GRADIENT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Add what the members of its class do to one point, from differences; no two programs share a result."""
    point = tl.load(by_class + tl.program_id(0))
    first, last = tl.load(begin + tl.program_id(0)), tl.load(end + tl.program_id(0))
    columns = tl.arange(0, WIDTH)
    inside = columns < dims
    here = tl.load(positions + point * dims + columns, mask=inside, other=0.0)
    here_rest = tl.load(rests + point * dims + columns, mask=inside, other=0.0)
    kind = tl.load(is_sample + point) != 0
    slope_here = tl.load(slopes + point) if GRADIENT else 0.0
    own = 0.0
    pulled = tl.zeros((WIDTH,), dtype=tl.float32)
    for slot in range(first, last):
        mate = tl.load(by_class + slot)
        if mate != point:
            weight = _kind_weight(kind, tl.load(is_sample + mate) != 0, samples, mixed, proxies)
            difference = here - tl.load(positions + mate * dims + columns, mask=inside, other=0.0)
            difference += here_rest - tl.load(rests + mate * dims + columns, mask=inside, other=0.0)
            r2 = tl.sum(difference * difference, 0)
            energy, slope = _pair(r2, alpha, edge, core, offset, start, stop, LAW, ROLE)
            own += energy * weight
            if GRADIENT:
                pulled += difference * (slope * weight * (slope_here + tl.load(slopes + mate)))
    tl.store(sums + point, own.to(tl.float64))
    if GRADIENT:
        place = gradient + point * dims + columns
        tl.store(place, tl.load(place, mask=inside, other=0.0) + pulled, mask=inside)


@triton.jit
def project(
    gradient, positions, inverses, order, result, first, num, dims, ON_SPHERE: tl.constexpr, WIDTH: tl.constexpr
):
    """Row k of `gradient` to row order[k] - first of `result`, tangential and rescaled for points on the sphere."""
    k = tl.program_id(0)
    row = tl.load(order + k) - first
    if (row >= 0) & (row < num):
        columns = tl.arange(0, WIDTH)
        inside = columns < dims
        place = k.to(tl.int64) * dims + columns
        value = tl.load(gradient + place, mask=inside, other=0.0)
        if ON_SPHERE:
            position = tl.load(positions + place, mask=inside, other=0.0)
            value = value - tl.sum(value * position, 0) * position
            value = (value.to(tl.float64) * tl.load(inverses + k)).to(tl.float32)
        tl.store(result + row.to(tl.int64) * dims + columns, value, mask=inside)
