"""Why an image is where it is: what every charge adds to the class potential at its place.

Fields superpose, so Eq. 3 is a sum over charges, and its terms are the answer:

    Psi_j(z) = sum over class j of psi_att(r) + sum over the others of (psi_rep(r) - psi_rep(reach)) + constant

A charge of another class that is out of reach acts on nothing, but Eq. 2 gives it the potential psi_rep(reach).
These constants are added up on their own, so that the terms are the charges that act.

An indexed image at a distance of about 0 is the image that is asked about, sent again: as a charge of another class it
would repel without bound, and hide all other terms. It does not act on itself, and so is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.field import DecayLaw, attraction, repulsion
from pfml.serving.gallery import Contents

__all__ = ["Contributions", "contributions", "pair_potentials"]

#: Nearer than this, an indexed image is the very image that is asked about: embedded in another batch it moves by 1e-6,
#: on another device by more; images that differ lie hundreds of times farther apart.
VERY_NEAR = 1e-3


@dataclass(frozen=True, eq=False)
class Contributions:
    """The potential of a class at a place, charge by charge: the images of the index first, then the proxies.

    Args:
        potentials: (n + p,) float64, the term of each charge; 0 for the image itself and for those without a class.
        distances: (n + p,) float64.
        same: (n + p,) whether the charge is of the class, and attracts.
        acts: (n + p,) whether the charge has a class, and is not the image itself.
        constant: What Eq. 3 has besides the terms.
        class_attractions: (C,) how strongly each class attracts, positive.
        left_out: How many indexed images with a class do not act because they are the image itself, by their place.
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
        """(n + p,) each term as a part of the sum of their sizes; they add up to total / sum of sizes."""
        size = float(self.potentials.abs().sum())
        return self.potentials / size if size else self.potentials

    def strongest(self, count: int, *, attracting: bool) -> list[int]:
        """The charges of the largest terms that attract, or that repel, largest first; none whose term is 0.

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
    """What each charge adds to the potential of class `label` at a location (D,).

    Args:
        location: On the unit sphere.
        label: Position of the class in `contents.class_names`.
        contents: The charges.
        law: Of the field; it must decay.
        without: The id of the image that is asked about, which does not act on itself.
    """
    points = torch.cat([contents.points, contents.proxies]).double()
    labels = torch.cat([contents.labels, contents.proxy_labels])
    distances = (points - location.double()).norm(dim=1)
    acts = labels >= 0
    if without is not None and (row := contents.row(without)) is not None:
        acts[row] = False
    very_near = acts & (distances < VERY_NEAR)
    very_near[len(contents.ids) :] = False  # a proxy is no image, however near
    acts &= ~very_near
    same = labels == label
    potentials = torch.where(acts, pair_potentials(distances, same, law), 0.0)
    pulls = -attraction(law, shifted=False).potential(distances[acts])
    by_class = torch.zeros(len(contents.class_names), dtype=torch.float64).index_add_(0, labels[acts], pulls)
    others = int((acts & ~same).sum())
    constant = others * repulsion(law, shifted=True).offset
    return Contributions(potentials, distances, same, acts, constant, by_class, int(very_near.sum()))
