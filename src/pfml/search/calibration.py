"""Calibration: a score of "known" and its threshold, chosen and measured by cross-fitting over classes.

Each image is a query twice. It is

    genuine     while its class is in the gallery: searched among all other images;
    impostor    when its class is taken out of the gallery: searched among the images of the other classes.

The classes are divided into folds. What the queries of all other folds choose (score, weights, threshold, thresholds of
classes) is measured on the queries of a fold, so that every class is measured and none by a choice of its own. The
threshold that is kept is chosen on all classes. The rates belong to galleries of the size that they were measured with:
in a larger one an impostor finds something nearer.

A model that was trained on all classes has no unseen ones. Then its known classes are left out of the gallery in turn
(`calibrate_known`): held-out images are searched in a gallery of all training images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pfml.data.decoding import Track
from pfml.data.image_set import ImageSet, RetrievalData, refuse_seen_classes
from pfml.evaluation.class_attraction import fitted_law
from pfml.evaluation.model_evaluation import embed
from pfml.evaluation.nearest_neighbors import directions
from pfml.models.embedder import Embedder
from pfml.search.identity import ModelIdentity
from pfml.search.neighborhood import class_spreads, nearest_neighborhood
from pfml.search.scores import CANDIDATES, COMBINATION, SCORES, Scoring, measured_scores, standard_weights, typical
from pfml.search.threshold import Rate, Threshold

__all__ = [
    "AUTO",
    "FALSE_ACCEPT_RATE",
    "FEWEST_CLASSES",
    "PREFERRED",
    "calibrate",
    "calibrate_known",
    "calibrate_known_points",
    "calibrate_points",
]

#: What is asked for unless it is said. At 1 %, nearly all known photographs of birds are called unknown, too.
FALSE_ACCEPT_RATE = 0.05
#: `PREFERRED`, unless another score accepts clearly more.
AUTO = "auto"
#: What research/unknown.py found best on CUB classes 1 to 100, where the best on the calibration data was worse.
PREFERRED = COMBINATION
#: How many times as many known images that is.
CLEARLY_MORE = 1.5
CONFIDENCE = 0.95
#: So that three are in the gallery of an impostor.
FEWEST_CLASSES = 4
FOLDS = 10
RESAMPLES = 1000
#: A class has a threshold of its own if at least this number of its impostors may be accepted.
CLASS_ACCEPTS = 2


def calibrate(
    embedder: Embedder,
    images: ImageSet,
    *,
    false_accept_rate: float = FALSE_ACCEPT_RATE,
    score: str = AUTO,
    seed: int = 0,
    batch_size: int = 128,
    data: str = "",
    track: Track | None = None,
) -> Threshold:
    """The threshold below which an image is unknown to `embedder`.

    Args:
        embedder: On the device where it is to compute.
        images: Of classes that it was not trained on.
        false_accept_rate: Of images whose class is not in the index, the share that may be accepted.
        score: One of `CANDIDATES`, or "auto" for `PREFERRED`, unless another accepts clearly more known images.
        seed: Of the folds.
        batch_size: Images that the model embeds at a time.
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
        class_names=images.class_names,
        false_accept_rate=false_accept_rate,
        score=score,
        model=ModelIdentity.of(embedder),
        seed=seed,
        data=data,
    )


def calibrate_known(
    embedder: Embedder,
    data: RetrievalData,
    *,
    false_accept_rate: float = FALSE_ACCEPT_RATE,
    score: str = AUTO,
    seed: int = 0,
    batch_size: int = 128,
    source: str = "",
    track: Track | None = None,
) -> Threshold:
    """The threshold below which an image is unknown to an embedder that was trained on all classes at hand.

    With the protocol "images", held-out images are searched in the gallery of `data`, the training images. With "none"
    there are training images alone: each is searched among the others. The arguments are those of `calibrate`.

    Args:
        embedder: On the device where it is to compute.
        data: With the protocol "images" or "none".
        false_accept_rate: Of images whose class is not in the index, the share that may be accepted.
        score: One of `CANDIDATES`, or "auto".
        seed: Of the folds.
        batch_size: Images that the model embeds at a time.
        source: What the data are, in words.
        track: Shows the progress, as track(iterable, description, total).
    """
    if data.protocol == "classes":
        raise ValueError("known classes must be all that there are, got unseen ones: calibrate on these")

    def points(images: ImageSet) -> Tensor:
        return embed(embedder, images, batch_size=batch_size, track=track).cpu()

    queries, gallery = (data.train, None) if data.protocol == "none" else (data.test, data.gallery or data.train)
    return calibrate_known_points(
        points(queries),
        queries.labels,
        None if gallery is None else points(gallery),
        None if gallery is None else gallery.labels,
        class_names=queries.class_names,
        false_accept_rate=false_accept_rate,
        score=score,
        model=ModelIdentity.of(embedder),
        seed=seed,
        data=source,
    )


