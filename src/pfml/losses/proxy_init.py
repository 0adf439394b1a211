"""Where proxies start: (C, M, D), at random or from embeddings of their class."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from pfml.sphere import unit

__all__ = [
    "PROXY_INITS",
    "class_proxies",
    "class_sample_proxies",
    "kmeans_proxies",
    "normal_proxies",
    "warn_of_classes_without_samples",
]


def normal_proxies(num_classes: int, per_class: int, dim: int, *, generator: Generator | None = None) -> Tensor:
    """Directions of a normal distribution: uniform on the sphere."""
    return unit(torch.randn(num_classes, per_class, dim, generator=generator))


def class_sample_proxies(samples: Tensor, per_class: int, *, generator: Generator | None = None) -> Tensor:
    """`per_class` different samples of one class, (M, D); some of them twice if there are too few."""
    rounds = -(-per_class // len(samples))
    order = torch.cat([torch.randperm(len(samples), generator=generator) for _ in range(rounds)])
    return samples[order[:per_class].to(samples.device)]


def kmeans_proxies(samples: Tensor, per_class: int, *, generator: Generator | None = None, restarts: int = 5) -> Tensor:
    """The centers of k-means over the samples of one class, (M, D); the best of several starts."""
    if len(samples) <= per_class:
        return class_sample_proxies(samples, per_class, generator=generator)
    starts = [_spread_seeds(samples, per_class, generator) for _ in range(restarts)]
    candidates = [_lloyd(samples, seeds) for seeds in starts]
    misfits = [torch.cdist(samples, centers).min(dim=1).values.square().sum() for centers in candidates]
    return candidates[int(torch.stack(misfits).argmin())]


def _lloyd(samples: Tensor, centers: Tensor, iterations: int = 20) -> Tensor:
    """Move each center to the mean of the samples nearest to it, until nothing moves."""
    for _ in range(iterations):
        nearest = torch.cdist(samples, centers).argmin(dim=1)
        sums = torch.zeros_like(centers).index_add_(0, nearest, samples)
        counts = torch.bincount(nearest, minlength=len(centers))[:, None]
        moved = torch.where(counts > 0, sums / counts, centers)  # an empty cluster waits where it is
        if torch.equal(moved, centers):
            break
        centers = moved
    return centers


def _spread_seeds(samples: Tensor, count: int, generator: Generator | None) -> Tensor:
    """k-means++: each further seed is drawn with probability proportional to its squared distance to the others."""
    chosen = [int(torch.randint(len(samples), (), generator=generator))]
    distances = torch.full((len(samples),), torch.inf, device=samples.device)
    for _ in range(count - 1):
        distances = torch.minimum(distances, (samples - samples[chosen[-1]]).square().sum(dim=1))
        weights = distances.double().cpu()
        if not weights.sum() > 0:  # fewer distinct samples than seeds
            weights = torch.ones_like(weights)
        chosen.append(int(torch.multinomial(weights, 1, generator=generator)))
    return samples[chosen]


#: Initializations that need embeddings: name -> function of one class's samples.
PROXY_INITS: dict[str, Callable[..., Tensor]] = {
    "samples": class_sample_proxies,
    "kmeans": kmeans_proxies,
}


def class_proxies(init: str, samples: Tensor, per_class: int, *, generator: Generator | None = None) -> Tensor:
    """The proxies of one class as `PROXY_INITS[init]` places them, (M, D); anywhere if the class has no samples."""
    if not len(samples):
        return normal_proxies(1, per_class, samples.shape[1], generator=generator)[0].to(samples)
    return PROXY_INITS[init](samples, per_class, generator=generator)


def warn_of_classes_without_samples(labels: Tensor, num_classes: int) -> None:
    """Say which classes are meant: a batch instead of the training set would leave many without."""
    missing = (torch.bincount(labels, minlength=num_classes) == 0).nonzero().flatten().tolist()
    if missing:
        some = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        warnings.warn(
            f"{len(missing)} of {num_classes} classes have no samples for their proxies to start from ({some}): "
            f"theirs start anywhere",
            stacklevel=4,  # who called initialize_proxies, past no_grad
        )
