"""The Poincare ball: hyperbolic space of curvature -c as the points x with c |x|^2 < 1.

    exponential map at 0:  exp(v)  = tanh(sqrt(c) |v|) v / (sqrt(c) |v|)
    Moebius addition:      x + y   = ((1 + 2 c xy + c y^2) x + (1 - c x^2) y) / (1 + 2 c xy + c^2 x^2 y^2)
    distance:              d(x, y) = 2 / sqrt(c) artanh(sqrt(c) |(-x) + y|)

Near the boundary a point is its direction, and neither 1 - c x^2 nor the argument of artanh can be resolved. So
distances are computed from what a network gives, the tangent vectors at 0, in a form without such differences. With
a = sqrt(c) |v|, b = sqrt(c) |w| and r the distance of the directions v / |v| and w / |w|:

    sinh^2(sqrt(c) d / 2) = sinh^2(a - b) + sinh(2 a) sinh(2 b) r^2 / 4

At equal lengths, as after clipping, d grows with the angle alone: the order of neighbors is that of their cosines.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pfml.sphere import inverse_norms, unit

__all__ = [
    "ball_distance",
    "clip_lengths",
    "exponential_map",
    "mobius_addition",
    "riemannian_gradient",
    "tangent_distances",
]

#: A squared chord below it is a rounding error of the product that it comes from.
COINCIDENT = 4e-15


def clip_lengths(vectors: Tensor, radius: float) -> Tensor:
    """min(1, radius / |v|) v (Guo et al., CVPR 2022): vectors (n, D) of length `radius` at most, in their dtype.

    Example:
        >>> clip_lengths(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
        tensor([[0.6000, 0.8000],
                [0.3000, 0.4000]])
    """
    factors = (radius * inverse_norms(vectors)).clamp(max=1.0)  # float64, so that no length overflows
    return (vectors.double() * factors).to(vectors.dtype)


def exponential_map(vectors: Tensor, *, curvature: float) -> Tensor:
    """exp(v), (n, D): where tangent vectors at 0 lie in the ball, at the distance 2 |v| from 0."""
    root = curvature**0.5
    wide = vectors.double()
    lengths = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    is_zero = lengths == 0
    scaled = root * torch.where(is_zero, 1.0, lengths)
    return (wide * torch.where(is_zero, 1.0, scaled.tanh() / scaled)).to(vectors.dtype)


def mobius_addition(x: Tensor, y: Tensor, *, curvature: float) -> Tensor:
    """The Moebius sum of points (..., D) of the ball, which in general is not that of y and x."""
    dtype, c = torch.promote_types(x.dtype, y.dtype), curvature
    x, y = x.double(), y.double()
    products = (x * y).sum(dim=-1, keepdim=True)
    squares_x, squares_y = (one.square().sum(dim=-1, keepdim=True) for one in (x, y))
    numerator = (1 + 2 * c * products + c * squares_y) * x + (1 - c * squares_x) * y
    return (numerator / (1 + 2 * c * products + c**2 * squares_x * squares_y)).to(dtype)


def ball_distance(x: Tensor, y: Tensor, *, curvature: float) -> Tensor:
    """d(x, y) of points (..., D) inside the ball: 2 / sqrt(c) arsinh(sqrt(c / ((1 - c x^2) (1 - c y^2))) |x - y|)."""
    dtype, root = torch.promote_types(x.dtype, y.dtype), curvature**0.5
    x, y = x.double(), y.double()
    lengths_x, lengths_y = (root * torch.linalg.vector_norm(one, dim=-1) for one in (x, y))
    rooms = (1 - lengths_x) * (1 + lengths_x) * (1 - lengths_y) * (1 + lengths_y)
    return (2 / root * torch.asinh(root * torch.linalg.vector_norm(x - y, dim=-1) / rooms.sqrt())).to(dtype)


def tangent_distances(vectors: Tensor, others: Tensor, *, curvature: float) -> Tensor:
    """d(exp(v), exp(w)) of all pairs, (n, m), of tangent vectors (n, D) and (m, D) at 0, in their dtype.

    Finite up to sqrt(c) |v| = 170, where sinh of float64 ends. Points that coincide have distance 0 and no gradient.
    The products are those of float64: angles are exact to 1e-8 of a radian.
    """
    dtype, root = torch.promote_types(vectors.dtype, others.dtype), curvature**0.5
    directions, other_directions = unit(vectors.double()), unit(others.double())
    lengths = root * torch.linalg.vector_norm(vectors.double(), dim=-1)[:, None]  # (n, 1)
    other_lengths = root * torch.linalg.vector_norm(others.double(), dim=-1)  # (m,)
    chords = 2 - 2 * directions @ other_directions.T  # (n, m), squared
    chords = torch.where(chords > COINCIDENT, chords, 0.0)
    across = (2 * lengths).sinh() * (2 * other_lengths).sinh() * chords / 4
    squares = (lengths - other_lengths).sinh().square() + across
    apart = squares > 0
    half = torch.where(apart, squares, 1.0).sqrt().asinh()
    return torch.where(apart, 2 / root * half, 0.0).to(dtype)


def riemannian_gradient(vectors: Tensor, *, curvature: float) -> Tensor:
    """The same vectors (n, D), whose gradients are those of the ball's metric: times (1 - c |exp(v)|^2)^2 / 4."""
    lengths = curvature**0.5 * torch.linalg.vector_norm(vectors.detach().double(), dim=-1, keepdim=True)
    factors = (lengths.cosh() ** -4 / 4).to(vectors.dtype)
    return vectors.detach() + factors * (vectors - vectors.detach())
