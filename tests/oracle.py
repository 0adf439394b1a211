"""Eqs. 1 to 6 as Python loops over Python floats: slow, and hard to get wrong."""

from __future__ import annotations

import math


def psi_att(r: float, delta: float, alpha: float) -> float:
    """Eq. 1."""
    return -1 / delta**alpha if r < delta else -1 / r**alpha


def psi_rep(r: float, delta: float, alpha: float) -> float:
    """Eq. 2."""
    return 1 / r**alpha if r < delta else 1 / delta**alpha


def class_potential(j, location, points, labels, *, delta=0.2, alpha=3.0, delta_rep=None):
    """Eqs. 3 to 5: Psi_j at a location."""
    total = 0.0
    for point, label in zip(points, labels, strict=True):
        r = math.dist(location, point)
        total += psi_att(r, delta, alpha) if label == j else psi_rep(r, delta_rep or delta, alpha)
    return total


def potential_energy(points, labels, **law):
    """Eq. 6: U, self terms included."""
    return math.fsum(
        class_potential(label, point, points, labels, **law) for point, label in zip(points, labels, strict=True)
    )


def forces(points, labels, *, delta=0.2, alpha=3.0, core=0.01, delta_rep=None):
    """-dU / dpoints of Eq. 6, a list of vectors; below the core a pair keeps the size of force that it has there."""
    total = [[0.0] * len(point) for point in points]
    for at, own_label, force in zip(points, labels, total, strict=True):
        for source, label in zip(points, labels, strict=True):
            r = math.dist(at, source)
            attracts = label == own_label
            if r == 0 or attracts != (r >= (delta if attracts else delta_rep or delta)):
                continue
            size = 2 * alpha * max(r, core) ** (-alpha - 1) * (-1 if attracts else 1)  # Eq. 6 counts a pair twice
            for d, (a, b) in enumerate(zip(at, source, strict=True)):
                force[d] += size * ((a - b) / r)
    return total


def anchor_energies(points, labels, num_samples, normalization, *, delta, alpha, delta_rep):
    """The two normalized energies of `pfml.superposition`, one number for each anchor."""
    energies = []
    anchors = range(num_samples) if normalization == "anchor" else range(len(points))
    for a in anchors:
        strength = repulsion = foreign = 0.0
        for b in range(len(points)):
            if a == b:
                continue
            r = math.dist(points[a], points[b])
            if labels[a] == labels[b]:
                strength += max(r, delta) ** -alpha
            else:
                repulsion += min(r, delta_rep) ** -alpha - delta_rep**-alpha
                foreign += max(r, delta) ** -alpha
        if normalization == "log":
            energies.append(math.log(1 + repulsion / delta**-alpha) - math.log(strength))
        else:
            energies.append(-math.log(strength / (strength + foreign)))
    return energies
