"""Embeddings of images by a model, and the metrics of these embeddings."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pfml.data.decoding import Track
from pfml.data.image_set import ImageSet, RetrievalData, refuse_seen_classes
from pfml.data.image_source import ImageSource, open_images
from pfml.data.pinned_memory import to_device
from pfml.distributed.schedule import shard_sizes, shard_slice
from pfml.distributed.world import World
from pfml.evaluation.classification import Classification, classification_metrics
from pfml.evaluation.retrieval import RetrievalMetrics, retrieval_metrics
from pfml.models.embedder import Embedder, evaluation_mode

__all__ = ["EmbeddedTest", "embed", "embed_test", "evaluate"]


#: Images that a CPU embeds at a time, whatever the batch size: more are no faster, and the activations of the first
#: layers take gigabytes.
CPU_IMAGES = 32


def evaluate(
    embedder: Embedder,
    data: RetrievalData | ImageSet,
    *,
    recall_at: Sequence[int] | None = None,
    nmi: bool = False,
    seed: int = 0,
    test_source: ImageSource | None = None,
    gallery_source: ImageSource | None = None,
    batch_size: int = 128,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    track: Track | None = None,
    world: World | None = None,
) -> RetrievalMetrics:
    """The metrics of an embedder on classes that it has not seen, or on held-out images of classes that it knows.

    Args:
        embedder: In any mode; it is evaluated in evaluation mode and left as it was.
        data: A data set, whose `test` is searched among itself or in `gallery`; or images to search among each other.
            Only with the protocol "images" may the embedder know the classes.
        recall_at: The K of Recall@K; None for those that the literature reports on the data set, or 1, 2, 4, 8.
        nmi: Whether to cluster, too.
        seed: Of the clustering.
        test_source: The test images, opened before, for repeated evaluation; None to open them for this one.
        gallery_source: The gallery's images likewise.
        batch_size: Images that the model embeds at a time.
        device: Where to compute; the embedder is moved there, and stays. None for where it is.
        autocast: torch.bfloat16 or torch.float16 for mixed precision in the model; None for float32.
        track: Shows the progress, as track(iterable, description, total).
        world: The ranks that share the work and all get the result; None for one process by itself.

    Raises:
        SeenClassError: If the embedder was trained on a class of the test images or of the gallery.
    """
    embedded = embed_test(
        embedder,
        data,
        test_source=test_source,
        gallery_source=gallery_source,
        batch_size=batch_size,
        device=device,
        autocast=autocast,
        track=track,
        world=world,
    )
    if recall_at is None:
        recall_at = data.recall_at if isinstance(data, RetrievalData) else (1, 2, 4, 8)

    def metrics() -> RetrievalMetrics:
        return embedded.retrieval(recall_at=recall_at, nmi=nmi, seed=seed)

    return _metrics_by_first(metrics, world or World())


@dataclass(frozen=True, eq=False)
class EmbeddedTest:
    """Embeddings of test images and of the gallery that they are searched in, and their labels.

    Args:
        queries, labels: (N, D) and (N,) int64.
        gallery, gallery_labels: (G, D) and (G,); None where the queries are searched among each other.
    """

    queries: Tensor
    labels: Tensor
    gallery: Tensor | None = None
    gallery_labels: Tensor | None = None

    def retrieval(self, *, recall_at: Sequence[int], nmi: bool = False, seed: int = 0) -> RetrievalMetrics:
        """How well classes are found; see `retrieval_metrics`."""
        return retrieval_metrics(
            self.queries,
            self.labels,
            gallery=self.gallery,
            gallery_labels=self.gallery_labels,
            recall_at=recall_at,
            nmi=nmi,
            seed=seed,
        )

    def classification(self, proxies: Tensor | None = None) -> Classification:
        """How often queries are taken for the right class of the gallery; see `classification_metrics`."""
        if self.gallery is None or self.gallery_labels is None:
            raise ValueError("known classes must have a gallery of their images, got queries without one")
        return classification_metrics(self.queries, self.labels, self.gallery, self.gallery_labels, proxies=proxies)


def embed_test(
    embedder: Embedder,
    data: RetrievalData | ImageSet,
    *,
    test_source: ImageSource | None = None,
    gallery_source: ImageSource | None = None,
    batch_size: int = 128,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    track: Track | None = None,
    world: World | None = None,
) -> EmbeddedTest:
    """Embeddings of what `evaluate` evaluates, for several metrics of the same embeddings; the arguments are its own.

    Raises:
        SeenClassError: If the embedder was trained on a class of the test images or of the gallery.
    """
    whole = isinstance(data, RetrievalData)
    test = data.test if isinstance(data, RetrievalData) else data
    gallery = data.gallery if isinstance(data, RetrievalData) else None
    if isinstance(data, RetrievalData) and data.protocol == "none":
        raise ValueError("nothing was held out of training, so that there is nothing to evaluate on: give other data")
    if embedder.trained_on is not None and not (isinstance(data, RetrievalData) and data.protocol == "images"):
        for images, role in ((test, "test" if whole else "evaluated"), (gallery, "gallery")):
            if images is not None:
                refuse_seen_classes(embedder.trained_on.class_names, images, role)
    if gallery is None and gallery_source is not None:
        raise ValueError("gallery_source must be left out: the data has no gallery")
    for images, source, name in ((test, test_source, "test_source"), (gallery, gallery_source, "gallery_source")):
        if images is not None and source is not None and len(source.sizes) != len(images):
            raise ValueError(f"{name} must hold the {len(images)} images of the data, got {len(source.sizes)}")

    def embedded(images: ImageSet | ImageSource) -> Tensor:
        return embed(
            embedder, images, batch_size=batch_size, device=device, autocast=autocast, track=track, world=world
        )

    queries = embedded(test_source or test)
    if gallery is None:
        return EmbeddedTest(queries, test.labels)
    return EmbeddedTest(queries, test.labels, embedded(gallery_source or gallery), gallery.labels)


def embed(
    embedder: Embedder,
    images: ImageSet | ImageSource,
    *,
    batch_size: int = 128,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    track: Track | None = None,
    world: World | None = None,
    features: bool | Sequence[str] = False,
    mirrored: bool = False,
) -> Tensor:
    """The embeddings of all images, (N, D) float32, in their order and on the device of the embedder.

    Images are resized and cropped as the embedder's preprocessing says. The arguments are those of `evaluate`; with
    `features` it is what the head's linear layer gets instead, (N, F), or what it would get with each of several
    poolings, side by side. With `mirrored` the images are mirrored left to right. Several ranks embed whole batches
    each, so that the result is that of one process to the bit, and each has all of it.
    """
    world = world or World()
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if device is not None:
        embedder.to(device)
    location = next(embedder.parameters()).device
    source = open_images(images, device=location, track=track) if isinstance(images, ImageSet) else images
    batches = [indices for indices in torch.arange(len(source.sizes)).split(batch_size) if len(indices)]
    mine = batches[world.shard(len(batches))]
    model: Callable[[Tensor], Tensor] = embedder
    width = embedder.embedding_dim
    if features:
        poolings = None if features is True else features
        model, width = partial(embedder.features, poolings=poolings), embedder.head.num_features * len(poolings or "1")
    result = torch.empty(sum(map(len, mine)), width, device=location)
    mixed = contextlib.nullcontext() if autocast is None else torch.autocast(location.type, dtype=autocast)
    plan = [embedder.preprocessing.windows(indices, source.sizes) for indices in mine]
    if mirrored:
        plan = [dataclasses.replace(windows, flipped=~windows.flipped) for windows in plan]
    cropped = zip(plan, source.crops(plan), strict=True)
    done = 0
    with world.together(), evaluation_mode(embedder), mixed:
        for windows, crops in track(cropped, "embedding", len(plan)) if track is not None else cropped:
            with torch.inference_mode():  # not around the crops: it does not reach the threads that make them
                for some in to_device(crops, location).split(CPU_IMAGES if location.type == "cpu" else len(windows)):
                    result[done : done + len(some)] = model(some).float()
                    done += len(some)
    return _gathered_batches(result, batches, world)


def _gathered_batches(mine: Tensor, batches: Sequence[Tensor], world: World) -> Tensor:
    """The rows of all batches in order, on every rank; `mine` are those of `world.shard(len(batches))`."""
    counts = shard_sizes(len(batches), world.size)
    sizes = [sum(map(len, batches[shard_slice(counts, rank)])) for rank in range(world.size)]
    return world.all_gather(mine, sizes)


def _metrics_by_first(metrics: Callable[[], RetrievalMetrics], world: World) -> RetrievalMetrics:
    """The result of `metrics` on every rank; only the first rank computes it."""
    return RetrievalMetrics(**world.by_first(lambda: dataclasses.asdict(metrics())))
