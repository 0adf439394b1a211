"""The rate of label noise with an interval, and each image's probability of being mislabeled, without any true label.

Two things make another class attract an image more than its own: it is hard, or it is mislabeled. A hard image is near
both classes. With x_c the log of the strongest class's attraction over that of c, divided by the exponent of the law
(so a log of distances), and rate, b, e, g to be found:

    its class is c with the probability     p(c) ~ exp(-(b x_c)^e)
    noise makes k of class c with           Q(k | c) ~ exp(-g d(c, k)),  k other than c
    its given label is k with               P(k) = (1 - rate) p(k) + rate * sum over c of p(c) Q(k | c)
    it is mislabeled with                   1 - (1 - rate) p(k) / P(k)

d is the distance between class centers. So noise at random (g = 0) and confusions of similar classes (g large) are both
recognized: images that hardly any other class attracts have few labels of others by hardness, and their share with
such labels is the rate. The four numbers are those of maximum likelihood; their scatter is that of classes (sandwich
estimate). docs/AUDIT.md has how near the estimate comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.functional import hessian, jvp
from torch.nn.functional import logsigmoid

from pfml.evaluation.class_attraction import steepness
from pfml.field import DecayLaw
from pfml.sphere import unit

__all__ = ["NoiseEstimate", "estimate_noise"]

#: Classes that an image may be of, those that attract it most, and images that the numbers are found from, at most.
CANDIDATES, MOST_IMAGES = 16, 20_000
#: A class center is the mean of its images without this share of them, the farthest, found in so many rounds: noisy
#: labels are among these, and would make the classes that they come from seem similar.
LEFT_OUT, ROUNDS = 0.4, 3
#: Distances of a class to others that count one by one, and the groups of all others, for the sum of Q.
NEAREST, GROUPS = 64, 64
#: Where b, e, g usually are, as logarithms, and how far from there: a weak prior, for folders that do not say. Chosen
#: on classes 1 to 100 of CUB and on glyphs (b is 30 to 60 there, and 17).
USUAL, SPREAD = (3.5, 0.0, 0.7), (0.6, 0.2, 1.0)
#: The least and greatest that these logarithms count as. An e below 0.8 has hard images at any distance from their
#: class, which are noise: on clean labels e is 0.8 to 1.3. The others keep what a search tries from overflowing.
BOUNDS = torch.tensor([[-2.0, math.log(0.8), -4.0], [7.0, 1.0, 4.0]], dtype=torch.float64)
#: Rates and g that the search starts from, and its steps.
STARTS, STEPS = ((0.02, 0.5), (0.02, 6.0), (0.2, 0.5), (0.2, 6.0)), 60
#: Draws of the numbers from their distribution, and the quantiles of them that are the interval.
SAMPLES, QUANTILES = 200, (0.05, 0.95)
#: No probability is greater: the numbers may be known well, but the model is only a model.
MOST_SURE = 0.999
#: With fewer images than these, nothing is estimated.
FEWEST = 10


@dataclass(frozen=True, eq=False)
class NoiseEstimate:
    """The rate of label noise, and what follows for each image.

    Args:
        rate: The estimate; 0 if there is no sign of label noise.
        interval: Its 90 % interval, by the scatter of classes.
        probability: (n,) that an image is mislabeled; 0 where no other class attracts it more than its own.
        lower_precision: (n,) of the list of all images with this score or a higher one, the lower end of its interval.
    """

    rate: float
    interval: tuple[float, float]
    probability: Tensor
    lower_precision: Tensor


def estimate_noise(scores: Tensor, attractions: Tensor, points: Tensor, labels: Tensor, law: DecayLaw) -> NoiseEstimate:
    """The label noise of images with these scores; those that are not finite are not judged and have probability 0.

    Args:
        scores: (n,) of `pfml.audit.scores.field_scores`.
        attractions: (n, C) from which they were computed.
        points: (n, D) the embeddings, on the unit sphere.
        labels: (n,) the given labels.
        law: Of the attractions.
    """
    probability, lower_precision = torch.zeros(2, len(scores), dtype=torch.float64)
    judged = scores.isfinite().nonzero()[:, 0]
    positive = judged[scores[judged] > 0]
    if len(judged) < FEWEST or not len(positive):
        return NoiseEstimate(0.0, (0.0, 1.0 if len(judged) < FEWEST else 0.0), probability, lower_precision)
    positive = positive[scores[positive].argsort(descending=True, stable=True)]
    present, labels = labels.unique(return_inverse=True)
    attractions = attractions[:, present]
    chosen = judged[torch.randperm(len(judged), generator=_generator())[:MOST_IMAGES].sort().values]
    distances = _center_distances(points, labels)
    exponent = steepness(law)
    model = _Model.of(attractions[chosen], labels[chosen], distances, exponent)
    numbers = _most_likely(model)
    if numbers is None:
        return NoiseEstimate(0.0, (0.0, _highest_rate(model)), probability, lower_precision)
    drawn = _drawn(model, numbers)
    suspicious = _Model.of(attractions[positive], labels[positive], distances, exponent)
    probability[positive] = suspicious.mislabeled(numbers).clamp(max=MOST_SURE)
    shares = torch.stack([suspicious.mislabeled(each) for each in drawn])  # (SAMPLES, positive)
    counts = torch.arange(1, len(positive) + 1)
    lower_precision[positive] = (shares.cumsum(dim=1) / counts).quantile(QUANTILES[0], dim=0).clamp(max=MOST_SURE)
    rate, rates = float(numbers[3].sigmoid()), drawn[:, 3].sigmoid()
    low, high = rates.quantile(torch.tensor(QUANTILES, dtype=torch.float64)).tolist()
    return NoiseEstimate(rate, (min(low, rate), max(high, rate)), probability, lower_precision)


@dataclass(frozen=True, eq=False)
class _Model:
    """The likelihood of given labels, by the numbers log b, log e, log g, logit rate.

    Args:
        gaps: (n, K) log of x_c of the K classes that attract each image most.
        own_gap: (n,) log of x of the given class.
        rest_gap: (n,) log of the mean x of the classes that are not among the K.
        rest: How many these are.
        candidates: (n, K) these classes.
        steps: (n, K) d from each of them to the given class; inf if it is the given one.
        around: (C, G) d from each class to others, nearest first, then means of groups of them.
        sizes: (G,) how many classes these distances stand for.
        labels: (n,) the given labels.
    """

    gaps: Tensor
    own_gap: Tensor
    rest_gap: Tensor
    rest: int
    candidates: Tensor
    steps: Tensor
    around: Tensor
    sizes: Tensor
    labels: Tensor

    @classmethod
    def of(cls, attractions: Tensor, labels: Tensor, distances: Tensor, exponent: float) -> _Model:
        """The model of images with attractions (n, C) by a law of this exponent, and class distances (C, C)."""
        logs = attractions.double().clamp(min=torch.finfo(attractions.dtype).tiny).log() / exponent
        top = logs.topk(min(CANDIDATES, logs.shape[1]), dim=1)
        rest = logs.shape[1] - top.values.shape[1]
        others = (logs.sum(dim=1) - top.values.sum(dim=1)) / max(rest, 1)
        of_interest = torch.cat([top.values, logs.gather(1, labels[:, None]), others[:, None]], dim=1)
        gaps = (top.values[:, :1] - of_interest).clamp(min=1e-9).log()
        around, sizes = _summarized(distances)
        steps = distances[top.indices, labels[:, None]]
        return cls(gaps[:, :-2], gaps[:, -2], gaps[:, -1], rest, top.indices, steps, around, sizes, labels)

    def parts(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The logs of p(given class) and of the probability that noise gives it, each (n,)."""
        b, e, g = numbers[:3].clamp(*BOUNDS).exp()
        hardness = -torch.exp(e * (b.log() + self.gaps))
        total = hardness.logsumexp(dim=1)
        if self.rest:
            total = torch.logaddexp(total, math.log(self.rest) - torch.exp(e * (b.log() + self.rest_gap)))
        reached = (self.sizes.log() - g * self.around).logsumexp(dim=1)[self.candidates]
        moved = torch.where(self.steps.isinf(), -torch.inf, -g * self.steps.nan_to_num(posinf=0.0) - reached)
        return -torch.exp(e * (b.log() + self.own_gap)) - total, (hardness + moved).logsumexp(dim=1) - total

    def log_likelihoods(self, numbers: Tensor) -> Tensor:
        """That of each given label, (n,)."""
        right, noise = self.parts(numbers)
        rate = numbers[3]
        return torch.logaddexp(right + logsigmoid(-rate), noise + logsigmoid(rate))

    def loss(self, numbers: Tensor) -> Tensor:
        """The negative log likelihood of all labels, with the prior."""
        return _prior(numbers) - self.log_likelihoods(numbers).sum()

    def loss_without_noise(self, numbers: Tensor) -> Tensor:
        """Likewise where every label is right."""
        return _prior(numbers) - self.parts(numbers)[0].sum()

    def mislabeled(self, numbers: Tensor) -> Tensor:
        """The probability of each image to be mislabeled, (n,)."""
        right, noise = self.parts(numbers)
        return (noise - right + numbers[3]).sigmoid()


