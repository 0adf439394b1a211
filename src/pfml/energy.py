"""The class potential at any location (Eqs. 3 to 5), the total potential energy (Eq. 6), and the forces.

All functions take tensors of points (n, D) and their labels (n,); whether a point is a sample or a proxy makes no
difference to its field. `pfml.PotentialFieldLoss` is the same energy as a module with proxies of its own.

Eq. 2 has no bound as r -> 0. The literal energy follows it there too. Everything else (the shifted form, the
forces, the class potentials, the loss) ends at the law's core, delta / 20 for the paper's law: below it potentials
continue as straight lines (`pfml.field.Interaction`), so that they are finite wherever the points are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pfml.backends import BACKENDS, resolve_backend
from pfml.field import DecayLaw, PowerLaw, attraction, repulsion
from pfml.half_precision import watched, widened
from pfml.superposition import Charges, Field, PairWeights

__all__ = ["class_potential", "class_potentials", "forces", "potential_energy"]

#: Distances that are held at once by `class_potentials`.
DISTANCES_AT_ONCE = 2**22


def potential_energy(
    points: Tensor,
    labels: Tensor,
    *,
    law: DecayLaw | None = None,
    form: str = "literal",
    normalization: str = "none",
    backend: str = "auto",
) -> Tensor:
    """Eq. 6: the total energy U of `points`, a scalar.

    Args:
        points: Positions, (n, D), used as they are (not normalized).
        labels: Classes, (n,), any integers.
        law: The decay law; the paper's `PowerLaw()` if None.
        form: "literal": U as Eq. 6 has it, with every constant, every point's potential on itself, and no core, in
            float64: finite as long as float64 has r^-alpha, and infinite if points of two classes coincide (r = 0), as
            Eq. 2 is there. "shifted": for training, without constants and self terms and with the law's core, so with
            the same gradients where no two classes are closer than that, and finite everywhere.
        normalization: A key of `pfml.superposition.NORMALIZATIONS`; other than "none" only in the shifted form.
        backend: "auto" or a key of `pfml.backends.BACKENDS`.

    Example:
        >>> points, labels = torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1])
        >>> law = PowerLaw(delta=0.5, alpha=1.0)
        >>> potential_energy(points, labels, law=law)  # each attracts itself with 1 / delta, and repels the other
        tensor(0., dtype=torch.float64)
    """
    law = PowerLaw() if law is None else law
    given = points
    _check_points(points, labels)
    _check_finite(points)
    if form not in ("literal", "shifted"):
        raise ValueError(f"form must be 'literal' or 'shifted', got {form!r}")
    if form == "literal" and normalization != "none":
        raise ValueError(f"the literal form is Eq. 6 itself and takes no normalization, got {normalization!r}")
    if form == "literal" or not points.is_floating_point() or points.element_size() < 4:
        points = widened(points, torch.float64 if form == "literal" else torch.float32)
    no_proxies = Charges(points[:0].detach(), labels[:0])
    field = Field(law, normalization, literal=form == "literal")
    if not math.isfinite(field.own_pair.offset):
        raise ValueError(
            "the literal form has every point's potential on itself, so that attraction must be finite at r = 0, "
            f"which {type(law).__name__} is not: use form='shifted'"
        )
    if form == "literal" and backend == "triton":
        backend = "tiled"  # which has float64
    compute = BACKENDS[resolve_backend(backend, len(points), points, field)]
    energy = compute(Charges(points, labels), no_proxies, field, PairWeights())
    return watched(energy + _constants(labels, field) if form == "literal" else energy, given)


def _constants(labels: Tensor, field: Field) -> float:
    """What the shifted form leaves out: each same-class pair's psi_att(0), each other pair's psi_rep out of reach."""
    sizes = labels.unique(return_counts=True)[1].double()
    same = sizes.square().sum().item()  # ordered pairs, every point with itself included
    different = float(len(labels)) ** 2 - same
    return same * field.own_pair.offset + different * field.other_pair.offset


def forces(points: Tensor, labels: Tensor, *, law: DecayLaw | None = None, backend: str = "auto") -> Tensor:
    """-dU / dpoints, (n, D): twice the field -grad Psi_y(z) at each point, since Eq. 6 counts each pair twice.

    Of the shifted form: below the law's core a pair keeps the size of force that it has there.

    Example:
        >>> forces(torch.tensor([[0.0], [1.0]]), torch.tensor([0, 0]), law=PowerLaw(delta=0.5, alpha=1.0))
        tensor([[ 2.],
                [-2.]])
    """
    _check_points(points, labels)
    moving = (points.detach() if points.is_floating_point() else points.float()).requires_grad_()
    with torch.enable_grad():
        energy = potential_energy(moving, labels, law=law, form="shifted", backend=backend)
    (gradient,) = torch.autograd.grad(energy, moving)
    return -gradient


def class_potential(
    locations: Tensor, classes: Tensor | int, points: Tensor, labels: Tensor, *, law: DecayLaw | None = None
) -> Tensor:
    """Eq. 3: Psi_j(r) = Psi_j,att(r) + Psi_j,rep(r), (n,), at each location r for its own class j; differentiable.

    With the law's core, so finite everywhere (`pfml.field.Interaction`).

    Args:
        locations: Where to measure, (n, D).
        classes: The class j of each location, (n,) integers, or one class for all.
        points: The charges that create the field (samples and proxies), (m, D).
        labels: Their classes, (m,).
        law: The decay law; the paper's `PowerLaw()` if None.

    Example:
        >>> class_potential(torch.tensor([[2.0]]), 0, torch.tensor([[0.0]]), torch.tensor([0]), law=PowerLaw(alpha=1.0))
        tensor([-0.5000])
    """
    law = PowerLaw() if law is None else law
    _check_points(points, labels)
    _check_locations(locations, points)
    wide = torch.promote_types(torch.promote_types(locations.dtype, points.dtype), torch.float32)
    locations, points = locations.to(wide), points.to(wide)
    classes = torch.as_tensor(classes, device=points.device)
    if classes.is_floating_point() or classes.dtype == torch.bool:
        raise TypeError(f"classes must be integers, got {classes.dtype}")
    if classes.shape not in ((), locations.shape[:1]):
        raise ValueError(
            f"classes must be one, or ({len(locations)},) like the locations, got shape {tuple(classes.shape)}"
        )
    classes = classes.expand(len(locations))
    r = torch.cdist(locations, points, compute_mode="donot_use_mm_for_euclid_dist")  # (n, m)
    same_class = classes[:, None] == labels[None, :]  # (n, m)
    attracting = attraction(law, shifted=False).potential(r)  # Eq. 4, a term per charge
    repelling = repulsion(law, shifted=False).potential(r)  # Eq. 5
    return torch.where(same_class, attracting, repelling).sum(dim=1)


def class_potentials(
    locations: Tensor, points: Tensor, labels: Tensor, num_classes: int, *, law: DecayLaw | None = None
) -> Tensor:
    """Eqs. 3 to 5 for every class at once: Psi_j(r), (n, C) in float64, in bounded memory.

    Psi_j = sum over all charges of psi_rep + sum over the charges of class j of (psi_att - psi_rep).
    The class of lowest potential is the one that the field would pull a charge at r into. With the law's core, so
    finite everywhere (`pfml.field.Interaction`).

    Example:
        >>> points, labels = torch.tensor([[0.0], [4.0]]), torch.tensor([0, 1])
        >>> class_potentials(torch.tensor([[1.0]]), points, labels, num_classes=2).argmin(dim=1)
        tensor([0])
    """
    law = PowerLaw() if law is None else law
    _check_points(points, labels)
    _check_locations(locations, points)
    _check_finite(points)
    _check_finite(locations, "locations")
    outside = ((labels < 0) | (labels >= num_classes)).nonzero().flatten()
    if len(outside):
        first = int(outside[0])
        raise ValueError(f"labels must lie in [0, {num_classes}), got {int(labels[first])} at index {first}")
    attract, repel = attraction(law, shifted=False), repulsion(law, shifted=False)
    points, labels = points.double(), labels.long()
    rows = max(DISTANCES_AT_ONCE // max(len(points), num_classes, 1), 1)
    parts = []
    for part in locations.double().split(rows):
        r = torch.cdist(part, points)  # (k, m); products in float64 are exact enough here
        repelling = repel.potential(r)
        own = part.new_zeros(len(part), num_classes).index_add(1, labels, attract.potential(r) - repelling)
        parts.append(own + repelling.sum(dim=1, keepdim=True))
    return torch.cat(parts) if parts else locations.new_zeros(0, num_classes, dtype=torch.float64)


def _check_points(points: Tensor, labels: Tensor) -> None:
    for name, value in (("points", points), ("labels", labels)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if points.dim() != 2:
        raise ValueError(f"points must be (n, D), got shape {tuple(points.shape)}")
    if labels.shape != points.shape[:1]:
        raise ValueError(f"labels must be ({len(points)},) like the points, got shape {tuple(labels.shape)}")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be integers, got {labels.dtype}")


def _check_finite(points: Tensor, name: str = "points") -> None:
    bad_rows = (~torch.isfinite(points)).any(dim=1).nonzero().flatten().tolist()
    if bad_rows:
        raise ValueError(f"{name} must be finite, got NaN or Inf in {len(bad_rows)} rows, the first is {bad_rows[0]}")


def _check_locations(locations: Tensor, points: Tensor) -> None:
    if locations.dim() != 2 or locations.shape[1] != points.shape[1]:
        raise ValueError(f"locations must be (n, {points.shape[1]}) like the points, got {tuple(locations.shape)}")
