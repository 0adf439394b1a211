"""How many labels are wrong, from the scores alone: bells fitted to them, of which the highest holds the wrong labels.

Two bells, one of right and one of wrong labels, mostly tell. Where few labels are wrong, images that are easy to tell
and images that are hard are two groups themselves, and the wrong ones a third: docs/AUDIT.md has how often.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SEPARATION", "Mixture", "fit_mixture"]

#: Ashman's D above which two bells count as two (Ashman et al., 1994).
SEPARATION = 2.0
#: Fewer scores than these tell nothing.
FEWEST = 10


@dataclass(frozen=True, eq=False)
class Mixture:
    """Normal distributions fitted to the scores.

    Args:
        probability: (n,) that an image belongs to the highest bell: its label is wrong; 0 if no bell stands apart.
        rate: The share of the highest bell, an estimate of the share of wrong labels; 0 if none stands apart.
        separation: Ashman's D of the highest and the next one, sqrt(2) |m1 - m2| / sqrt(s1^2 + s2^2).
        bells: How many there are.
    """

    probability: Tensor
    rate: float
    separation: float
    bells: int


def fit_mixture(scores: Tensor) -> Mixture:
    """The mixture of `scores`, (n,); those that are not finite have probability 0.

    Of two bells, the higher one counts if they are apart by `SEPARATION` and its middle is above 0, where another class
    attracts more strongly than the own. If they are not, the same is asked of three, provided that three describe the
    scores better than one does (by BIC). Clean labels pass neither, and then nothing is listed.
    """
    nothing = torch.zeros(len(scores), dtype=torch.float64)
    finite = scores.isfinite()
    values = scores[finite].double().cpu()
    if len(values) < FEWEST or float(values.std()) == 0:
        return Mixture(nothing, 0.0, 0.0, 1)
    column = values[:, None].numpy()
    fit = _bells(column, 2)
    separation = _separation(fit)
    if not _stands_apart(fit):
        fit = _bells(column, 3)
        if not _stands_apart(fit) or fit.bic(column) >= _bells(column, 1).bic(column):
            return Mixture(nothing, 0.0, separation, 1)
    next_one, highest = _two_highest(fit)
    probability = torch.as_tensor(fit.predict_proba(column)[:, highest])
    # where the lower bell is the wider one, its far end would come out as wrong
    probability[values <= float(fit.means_[next_one, 0])] = 0.0
    nothing[finite] = probability
    return Mixture(nothing, float(fit.weights_[highest]), _separation(fit), len(fit.weights_))


def _bells(column: NDArray[Any], count: int) -> Any:
    from sklearn.mixture import GaussianMixture

    return GaussianMixture(count, random_state=0, n_init=3).fit(column)


def _two_highest(fit: Any) -> tuple[int, int]:
    *_, next_one, highest = (int(k) for k in fit.means_[:, 0].argsort())
    return next_one, highest


def _separation(fit: Any) -> float:
    next_one, highest = _two_highest(fit)
    means, variances = fit.means_[:, 0], fit.covariances_[:, 0, 0]
    return math.sqrt(2) * float(means[highest] - means[next_one]) / math.sqrt(variances[highest] + variances[next_one])


def _stands_apart(fit: Any) -> bool:
    """Whether the highest bell is one by itself, of images that another class attracts more strongly."""
    return _separation(fit) >= SEPARATION and float(fit.means_[:, 0].max()) > 0