def _prior(numbers: Tensor) -> Tensor:
    usual, spread = torch.tensor([USUAL, SPREAD], dtype=torch.float64)
    return (((numbers[:3] - usual) / spread) ** 2).sum() / 2


def _most_likely(model: _Model) -> Tensor | None:
    """The numbers of the greatest likelihood; None if the labels are as well explained without noise (BIC)."""
    found = [
        _minimized(model.loss, torch.tensor([*USUAL[:2], math.log(g), math.log(rate / (1 - rate))]).double())
        for rate, g in STARTS
    ]
    without = _minimized(model.loss_without_noise, torch.tensor([*USUAL, 0.0]).double())
    loss, numbers = min(found, key=lambda one: one[0])
    return numbers if loss < without[0] - math.log(len(model.labels)) else None


def _minimized(loss: Callable[[Tensor], Tensor], start: Tensor) -> tuple[float, Tensor]:
    """The least value that a search from `start` finds, and where."""
    numbers = start.clone().requires_grad_()
    search = torch.optim.LBFGS([numbers], max_iter=STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        search.zero_grad()
        value = loss(numbers)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    search.step(closure)  # type: ignore[no-untyped-call]
    found = numbers.detach()
    value = float(loss(found))
    return (value, found) if math.isfinite(value) else (math.inf, start)


def _drawn(model: _Model, numbers: Tensor) -> Tensor:
    """Numbers from the distribution that they have if classes are drawn anew, (SAMPLES, 4)."""
    directions = torch.eye(4, dtype=torch.float64)
    each = torch.stack([jvp(model.log_likelihoods, numbers, one)[1] for one in directions], dim=1)  # (n, 4)
    classes = model.labels.unique(return_inverse=True)[1]
    of_classes = torch.zeros(int(classes.max()) + 1, 4, dtype=torch.float64).index_add(0, classes, each)
    curvature = torch.linalg.pinv(hessian(model.loss, numbers), hermitian=True)
    covariance = curvature @ (of_classes.T @ of_classes) @ curvature
    values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    noise = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=_generator())
    return numbers + noise @ (vectors * values.clamp(min=0).sqrt()).T