def calibrate_known_points(
    points: Tensor,
    labels: Tensor,
    gallery: Tensor | None = None,
    gallery_labels: Tensor | None = None,
    *,
    model: ModelIdentity,
    class_names: Sequence[str] | None = None,
    false_accept_rate: float = FALSE_ACCEPT_RATE,
    score: str = AUTO,
    seed: int = 0,
    data: str = "",
) -> Threshold:
    """`calibrate_known` for vectors.

    Args:
        points: Queries, (N, D).
        labels: (N,).
        gallery: (G, D) that they are searched in; None to search the queries among each other, each without itself.
        gallery_labels: (G,).
        model: What made the vectors.
        class_names: Of the labels, for thresholds of single classes; None for a common one alone.
        false_accept_rate: Of images whose class is not in the index, the share that may be accepted.
        score: One of `CANDIDATES`, or "auto".
        seed: Of the folds.
        data: What the images are, in words.
    """
    if gallery_labels is not None and len(gallery_labels.unique()) < 2:
        raise ValueError("a gallery must have another class when one is left out, got images of a single class")
    protocol, size = ("none", len(points)) if gallery is None else ("images", len(gallery))
    queries = _queries(points, labels, gallery, gallery_labels, false_accept_rate)
    threshold = _cross_fitted(queries, class_names, false_accept_rate, score, model, data, seed)
    return replace(threshold, gallery_size=size, protocol=protocol)


def calibrate_points(
    points: Tensor,
    labels: Tensor,
    *,
    model: ModelIdentity,
    class_names: Sequence[str] | None = None,
    false_accept_rate: float = FALSE_ACCEPT_RATE,
    score: str = AUTO,
    seed: int = 0,
    data: str = "",
) -> Threshold:
    """`calibrate` for vectors (N, D) with labels (N,), which must be of classes that the model has not seen."""
    queries = _queries(points, labels, None, None, false_accept_rate)
    return _cross_fitted(queries, class_names, false_accept_rate, score, model, data, seed)


@dataclass(frozen=True, eq=False)
class _Queries:
    """Each query as genuine and as impostor: `SCORES` (n, scores) and the most likely class (n,) of both.

    `is_known` is false for an image whose class has no other image in the gallery: it is an impostor only.
    """

    labels: Tensor
    is_known: Tensor
    genuine: Tensor
    genuine_class: Tensor
    impostor: Tensor
    impostor_class: Tensor
    scoring: Scoring

    def rows(self, chosen: Tensor) -> _Queries:
        """Some of the queries."""
        return replace(
            self,
            labels=self.labels[chosen],
            is_known=self.is_known[chosen],
            genuine=self.genuine[chosen],
            genuine_class=self.genuine_class[chosen],
            impostor=self.impostor[chosen],
            impostor_class=self.impostor_class[chosen],
        )


@dataclass(frozen=True, eq=False)
class _Choice:
    """What some queries choose: a score, its threshold, and label -> threshold of a class."""

    scoring: Scoring
    value: float
    class_values: dict[int, float]

    def accepts(self, scores: Tensor, classes: Tensor) -> Tensor:
        """(n,) bool for the scores and the most likely classes of queries."""
        values = torch.full_like(scores, self.value)
        for label, value in self.class_values.items():
            values[classes == label] = value
        return scores >= values


