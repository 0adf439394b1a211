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

#: Pairs of a sample and a proxy that are looked at together, so that memory does not grow with their number.
PAIRS_AT_ONCE = 2**24


@torch.no_grad()
def fit(samples: Charges, proxies: Charges, num_classes: int, law: DecayLaw) -> Tensor:
    """How strong its own class is at each sample, in units of the strongest other class, (n,).

    The proxies are laid class by class, as many of each. Where no class is felt at all, fit is 0 for every sample.
    """
    sources = proxies.positions()
    rows = max(PAIRS_AT_ONCE // len(sources), 1)
    parts = zip(samples.positions().split(rows), samples.labels.split(rows), strict=True)
    return torch.cat([_fit(points, labels, sources, num_classes, law) for points, labels in parts])


def _fit(points: Tensor, labels: Tensor, sources: Tensor, num_classes: int, law: DecayLaw) -> Tensor:
    r = torch.cdist(points, sources)  # (n, C * M)
    by_class = -law.attraction(r).view(len(r), num_classes, len(sources) // num_classes).sum(dim=2)  # (n, C)
    # not by index: a label out of range, whose check may be deferred, must not make the device fail
    is_own = labels[:, None] == torch.arange(num_classes, device=labels.device)
    own = by_class.masked_fill(~is_own, 0.0).sum(dim=1)
    strongest = by_class.masked_fill(is_own, 0.0).amax(dim=1)
    return own / strongest.clamp_min(torch.finfo(r.dtype).tiny)  # far away, or under a steep law, both vanish


@torch.no_grad()
def trusted(fits: Tensor, trust: float) -> Tensor:
    """Whether each sample of a batch is trusted, (n,), given the `fit` of all of them."""
    if not len(fits):
        return fits >= 0
    return fits >= trust * fits.median().clamp(max=1.0)
