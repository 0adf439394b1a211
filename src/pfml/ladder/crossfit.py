"""Cross-fitting: how well a way to make embeddings does on images that it has not seen, from training images alone.

The training images are divided into parts at random. A candidate is fitted to all parts but one and judged on that one;
every image is judged once in each repetition. Two protocols divide them:

- "classes": a part is some of the classes, and its images are searched among each other. So are unseen classes.
- "images": a part is some of the images of every class, and they are searched among the images that were fitted to.

Candidates are compared on the same queries, so that what is hard for all of them cancels. The standard error is about
what is drawn at random: with "classes" it is that of the mean over classes, since images of one class are alike; with
"images" the classes stay, and it is that of the mean over images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from pfml.data.decoding import Track
from pfml.evaluation.metrics import HEADLINE
from pfml.evaluation.nearest_neighbors import directions
from pfml.evaluation.ranks import query_scores

__all__ = ["CrossFitted", "Division", "Embed", "Gain", "cross_fit", "divisions"]

#: Unseen classes are divided from this number on.
FEWEST_CLASSES = 4
#: Repetitions of the division into parts.
REPEATS = 3
#: Parts by classes, from so many classes on; few classes are judged in few parts, since one class alone finds itself.
PARTS = ((0, 2), (12, 3), (32, 4))
#: Parts by images.
IMAGE_PARTS = 4

#: From positions of images to their embeddings.
Embed = Callable[[Tensor], Tensor]
Candidate = TypeVar("Candidate", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Division:
    """Images to fit to and images to judge by, as positions among the training images.

    Args:
        fitted: (n,) int64.
        judged: (m,) int64.
        is_searched_in_fitted: Whether the judged images are searched among the fitted ones, not among each other.
    """

    fitted: Tensor
    judged: Tensor
    is_searched_in_fitted: bool


@dataclass(frozen=True, eq=False)
class CrossFitted:
    """What each training image found, as a query that the candidate had not seen.

    Args:
        scores: Metric -> (N,) float64, NaN for images without a match.
        labels: (N,) int64.
    """

    scores: dict[str, Tensor]
    labels: Tensor

    def mean(self, metric: str) -> float:
        """The metric over all queries that have a match."""
        values = self.scores[metric]
        return float(values[~values.isnan()].mean())


@dataclass(frozen=True)
class Gain:
    """The difference of a metric between two candidates, with its standard error."""

    mean: float
    error: float

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the mean."""
        return self.mean - 1.96 * self.error, self.mean + 1.96 * self.error

    @classmethod
    def between(cls, before: CrossFitted, after: CrossFitted, metric: str, *, protocol: str = "classes") -> Gain:
        """From one candidate to another, on the same images; over classes or images, by the protocol."""
        difference = after.scores[metric] - before.scores[metric]
        judged = ~difference.isnan()
        labels = before.labels[judged] if protocol == "classes" else torch.arange(int(judged.sum()))
        classes, position = labels.unique(return_inverse=True)
        counts = torch.bincount(position, minlength=len(classes)).double()
        sums = torch.zeros(len(classes), dtype=torch.float64).index_add_(0, position, difference[judged])
        mean = float(sums.sum() / counts.sum())
        if len(classes) < 2:
            return cls(mean, math.inf)
        # of a ratio of sums, with classes as the units that were drawn
        residual = sums - mean * counts
        error = float(residual.square().sum().sqrt()) / float(counts.sum())
        return cls(mean, error * math.sqrt(len(classes) / (len(classes) - 1)))


def divisions(labels: Tensor, protocol: str, *, seed: int = 0, repeats: int = REPEATS) -> list[Division]:
    """The divisions of images with these labels by a protocol, "classes" or "images".

    Raises:
        ValueError: If there are too few classes, or too few images of each, to divide.
    """
    if protocol not in ("classes", "images"):
        raise ValueError(f"protocol must be classes or images, got {protocol!r}")
    random = torch.Generator().manual_seed(seed)
    return list(_by_classes(labels, repeats, random) if protocol == "classes" else _by_images(labels, repeats, random))


def cross_fit(
    labels: Tensor,
    fit: Callable[[Tensor], Mapping[Candidate, Embed]],
    parts: Sequence[Division],
    *,
    track: Track | None = None,
) -> dict[Candidate, CrossFitted]:
    """Candidate -> its scores; means over repetitions for each image.

    Args:
        labels: (N,) int64 of the training images.
        fit: From the positions of the images to fit to, to candidates.
        parts: See `divisions`.
        track: Shows the progress, as track(iterable, description, total).
    """
    sums: dict[Candidate, dict[str, Tensor]] = {}
    counts = torch.zeros(len(labels), dtype=torch.float64)
    for part in parts if track is None else track(parts, "validating", len(parts)):
        own, searched = labels[part.judged], labels[part.fitted] if part.is_searched_in_fitted else None
        for candidate, embed in fit(part.fitted).items():
            queries = directions(embed(part.judged), "embeddings")
            items = None if searched is None else directions(embed(part.fitted), "embeddings")
            scores = query_scores(queries, own, items, searched)
            found = scores.num_matches > 0
            judged = part.judged[found]
            if candidate not in sums:
                sums[candidate] = {metric: torch.zeros(len(labels), dtype=torch.float64) for metric in HEADLINE}
            sums[candidate]["recall_at_1"][judged] += (scores.first_rank[found] == 1).double()
            sums[candidate]["map_at_r"][judged] += scores.average_precision_at_r[found]
        counts[judged] += 1
    return {
        candidate: CrossFitted({metric: total / counts for metric, total in totals.items()}, labels)
        for candidate, totals in sums.items()
    }


def _by_classes(labels: Tensor, repeats: int, random: torch.Generator) -> Iterator[Division]:
    classes = labels.unique()
    if len(classes) < FEWEST_CLASSES:
        raise ValueError(f"validation needs {FEWEST_CLASSES} classes or more to divide, got {len(classes)}")
    count = next(parts for fewest, parts in reversed(PARTS) if len(classes) >= fewest)
    for _ in range(repeats):
        shuffled = classes[torch.randperm(len(classes), generator=random)]
        for held in shuffled.tensor_split(count):
            is_judged = torch.isin(labels, held)
            yield Division((~is_judged).nonzero()[:, 0], is_judged.nonzero()[:, 0], False)


def _by_images(labels: Tensor, repeats: int, random: torch.Generator) -> Iterator[Division]:
    counts = torch.bincount(labels)
    if int(counts.max()) < 2:
        raise ValueError("validation needs a class with two images or more to divide, and there is none")
    for _ in range(repeats):
        # images of a class take turns: each part has about as many of each
        order = torch.randperm(len(labels), generator=random)
        order = order[labels[order].argsort(stable=True)]
        first = torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1]])
        turn = torch.empty_like(labels)
        start = torch.randint(IMAGE_PARTS, (len(counts),), generator=random)
        turn[order] = torch.arange(len(labels)) - first[labels[order]] + start[labels[order]]
        for part in range(IMAGE_PARTS):
            is_judged = (turn % IMAGE_PARTS == part) & (counts[labels] > 1)  # a single image is never judged
            if bool(is_judged.any()):
                yield Division((~is_judged).nonzero()[:, 0], is_judged.nonzero()[:, 0], True)
