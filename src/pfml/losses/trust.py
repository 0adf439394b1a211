"""Which samples fit their labels, by the field of the proxies.

The strength of a class at a point is the sum over its proxies of -psi_att(r), what Eq. 1 attracts with. A sample fits
if its own class is there about as strong as any other one:

    fit[i]     = strength of the own class at i / strength of the strongest other class at i
    trusted[i] = fit[i] >= trust * min(1, median of fit)

A sample with a wrong label lies where its true class is strong, so its fit is far below 1. The median is there for the
start, when proxies lie anywhere and no sample fits: then a sample is measured by the others of its batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pfml.field import DecayLaw
from pfml.superposition import Charges

__all__ = ["fit", "trusted"]


@torch.no_grad()
def fit(samples: Charges, proxies: Charges, num_classes: int, law: DecayLaw) -> Tensor:
    """How strong its own class is at each sample, in units of the strongest other class, (n,).

    The proxies are laid class by class, as many of each.
    """
    r = torch.cdist(samples.positions(), proxies.positions())
    by_class = -law.attraction(r).view(len(r), num_classes, -1).sum(dim=2)
    own = by_class.gather(1, samples.labels[:, None])
    strongest = by_class.scatter(1, samples.labels[:, None], 0.0).amax(dim=1)
    return own[:, 0] / strongest


@torch.no_grad()
def trusted(fits: Tensor, trust: float) -> Tensor:
    """Whether each sample of a batch is trusted, (n,), given the `fit` of all of them."""
    if not len(fits):
        return fits >= 0
    return fits >= trust * fits.median().clamp(max=1.0)