def _queries(
    points: Tensor, labels: Tensor, gallery: Tensor | None, gallery_labels: Tensor | None, false_accept_rate: float
) -> _Queries:
    """Search each image in the gallery, or among the others, with and without its class."""
    if not 0 < false_accept_rate < 1:
        raise ValueError(f"false_accept_rate must lie between 0 and 1, got {false_accept_rate}")
    if labels.shape != points.shape[:1]:
        raise ValueError(f"labels must be ({len(points)},), one per point, got {tuple(labels.shape)}")
    if len(labels.unique()) < FEWEST_CLASSES:
        raise ValueError(f"there must be at least {FEWEST_CLASSES} classes to calibrate on, got {len(labels.unique())}")
    points = directions(points, "points")
    items = points if gallery is None else directions(gallery, "gallery")
    item_labels = labels if gallery_labels is None else gallery_labels
    num_classes = int(torch.cat([labels, item_labels]).max()) + 1
    law = fitted_law(items, item_labels, num_classes)
    spread = typical(class_spreads(items, item_labels, num_classes)[0])
    scoring = Scoring("distance", law.contact, law.alpha, spread)
    both = [
        nearest_neighborhood(
            points,
            labels,
            None if gallery is None else items,
            item_labels,
            num_classes=num_classes,
            without_own_class=is_impostor,
        )
        for is_impostor in (False, True)
    ]
    genuine, impostor = both
    others = torch.bincount(item_labels, minlength=num_classes)[labels] - int(gallery is None)
    return _Queries(
        labels,
        others > 0,
        measured_scores(genuine, scoring),
        genuine.attraction(law).labels,
        measured_scores(impostor, scoring),
        impostor.attraction(law).labels,
        scoring,
    )


def _cross_fitted(
    queries: _Queries,
    class_names: Sequence[str] | None,
    false_accept_rate: float,
    score: str,
    model: ModelIdentity,
    data: str,
    seed: int,
) -> Threshold:
    """The threshold that all queries choose, and the rates of those that all but a fold choose."""
    if score not in (AUTO, *CANDIDATES):
        raise ValueError(f"score must be one of {', '.join((AUTO, *CANDIDATES))}, got {score!r}")
    if not queries.is_known.any():
        raise ValueError("some class must have two images for false rejects to be measured, got one image of each")
    candidates = (PREFERRED, *CANDIDATES) if score == AUTO else (score,)
    folds = _folds(queries.labels, seed)
    _refuse_few(len(queries.labels) - max(int(fold.sum()) for fold in folds), false_accept_rate)
    per_class = class_names is not None
    accepted = torch.zeros(2, len(queries.labels), dtype=torch.bool)
    for fold in folds:
        choice = _chosen(queries.rows(~fold), candidates, false_accept_rate, per_class)
        accepted[:, fold] = torch.stack(_accepted(choice, queries.rows(fold)))
    genuine, impostor = accepted[0][queries.is_known], accepted[1]
    labels = queries.labels[queries.is_known]
    wrong = genuine & (queries.genuine_class[queries.is_known] != labels)
    final = _chosen(queries, candidates, false_accept_rate, per_class)
    distances = queries.impostor[:, list(SCORES).index("distance")]
    names = {} if class_names is None else {label: class_names[label] for label in final.class_values}
    return Threshold(
        final.scoring,
        final.value,
        min(max(-_smallest_accepted(distances, false_accept_rate), 0.0), 2.0),
        false_accept_rate,
        model,
        data,
        false_accepts=_rate(impostor, queries.labels, seed),
        false_rejects=_rate(~genuine, labels, seed),
        wrong_classes=_rate(wrong, labels, seed),
        measured_on=(len(queries.labels), len(queries.labels.unique())),
        class_values={names[label]: value for label, value in final.class_values.items()},
        class_names=tuple(class_names[label] for label in queries.labels.unique().tolist()) if class_names else (),
        compared={name: _accepted_share(queries, name, false_accept_rate) for name in CANDIDATES},
        scores={
            "genuine": final.scoring.of_measured(queries.genuine[queries.is_known]),
            "impostor": final.scoring.of_measured(queries.impostor),
        },
    )


