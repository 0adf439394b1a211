"""How many labels are wrong, from the scores alone: two bells, of which the higher one holds the wrong labels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SEPARATION", "Mixture", "fit_mixture"]

#: Ashman's D above which two bells count as two (Ashman et al., 1994).
SEPARATION = 2.0


@dataclass(frozen=True, eq=False)
class Mixture:
    """Two normal distributions fitted to the scores.

    Args:
        probability: (n,) that an image belongs to the higher bell: its label is wrong; 0 if there is one bell only.
        rate: The share of the higher bell, an estimate of the share of wrong labels; 0 if there is one bell only.
        separation: Ashman's D of the two, sqrt(2) |m1 - m2| / sqrt(s1^2 + s2^2).
    """

    probability: Tensor
    rate: float
    separation: float


def fit_mixture(scores: Tensor) -> Mixture:
    """The mixture of `scores`, (n,); those that are not finite have probability 0.

    The higher bell counts only if the two are apart by `SEPARATION` and its middle is above 0, where another class
    attracts more strongly than the own. Clean labels have one bell, and then nothing is listed.
    """
    from sklearn.mixture import GaussianMixture

    nothing = torch.zeros(len(scores), dtype=torch.float64)
    finite = scores.isfinite()
    values = scores[finite].double().cpu()
    if len(values) < 10 or float(values.std()) == 0:
        return Mixture(nothing, 0.0, 0.0)
    column = values[:, None].numpy()
    fit = GaussianMixture(2, random_state=0, n_init=3).fit(column)
    low, high = (int(k) for k in fit.means_[:, 0].argsort())
    means, variances = fit.means_[:, 0], fit.covariances_[:, 0, 0]
    separation = math.sqrt(2) * float(means[high] - means[low]) / math.sqrt(float(variances.sum()))
    if separation < SEPARATION or means[high] <= 0:
        return Mixture(nothing, 0.0, separation)
    probability = torch.as_tensor(fit.predict_proba(column)[:, high])
    # where the lower bell is the wider one, its far end would come out as wrong
    probability[values <= float(means[low])] = 0.0
    nothing[finite] = probability
    return Mixture(nothing, float(fit.weights_[high]), separation)
