"""What a run needs before its first step: the embedder on its device, images, batches, data that can be evaluated."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfml.data import BalancedBatches, ImageSet, NeighborBatches, RandomBatches, RetrievalData, open_images
from pfml.data.decoded_images import DecodedImages
from pfml.data.decoding import listing_all_unreadable
from pfml.data.image_set import refuse_seen_classes
from pfml.data.image_source import ImageSource
from pfml.methods import METHODS, LossConfig, create_loss
from pfml.models import Embedder, TrainedOn
from pfml.models.adapters import add_adapters
from pfml.models.freezing import batch_norms
from pfml.runs.config import StorageConfig, TrainConfig
from pfml.training.progress import Monitor

__all__ = [
    "create_batches",
    "learned",
    "nearest_classes",
    "on_device",
    "open_sources",
    "prepare_backbone",
    "require_loss_packages",
    "require_matches",
]


def on_device(embedder: Embedder, device: torch.device) -> Embedder:
    """The embedder on `device`, with channels last in memory, as its convolutions are fastest."""
    return embedder.to(memory_format=torch.channels_last).to(device)


def prepare_backbone(embedder: Embedder, config: TrainConfig) -> None:
    """Freeze the backbone, or give it adapters, in place, as `config` says."""
    if config.test_image_size is not None:
        embedder.require_image_size(config.test_image_size)
    if config.freeze == "trunk":
        if embedder.head.linear is None:
            raise ValueError("freeze trunk trains the embedding layer, and there is none: set model.embedding_dim")
        embedder.freeze_backbone()
    elif config.lora:
        embedder.freeze_backbone(but=add_adapters(embedder.backbone, config.lora))
    if config.batch.mini_batch_size is not None and config.batch_norm == "train" and any(batch_norms(embedder)):
        raise ValueError(
            "in mini-batches, BatchNorm cannot take its statistics from all of a batch: choose batch_norm freeze, "
            "freeze-statistics or freeze-all, or leave out batch.mini_batch_size"
        )


def create_batches(images: ImageSet, config: TrainConfig) -> RandomBatches | BalancedBatches:
    """The sampler that `config.batch` describes."""
    size, per_class = config.batch.size, config.batch.samples_per_class
    classes = len(images.labels.unique())
    if per_class and size // per_class > classes:
        raise ValueError(
            f"batch.size {size} with batch.samples_per_class {per_class} needs {size // per_class} training classes, "
            f"and there are {classes}: lower batch.size to {classes * per_class} or less"
        )
    if size > len(images):
        raise ValueError(f"batch.size must not exceed the {len(images)} training images, got {size}")
    if per_class == 0:
        return RandomBatches(len(images), size, config.seed, per_epoch=config.batch.per_epoch)
    shape = images.labels, size // per_class, per_class
    if config.batch.neighbors:
        return NeighborBatches(*shape, config.batch.neighbors, config.seed, per_epoch=config.batch.per_epoch)
    return BalancedBatches(*shape, config.seed, per_epoch=config.batch.per_epoch)


def nearest_classes(loss: Any, count: int) -> Tensor:
    """The nearest other classes of each class, (C, count), as the loss says for `batch.neighbors`."""
    if not hasattr(loss, "class_neighbors"):
        raise ValueError(
            "batch.neighbors needs a loss that knows which classes are near, such as htl: set it to 0 for this one"
        )
    nearest: Tensor = loss.class_neighbors(count)
    return nearest


def learned(embedder: Embedder, data: RetrievalData) -> TrainedOn:
    """What the embedder will have learned from; classes that it knows from before must not be evaluated on."""
    if embedder.trained_on is None:
        return TrainedOn(data.name, data.train.class_names)
    before = embedder.trained_on
    if data.protocol == "classes":
        refuse_seen_classes(before.class_names, data.test, "test")
    if data.validation is not None:
        refuse_seen_classes(before.class_names, data.validation, "validation")
    names = dict.fromkeys((*before.class_names, *data.train.class_names))
    dataset = data.name if before.dataset == data.name else f"{before.dataset}, {data.name}"
    return TrainedOn(dataset, tuple(names))


def require_matches(data: RetrievalData) -> None:
    """Refuse data on which no query has anything to find, before any time is spent on it."""
    for role, queries, gallery in (("test", data.test, data.gallery), ("validation", data.validation, None)):
        if queries is None or (role == "test" and data.protocol == "none"):
            continue
        counts = torch.bincount((queries if gallery is None else gallery).labels, minlength=queries.num_classes)
        if not bool((counts[queries.labels] > (gallery is None)).any()):
            raise ValueError(
                f"no {role} image has another image of its class to find: the data cannot be evaluated; "
                f"it needs a class with two images or more"
            )


def require_loss_packages(config: LossConfig) -> None:
    """Raise ImportError if the loss needs a package that is missing, before any time is spent on images."""
    if config.name not in METHODS or not config.trains:
        return  # a loss of one's own has been imported
    with torch.random.fork_rng(devices=[]), suppress(ValueError, TypeError, RuntimeError):
        create_loss(config, 2, 2, 2)  # what is wrong with its options is said with the sizes that it will have


def open_sources(
    data: RetrievalData, device: torch.device, storage: StorageConfig, monitor: Monitor
) -> dict[str, ImageSource]:
    """An image source for each part of the data; every file has been read once before training starts.

    Raises:
        UnreadableImagesError: Once, for all files of all parts that cannot be read.
    """
    with listing_all_unreadable(data, max(storage.workers, 1), monitor.track):
        return _opened(data, device, storage, monitor)


def _opened(
    data: RetrievalData, device: torch.device, storage: StorageConfig, monitor: Monitor
) -> dict[str, ImageSource]:
    sources: dict[str, ImageSource] = {}
    budget = storage.budget_gib
    for role, images in data.parts.items():
        if role == "test" and data.protocol == "none":
            continue
        files = isinstance(images.images, tuple)
        sources[role] = open_images(
            images,
            device=device,
            storage=storage.storage,
            budget_gib=max(budget, 0.0),
            workers=storage.workers,
            short_side=storage.short_side,
            cache=_cache_folder(storage.cache, images) if files and storage.cache is not None else None,
            track=monitor.track,
        )
        if isinstance(sources[role], DecodedImages):
            budget -= 3 * int(sources[role].sizes.prod(1).sum()) / 2**30
        if not isinstance(images.images, Tensor):
            monitor.remark(f"{role}: {sources[role].description}")
    if data.gallery is data.train:
        sources["gallery"] = sources["train"]
    return sources


def _cache_folder(cache: Path, images: ImageSet) -> Path:
    """A folder of its own for each list of files, so that splits of one data set do not replace each other."""
    names = "\n".join(map(images.name_of, range(len(images))))
    return cache / hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()[:16]
