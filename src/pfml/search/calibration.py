"""The threshold of "unknown": chosen on some classes that the model has not seen, measured on others.

Each image of a half of the classes is a query among the other images of that half. It is

    genuine     while its class is in the gallery: the distance to the nearest image of its own class;
    impostor    when its class is taken out of the gallery: the distance to the nearest image of the others.

A threshold accepts what is not farther: the false accept rate is the share of impostors that it accepts, the false
reject rate the share of genuine queries that it does not. The rates belong to galleries of the size that they were
measured with: in a larger one an impostor finds something nearer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.data.decoding import Track
from pfml.data.image_set import ImageSet, refuse_seen_classes
from pfml.evaluation.model_evaluation import embed
from pfml.evaluation.nearest_neighbors import directions
from pfml.models.embedder import Embedder
from pfml.precision import full_precision
from pfml.search.identity import ModelIdentity
from pfml.search.state import distances_between
from pfml.search.threshold import Rate, Threshold

__all__ = ["calibrate", "calibrate_points"]

#: Bytes of similarities that are held at once.
MEMORY = 2**26
CONFIDENCE = 0.95
#: Two to choose and two to measure on.
FEWEST_CLASSES = 4
RESAMPLES = 1000


@dataclass(frozen=True, eq=False)
class Distances:
    """Of each query of a half, (n,) float64; `genuine` is NaN for an image that is alone in its class."""

    genuine: Tensor
    impostor: Tensor
    labels: Tensor


def calibrate(
    embedder: Embedder,
    images: ImageSet,
    *,
    false_accept_rate: float = 0.01,
    seed: int = 0,
    batch_size: int = 128,
    data: str = "",
    track: Track | None = None,
) -> Threshold:
    """The distance beyond which an image is unknown to `embedder`.

    Args:
        embedder: On the device where it is to compute.
        images: Of classes that it was not trained on.
        false_accept_rate: Of images whose class is not in the index, the share that may be accepted.
        seed: Of the division of the classes.
        batch_size: Images that pass through the network at a time.
        data: What the images are, in words.
        track: Shows the progress, as track(iterable, description, total).

    Raises:
        SeenClassError: If the embedder was trained on one of the classes.
    """
    if embedder.trained_on is not None:
        refuse_seen_classes(embedder.trained_on.class_names, images, "calibration")
    points = embed(embedder, images, batch_size=batch_size, track=track).cpu()
    return calibrate_points(
        points,
        images.labels,
        false_accept_rate=false_accept_rate,
        model=ModelIdentity.of(embedder),
        seed=seed,
        data=data,
    )


def calibrate_points(
    points: Tensor,
    labels: Tensor,
    *,
    model: ModelIdentity,
    false_accept_rate: float = 0.01,
    seed: int = 0,
    data: str = "",
) -> Threshold:
    """`calibrate` for vectors (N, D) with labels (N,), which must be of classes that the model has not seen."""
    if not 0 < false_accept_rate < 1:
        raise ValueError(f"false_accept_rate must lie between 0 and 1, got {false_accept_rate}")
    if labels.shape != points.shape[:1]:
        raise ValueError(f"labels must be ({len(points)},), one per point, got {tuple(labels.shape)}")
    points = directions(points, "points")
    halves = _halves(labels, seed)
    choosing, measuring = (_distances(points[half], labels[half]) for half in halves)
    needed = math.ceil(1 / false_accept_rate - 1e-9)
    fewest = min(len(choosing.impostor), len(measuring.impostor))
    if fewest < needed:
        raise ValueError(
            f"a false accept rate of {false_accept_rate:g} must be chosen on at least {needed:,} images and measured "
            f"on as many others, got {len(choosing.impostor):,} and {len(measuring.impostor):,}; "
            f"with so many the rate (--false-accept-rate) must be {_smallest_rate(fewest):g} or more; "
            f"ask for that, or give more images"
        )
    distance = _largest_distance(choosing.impostor, false_accept_rate)
    known = ~measuring.genuine.isnan()
    if not known.any():
        raise ValueError("some class must have two images for false rejects to be measured, got one image of each")
    genuine, impostor, classes = measuring.genuine[known], measuring.impostor, measuring.labels
    wrong = (measuring.impostor < measuring.genuine)[known] & (measuring.impostor[known] <= distance)
    return Threshold(
        distance,
        false_accept_rate,
        model,
        data,
        false_accepts=_rate(impostor <= distance, classes, seed),
        false_rejects=_rate(genuine > distance, classes[known], seed),
        wrong_classes=_rate(wrong, classes[known], seed),
        chosen_on=(len(choosing.labels), len(choosing.labels.unique())),
        measured_on=(len(classes), len(classes.unique())),
        distances={"genuine": genuine, "impostor": impostor},
    )


def _smallest_rate(images: int) -> float:
    """The smallest rate that so many images can show, 1 of them, rounded up to three digits."""
    scale = 10.0 ** (2 - math.floor(math.log10(1 / images)))
    return math.ceil(scale / images - 1e-9) / scale


def _halves(labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Which images belong to either half of the classes, drawn at random."""
    classes = labels.unique()
    if len(classes) < FEWEST_CLASSES:
        raise ValueError(
            f"there must be at least {FEWEST_CLASSES} classes, two to choose and two to measure on, got {len(classes)}"
        )
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))
    first = torch.isin(labels, classes[order[: len(classes) // 2]])
    return first.nonzero()[:, 0], (~first).nonzero()[:, 0]


def _distances(points: Tensor, labels: Tensor) -> Distances:
    """Each image as a query among the others, in bounded memory."""
    rows = max(MEMORY // (4 * len(points)), 1)
    own, other, alone = [], [], []
    for indices in torch.arange(len(points)).split(rows):
        with full_precision(points.device):
            similarities = points[indices] @ points.T
        same = labels[indices, None] == labels[None, :]
        other.append(similarities.masked_fill(same, -torch.inf).argmax(dim=1))
        same[torch.arange(len(indices)), indices] = False
        own.append(similarities.masked_fill_(~same, -torch.inf).argmax(dim=1))
        alone.append(~same.any(dim=1))
    genuine = distances_between(points, points[torch.cat(own)])
    impostor = distances_between(points, points[torch.cat(other)])
    return Distances(genuine.masked_fill(torch.cat(alone), torch.nan), impostor, labels)


def _largest_distance(impostor: Tensor, rate: float) -> float:
    """The largest distance that accepts at most this share of the impostors."""
    accepted = math.floor(rate * len(impostor) + 1e-9)
    first_refused = float(impostor.sort().values[accepted])
    return max(math.nextafter(first_refused, 0.0), 0.0)


def _rate(happened: Tensor, labels: Tensor, seed: int) -> Rate:
    """The share of images that it happened to.

    The interval is the wider of two, end by end: the exact one for independent images (Clopper and Pearson), and that
    of drawing whole classes anew, since images of one class are alike.
    """
    from scipy.stats import beta

    count, total = int(happened.sum()), len(happened)
    outside = (1 - CONFIDENCE) / 2
    low = float(beta.ppf(outside, count, total - count + 1)) if count else 0.0
    high = float(beta.ppf(1 - outside, count + 1, total - count)) if count < total else 1.0
    _, of_class = labels.unique(return_inverse=True)
    totals = of_class.bincount().double()
    counts = of_class.bincount(weights=happened.double(), minlength=len(totals))
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(totals), (RESAMPLES, len(totals)), generator=generator)
    shares = counts[drawn].sum(1) / totals[drawn].sum(1)
    return Rate(count, total, min(low, float(shares.quantile(outside))), max(high, float(shares.quantile(1 - outside))))
