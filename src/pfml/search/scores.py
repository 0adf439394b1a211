"""Scores of "known": the higher, the more a query looks like an image of a class in the gallery. One visible dict.

`SCORES` holds functions of the neighborhood alone. "combination" is the sum of all, each divided by its standard
deviation. Equal weights: with label noise, weights that are fitted to genuine queries and impostors are worse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pfml.field import PowerLaw
from pfml.search.neighborhood import ClassAttraction, Neighborhood

__all__ = ["CANDIDATES", "COMBINATION", "SCORES", "Scoring", "measured_scores", "standard_weights", "typical"]

#: Distances below this are equal.
SMALLEST = 1e-6
#: The weighted sum of `SCORES`.
COMBINATION = "combination"


def _distance(near: Neighborhood, found: ClassAttraction) -> Tensor:
    """-r of the nearest image."""
    return -near.distances[:, 0]


def _potential(near: Neighborhood, found: ClassAttraction) -> Tensor:
    """The logarithm of the attraction of the most attractive class."""
    return found.potential.clamp(min=torch.finfo(torch.float64).tiny).log()


def _margin(near: Neighborhood, found: ClassAttraction) -> Tensor:
    """The potential of the most attractive class less that of the second one.

    The second one attracts at least as the last neighbor does: an image beyond the neighbors may be as near.
    """
    second = torch.maximum(found.second, found.weakest)
    return _potential(near, found) - second.clamp(min=torch.finfo(torch.float64).tiny).log()


def _agreement(near: Neighborhood, found: ClassAttraction) -> Tensor:
    """The share of the neighbors that are of the most attractive class."""
    return found.votes / found.voters.clamp(min=1)


def _relative(near: Neighborhood, found: ClassAttraction) -> Tensor:
    """-log(r / spread) of the nearest image, with the spread of its class."""
    return -(near.distances[:, 0].clamp(min=SMALLEST) / near.spread.clamp(min=SMALLEST)).log()


#: Name -> score of each query, (n,).
SCORES: dict[str, Callable[[Neighborhood, ClassAttraction], Tensor]] = {
    "distance": _distance,
    "potential": _potential,
    "margin": _margin,
    "agreement": _agreement,
    "relative": _relative,
}
#: What `pfml calibrate` can choose.
CANDIDATES = (*SCORES, COMBINATION)


@dataclass(frozen=True)
class Scoring:
    """How a neighborhood is scored.

    Args:
        name: One of `CANDIDATES`.
        delta: Radius inside which all images attract equally.
        alpha: Rate at which attraction decays beyond.
        spread: Taken for a class that has less than two images.
        weights: Of `SCORES` in "combination"; empty for other scores.
    """

    name: str
    delta: float
    alpha: float
    spread: float
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in CANDIDATES:
            raise ValueError(f"a score must be one of {', '.join(CANDIDATES)}, got {self.name!r}")
        if self.name == COMBINATION and len(self.weights) != len(SCORES):
            raise ValueError(f"a combination must have {len(SCORES)} weights, got {len(self.weights)}")

    @property
    def law(self) -> PowerLaw:
        """The law of attraction."""
        return PowerLaw(delta=self.delta, alpha=self.alpha)

    @property
    def needs_spread(self) -> bool:
        """Whether the spread of classes matters."""
        return self.name in ("relative", COMBINATION)

    def of(self, near: Neighborhood) -> Tensor:
        """(n,) float64."""
        return self.of_measured(measured_scores(near, self))

    def of_measured(self, measured: Tensor) -> Tensor:
        """The same, (n,), of what `measured_scores` returned."""
        if self.name != COMBINATION:
            return measured[:, list(SCORES).index(self.name)]
        return measured @ torch.tensor(self.weights, dtype=torch.float64)


def measured_scores(near: Neighborhood, scoring: Scoring) -> Tensor:
    """All of `SCORES` for each query, (n, scores) float64, by the law and the spread of `scoring`."""
    known = replace(near, spread=near.spread.nan_to_num(nan=scoring.spread))
    found = known.attraction(scoring.law)
    return torch.stack([score(known, found).double() for score in SCORES.values()], dim=1)


def standard_weights(genuine: Tensor, impostor: Tensor) -> tuple[float, ...]:
    """The weights of "combination": 1 / standard deviation of each score, so that all count equally.

    Args:
        genuine: Scores of queries whose class is in the gallery, (n, scores).
        impostor: Of queries whose class is not, (m, scores).
    """
    deviation = torch.cat([genuine, impostor]).std(dim=0)
    return tuple((1 / deviation.clamp(min=SMALLEST)).tolist())


def typical(values: Sequence[float] | Tensor) -> float:
    """The median of the finite values; 1 if there is none."""
    finite = torch.as_tensor(values, dtype=torch.float64)
    finite = finite[finite.isfinite()]
    return float(finite.median()) if len(finite) else 1.0
