"""The verdict on a query: its most likely class by the nearest images, and whether it is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pfml.field import PowerLaw
from pfml.search.index import Hit
from pfml.search.neighborhood import NEIGHBORS, Neighborhood
from pfml.search.threshold import Threshold

__all__ = ["Verdict", "verdict_of"]

#: Rate at which attraction decays before `pfml calibrate` has fitted it.
ALPHA = 12.0
#: Distances below this are equal.
SMALLEST = 1e-6


@dataclass(frozen=True)
class Verdict:
    """What the nearest images say about a query.

    Args:
        class_name: The class that attracts it most; None if no neighbor has a class.
        votes: Neighbors of this class.
        of: Neighbors that have a class.
        potential: The share of this class in the attraction of these neighbors, 0 to 1.
        margin: The same less the share of the second class.
        score: Of the neighborhood; None before `pfml calibrate`. Without a class, minus the distance of the nearest.
        is_known: Whether the score reaches the threshold; None before `pfml calibrate`.
    """

    class_name: str | None
    votes: int
    of: int
    potential: float
    margin: float
    score: float | None
    is_known: bool | None


def verdict_of(
    hits: Sequence[Hit], *, threshold: Threshold | None = None, spread_of: Callable[[str], float] | None = None
) -> Verdict:
    """The verdict of the nearest images.

    Args:
        hits: What a search of the whole index found, nearest first; the first `NEIGHBORS` vote.
        threshold: None before `pfml calibrate`.
        spread_of: The spread of a class of the index, as `ImageIndex.class_spread` has it; None for that of the
            calibration.
    """
    near = hits[:NEIGHBORS]
    if not near:
        return Verdict(None, 0, 0, 0.0, 0.0, None, None if threshold is None else False)
    names = list(dict.fromkeys(hit.class_name for hit in near if hit.class_name))
    number = {name: k for k, name in enumerate(names)}
    nearest = near[0]
    spread = math.nan
    if threshold is not None and threshold.scoring.needs_spread and spread_of is not None and nearest.class_name:
        spread = spread_of(nearest.class_name)
    neighborhood = Neighborhood(
        torch.tensor([[hit.distance for hit in near]], dtype=torch.float64),
        torch.tensor([[number.get(hit.class_name, -1) for hit in near]]),
        torch.tensor([spread], dtype=torch.float64),
    )
    law = PowerLaw(delta=max(nearest.distance, SMALLEST), alpha=ALPHA) if threshold is None else threshold.scoring.law
    found = neighborhood.attraction(law)
    class_name = names[int(found.labels[0])] if names else None
    total = float(found.total[0]) or 1.0
    score = None
    if threshold is not None:
        score = -nearest.distance if class_name is None else float(threshold.scoring.of(neighborhood)[0])
    return Verdict(
        class_name,
        int(found.votes[0]),
        int(found.voters[0]),
        float(found.potential[0]) / total,
        float(found.potential[0] - found.second[0]) / total,
        score,
        None if threshold is None or score is None else threshold.is_known(score, class_name),
    )
