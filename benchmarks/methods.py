"""What the benchmark compares: one row of `METHODS` each, forward and backward of one training step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from charge_sets import DELTA, DIMS, ChargeSet
from pfml.backends import BACKENDS
from pfml.field import PowerLaw
from pfml.superposition import Field, PairWeights

__all__ = ["ANCHOR", "LOG", "METHODS", "PAPER", "Method", "Step", "backend_step", "naive_step"]

Step = Callable[[], object]

ALPHA = 3.0
PAPER = Field(PowerLaw(delta=DELTA, alpha=ALPHA))
LOG = Field(PowerLaw(delta=0.6, delta_rep=1.2, alpha=6.0), "log")
ANCHOR = Field(PowerLaw(alpha=16.0), "anchor")


class Method(NamedTuple):
    """How to set up one step, and what is known about it beforehand."""

    step: Callable[[ChargeSet], Step]
    #: The field whose forces the step leaves in `points.grad`; None where there is nothing to check.
    field: Field | None = None
    #: Peak extra memory per pair of points, in bytes: measured, and used to refuse a case that would not fit.
    bytes_per_pair: float = 0.0
    #: Whether the positions of the points change the amount of work.
    depends_on_state: bool = True


def naive_energy(charges: ChargeSet) -> Tensor:
    """Eq. 6 as one would write it first: one n x n matrix of distances from a product, the rest is autograd's."""
    points = torch.cat([charges.samples.points, F.normalize(charges.proxies.points, dim=1)])
    labels = torch.cat([charges.samples.labels, charges.proxies.labels])
    r = torch.cdist(points, points)  # (n, n)
    attraction = -r.clamp_min(DELTA).pow(-ALPHA)
    repulsion = r.clamp_max(DELTA).pow(-ALPHA)
    same_class = labels[:, None] == labels[None, :]  # (n, n)
    return torch.where(same_class, attraction, repulsion).sum()


def naive_step(charges: ChargeSet) -> Step:
    """Forward and backward of `naive_energy`."""
    return partial(_forward_backward, charges, partial(naive_energy, charges))


def backend_step(name: str, field: Field) -> Callable[[ChargeSet], Step]:
    """Forward and backward of one backend, for any charges."""

    def setup(charges: ChargeSet) -> Step:
        energy = partial(BACKENDS[name], charges.samples, charges.proxies, field, PairWeights())
        return partial(_forward_backward, charges, energy)

    return setup


def _forward_backward(charges: ChargeSet, energy: Callable[[], Tensor]) -> None:
    for group in (charges.samples, charges.proxies):
        group.points.grad = None
    energy().backward()


def _product(charges: ChargeSet) -> Step:
    points = torch.cat([charges.samples.points, charges.proxies.points]).detach()
    return lambda: points @ points.T


def _product_preallocated(charges: ChargeSet) -> Step:
    points = torch.cat([charges.samples.points, charges.proxies.points]).detach()
    out = torch.empty(len(points), len(points))
    return lambda: torch.mm(points, points.T, out=out)


def _proxy_anchor(charges: ChargeSet) -> Step:
    from pytorch_metric_learning.losses import ProxyAnchorLoss

    return partial(_metric_learning_step, charges, ProxyAnchorLoss(charges.classes, DIMS))


def _soft_triple(charges: ChargeSet) -> Step:
    from pytorch_metric_learning.losses import SoftTripleLoss

    loss = SoftTripleLoss(charges.classes, DIMS, centers_per_class=charges.proxies_per_class)
    return partial(_metric_learning_step, charges, loss)


def _metric_learning_step(charges: ChargeSet, loss: torch.nn.Module) -> None:
    loss.zero_grad()
    charges.samples.points.grad = None
    loss(charges.samples.points, charges.samples.labels).backward()


METHODS: dict[str, Method] = {
    "product": Method(_product, bytes_per_pair=4, depends_on_state=False),
    "product-preallocated": Method(_product_preallocated, bytes_per_pair=4, depends_on_state=False),
    "naive": Method(naive_step, PAPER, bytes_per_pair=33),
    "dense": Method(backend_step("dense", PAPER), PAPER, bytes_per_pair=178, depends_on_state=False),
    "tiled": Method(backend_step("tiled", PAPER), PAPER),
    "tiled-log": Method(backend_step("tiled", LOG), LOG),
    "tiled-anchor": Method(backend_step("tiled", ANCHOR), ANCHOR),
    "pml-proxy-anchor": Method(_proxy_anchor, depends_on_state=False),
    "pml-soft-triple": Method(_soft_triple, depends_on_state=False),
}
