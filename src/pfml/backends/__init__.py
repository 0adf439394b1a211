"""Ways to compute the energy of a field. All have one signature and the same numerics.

    backend(samples, proxies, field, weights) -> energy, a scalar tensor that can be differentiated once

dense is the reference, tiled runs anywhere in bounded memory, triton on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pfml.backends.dense import dense_energy
from pfml.backends.fused import fused_energy, unavailable
from pfml.backends.tiled import tiled_energy
from pfml.superposition import Charges, Field, PairWeights

__all__ = ["BACKENDS", "choose_backend", "resolve_backend"]

Backend = Callable[[Charges, Charges, Field, PairWeights], Tensor]

BACKENDS: dict[str, Backend] = {
    "dense": dense_energy,
    "tiled": tiled_energy,
    "triton": fused_energy,
}

#: Up to here the dense reference is the faster one: the tiled backend's cost is all overhead (they meet between 32
#: and 64 points, in 512 and in 64 dimensions, on 2 cores).
DENSE_UP_TO = 32
#: The same for soft charges.
SOFT_DENSE_UP_TO = 1024


def choose_backend(
    num_points: int, like: Tensor | None = None, field: Field | None = None, *, soft: bool = False
) -> str:
    """The name of the backend that "auto" takes for `num_points` charges like `like`, (..., D), under `field`.

    On a GPU triton is the fastest at every size (`make bench-gpu`), where its kernels know the field. Soft charges
    come in batches, and each pair of them acts: up to a batch, every pair at once is the fastest way.
    """
    if soft:
        return "dense" if num_points <= SOFT_DENSE_UP_TO else "tiled"
    if like is not None and field is not None and like.is_cuda:
        knows = unavailable(like.device, like.dtype, like.shape[-1], field) is None
        return "triton" if knows else "tiled"
    return "dense" if num_points <= DENSE_UP_TO else "tiled"


def resolve_backend(
    name: str, num_points: int, like: Tensor | None = None, field: Field | None = None, *, soft: bool = False
) -> str:
    """The name of a backend that exists: `name` itself, or the choice of "auto"."""
    if name == "auto":
        return choose_backend(num_points, like, field, soft=soft)
    if name not in BACKENDS:
        raise ValueError(f"backend must be 'auto' or one of {sorted(BACKENDS)}, got {name!r}")
    return name
