"""Points on the unit sphere."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["inverse_norms", "unit"]


def inverse_norms(points: Tensor) -> Tensor:
    """1 / |points|, (n, 1) in float64, where no float32 value overflows or underflows; 1 for a zero vector."""
    norms = torch.linalg.vector_norm(points.double(), dim=-1, keepdim=True)
    return 1 / torch.where(norms > 0, norms, 1.0)


def unit(points: Tensor) -> Tensor:
    """points / |points| in the dtype of `points`; a zero vector stays where it is, at the origin.

    Example:
        >>> unit(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """
    return (points.double() * inverse_norms(points)).to(points.dtype)
