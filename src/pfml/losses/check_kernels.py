"""The checks of a batch on a GPU in two Triton kernels: as torch operations, launching them takes longer than a field.

    look      what is found in any of the values: a label out of range, NaN or Inf, an embedding unlike the first
    conclude  what that means

Findings are joined by "or", so that equal inputs give equal results in any order.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LABEL", "VALUE", "conclude", "look"]

#: Bits of what is found.
LABEL, VALUE, DIFFERENT = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)


@triton.jit
def _not_finite(value):
    return (tl.abs(value.to(tl.float32)) < float("inf")) == False  # noqa: E712  (NaN is not less)


@triton.jit
def look(
    embeddings, labels, proxies, found, num_embedded, num_labels, num_proxied, num_classes, dims, BLOCK: tl.constexpr
):
    """Add to `found` what is in a block of each; `num_embedded` and `num_proxied` count values, not rows."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels + at, mask=at < num_labels, other=0)
    bits = tl.where((label < 0) | (label >= num_classes), LABEL, 0)
    embedded = at < num_embedded
    value = tl.load(embeddings + at, mask=embedded, other=0.0)
    first = tl.load(embeddings + at % dims, mask=embedded, other=0.0)
    bits |= tl.where(_not_finite(value), VALUE, 0) | tl.where(value != first, DIFFERENT, 0)
    bits |= tl.where(_not_finite(tl.load(proxies + at, mask=at < num_proxied, other=0.0)), VALUE, 0)
    any_label = tl.max(bits & LABEL, 0)
    any_value, any_different = tl.max(bits & VALUE, 0), tl.max(bits & DIFFERENT, 0)
    together = any_label | any_value | any_different
    if together > 0:
        tl.atomic_or(found, together)


@triton.jit
def conclude(found, verdicts, num_labels):
    """verdicts[0]: whether anything is wrong; verdicts[1]: or whether all embeddings, if there are more, are equal."""
    bits = tl.load(found)
    is_bad = (bits & (LABEL | VALUE)) != 0
    tl.store(verdicts, is_bad.to(tl.int8))
    tl.store(verdicts + 1, (is_bad | ((num_labels > 1) & ((bits & DIFFERENT) == 0))).to(tl.int8))
