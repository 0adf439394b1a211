"""The threshold of "unknown": chosen on some classes that the model has not seen, measured on others.

Each image of a half of the classes is a query among the other images of that half. It is

    genuine     while its class is in the gallery: the distance to the nearest image of its own class;
    impostor    when its class is taken out of the gallery: the distance to the nearest image of the others.

A threshold accepts what is not farther: the false accept rate is the share of impostors that it accepts, the false
reject rate the share of genuine queries that it does not. The rates belong to galleries of the size that they were
measured with: in a larger one an impostor finds something nearer.

A model that was trained on all classes has no unseen ones. Then its known classes are left out of the gallery in turn
(`calibrate_known`): the same two distances of held-out images, in a gallery of all training images.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from pfml.data.decoding import Track
from pfml.data.image_set import ImageSet, RetrievalData, refuse_seen_classes
from pfml.evaluation.model_evaluation import embed
from pfml.evaluation.nearest_neighbors import directions
from pfml.models.embedder import Embedder
from pfml.precision import full_precision
from pfml.search.backends import distances_between
from pfml.search.identity import ModelIdentity
from pfml.storage.files import DamagedFileError
from pfml.storage.manifest import Format
from pfml.storage.sealed_tensors import read_sealed_tensors, write_sealed_tensors

__all__ = [
    "THRESHOLD",
    "Rate",
    "Threshold",
    "calibrate",
    "calibrate_known",
    "calibrate_known_points",
    "calibrate_points",
]

#: The format of threshold.json.
THRESHOLD = Format("distance threshold", 1, "calibrate again with pfml calibrate")
#: Bytes of similarities that are held at once.
MEMORY = 2**26
CONFIDENCE = 0.95
#: Two to choose and two to measure on.
FEWEST_CLASSES = 4
RESAMPLES = 1000


@dataclass(frozen=True)
class Rate:
    """A share of images, with the interval that holds the true one with 95 % confidence.

    Args:
        count: How many.
        total: Of how many.
        low: Lower end of the interval.
        high: Upper end of it.
    """

    count: int
    total: int
    low: float
    high: float

    @property
    def value(self) -> float:
        """The share, count / total."""
        return self.count / self.total

    def __str__(self) -> str:
        return f"{self.value:.2%} ({self.count:,} of {self.total:,}; 95 %: {self.low:.2%} to {self.high:.2%})"


@dataclass(frozen=True)
class Threshold:
    """An image is unknown if its nearest neighbor is farther than `distance`.

    Args:
        distance: The largest one at which the asked rate was kept on the classes that chose it.
        false_accept_rate: The asked rate: of images whose class is not in the index, the share that is accepted.
        model: What made the vectors; distances of another model mean something else.
        data: The images that it was found by, in words.
        false_accepts: The rate on classes that had no part in the choice.
        false_rejects: On these, of images whose class is in the index, the share that is called unknown.
        wrong_classes: On these, of images whose class is in the index, the share whose nearest neighbor is accepted
            and of another class.
        chosen_on: Number of images and of classes that chose the distance.
        measured_on: Number of images and of classes that the rates were measured on.
        distances: Those that the rates were measured on, "genuine" and "impostor", for plots.
        gallery_size: Images that these were searched among; None, as in older files, for the measured ones themselves.
        protocol: "classes" if the model has not seen the classes that were measured on; else what was held out of
            training, "images" or "none": known classes were left out of the gallery in turn.
    """

    distance: float
    false_accept_rate: float
    model: ModelIdentity
    data: str
    false_accepts: Rate
    false_rejects: Rate
    wrong_classes: Rate
    chosen_on: tuple[int, int]
    measured_on: tuple[int, int]
    distances: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)
    gallery_size: int | None = None
    protocol: str = "classes"

    @property
    def searched_in(self) -> int:
        """How many images the measured ones were searched among."""
        return self.measured_on[0] if self.gallery_size is None else self.gallery_size

    def __post_init__(self) -> None:
        if not 0 <= self.distance <= 2:
            raise ValueError(f"a distance on the unit sphere must lie in [0, 2], got {self.distance}")

    def is_unknown(self, distance: float) -> bool:
        """Whether an image with its nearest neighbor at this distance is unknown; at a distance of NaN it is."""
        return not float(distance) <= self.distance

    def save(self, folder: str | Path) -> Path:
        """Write threshold.json to `folder`, whole or not at all, replacing one there; the file.

        The distances lie beside it, in a file that it names with its checksum.
        """
        content = {name: value for name, value in asdict(self).items() if name != "distances"}
        tensors = {name: values.contiguous() for name, values in self.distances.items()}
        # an empty set of tensors is nothing that a checksum could speak for
        write_sealed_tensors(Path(folder), "threshold", tensors or {"none": torch.zeros(1)}, content, THRESHOLD)
        return Path(folder) / "threshold.json"

    @classmethod
    def load(cls, folder: str | Path) -> Threshold | None:
        """The threshold in `folder`, None if there is none; a damaged one is refused."""
        path = Path(folder) / "threshold.json"
        if not path.is_file():
            return None
        content, tensors = read_sealed_tensors(Path(folder), "threshold", THRESHOLD)
        try:
            return cls(
                float(content["distance"]),
                float(content["false_accept_rate"]),
                ModelIdentity(**content["model"]),
                str(content["data"]),
                false_accepts=Rate(**content["false_accepts"]),
                false_rejects=Rate(**content["false_rejects"]),
                wrong_classes=Rate(**content["wrong_classes"]),
                chosen_on=_pair(content["chosen_on"]),
                measured_on=_pair(content["measured_on"]),
                gallery_size=None if content.get("gallery_size") is None else int(content["gallery_size"]),
                protocol=str(content.get("protocol", "classes")),
                # what is loaded is mapped: it would follow the file
                distances={name: values.clone() for name, values in tensors.items() if name != "none"},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedFileError(f"{path} must describe a threshold, got {error!r}") from None


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
        false_accept_rate=false_accept_rate,
        model=ModelIdentity.of(embedder),
        seed=seed,
        data=data,
    )


def calibrate_known(
    embedder: Embedder,
    data: RetrievalData,
    *,
    false_accept_rate: float = 0.01,
    seed: int = 0,
    batch_size: int = 128,
    source: str = "",
    track: Track | None = None,
) -> Threshold:
    """The distance beyond which an image is unknown to an embedder that was trained on all classes at hand.

    With the protocol "images", held-out images are searched in the gallery of `data`, the training images. With "none"
    there are training images alone: each is searched among the others. The arguments are those of `calibrate`.

    Args:
        embedder: On the device where it is to compute.
        data: With the protocol "images" or "none".
        false_accept_rate: Of images whose class is not in the index, the share that may be accepted.
        seed: Of the division of the classes.
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
        false_accept_rate=false_accept_rate,
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
    false_accept_rate: float = 0.01,
    seed: int = 0,
    data: str = "",
) -> Threshold:
    """`calibrate_known` for vectors: images of half of the classes choose the distance, the others measure it.

    A query is an impostor when its class is left out of the gallery, of which all other classes stay.

    Args:
        points: Queries, (N, D).
        labels: (N,).
        gallery: (G, D) that they are searched in; None to search the queries among each other, each without itself.
        gallery_labels: (G,).
        model: What made the vectors.
        false_accept_rate: Of images whose class is not in the index, the share that may be accepted.
        seed: Of the division of the classes.
        data: What the images are, in words.
    """
    _check_rate(points, labels, false_accept_rate)
    points, halves = directions(points, "points"), _halves(labels, seed)
    if gallery_labels is not None and len(gallery_labels.unique()) < 2:
        raise ValueError("a gallery must have another class when one is left out, got images of a single class")
    protocol, size = ("none", len(points)) if gallery is None else ("images", len(gallery))
    items = None if gallery is None else directions(gallery, "gallery")
    found = _distances(points, labels, items, gallery_labels)
    choosing, measuring = (found.rows(half) for half in halves)
    threshold = _threshold(choosing, measuring, false_accept_rate, model, data, seed)
    return replace(threshold, gallery_size=size, protocol=protocol)


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
    _check_rate(points, labels, false_accept_rate)
    points = directions(points, "points")
    halves = _halves(labels, seed)
    choosing, measuring = (_distances(points[half], labels[half]) for half in halves)
    return _threshold(choosing, measuring, false_accept_rate, model, data, seed)


