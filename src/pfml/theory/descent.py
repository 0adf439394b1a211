"""Descent in the attraction field of one class, for many sets of points at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pfml.energy import class_potential
from pfml.field import DecayLaw

__all__ = ["descent", "end_of_descent", "field_and_gradient"]


def field_and_gradient(locations: Tensor, points: Tensor, law: DecayLaw) -> tuple[Tensor, Tensor]:
    """Psi_att, (T, k), and its gradient, (T, k, D), at `locations`, each in the field of its own trial's `points`.

    Args:
        locations: Where to measure, (T, k, D).
        points: The data of each trial, (T, n, D).
        law: Their decay law.
    """
    labels = points.new_zeros(points.shape[1], dtype=torch.int64)

    def potential(where: Tensor, charges: Tensor) -> Tensor:
        return class_potential(where, 0, charges, labels, law=law)

    moving = locations.detach().requires_grad_()
    with torch.enable_grad():
        potentials = torch.vmap(potential)(moving, points)
    (gradient,) = torch.autograd.grad(potentials.sum(), moving)
    return potentials.detach(), gradient


def descent(
    start: Tensor, points: Tensor, law: DecayLaw, *, longest: Tensor | float, steps: int, balls: Tensor | None = None
) -> Iterator[Tensor]:
    """The positions, (T, k, D), after each of `steps` steps down the field of `points`.

    The force grows by orders of magnitude toward a datum and vanishes inside it, so its size is of no use as a step.
    A step has the direction of the force and a length of its own: halved after a step that would lead up, which is not
    taken, and raised by half after one that leads down. So nothing jumps over a barrier higher than where it is.

    Args:
        start: Where to begin, (T, k, D).
        points: The data, (T, n, D).
        law: Their decay law.
        longest: Length of the first step, which no step exceeds; a number or (T, 1, 1).
        steps: How many.
        balls: Centers, (T, k, D), of the balls of radius delta that the positions must not leave, if any.
    """
    where = start
    longest = torch.as_tensor(longest, dtype=start.dtype).expand(len(start), 1, 1)
    length = longest.expand(*start.shape[:2], 1)
    height, gradient = field_and_gradient(where, points, law)
    for _ in range(steps):
        ahead = where - length * torch.nn.functional.normalize(gradient, dim=-1, eps=1e-300)
        if balls is not None:
            # Just inside: a datum's own pull acts on its sphere, and the proof asks about the others' alone.
            ahead = balls + _shortened(ahead - balls, law.contact * (1 - 1e-9))
        height_ahead, gradient_ahead = field_and_gradient(ahead, points, law)
        lower = height_ahead < height
        height = torch.where(lower, height_ahead, height)
        where = torch.where(lower[..., None], ahead, where)
        gradient = torch.where(lower[..., None], gradient_ahead, gradient)
        length = torch.where(lower[..., None], (1.5 * length).minimum(longest), 0.5 * length)
        yield where


def _shortened(vectors: Tensor, longest: float) -> Tensor:
    lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    shortened: Tensor = vectors * (longest / lengths).clamp_max(1)
    return shortened


def end_of_descent(positions: Iterator[Tensor]) -> Tensor:
    """The last of the positions that `descent` yields."""
    *_, last = positions
    return last