def _folds(labels: Tensor, seed: int) -> list[Tensor]:
    """(n,) bool of each fold: whole classes, drawn at random; with few classes each is a fold of its own."""
    classes = labels.unique()
    order = classes[torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))]
    return [torch.isin(labels, some) for some in order.tensor_split(min(FOLDS, len(classes)))]


def _refuse_few(images: int, false_accept_rate: float) -> None:
    needed = math.ceil(1 / false_accept_rate - 1e-9)
    if images < needed:
        raise ValueError(
            f"a false accept rate of {false_accept_rate:g} must be chosen on at least {needed:,} images, got "
            f"{images:,} besides those of the classes left out; with so many the rate (--false-accept-rate) must be "
            f"{_smallest_rate(images):g} or more; ask for that, or give more images"
        )


def _smallest_rate(images: int) -> float:
    """The smallest rate that so many images can show, 1 of them, rounded up to three digits."""
    scale = 10.0 ** (2 - math.floor(math.log10(1 / images)))
    return math.ceil(scale / images - 1e-9) / scale


def _fitted(queries: _Queries, name: str) -> Scoring:
    """A score, with the weights that the queries give it."""
    is_combined = name == COMBINATION
    weights = standard_weights(queries.genuine[queries.is_known], queries.impostor) if is_combined else ()
    return replace(queries.scoring, name=name, weights=weights)


def _accepted(choice: _Choice, queries: _Queries) -> tuple[Tensor, Tensor]:
    """Which queries are accepted as genuine, and as impostors."""
    return (
        choice.accepts(choice.scoring.of_measured(queries.genuine), queries.genuine_class),
        choice.accepts(choice.scoring.of_measured(queries.impostor), queries.impostor_class),
    )


def _accepted_share(queries: _Queries, name: str, rate: float) -> float:
    """The share of genuine queries that a score accepts at the rate, by a common threshold."""
    scoring = _fitted(queries, name)
    value = _smallest_accepted(scoring.of_measured(queries.impostor), rate)
    return float((scoring.of_measured(queries.genuine[queries.is_known]) >= value).double().mean())


def _chosen(queries: _Queries, candidates: Sequence[str], rate: float, per_class: bool) -> _Choice:
    """The first candidate, or the best one if it accepts clearly more genuine queries, and its thresholds."""
    shares = {name: _accepted_share(queries, name, rate) for name in candidates} if len(candidates) > 1 else {}
    best = max(shares, key=lambda name: shares[name], default=candidates[0])
    is_clear = bool(shares) and shares[best] > CLEARLY_MORE * shares[candidates[0]]
    scoring = _fitted(queries, best if is_clear else candidates[0])
    impostor = scoring.of_measured(queries.impostor)
    value = _smallest_accepted(impostor, rate)
    class_values: dict[int, float] = {}
    if per_class:
        for label in queries.impostor_class.unique().tolist():
            own = impostor[queries.impostor_class == label]
            if _acceptable(len(own), rate) >= CLASS_ACCEPTS:
                class_values[label] = _smallest_accepted(own, rate)
    return _Choice(scoring, value, class_values)


def _acceptable(impostors: int, rate: float) -> int:
    """How many of so many impostors may be accepted; -1 if they are too few for the rate."""
    return math.floor(rate * (impostors + 1) + 1e-9) - 1


def _smallest_accepted(impostor: Tensor, rate: float) -> float:
    """The smallest score that accepts at most this share of further impostors, by expectation (conformal prediction).

    A further impostor is above the k-th highest of n with a probability of k / (n + 1), so k is at most rate (n + 1).
    """
    accepted = _acceptable(len(impostor), rate)
    first_refused = float(impostor.sort(descending=True).values[accepted])
    return math.nextafter(first_refused, math.inf)


def _rate(happened: Tensor, labels: Tensor, seed: int) -> Rate:
    """The share of images that it happened to.

    The interval is the wider of two, end by end: the exact one for independent images (Clopper and Pearson), and that
    of drawing whole classes again, since images of one class are alike.
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