def _check_rate(points: Tensor, labels: Tensor, false_accept_rate: float) -> None:
    if not 0 < false_accept_rate < 1:
        raise ValueError(f"false_accept_rate must lie between 0 and 1, got {false_accept_rate}")
    if labels.shape != points.shape[:1]:
        raise ValueError(f"labels must be ({len(points)},), one per point, got {tuple(labels.shape)}")


def _threshold(
    choosing: _Distances, measuring: _Distances, false_accept_rate: float, model: ModelIdentity, data: str, seed: int
) -> Threshold:
    """The largest distance that keeps the rate on some classes, and its rates on others."""
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


@dataclass(frozen=True, eq=False)
class _Distances:
    """Of each query of a half, (n,) float64; `genuine` is NaN for an image that is alone in its class."""

    genuine: Tensor
    impostor: Tensor
    labels: Tensor

    def rows(self, chosen: Tensor) -> _Distances:
        """Those of some queries."""
        return _Distances(self.genuine[chosen], self.impostor[chosen], self.labels[chosen])


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


def _distances(
    points: Tensor, labels: Tensor, gallery: Tensor | None = None, gallery_labels: Tensor | None = None
) -> _Distances:
    """Each image as a query in the gallery, or among the others, in bounded memory."""
    items = points if gallery is None else gallery
    item_labels = labels if gallery_labels is None else gallery_labels
    rows = max(MEMORY // (4 * len(items)), 1)
    own, other, alone = [], [], []
    for indices in torch.arange(len(points)).split(rows):
        with full_precision(points.device):
            similarities = points[indices] @ items.T
        same = labels[indices, None] == item_labels[None, :]
        other.append(similarities.masked_fill(same, -torch.inf).argmax(dim=1))
        if gallery is None:
            same[torch.arange(len(indices)), indices] = False
        own.append(similarities.masked_fill_(~same, -torch.inf).argmax(dim=1))
        alone.append(~same.any(dim=1))
    genuine = distances_between(points, items[torch.cat(own)])
    impostor = distances_between(points, items[torch.cat(other)])
    return _Distances(genuine.masked_fill(torch.cat(alone), torch.nan), impostor, labels)


def _largest_distance(impostor: Tensor, rate: float) -> float:
    """The largest distance that accepts at most this share of the impostors."""
    accepted = math.floor(rate * len(impostor) + 1e-9)
    first_refused = float(impostor.sort().values[accepted])
    return max(math.nextafter(first_refused, 0.0), 0.0)


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


def _pair(values: list[int]) -> tuple[int, int]:
    images, classes = values
    return int(images), int(classes)
