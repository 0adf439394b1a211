"""Split-precision points on the GPU, and how much a pair of charges counts."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["exact", "prepare", "source_weight"]

#: Largest component (times the scale) below which a position is quantized to zero.
SMALLEST = tl.constexpr(1e-30)


@triton.jit
def source_weight(anchor, source, weights):
    """How much a source counts at an anchor, by `SourceWeights`; 1: a sample, 0: a proxy, below: padding."""
    at_sample = tl.where(source == 1, weights.samples_on_samples, weights.proxies_on_samples)
    at_proxy = tl.where(source == 1, weights.samples_on_proxies, weights.proxies_on_proxies)
    return tl.where((anchor < 0) | (source < 0), 0.0, tl.where(anchor == 1, at_sample, at_proxy))


@triton.jit
def exact(given, charges, inverses, columns, inside):
    """Positions of charges in float64; charges, inverses, columns and inside must broadcast together."""
    of_sample = charges + 0 * columns < given.num_samples
    at_sample = given.samples + charges.to(tl.int64) * given.dims + columns
    at_proxy = given.proxies + (charges - given.num_samples).to(tl.int64) * given.dims + columns
    point = tl.load(at_sample, mask=inside & of_sample, other=0.0)
    point += tl.load(at_proxy, mask=inside & (of_sample == False), other=0.0)  # noqa: E712  (a tensor)
    return point.to(tl.float64) * inverses


@triton.jit
def _store_quantized(rows, row, scaled, offsets, inside):
    """Store a position rounded to multiples of a 127th of its largest component, and a bound of the distance to it.

    The bound is raised by more than float64 and float32 round off.
    """
    step = (tl.maximum(tl.max(tl.abs(scaled), 0), SMALLEST) * (1.0 / 127)).to(tl.float32)
    wide_step = step.to(tl.float64)
    quantized = tl.floor(scaled * (1.0 / wide_step) + 0.5)  # 127 at most: float32 rounds off 2^-24 of the step
    missing = scaled - quantized * wide_step
    tl.store(rows.quantized + offsets, quantized.to(tl.int32).to(tl.int8), mask=inside)
    tl.store(rows.steps + row, step)
    square = tl.sum(quantized * quantized, 0) * (wide_step * wide_step)
    tl.store(rows.quantized_squares + row, square.to(tl.float32))
    error = tl.sqrt(tl.sum(missing * missing, 0))
    tl.store(rows.errors + row, (error * 1.000001 + 1e-6).to(tl.float32))


@triton.jit
def prepare(
    given, sample_labels, proxy_labels, given_slopes, order, rows, num_charges, num_rows, padded,
    ORDERED: tl.constexpr, SLOPES: tl.constexpr, SAMPLES_ON_SPHERE: tl.constexpr, PROXIES_ON_SPHERE: tl.constexpr,
    ONLY_HIGH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Fill row k with charge order[k]; rows from `num_rows` on, and those of a negative charge, are padding.

    ONLY_HIGH: nothing but the high parts.
    """
    row = tl.program_id(0)
    charge = tl.load(order + row, mask=row < num_rows, other=-1).to(tl.int32) if ORDERED else row
    used = (row < num_rows) & (charge >= 0)
    charge = tl.where(used, charge, 0)
    columns = tl.arange(0, WIDTH)
    of_sample = charge < given.num_samples
    point = exact(given, charge, 1.0, columns, columns < tl.where(used, given.dims, 0))
    square = tl.sum(point * point, 0)
    norm = tl.sqrt(square)
    inverse = tl.where(norm > 0, 1.0 / tl.where(norm > 0, norm, 1.0), 1.0)
    on_sphere = tl.where(of_sample, SAMPLES_ON_SPHERE, PROXIES_ON_SPHERE)
    inverse = tl.where(on_sphere, inverse, 1.0)
    unit = tl.load(rows.scale).to(tl.float64)
    scaled = point * inverse * unit
    rounded = (tl.floor(scaled * 32.0 + 0.5) * 0.03125).to(tl.float32).to(tl.float16)
    offsets = row.to(tl.int64) * padded + columns
    tl.store(rows.high + offsets, rounded, mask=columns < padded)
    if not ONLY_HIGH:
        left = (scaled - rounded.to(tl.float64)).to(tl.float32).to(tl.float16)
        tl.store(rows.low + offsets, left, mask=columns < padded)
        h, rest = rounded.to(tl.float64), left.to(tl.float64)
        tl.store(rows.squares + row, tl.sum(h * h, 0).to(tl.float32))  # exact, as the products are
        tl.store(rows.rests + row, tl.sum((2.0 * h + rest) * rest, 0).to(tl.float32))
        _store_quantized(rows, row, scaled, offsets, columns < padded)
        tl.store(rows.inverses + row, inverse)
        label = tl.load(sample_labels + charge, mask=used & of_sample, other=0)
        label += tl.load(proxy_labels + charge - given.num_samples, mask=used & (of_sample == False), other=0)  # noqa: E712
        tl.store(rows.labels + row, label)
        tl.store(rows.kinds + row, tl.where(used, of_sample.to(tl.int32), -1))
        tl.store(rows.charges + row, charge)
        if SLOPES:
            for channel in tl.static_range(2):
                slope = tl.load(given_slopes + channel * num_charges + charge, mask=used, other=0.0)
                tl.store(rows.slopes + channel * tl.num_programs(0) + row, slope)
