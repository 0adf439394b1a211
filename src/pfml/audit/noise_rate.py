"""The rate of label noise with an interval, and each image's probability of being mislabeled, from the scores alone.

What score a mislabeled image has is known without a true label: give an image a class at random that is neither its
given one nor the one that attracts it most, and score that. A positive score is that of a mislabeled image, with this
density, or that of a right label on a hard image; these decay exponentially. How many there are of both follows by
expectation maximization, and its spread from a bootstrap over classes. Label noise between similar classes has lower
scores than noise at random, and is underestimated. docs/AUDIT.md has how near the estimate comes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["NoiseEstimate", "estimate_noise"]

#: Classes at random that each image is scored with; of more such scores than these, a subsample makes the density.
EXAMPLES, MOST_EXAMPLES = 4, 20_000
#: Bootstrap samples of the classes, and the quantiles of them that are the interval.
SAMPLES, QUANTILES = 200, (0.05, 0.95)
#: Steps of expectation maximization, and the decay of the scores of right labels that it starts from, as a fraction of
#: the mean score of mislabeled images.
STEPS, START = 60, 0.1
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
    probability, lower_precision = torch.zeros(2, len(scores), dtype=torch.float64)
    judged = scores.isfinite()
    positive = (judged & (scores > 0)).nonzero()[:, 0]
    if int(judged.sum()) < FEWEST or not len(positive):
        return NoiseEstimate(0.0, (0.0, 1.0 if int(judged.sum()) < FEWEST else 0.0), probability, lower_precision)
    positive = positive[scores[positive].argsort(descending=True, stable=True)]
    values = scores[positive].double()
    examples = _mislabeled_scores(attractions[judged], labels[judged])
    counts = _bootstrap(labels[judged])  # (1 + SAMPLES, C)
    weights = counts[:, labels[positive]]  # (1 + SAMPLES, positive)
    share = _mislabeled_share(values, examples, weights)
    images = counts @ torch.bincount(labels[judged], minlength=counts.shape[1]).double()
    rates = (weights * share).sum(dim=1) / images
    precisions = (weights * share).cumsum(dim=1) / weights.cumsum(dim=1).clamp(min=1e-9)
    probability[positive] = share[0]
    lower_precision[positive] = precisions[1:].quantile(QUANTILES[0], dim=0)
    low, high = rates[1:].quantile(torch.tensor(QUANTILES, dtype=torch.float64)).tolist()
    least = 0.5 / int(judged.sum())  # of less than half an image there is no sign
    rate, low, high = (each if each > least else 0.0 for each in (float(rates[0]), low, high))
    return NoiseEstimate(rate, (min(low, rate), max(high, rate)), probability, lower_precision)


def _mislabeled_scores(attractions: Tensor, labels: Tensor) -> Tensor:
    """The scores that images have with labels that are wrong, (examples,)."""
    count, classes = attractions.shape
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(count, generator=generator)[: MOST_EXAMPLES // EXAMPLES]
    top = attractions[rows].max(dim=1)
    weights = (torch.bincount(labels, minlength=classes) > 0).double().repeat(len(rows), 1)
    weights[torch.arange(len(rows)), top.indices] = 0.0
    if classes > 2:
        weights[torch.arange(len(rows)), labels[rows]] = 0.0
    kept = weights.sum(dim=1) > 0
    rows, weights, strongest = rows[kept], weights[kept], top.values[kept]
    drawn = torch.multinomial(weights, EXAMPLES, replacement=True, generator=generator)
    tiny = torch.finfo(attractions.dtype).tiny
    own = attractions[rows].gather(1, drawn)
    return (strongest.clamp(min=tiny).log()[:, None] - own.clamp(min=tiny).log()).flatten().double()


def _bootstrap(labels: Tensor) -> Tensor:
    """How often each class is in each sample, (1 + SAMPLES, C); the first sample has all of them once."""
    classes = labels.unique()
    drawn = torch.randint(len(classes), (SAMPLES, len(classes)), generator=torch.Generator().manual_seed(0))
    weights = torch.zeros(1 + SAMPLES, int(classes.max()) + 1, dtype=torch.float64)
    weights[0, classes] = 1.0
    weights[1:].scatter_add_(1, classes[drawn], torch.ones(drawn.shape, dtype=torch.float64))
    return weights


def _mislabeled_share(values: Tensor, examples: Tensor, weights: Tensor) -> Tensor:
    """The probability of each positive score to be that of a mislabeled image, in each sample, (samples, positive).

    Args:
        values: (positive,) the scores, highest first.
        examples: Scores of mislabeled images.
        weights: (samples, positive) how often each image is in each sample.
    """
    density = _density(values, examples)
    total = weights.sum(dim=1)
    mislabeled, hard = total / 2, total / 2
    scale = torch.full_like(total, START * float(examples.mean()))
    share = torch.zeros_like(weights)
    for _ in range(STEPS):
        one = mislabeled[:, None] * density
        other = hard[:, None] * torch.exp(-values / scale[:, None]) / scale[:, None]
        share = one / (one + other).clamp(min=1e-300)
        mislabeled, rest = (weights * share).sum(dim=1), weights * (1 - share)
        hard = rest.sum(dim=1)
        scale = ((rest * values).sum(dim=1) / hard.clamp(min=1e-9)).clamp(min=1e-3)
    return share.flip(1).cummax(dim=1).values.flip(1)  # a higher score is no less suspicious


def _density(values: Tensor, examples: Tensor) -> Tensor:
    """The density of `examples`, all positive, at `values`: a Gaussian kernel, reflected at 0; Silverman's width."""
    width = max(1.06 * float(examples.std()) * len(examples) ** -0.2, 1e-6)
    found = []
    for some in values.split(256):
        kernels = [torch.exp(-(((some[:, None] - sign * examples) / width) ** 2) / 2) for sign in (1.0, -1.0)]
        found.append((kernels[0] + kernels[1]).mean(dim=1) / (width * math.sqrt(2 * math.pi)))
    return torch.cat(found)
