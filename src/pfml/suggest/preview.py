"""A preview of the images before training: the distances between some of them."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from pfml.data import ImageSet, check_images, open_images
from pfml.data.decoding import Track, UnreadableImagesError
from pfml.data.seeding import generator_for
from pfml.evaluation import embed
from pfml.models import Embedder
from pfml.models.backbone_table import BACKBONES, with_image_size

__all__ = ["InitialDistances", "distances_of", "preview"]

#: Images of a class in the preview.
PER_CLASS = 6


@dataclass(frozen=True)
class InitialDistances:
    """How far images are from each other before training, as chords on the unit sphere (0 to 2).

    Args:
        close_positives: A quarter of the positive pairs (of one class) are closer than this; NaN if no class has two
            images.
        positives: The median distance of positive pairs; NaN likewise.
        nearest_negatives: The median over images of the distance to the nearest image of another class.
        negatives: The median distance of negative pairs (of different classes).
        images_per_second: Throughput of the model on this machine.
    """

    close_positives: float
    positives: float
    nearest_negatives: float
    negatives: float
    images_per_second: float = math.inf


def preview(
    embedder: Embedder,
    images: ImageSet,
    *,
    image_size: int | None = None,
    limit: int = 96,
    seed: int = 0,
    track: Track | None = None,
) -> InitialDistances:
    """The distances between up to `limit` of the images, a few of each class, as the embedder places them.

    Args:
        embedder: Before training.
        images: Those to train on.
        image_size: Another side of the crops, for a convolutional backbone; others see their own size.
        limit: Images to embed.
        seed: Of the choice of images.
        track: Shows the progress.

    Raises:
        UnreadableImagesError: If one of these cannot be read; it lists all images of the set that cannot be.
    """
    some = images.subset(_few_of_each(images.labels, limit, seed))
    own_size = embedder.preprocessing
    if image_size is not None and embedder.config.backbone in BACKBONES:  # which are all convolutional
        embedder.preprocessing = with_image_size(own_size, image_size)
    try:
        source = open_images(some, device=next(embedder.parameters()).device, track=track)
        embed(embedder, some.subset([0]))  # the first pass is slow, and no measure of the others
        started = time.perf_counter()
        points = embed(embedder, source, track=track).cpu()
        speed = len(some) / max(time.perf_counter() - started, 1e-9)
        return distances_of(points, some.labels, images_per_second=speed)
    except UnreadableImagesError:
        check_images(images, track=track)
        raise
    finally:
        embedder.preprocessing = own_size


def distances_of(points: Tensor, labels: Tensor, *, images_per_second: float = math.inf) -> InitialDistances:
    """The distances between unit vectors (n, D) with labels (n,)."""
    distances = torch.cdist(points.double(), points.double())
    same = labels[:, None] == labels
    positives = distances[same.triu(diagonal=1)]
    negatives = distances[(~same).triu(diagonal=1)]
    nearest = distances.masked_fill(same, torch.inf).amin(1)
    nearest = nearest[nearest.isfinite()]
    return InitialDistances(
        close_positives=_quantile(positives, 0.25),
        positives=_quantile(positives, 0.5),
        nearest_negatives=_quantile(nearest, 0.5),
        negatives=_quantile(negatives, 0.5),
        images_per_second=images_per_second,
    )


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
