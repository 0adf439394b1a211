"""A first look at one's own images: their sizes, and how the pretrained network places some of them."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pfml.data import ImageSet, check_images, open_images
from pfml.data.decoding import Track, UnreadableImagesError, read_size
from pfml.data.seeding import generator_for
from pfml.evaluation import embed
from pfml.models import Embedder

__all__ = ["InitialDistances", "distances_of", "first_look", "typical_short_side"]

#: Images of a class that are looked at.
PER_CLASS = 6
#: Files whose header is read for the typical size.
SIZES = 100


@dataclass(frozen=True)
class InitialDistances:
    """How far images are from each other before training, as chords on the unit sphere (0 to 2).

    Args:
        close_mates: A quarter of the pairs of one class are closer than this; NaN if no class has two images.
        mates: The median distance of pairs of one class; NaN likewise.
        nearest_others: The median over images of the distance to the nearest image of another class.
        others: The median distance of pairs of different classes.
        images_per_second: What the network embeds on this machine.
        image_size: Side of the crops that it saw.
    """

    close_mates: float
    mates: float
    nearest_others: float
    others: float
    images_per_second: float
    image_size: int


def first_look(
    embedder: Embedder, images: ImageSet, *, limit: int = 96, seed: int = 0, track: Track | None = None
) -> InitialDistances:
    """The distances between up to `limit` of the images, a few of each class, as the embedder places them.

    Raises:
        UnreadableImagesError: If one of these cannot be read; it lists all images of the set that cannot be.
    """
    chosen = _few_of_each(images.labels, limit, seed)
    some = images.subset(chosen)
    try:
        source = open_images(some, device=next(embedder.parameters()).device, track=track)
    except UnreadableImagesError:
        check_images(images, track=track)
        raise
    embed(embedder, some.subset([0]))  # the first pass is slow, and no measure of the others
    started = time.perf_counter()
    points = embed(embedder, source, track=track).cpu()
    speed = len(some) / max(time.perf_counter() - started, 1e-9)
    return distances_of(points, some.labels, images_per_second=speed, image_size=embedder.preprocessing.crop)


def distances_of(points: Tensor, labels: Tensor, *, images_per_second: float, image_size: int) -> InitialDistances:
    """The distances between unit vectors (n, D) with labels (n,)."""
    distances = torch.cdist(points.double(), points.double())
    same = labels[:, None] == labels
    mates = distances[same.triu(diagonal=1)]
    others = distances[(~same).triu(diagonal=1)]
    nearest = distances.masked_fill(same, torch.inf).amin(1)
    nearest = nearest[nearest.isfinite()]
    return InitialDistances(
        close_mates=_quantile(mates, 0.25),
        mates=_quantile(mates, 0.5),
        nearest_others=_quantile(nearest, 0.5),
        others=_quantile(others, 0.5),
        images_per_second=images_per_second,
        image_size=image_size,
    )


def typical_short_side(images: ImageSet, *, limit: int = SIZES) -> int | None:
    """The median short side of up to `limit` of the images, by their headers; None for a set without images."""
    if len(images) == 0:
        return None
    if isinstance(images.images, Tensor):
        return min(images.images.shape[2:])
    step = max(len(images) // limit, 1)
    return round(statistics.median(min(_size(path, images)) for path in images.images[::step]))


def _size(path: Path, images: ImageSet) -> tuple[int, int]:
    try:
        return read_size(path)
    except ValueError:
        check_images(images)  # which lists all that cannot be read
        raise


def _few_of_each(labels: Tensor, limit: int, seed: int) -> Tensor:
    """Positions of up to `PER_CLASS` images of each class, of as many classes as `limit` images can be of."""
    generator = generator_for(seed, "first look", 0)
    order = torch.randperm(len(labels), generator=generator)
    taken: dict[int, list[int]] = {}
    for k in order.tolist():
        members = taken.setdefault(int(labels[k]), [])
        if len(members) < PER_CLASS:
            members.append(k)
    chosen = [k for members in taken.values() for k in members][:limit]
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def _quantile(values: Tensor, share: float) -> float:
    return float(values.quantile(share)) if len(values) else float("nan")
