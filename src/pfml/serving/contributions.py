"""The terms of the potential of a class at an image, charge by charge: why an image is where it is.

Fields superpose, so Eq. 3 is a sum over charges:

    Psi_j(z) = sum over class j of psi_att(r) + sum over other classes of (psi_rep(r) - psi_rep(reach)) + constant

A charge of another class that is out of reach exerts no force, but Eq. 2 gives it the potential psi_rep(reach).
These constants are summed separately, so that the terms are the charges that act.

An indexed image at a distance of about 0 is a duplicate of the query: as a charge of another class it would repel
without bound, and hide all other terms. An image does not act on itself, so it is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.field import DecayLaw, attraction, repulsion
from pfml.serving.gallery import Contents

__all__ = ["Contributions", "contributions", "pair_potentials"]

#: Below this distance an indexed image is a duplicate of the query: another batch moves an embedding by 1e-6, another
#: device by more; different images are hundreds of times farther apart.
DUPLICATE = 1e-3


@dataclass(frozen=True, eq=False)
class Contributions:
    """The potential of a class at a point, charge by charge: the images of the index first, then the proxies.

    Args:
        potentials: (n + p,) float64, the term of each charge; 0 for the image itself and for those without a class.
        distances: (n + p,) float64.
        same: (n + p,) whether the charge is of the class, so that it attracts.
        acts: (n + p,) whether the charge has a class and is not the image itself.
        constant: Eq. 3 less the terms.
        class_attractions: (C,) the attraction of each class, positive.
        left_out: How many indexed images with a class are duplicates of the image.
    """

    potentials: Tensor
    distances: Tensor
    same: Tensor
    acts: Tensor
    constant: float
    class_attractions: Tensor
    left_out: int

    @property
    def total(self) -> float:
        """The sum of all terms."""
        return float(self.potentials.sum())

    @property
    def shares(self) -> Tensor:
        """(n + p,) each term over the sum of the absolute values of all terms."""
        size = float(self.potentials.abs().sum())
        return self.potentials / size if size else self.potentials

    def strongest(self, count: int, *, attracting: bool) -> list[int]:
        """The charges with the largest terms that attract, or repel, largest first, without terms of 0.

        Charges on contact attract equally: of equal terms, the nearest charge comes first.
        """
        chosen = self.same if attracting else ~self.same
        sizes = self.potentials.abs() * (chosen & self.acts)
        nearest = self.distances.argsort(stable=True)
        order = nearest[sizes[nearest].argsort(descending=True, stable=True)][:count]
        return [k for k in order.tolist() if float(sizes[k]) > 0]


def pair_potentials(r: Tensor, same: Tensor, law: DecayLaw) -> Tensor:
    """The potential of a charge at each distance r: Eq. 1 if it is of the same class, else Eq. 2 less its constant."""
    repelling = repulsion(law, shifted=True)
    outside = torch.where(r < repelling.stop, repelling.potential(r), 0.0)
    return torch.where(same, attraction(law, shifted=False).potential(r), outside)


def contributions(
    location: Tensor, label: int, contents: Contents, law: DecayLaw, *, without: int | None = None
) -> Contributions:
    """The term of each charge in the potential of class `label` at a location (D,).

    Args:
        location: On the unit sphere.
        label: Position of the class in `contents.class_names`.
        contents: The charges.
        law: Of the field; it must decay.
        without: The id of the query image, which does not act on itself.
    """
    points = torch.cat([contents.points, contents.proxies]).double()
    labels = torch.cat([contents.labels, contents.proxy_labels])
    distances = (points - location.double()).norm(dim=1)
    acts = labels >= 0
    if without is not None and (row := contents.row(without)) is not None:
        acts[row] = False
    duplicates = acts & (distances < DUPLICATE)
    duplicates[len(contents.ids) :] = False  # a proxy is never a duplicate
    acts &= ~duplicates
    same = labels == label
    potentials = torch.where(acts, pair_potentials(distances, same, law), 0.0)
    pulls = -attraction(law, shifted=False).potential(distances[acts])
    by_class = torch.zeros(len(contents.class_names), dtype=torch.float64).index_add_(0, labels[acts], pulls)
    negatives = int((acts & ~same).sum())
    constant = negatives * repulsion(law, shifted=True).offset
    return Contributions(potentials, distances, same, acts, constant, by_class, int(duplicates.sum()))
