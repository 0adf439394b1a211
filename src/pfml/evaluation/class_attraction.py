"""How strongly each class attracts an image: Eq. 4 without its sign, and a law whose radii fit the embeddings.

The field is that of labeled images and of proxies. Attraction is a sum of positive terms that decay with the distance,
so the classes' shares of it are like probabilities.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pfml.energy import DISTANCES_AT_ONCE
from pfml.evaluation.nearest_neighbors import nearest
from pfml.field import DecayLaw, PowerLaw, attraction

__all__ = ["ALPHAS", "class_attractions", "fitted_law", "most_attractive", "steepness", "strength"]

#: Rates of decay that `fitted_law` chooses from.
ALPHAS = (3.0, 6.0, 12.0, 24.0, 48.0)
#: Images that `fitted_law` compares the labels of.
SAMPLE = 1024


def strength(r: Tensor, law: DecayLaw) -> Tensor:
    """-psi_att(r): how strongly a charge attracts its own class at distance r."""
    return -attraction(law, shifted=False).potential(r)


def steepness(law: DecayLaw) -> float:
    """The exponent with which the strength of `law` falls from distance 1 to 2: alpha of a power law."""
    near, far = strength(torch.tensor([1.0, 2.0], dtype=torch.float64), law).tolist()
    return max(math.log(near / far) / math.log(2), 1e-3)


def class_attractions(
    points: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    law: DecayLaw,
    proxies: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """-Psi_j,att (Eq. 4) of every class j at each image, (n, C) in float64, in bounded memory.

    Args:
        points: The images, (n, D) unit vectors; none of them acts on itself.
        labels: (n,) in [0, C).
        num_classes: C.
        law: Must decay: its attraction is negative everywhere.
        proxies: (C, M, D); None for a field of images alone.
        rows: Positions of the images to compute it at; None for all.
    """
    charges, classes = _charges(points, labels, num_classes, law, proxies)
    rows = torch.arange(len(points)) if rows is None else rows
    result = torch.empty(len(rows), num_classes, dtype=torch.float64, device=points.device)
    at_once = max(DISTANCES_AT_ONCE // max(len(charges), 1), 1)
    for out, part in zip(result.split(at_once), rows.split(at_once), strict=True):
        pull = strength(torch.cdist(charges, charges[part]), law)  # (m, k)
        pull[part, torch.arange(len(part))] = 0.0  # none acts on itself
        out.copy_(pull.new_zeros(num_classes, len(part)).index_add_(0, classes, pull).T)
    return result


def most_attractive(
    locations: Tensor,
    points: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    law: DecayLaw,
    proxies: Tensor | None = None,
) -> Tensor:
    """The class j of greatest -Psi_j,att (Eq. 4) at each location, (q,); of equal ones the lowest j.

    Args:
        locations: (q, D) unit vectors, none of which is a charge.
        points: The images that attract, (n, D) unit vectors.
        labels: (n,) in [0, C).
        num_classes: C.
        law: Must decay.
        proxies: (C, M, D) that attract too; None for a field of images alone.
    """
    charges, classes = _charges(points, labels, num_classes, law, proxies)
    found = [torch.empty(0, dtype=torch.int64, device=points.device)]
    for part in locations.double().split(max(DISTANCES_AT_ONCE // max(len(charges), num_classes, 1), 1)):
        pull = strength(torch.cdist(charges, part), law)  # (m, k)
        of_class = pull.new_zeros(num_classes, len(part)).index_add_(0, classes, pull)
        found.append(of_class.argmax(dim=0))
    return torch.cat(found)


def fitted_law(points: Tensor, labels: Tensor, num_classes: int, *, proxies: Tensor | None = None) -> PowerLaw:
    """The power law whose field overrules the fewest given labels.

    delta is the median distance to the nearest neighbor: nearer than that, all are equally near. alpha is the one of
    `ALPHAS` for which the fewest images are attracted more strongly by another class than by their own, counted on a
    fixed subsample of at most 1,024 images. No true label is needed for that. The law that trained the run is made
    to move points, and may be much too flat to tell classes apart where all points are close.
    """
    similarities, _ = nearest(points, None, 1)
    distances = (2 - 2 * similarities[:, 0].double()).clamp(min=0).sqrt()
    positive = distances[distances > 0]
    delta = float(positive.median()) if len(positive) else 1.0
    rows = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:SAMPLE].sort().values
    best, fewest = ALPHAS[0], math.inf
    for alpha in ALPHAS:
        law = PowerLaw(delta=delta, alpha=alpha)
        pull = class_attractions(points, labels, num_classes, law=law, proxies=proxies, rows=rows)
        overruled = int((pull.argmax(dim=1) != labels[rows]).sum())
        if overruled < fewest:
            best, fewest = alpha, overruled
    return PowerLaw(delta=delta, alpha=best)


def _charges(
    points: Tensor, labels: Tensor, num_classes: int, law: DecayLaw, proxies: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Images and proxies in float64 and their classes; a law that does not decay is refused."""
    if not law.decays:
        raise ValueError(f"the law of a class attraction must decay with the distance, got {law}: use the fitted one")
    charges, classes = points.double(), labels.long()
    if proxies is not None and proxies.numel():
        own = torch.arange(num_classes, device=labels.device).repeat_interleave(proxies.shape[1])
        charges = torch.cat([charges, proxies.to(points.device).flatten(0, 1).double()])
        classes = torch.cat([classes, own])
    return charges, classes
