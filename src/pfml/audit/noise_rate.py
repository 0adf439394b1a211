"""The rate of label noise with an interval, and each image's probability of being mislabeled, from the scores alone.

What score a mislabeled image has is known without a true label: give an image a class at random that is neither its
given one nor the one that attracts it most, and score that. The scores of all images are a mixture of these and of
those of right labels, of which nothing is assumed but that none is as high as the highest. Then

    P(score > t) >= rate P(score > t | mislabeled) for every t,

and the smallest ratio of the two is the estimate (Blanchard et al., JMLR 2010). Label noise between similar classes has
lower scores than noise at random, and is underestimated. docs/AUDIT.md has how near it comes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["NoiseEstimate", "estimate_noise"]

#: Classes at random that each image is scored with.
EXAMPLES = 4
#: Fraction of the mislabeled images that must lie above a threshold for its ratio to count.
SMALLEST_TAIL = 0.25
#: Thresholds at which ratios are taken.
THRESHOLDS = 64
#: Bootstrap samples of the classes, and the quantiles of them that are the interval.
SAMPLES, QUANTILES = 400, (0.05, 0.95)
#: With fewer images than these, nothing is estimated.
FEWEST = 10


@dataclass(frozen=True, eq=False)
class NoiseEstimate:
    """The rate of label noise, and what follows for each image.

    Args:
        rate: The estimate; 0 if there is no sign of label noise.
        interval: Its 90 % interval, by a bootstrap over classes.
        probability: (n,) that an image is mislabeled.
        lower_precision: (n,) of the list of all images with this score or a higher one, the lower end of its interval.
    """

    rate: float
    interval: tuple[float, float]
    probability: Tensor
    lower_precision: Tensor


def estimate_noise(scores: Tensor, attractions: Tensor, labels: Tensor) -> NoiseEstimate:
    """The label noise of images with these scores; those that are not finite are not judged and have probability 0.

    Args:
        scores: (n,) of `pfml.audit.scores.field_scores`.
        attractions: (n, C) from which they were computed.
        labels: (n,) the given labels.
    """
    finite = scores.isfinite()
    probability, lower_precision = torch.zeros(2, len(scores), dtype=torch.float64)
    values, given = scores[finite].double().cpu(), labels[finite].cpu()
    if len(values) < FEWEST:
        return NoiseEstimate(0.0, (0.0, 1.0), probability, lower_precision)
    mislabeled = _mislabeled_scores(attractions[finite].cpu(), given)  # (n, EXAMPLES)
    weights = _bootstrap(len(given.unique()))
    tails = torch.linspace(0.0, 1 - SMALLEST_TAIL, THRESHOLDS, dtype=torch.float64)
    above, expected = _counts(values, mislabeled, given, torch.quantile(_subsample(mislabeled), tails), weights)
    rates = (above / expected.clamp(min=1e-9)).min(dim=1).values.clamp(max=1.0)
    rate, (low, high) = float(rates[0]), torch.quantile(rates[1:], torch.tensor(QUANTILES).double()).tolist()
    probability[finite] = _probability(values, mislabeled, rate)
    if bool((values > 0).any()):
        spaced = torch.linspace(0.0, 1.0, THRESHOLDS, dtype=torch.float64)
        thresholds = torch.quantile(_subsample(values[values > 0]), spaced, interpolation="lower")
        above, expected = _counts(values, mislabeled, given, thresholds, weights)
        precision = (rates[:, None] * expected / above.clamp(min=1e-9)).clamp(max=1.0)[1:]
        lower = torch.cat([torch.zeros(1).double(), precision.quantile(QUANTILES[0], dim=0)])
        lower_precision[finite] = lower[torch.searchsorted(thresholds, values, right=True)]
    return NoiseEstimate(rate, (min(low, rate), max(high, rate)), probability, lower_precision)


def _subsample(values: Tensor) -> Tensor:
    """At most a million of the values: more are too many for torch.quantile."""
    flat = values.flatten()
    return flat[:: max(len(flat) // 10**6, 1)]


def _mislabeled_scores(attractions: Tensor, labels: Tensor) -> Tensor:
    """The score of each image under some labels that are wrong, (n, EXAMPLES)."""
    count, classes = attractions.shape
    top = attractions.max(dim=1)
    weights = torch.ones(count, classes, dtype=torch.float64)
    rows = torch.arange(count)
    if classes > 2:
        weights[rows, labels] = 0.0
    weights[rows, top.indices] = 0.0
    weights *= torch.bincount(labels, minlength=classes) > 0  # no image, no attraction
    weights[weights.sum(dim=1) == 0] = 1.0
    drawn = torch.multinomial(weights, EXAMPLES, replacement=True, generator=torch.Generator().manual_seed(0))
    tiny = torch.finfo(attractions.dtype).tiny
    given = attractions.gather(1, drawn)
    return top.values.clamp(min=tiny).log()[:, None] - given.clamp(min=tiny).log()


def _bootstrap(classes: int) -> Tensor:
    """How often each class is in each sample, (1 + SAMPLES, classes); the first has all of them once."""
    drawn = torch.randint(classes, (SAMPLES, classes), generator=torch.Generator().manual_seed(0))
    weights = torch.zeros(1 + SAMPLES, classes, dtype=torch.float64)
    weights[0] = 1.0
    weights[1:].scatter_add_(1, drawn, torch.ones(drawn.shape, dtype=torch.float64))
    return weights


def _counts(
    values: Tensor, mislabeled: Tensor, labels: Tensor, thresholds: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Images at or above each threshold, and as many as there would be if all were mislabeled; (samples, T) each."""
    of_class = labels.unique(return_inverse=True)[1]
    counts = torch.zeros(2, weights.shape[1], len(thresholds), dtype=torch.float64)
    counts[0].index_add_(0, of_class, (values[:, None] >= thresholds).double())
    for some in mislabeled.unbind(dim=1):
        counts[1].index_add_(0, of_class, (some[:, None] >= thresholds).double() / EXAMPLES)
    return weights @ counts[0], weights @ counts[1]


def _probability(values: Tensor, mislabeled: Tensor, rate: float) -> Tensor:
    """rate f(score | mislabeled) / f(score) at each image, increasing in the score, (n,)."""
    from sklearn.isotonic import IsotonicRegression

    if rate <= 0:
        return torch.zeros_like(values)
    scores = torch.cat([values, mislabeled.flatten()]).numpy()
    is_example = torch.cat([torch.zeros(len(values)), torch.ones(mislabeled.numel())]).numpy()
    weights = torch.cat([torch.ones(len(values)), torch.full((mislabeled.numel(),), rate / EXAMPLES)]).numpy()
    fit = IsotonicRegression(y_min=0.0, y_max=1.0).fit(scores, is_example, sample_weight=weights)
    share = torch.as_tensor(fit.predict(values.numpy()), dtype=torch.float64)
    return (share / (1 - share).clamp(min=1e-9)).clamp(max=1.0)
