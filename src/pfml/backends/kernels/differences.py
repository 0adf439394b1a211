"""Pairs from the differences of their positions, exact at every distance: close pairs, and the pairs of one class."""

from __future__ import annotations

import triton
import triton.language as tl

from pfml.backends.kernels.laws import over, pair
from pfml.backends.kernels.points import exact, source_weight

__all__ = ["finish", "interact_closely"]

#: What differences of scaled positions are multiplied by: then squares of all but the smallest are ordinary numbers.
MAGNIFIED = tl.constexpr(2.0**48)


@triton.jit
def _differences(
    given, row_charge, row_inverse, column_charge, column_inverse, unit, k, CHUNK: tl.constexpr
):  # fmt: skip
    """CHUNK components, from k on, of the differences of all pairs times `unit`, (rows, columns, CHUNK).

    They are rounded only now, and `unit` is so large that float32 has room for their squares. Of equal positions they
    are zero, which a fused multiplication and subtraction does not give: it leaves what rounding took from one of them.
    """
    steps = k + tl.arange(0, CHUNK)[None, :]
    inside = steps < given.dims
    x = exact(given, row_charge[:, None], row_inverse[:, None], steps, inside)
    y = exact(given, column_charge[:, None], column_inverse[:, None], steps, inside)
    x, y = x[:, None, :], y[None, :, :]
    return tl.where(x == y, 0.0, (x - y) * unit).to(tl.float32)


