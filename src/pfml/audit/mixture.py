"""The rate of label noise, estimated from the scores alone by a Gaussian mixture.

The component of highest mean holds the mislabeled images. Two components are mostly enough, one of right and one of
noisy labels. Where label noise is rare, easy and hard images are two components themselves, and the mislabeled ones a
third: docs/AUDIT.md has how often.
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

#: Ashman's D from which on two components count as separate (Ashman et al., 1994).
SEPARATION = 2.0
#: Fewer scores than these are not fitted.
FEWEST = 10


@dataclass(frozen=True, eq=False)
class Mixture:
    """A Gaussian mixture fitted to the scores.

    Args:
        probability: (n,) that an image belongs to the highest component: it is mislabeled; 0 if none is separate.
        rate: The weight of the highest component, an estimate of the rate of label noise; 0 if none is separate.
        separation: Ashman's D of the two highest components, sqrt(2) |m1 - m2| / sqrt(s1^2 + s2^2).
        components: How many there are.
    """

    probability: Tensor
    rate: float
    separation: float
    components: int


def fit_mixture(scores: Tensor) -> Mixture:
    """The mixture of `scores`, (n,); those that are not finite have probability 0.

    Of two components, the higher one counts if they are separated by `SEPARATION` and its mean is above 0, where
    another class attracts more strongly than the given one. Otherwise the same is asked of three components, provided
    that three have a lower BIC than one. Clean labels pass neither test, and then nothing is listed.
    """
    nothing = torch.zeros(len(scores), dtype=torch.float64)
    finite = scores.isfinite()
    values = scores[finite].double().cpu()
    if len(values) < FEWEST or float(values.std()) == 0:
        return Mixture(nothing, 0.0, 0.0, 1)
    column = values[:, None].numpy()
    fit = _fitted(column, 2)
    separation = _separation(fit)
    if not _is_separate(fit):
        fit = _fitted(column, 3)
        if not _is_separate(fit) or fit.bic(column) >= _fitted(column, 1).bic(column):
            return Mixture(nothing, 0.0, separation, 1)
    second, highest = _two_highest(fit)
    probability = torch.as_tensor(fit.predict_proba(column)[:, highest])
    # where the lower component is the wider one, its lower tail would come out as mislabeled
    probability[values <= float(fit.means_[second, 0])] = 0.0
    nothing[finite] = probability
    return Mixture(nothing, float(fit.weights_[highest]), _separation(fit), len(fit.weights_))


def _fitted(column: NDArray[Any], count: int) -> Any:
    from sklearn.mixture import GaussianMixture

    return GaussianMixture(count, random_state=0, n_init=3).fit(column)


def _two_highest(fit: Any) -> tuple[int, int]:
    *_, second, highest = (int(k) for k in fit.means_[:, 0].argsort())
    return second, highest


def _separation(fit: Any) -> float:
    second, highest = _two_highest(fit)
    means, variances = fit.means_[:, 0], fit.covariances_[:, 0, 0]
    return math.sqrt(2) * float(means[highest] - means[second]) / math.sqrt(variances[highest] + variances[second])


def _is_separate(fit: Any) -> bool:
    """Whether the highest component is separate, and of images that another class attracts more strongly."""
    return _separation(fit) >= SEPARATION and float(fit.means_[:, 0].max()) > 0
