"""Sample filtering by label: a sample stays if the field of the proxies agrees with its label.

The strength of a class at a point is the sum over its proxies of -psi_att(r), what Eq. 1 attracts with. A sample fits
if its own class is there about as strong as any other one:

    fit[i]     = strength of the own class at i / strength of the strongest other class at i
    trusted[i] = fit[i] >= trust * min(1, median of fit)

A sample with a noisy label lies where its true class is strong, so its fit is far below 1. The median is for the start
of training, when proxies are random and no sample fits: then a sample is compared with the rest of its batch. With a
single class every sample stays.

Strengths are computed in float64 and compared in float32. So the result does not depend on
the order in which proxies are added up: not on tiles, and not on ranks (`pfml.distributed.sharded_filter`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pfml.field import DecayLaw, power_law
from pfml.superposition import Charges

__all__ = [
    "FIT_LAW",
    "check_trust",
    "fit",
    "fit_of",
    "own_and_strongest",
    "proxy_strengths",
    "some_of",
    "strengths",
    "trusted",
]

#: By what fit is measured in losses that have proxies and no field of their own: the decay of the preset pfml-robust.
FIT_LAW = power_law(delta=1.0, alpha=24.0)
#: Pairs of a sample and a proxy that are looked at together, so that memory does not grow with their number.
PAIRS_AT_ONCE = 2**23
#: ... and samples among them: with fewer, the proxies would be read again and again.
SAMPLES_AT_ONCE = 2**12


def check_trust(trust: Any, proxies_per_class: int, law: DecayLaw) -> None:
    """Raise unless a loss with so many proxies and this law can trust its labels by that much."""
    if not isinstance(trust, int | float) or isinstance(trust, bool):
        raise TypeError(f"trust must be a number, got {trust!r}")
    if not 0 <= trust <= 1:
        raise ValueError(f"trust must lie in [0, 1], got {trust}")
    if trust and proxies_per_class == 0:
        raise ValueError("trust needs proxies, which tell what fits, got proxies_per_class=0")
    if trust and not law.decays:
        raise ValueError(f"trust needs an attraction that decays; {type(law).__name__} has none")


@torch.no_grad()
def trusted(fits: Tensor, trust: float) -> Tensor:
    """Whether each sample of a batch is trusted, (n,), given the `fit` of all of them."""
    if not len(fits):  # none has no median
        return fits.bool()
    fits = fits.float()
    return fits >= trust * fits.median().clamp(max=1.0)


@torch.no_grad()
def fit(samples: Charges, proxies: Charges, num_classes: int, law: DecayLaw) -> Tensor:
    """How strong its own class is at each sample, in units of the strongest other class, (n,) in float64.

    The proxies are laid class by class, as many of each. Where no class is felt at all, fit is 0 for every sample.
    """
    return fit_of(strengths(samples, proxies, len(proxies.points) // num_classes, law))


def fit_of(felt: Tensor) -> Tensor:
    """The own over the strongest other strength, (n,), given both, (2, n)."""
    own, strongest = felt
    return own / strongest.clamp_min(torch.finfo(felt.dtype).tiny)  # far away, or under a steep law, both vanish


@torch.no_grad()
def strengths(samples: Charges, proxies: Charges, per_class: int, law: DecayLaw) -> Tensor:
    """The strength of the own and of the strongest other class at each sample, (2, n) in float64.

    The proxies are laid class by class, `per_class` of each. A class that has none here counts as 0: of several sets of
    classes, the largest of these numbers are those of all classes.
    """
    starts = range(0, max(len(samples.points), 1), SAMPLES_AT_ONCE)
    parts = [some_of(samples, slice(start, start + SAMPLES_AT_ONCE)) for start in starts]
    return torch.cat([_strengths(part, proxies, per_class, law) for part in parts], dim=1)


def _strengths(samples: Charges, proxies: Charges, per_class: int, law: DecayLaw) -> Tensor:
    felt = samples.points.new_zeros(2, len(samples.points), dtype=torch.float64)
    classes_at_once = max(PAIRS_AT_ONCE // max(len(samples.points) * per_class, 1), 1)
    step = classes_at_once * per_class
    for start in range(0, len(proxies.points), step):
        some = some_of(proxies, slice(start, start + step))
        by_class = proxy_strengths(samples, some, law).unflatten(1, (-1, per_class)).sum(dim=2)
        felt = felt.maximum(own_and_strongest(by_class, samples.labels, some.labels[::per_class]))
    return felt


@torch.no_grad()
def proxy_strengths(samples: Charges, proxies: Charges, law: DecayLaw) -> Tensor:
    """The strength of each proxy at each sample, (n, proxies) in float64; those of a class add up."""
    points, sources = (charges._replace(points=charges.points.double()).positions() for charges in (samples, proxies))
    return -law.attraction(torch.cdist(points, sources))


def own_and_strongest(by_class: Tensor, labels: Tensor, classes: Tensor) -> Tensor:
    """The strength of the own and of the strongest other class, (2, n), of those that are there; 0 if none is.

    Args:
        by_class: (n, classes), their strengths, none of which is negative.
        labels: (n,), the own class of each sample.
        classes: (classes,), which ones they are.
    """
    # not by index: a label out of range, whose check may be deferred, must not make the device fail
    is_own = labels[:, None] == classes
    return torch.stack([by_class.masked_fill(hidden, 0.0).amax(dim=1) for hidden in (~is_own, is_own)])


def some_of(charges: Charges, rows: slice | Tensor) -> Charges:
    """The charges in these rows, given as a slice or as a mask."""
    return charges._replace(points=charges.points[rows], labels=charges.labels[rows])
