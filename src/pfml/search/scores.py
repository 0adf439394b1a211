"""Scores of "known": the higher, the more a query looks like an image of a class in the gallery. One visible dict.

`SCORES` holds functions of the neighborhood alone. "combination" is their weighted sum; the weights are those of a
logistic regression of genuine queries against impostors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pfml.field import PowerLaw
from pfml.search.neighborhood import ClassAttraction, Neighborhood

__all__ = ["CANDIDATES", "COMBINATION", "SCORES", "Scoring", "fit_combination", "measured_scores"]

#: Distances below this are equal.
SMALLEST = 1e-6
#: The weighted sum of `SCORES`.
COMBINATION = "combination"
#: Penalty on the squared weights of standardized scores, per query.
RIDGE = 1e-2
NEWTON_STEPS = 25


def _distance(near: Neighborhood, found: ClassAttraction) -> Tensor:
    """-r of the nearest image."""
    return -near.distances[:, 0]


def _potential(near: Neighborhood, found: ClassAttraction) -> Tensor:
    """The logarithm of the attraction of the most attractive class."""
    return found.potential.clamp(min=torch.finfo(torch.float64).tiny).log()


def _margin(near: Neighborhood, found: ClassAttraction) -> Tensor:
    """The same less that of the second class, of which one image at least is as near as the last neighbor."""
    second = torch.maximum(found.second, found.weakest)
    return _potential(near, found) - second.clamp(min=torch.finfo(torch.float64).tiny).log()


def _agreement(near: Neighborhood, found: ClassAttraction) -> Tensor:
    """The share of the neighbors that are of the most attractive class."""
    return found.votes / found.voters.clamp(min=1)


def _relative(near: Neighborhood, found: ClassAttraction) -> Tensor:
    """-log(r / spread) of the nearest image, with the spread of its class."""
    return -(near.distances[:, 0].clamp(min=SMALLEST) / near.spreads[:, 0].clamp(min=SMALLEST)).log()


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
        measured = measured_scores(near, self)
        if self.name != COMBINATION:
            return measured[:, list(SCORES).index(self.name)]
        return measured @ torch.tensor(self.weights, dtype=torch.float64)


def measured_scores(near: Neighborhood, scoring: Scoring) -> Tensor:
    """All of `SCORES` for each query, (n, scores) float64, by the law and the spread of `scoring`."""
    known = replace(near, spreads=near.spreads.nan_to_num(nan=scoring.spread))
    found = known.attraction(scoring.law)
    return torch.stack([score(known, found).double() for score in SCORES.values()], dim=1)


def fit_combination(genuine: Tensor, impostor: Tensor) -> tuple[float, ...]:
    """Weights of a logistic regression that tells genuine queries from impostors, by Newton's method.

    Args:
        genuine: Their scores, (n, scores).
        impostor: (m, scores).
    """
    every = torch.cat([genuine, impostor])
    deviation = every.std(dim=0).clamp(min=1e-12)
    inputs = torch.cat([(every - every.mean(dim=0)) / deviation, torch.ones(len(every), 1).double()], dim=1)
    target = torch.cat([torch.ones(len(genuine)), torch.zeros(len(impostor))]).double()
    # both kinds count equally, however many there are of each
    counts = torch.tensor([len(impostor), len(genuine)]).double()
    weight = (len(every) / (2 * counts))[target.long()]
    penalty = RIDGE * len(every) * torch.eye(inputs.shape[1]).double()
    penalty[-1, -1] = 0.0
    found = inputs.new_zeros(inputs.shape[1])
    for _ in range(NEWTON_STEPS):
        likely = (inputs @ found).sigmoid()
        slope = inputs.T @ (weight * (likely - target)) + penalty @ found
        curvature = (inputs.T * (weight * likely * (1 - likely))) @ inputs + penalty
        found = found - torch.linalg.solve(curvature + 1e-9 * torch.eye(len(found)).double(), slope)
    return tuple((found[:-1] / deviation).tolist())


def typical(values: Sequence[float] | Tensor) -> float:
    """The median of the finite values; 1 if there is none."""
    finite = torch.as_tensor(values, dtype=torch.float64)
    finite = finite[finite.isfinite()]
    return float(finite.median()) if len(finite) else 1.0
