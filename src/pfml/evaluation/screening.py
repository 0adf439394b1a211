"""Which similarities can matter, by products of 8-bit integers: a bound, not an estimate.

A vector is x = step q + e, with integers q of 8 bits and a remainder e whose length is computed. So of two vectors

    x . y = step^2 (q_x . q_y) + e_x . y + (x - e_x) . e_y,

and the product of integers, which is exact, differs from the similarity by at most |e_x| |y| + |x - e_x| |e_y|: about
0.02 for the embeddings of a trained model. A processor with VNNI computes it at least four times as fast as one of
float32. With AVX2 alone it takes half of the time, in integers of 7 bits: two products of such are added in 16 bits.
Where few pairs come near a threshold, only they are computed as floats, and nothing that could matter is missed.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

__all__ = ["Screen", "largest_integer", "listed_products", "pays"]

#: Fewer dimensions than these are quick in float32, too.
LEAST_DIMS = 128
#: Integers go up to this with VNNI. Without it one of the factors is moved up by 128, and (128 + 63) * 63 * 2 < 2**15.
LARGEST, LARGEST_OF_PAIRS = 127, 63
#: Products of vectors of more dimensions may not fit into 32 bits.
MOST_DIMS = (2**31 - 1) // LARGEST**2
#: Candidates for the largest value that is not clipped, as fractions of the largest that occurs.
CLIPS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
#: Rows on which they are compared, and rows that are rounded at once.
SAMPLED, ROWS_AT_ONCE = 1024, 2048
#: Lengths are those of float32 vectors, which are 1 up to this.
ROUNDING = 1e-5
#: A screen is used as long as hardly more than this fraction of its tiles had too many pairs to list.
WASTED = 1 / 8


def pays(points: Tensor) -> bool:
    """Whether this machine has the instructions that make a screen worth it, for points of this kind."""
    has_sums = LEAST_DIMS <= points.shape[1] <= MOST_DIMS
    return points.device.type == "cpu" and has_sums and largest_integer() > 0


@functools.cache
def largest_integer() -> int:
    """The largest integer whose products this processor adds exactly, and sooner than floats; 0 if there is none."""
    if not hasattr(torch.cpu, "get_capabilities"):
        return 0  # older versions of torch do not tell
    has = torch.cpu.get_capabilities()
    has_vnni = any(has.get(name) for name in ("avx512_vnni", "avx_vnni", "amx_int8"))
    if has_vnni and _adds_exactly(LARGEST):  # the library may have been told to use older instructions
        return LARGEST
    return LARGEST_OF_PAIRS if has.get("avx2") and _adds_exactly(LARGEST_OF_PAIRS) else 0


def _adds_exactly(largest: int) -> bool:
    """Whether products of vectors of the largest integers are exact."""
    extremes = torch.tensor([-largest, largest, largest], dtype=torch.int8).repeat(64, LEAST_DIMS)
    extremes[::2] = largest
    extremes[::3] *= -1
    return torch.equal(torch._int_mm(extremes, extremes.T).double(), extremes.double() @ extremes.double().T)


class Screen:
    """Vectors of unit length, rounded to integers.

    Args:
        queries: (N, D) float32.
        items: (G, D) float32; may be the same tensor.
        largest: Of the integers; `largest_integer()` if None.
    """

    def __init__(self, queries: Tensor, items: Tensor, largest: int | None = None) -> None:
        largest = largest or largest_integer()
        self.step = _step(items, largest)
        self.items, self.item_remainders = _rounded(items, self.step, largest)
        same = queries is items
        self.queries, self.query_remainders = (
            (self.items, self.item_remainders) if same else _rounded(queries, self.step, largest)
        )
        self.tried = self.wasted = 0

    @property
    def promising(self) -> bool:
        """Whether it is worth it so far, with these thresholds."""
        return self.wasted <= 1 + WASTED * self.tried

    def forget(self) -> None:
        """Begin anew: thresholds have changed."""
        self.tried = self.wasted = 0

    def products(self, rows: slice, columns: slice, out: Tensor) -> Tensor:
        """The products of the integers of queries `rows` and items `columns`, int32."""
        return torch._int_mm(self.queries[rows], self.items[columns].T, out=out)

    def least(self, similarity: Tensor, rows: slice, columns: slice) -> Tensor:
        """The least product at which a query of `rows` and any item of `columns` may have this similarity, int32.

        Args:
            similarity: (rows,), one for each query.
        """
        own = self.query_remainders[rows]
        farthest = self.item_remainders[columns].max()
        slack = (own + (1 + own) * farthest) * (1 + ROUNDING) + ROUNDING
        least = (similarity.double() - slack).div_(self.step**2).floor_()
        return least.clamp_(-(2.0**31), 2.0**31 - 1).to(torch.int32)


def listed_products(left: Tensor, right: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The product of each listed pair, (n,): rows of `left`, in ascending order, with rows of `right`.

    Torch's product that is sampled at the entries of a sparse matrix reads vectors where they lie, and takes a quarter
    of the time of gathering them.
    """
    starts = torch.zeros(len(left) + 1, dtype=torch.int64)
    starts[1:] = torch.bincount(rows, minlength=len(left)).cumsum(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")  # torch 2.11, once
        pattern = torch.sparse_csr_tensor(
            starts, columns, left.new_zeros(len(rows)), (len(left), len(right)), check_invariants=False
        )
    return torch.sparse.sampled_addmm(pattern, left, right.T, beta=0.0).values()


def _step(items: Tensor, largest: int) -> float:
    """The step with which the farthest of some items is rounded best."""
    some = items[:: max(len(items) // SAMPLED, 1)]
    farthest = float(some.abs().max()) if len(some) else 1.0
    steps = [clip * (farthest or 1.0) / largest for clip in CLIPS]
    return min(steps, key=lambda step: float(_rounded(some, step, largest)[1].amax()) if len(some) else step)


def _rounded(points: Tensor, step: float, largest: int) -> tuple[Tensor, Tensor]:
    """The integers, (n, D) int8, and the lengths of what they leave, (n,) float64."""
    integers = torch.empty(points.shape, dtype=torch.int8)
    remainders = torch.empty(len(points), dtype=torch.float64)
    for some in torch.arange(len(points)).split(ROWS_AT_ONCE):
        rows = slice(int(some[0]), int(some[-1]) + 1)
        rounded = (points[rows] / step).round_().clamp_(-largest, largest)
        integers[rows] = rounded.to(torch.int8)
        remainders[rows] = rounded.mul_(-step).add_(points[rows]).norm(dim=1).double()
    return integers, remainders