@triton.jit
def interact_closely(
    given, rows, columns, slots, row_stride, column_stride, sums, gradient, num_column_blocks, padded, weights, numbers,
    LAW: tl.constexpr, ATTRACTS: tl.constexpr, GRADIENT: tl.constexpr, AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Add what the column of the tiles that are marked -2 do to ROWS row, all from differences."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_slots = slots + tl.program_id(0) * ROWS // BLOCK * row_stride
    unit = tl.load(rows.scale).to(tl.float64) * MAGNIFIED  # scaled positions are shorter than 2^7
    for first in range(0, num_column_blocks, AT_ONCE):
        many = first + tl.arange(0, AT_ONCE)
        number = tl.load(row_slots + many * column_stride, mask=many < num_column_blocks, other=-1)
        if tl.min(number, 0) == -2:
            row_charge, row_inverse = tl.load(rows.charges + row), tl.load(rows.inverses + row)
            row_label, row_kind = tl.load(rows.labels + row), tl.load(rows.kinds + row)
            row_slope = tl.load(rows.slopes + row) if GRADIENT else 0.0
            for block in range(first, tl.minimum(first + AT_ONCE, num_column_blocks)):
                if tl.load(row_slots + block * column_stride) == -2:
                    for begin in range(block * BLOCK, (block + 1) * BLOCK, COLUMNS):
                        column = begin + tl.arange(0, COLUMNS)
                        column_charge, column_inverse = (
                            tl.load(columns.charges + column),
                            tl.load(columns.inverses + column),
                        )
                        other_class = row_label[:, None] != tl.load(columns.labels + column)[None, :]
                        a, b = row_kind[:, None], tl.load(columns.kinds + column)[None, :]
                        weight = source_weight(a, b, weights)
                        weight = tl.where(other_class, weight, 0.0)
                        r2 = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
                        for k in range(0, given.dims, CHUNK):
                            difference = _differences(
                                given, row_charge, row_inverse, column_charge, column_inverse, unit, k, CHUNK
                            )  # fmt: skip
                            r2 += tl.sum(difference * difference, 2)
                        far = tl.sqrt(r2)
                        r = (far.to(tl.float64) / unit).to(tl.float32)
                        energy, slope = pair(r, numbers, LAW, ATTRACTS)
                        own = tl.load(sums + row)
                        tl.store(sums + row, own + tl.sum(energy * weight, 1).to(tl.float64))
                        if GRADIENT:
                            back = source_weight(b, a, weights)
                            back = tl.where(other_class, back, 0.0) * tl.load(columns.slopes + column)[None, :]
                            pull = slope * (weight * row_slope[:, None] + back)
                            shrunk = over(1.0, far)
                            for k in range(0, given.dims, CHUNK):
                                difference = _differences(
                                    given, row_charge, row_inverse, column_charge, column_inverse, unit, k, CHUNK
                                )  # fmt: skip
                                steps = k + tl.arange(0, CHUNK)[None, :]
                                offsets = gradient + row[:, None].to(tl.int64) * padded + steps
                                before = tl.load(offsets, mask=steps < given.dims, other=0.0)
                                force = tl.sum(pull[:, :, None] * (difference * shrunk[:, :, None]), 1)
                                tl.store(offsets, before + force, mask=steps < given.dims)


@triton.jit
def finish(
    given, rows, classes, by_class, found, gradient, sums, sample_gradient, proxy_gradient, num_charges, padded,
    weights, numbers,
    LAW: tl.constexpr, ATTRACTS: tl.constexpr, GRADIENT: tl.constexpr, ANY_PAIRS: tl.constexpr,
    SAMPLES_ON_SPHERE: tl.constexpr, PROXIES_ON_SPHERE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Collect what acts on one charge: other classes from `found` and `gradient`, its own class from differences."""
    here = tl.program_id(0)
    row = tl.load(by_class + here) if ANY_PAIRS else here
    charge = tl.load(rows.charges + row)
    columns = tl.arange(0, WIDTH)
    inside = columns < given.dims
    inverse = tl.load(rows.inverses + row)
    position = exact(given, charge, inverse, columns, inside)

    own_sum = tl.full((), 0.0, tl.float64)
    other_sum = tl.load(found + row)
    force = tl.zeros((WIDTH,), dtype=tl.float32)
    if GRADIENT:
        force += tl.load(gradient + row.to(tl.int64) * padded + columns, mask=inside, other=0.0)
    if ANY_PAIRS:
        label = tl.load(classes + here)
        kind = tl.load(rows.kinds + row)
        slope_here = tl.load(rows.slopes + row) if GRADIENT else 0.0
        for direction in tl.static_range(-1, 2, 2):
            slot = here + direction
            inside_list = (slot >= 0) & (slot < num_charges)
            same_class = inside_list & (tl.load(classes + slot, mask=inside_list, other=0) == label)
            while same_class:
                positive = tl.load(by_class + slot)
                positive_charge, positive_kind = tl.load(rows.charges + positive), tl.load(rows.kinds + positive)
                there = exact(given, positive_charge, tl.load(rows.inverses + positive), columns, inside)
                difference = tl.where(position == there, 0.0, position - there).to(tl.float32)  # as in `_differences`
                r = tl.sqrt(tl.sum(difference * difference, 0))
                energy, slope = pair(r, numbers, LAW, ATTRACTS)
                slope = over(slope, r)
                weight = source_weight(kind, positive_kind, weights)
                own_sum += (energy * weight).to(tl.float64)
                if GRADIENT:
                    back = source_weight(positive_kind, kind, weights)
                    force += difference * (slope * (weight * slope_here + back * tl.load(rows.slopes + positive)))
                slot += direction
                inside_list = (slot >= 0) & (slot < num_charges)
                same_class = inside_list & (tl.load(classes + slot, mask=inside_list, other=0) == label)
    tl.store(sums + charge, own_sum)
    tl.store(sums + num_charges + charge, other_sum)

    if GRADIENT:
        if tl.where(charge < given.num_samples, SAMPLES_ON_SPHERE, PROXIES_ON_SPHERE):
            tangential = force.to(tl.float64)
            tangential -= tl.sum(tangential * position, 0) * position
            force = (tangential * inverse).to(tl.float32)
        if charge < given.num_samples:
            tl.store(sample_gradient + charge.to(tl.int64) * given.dims + columns, force, mask=inside)
        else:
            tl.store(
                proxy_gradient + (charge - given.num_samples).to(tl.int64) * given.dims + columns, force, mask=inside
            )