def _highest_rate(model: _Model) -> float:
    """The rate of noise at random that the labels would still allow, where they show none."""
    without, numbers = _minimized(model.loss_without_noise, torch.tensor([*USUAL, 0.0]).double())
    low, high = 0.0, 1.0
    for _ in range(20):
        rate = (low + high) / 2
        numbers[3] = math.log(rate / (1 - rate))
        low, high = (rate, high) if float(model.loss(numbers)) < without + 1.35 else (low, rate)
    return high


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _center_distances(points: Tensor, labels: Tensor) -> Tensor:
    """Squared distances between the centers of classes, (C, C), divided by their mean; inf from a class to itself."""
    counts = labels.bincount()
    first = counts.cumsum(0) - counts
    kept = torch.ones(len(labels), dtype=torch.bool)
    for _ in range(1 + ROUNDS):
        sums = torch.zeros(len(counts), points.shape[1], dtype=torch.float64)
        centers = unit(sums.index_add(0, labels[kept], points[kept].double()))
        near = (points.double() * centers[labels]).sum(dim=1)
        order = near.argsort(descending=True, stable=True)
        order = order[labels[order].argsort(stable=True)]  # class by class, nearest first
        rank = torch.empty_like(labels)
        rank[order] = torch.arange(len(labels)) - first[labels[order]]
        kept = rank < ((1 - LEFT_OUT) * counts[labels]).ceil()
    distances = (2 - 2 * centers @ centers.T).clamp(min=0)
    others = ~torch.eye(len(counts), dtype=torch.bool)
    return (distances / distances[others].mean().clamp(min=1e-12)).masked_fill(~others, torch.inf)


def _summarized(distances: Tensor) -> tuple[Tensor, Tensor]:
    """Distances of each class to the others, (C, G): the nearest one by one, groups of the rest by their mean.

    Also how many classes each of the G stands for.
    """
    ordered = distances.sort(dim=1).values[:, :-1]
    near, far = ordered[:, :NEAREST], ordered[:, NEAREST:]
    if not far.shape[1]:
        return near, torch.ones(near.shape[1], dtype=torch.float64)
    groups = far.tensor_split(min(GROUPS, far.shape[1]), dim=1)
    sizes = torch.tensor([1.0] * near.shape[1] + [float(each.shape[1]) for each in groups], dtype=torch.float64)
    return torch.cat([near, *(each.mean(dim=1, keepdim=True) for each in groups)], dim=1), sizes
