"""The sets of charges that the benchmarks run on: many sizes, three states of training, all seeded."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from pfml.superposition import Charges

__all__ = ["CLUSTERS", "DELTA", "DIMS", "SIZES", "STATES", "ChargeSet", "charge_set", "share_inside"]

DIMS = 512
DELTA = 0.2
BATCH = 100
SEED = 20

#: Points -> (classes C, proxies per class M): C x M proxies and a batch of 100 samples.
SIZES = {
    200: (20, 5),  # for tests
    400: (30, 10),
    1_600: (100, 15),
    3_000: (290, 10),
    6_100: (400, 15),
    11_100: (5_500, 2),
    22_736: (11_318, 2),
    50_000: (24_950, 2),
    100_000: (49_950, 2),
}

#: State -> number of equal clusters, whatever the class: 1 / clusters of all pairs lie inside delta. None: no clusters.
CLUSTERS = {"random": None, "trained": 100, "crowded": 5}
STATES = tuple(CLUSTERS)

#: Distances within a cluster. In 512 dimensions noise is orthogonal to noise, so two points at radii a and b from
#: their center are sqrt(a^2 + b^2) apart: radii that vary from point to point are what spreads the distances.
NEAREST, FARTHEST = 0.08, 0.2


class ChargeSet(NamedTuple):
    """Samples and proxies that want gradients, and how many classes of how many proxies there are."""

    samples: Charges
    proxies: Charges
    classes: int
    proxies_per_class: int


def charge_set(points: int, state: str, device: torch.device | str = "cpu") -> ChargeSet:
    """The seeded samples and proxies of one size and state; proxies sorted by class, as a loss keeps them."""
    if points not in SIZES:
        raise ValueError(f"points must be one of {sorted(SIZES)}, got {points}")
    if state not in CLUSTERS:
        raise ValueError(f"state must be one of {sorted(CLUSTERS)}, got {state!r}")
    classes, proxies_per_class = SIZES[points]
    generator = torch.Generator().manual_seed(SEED)
    positions = _positions(points, CLUSTERS[state], generator).to(device)
    sample_labels = torch.randint(classes, (BATCH,), generator=generator).to(device)
    proxy_labels = torch.arange(classes, device=device).repeat_interleave(proxies_per_class)
    return ChargeSet(
        samples=Charges(positions[:BATCH].clone().requires_grad_(), sample_labels),
        proxies=Charges(positions[BATCH:].clone().requires_grad_(), proxy_labels, on_sphere=True),
        classes=classes,
        proxies_per_class=proxies_per_class,
    )


def share_inside(charges: ChargeSet, radius: float) -> float:
    """The share of pairs of different charges that are less than `radius` apart."""
    points = torch.cat([charges.samples.points, charges.proxies.points]).detach()
    count = 0
    for rows in points.split(512):
        count += int((rows @ points.T > 1 - radius**2 / 2).count_nonzero())
    return (count - len(points)) / (len(points) * (len(points) - 1))


def _positions(points: int, clusters: int | None, generator: torch.Generator) -> Tensor:
    """Directions of Gaussian noise, or of noise around the directions of a few centers, (points, D) on the sphere."""
    noise = _directions(points, generator)
    if clusters is None:
        return noise
    centers = _directions(clusters, generator)
    cluster = torch.arange(points)[torch.randperm(points, generator=generator)] % clusters
    spread = torch.rand(points, 1, generator=generator)
    radius = (NEAREST + (FARTHEST - NEAREST) * spread) / math.sqrt(2)
    return torch.nn.functional.normalize(centers[cluster] + radius * noise, dim=1)


def _directions(count: int, generator: torch.Generator) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(count, DIMS, generator=generator), dim=1)
