"""What a planned run does: train, time, concatenate the embeddings of folds, plot."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfml.data import RetrievalData
from pfml.data.datasets import BENCHMARKS
from pfml.data.image_set import refuse_seen_classes
from pfml.evaluation import embed, query_scores, retrieval_metrics
from pfml.evaluation.nearest_neighbors import directions
from pfml.experiments.plan import PlannedRun
from pfml.models import load_embedder
from pfml.plots.grids import choose_queries, plot_retrievals, retrieve, thumbnails
from pfml.plots.maps import choose_images, plot_glyph_map, plot_photo_map, project
from pfml.plots.theme import LIGHT
from pfml.runs.config import DataConfig, RunConfig
from pfml.runs.data import PreparedData, prepare_data
from pfml.runs.folder import RunFolder
from pfml.storage.files import write_atomically
from pfml.training.environment import precision, resolve_device
from pfml.training.progress import Monitor
from pfml.training.runner import run as train

__all__ = ["TASKS", "Outcome", "RunContext", "prepared", "write_figures"]

QUERIES, FOUND = 6, 4  # the supplement shows 4 nearest images of each query
MAP_CLASSES, MAP_IMAGES = 20, 24


@dataclass(frozen=True)
class RunContext:
    """What a task needs besides the run.

    Args:
        folder: Of the run.
        parts: Folders of the runs that it needs, in their order.
        monitor: What to show meanwhile.
    """

    folder: Path
    parts: tuple[Path, ...]
    monitor: Monitor


@dataclass(frozen=True)
class Outcome:
    """The fields "results" and "images" of a record, and its "dim" if the plan could not know it."""

    results: dict[str, Any]
    images: dict[str, int]
    dim: int | None = None


def train_run(run: PlannedRun, context: RunContext) -> Outcome:
    """Train and evaluate, resuming from a checkpoint if there is one; evaluate only, for a method without training."""
    folder, steps = RunFolder(context.folder), _Steps(context.monitor)
    data = prepared(run.config.data)
    if data.data.protocol != "classes":
        raise ValueError(
            f"experiments compare results on unseen classes: data.split must be classes, got {data.data.protocol!r}"
        )
    results = train(run.config, folder.path, data=data, resume=folder.config.exists(), monitor=steps)
    flat, counts = _flat(results), _image_counts(data.data)
    if not run.config.loss.trains:
        return Outcome(flat, counts, load_embedder(folder.path).embedding_dim)
    seconds = seconds_per_epoch(folder, steps.per_epoch * run.config.batch.size)
    return Outcome({**flat, **({} if seconds is None else {"seconds_per_epoch": seconds})}, counts)


def concatenate_folds(run: PlannedRun, context: RunContext) -> Outcome:
    """The MLRC protocol's last step: search by the embeddings of all folds' models, side by side.

    "validation_selected" has the models that each fold's validation chose, as the protocol says; "last" those of the
    last epoch; "separated" the means of the folds' own metrics, both times over the models of "validation_selected".
    """
    data, _ = prepared(replace(run.config.data, validation="none"))
    models = [RunFolder(part).chosen_and_last() for part in context.parts]
    chosen, separated = _concatenated([one for one, _ in models], data, run.config)
    last, _ = _concatenated([one for _, one in models], data, run.config)
    results = {
        "last": last,
        "best": {**last, "epoch": run.epochs},
        "validation_selected": {**chosen, "epoch": None},
        "separated": separated,
    }
    return Outcome(results, _image_counts(data))


def plot_run(run: PlannedRun, context: RunContext) -> Outcome:
    """Train, then write figures of the trained model into the folder of the run."""
    outcome = train_run(run, context)
    data, _ = prepared(run.config.data)
    write_figures(context.folder, data, context.folder / "figures", seed=run.seed)
    return outcome


TASKS: dict[str, Callable[[PlannedRun, RunContext], Outcome]] = {
    "train": train_run,
    "time": train_run,
    "untrained": train_run,
    "concatenate": concatenate_folds,
    "figures": plot_run,
}


class _Steps(Monitor):
    """Another monitor, and the number of steps of an epoch."""

    def __init__(self, shown: Monitor) -> None:
        self.shown = shown
        self.per_epoch = 0
        self.remark, self.track, self.step = shown.remark, shown.track, shown.step  # type: ignore[method-assign]
        self.evaluated, self.stop = shown.evaluated, shown.stop  # type: ignore[method-assign]

    def start(self, epochs: int, steps_per_epoch: int, steps_done: int) -> None:
        self.per_epoch = steps_per_epoch
        self.shown.start(epochs, steps_per_epoch, steps_done)


def seconds_per_epoch(folder: RunFolder, images: int) -> float | None:
    """Median time to train on `images`, without evaluations; without the first epoch, which warms up, if it can be."""
    speeds = {entry["epoch"]: entry["images_per_second"] for entry in folder.entries("step")}
    speeds |= {entry["epoch"] - 1: entry["images_per_second"] for entry in folder.entries("evaluation")}
    later = [speed for epoch, speed in speeds.items() if epoch > 0]
    times = [images / speed for speed in later or speeds.values() if speed > 0]
    return statistics.median(times) if times else None


@lru_cache(maxsize=2)
def prepared(config: DataConfig) -> PreparedData:
    """The data, kept for the next runs, which often have the same."""
    return prepare_data(config)


def _flat(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results of a run as records have them: metrics on the test classes."""
    chosen = results["validation_selected"]
    best = results["best_on_test"]
    flat = {
        "last": results["last"]["test"],
        "best": {**best["test"], "epoch": best["epoch"]},
        "validation_selected": None if chosen is None else {**chosen["test"], "epoch": chosen["epoch"]},
    }
    return {**flat, **({"alignment": results["alignment"]} if "alignment" in results else {})}


def _concatenated(
    models: list[Path], data: RetrievalData, config: RunConfig
) -> tuple[dict[str, float], dict[str, float]]:
    """Metrics of the concatenated embeddings of some models, and the mean of the metrics of each alone."""
    device, roles = resolve_device(config.device), {"test": data.test, "gallery": data.gallery}
    points: dict[str, list[Tensor]] = {role: [] for role, images in roles.items() if images is not None}
    for model in models:
        embedder = load_embedder(model).to(device)
        for role in points:
            images = roles[role]
            assert images is not None
            if embedder.trained_on is not None:
                refuse_seen_classes(embedder.trained_on.class_names, images, role)
            points[role].append(embed(embedder, images, autocast=precision(config.autocast)))

    def metrics(chosen: slice) -> dict[str, float]:
        gallery = torch.cat(points["gallery"][chosen], 1) if data.gallery is not None else None
        return retrieval_metrics(
            torch.cat(points["test"][chosen], 1),
            data.test.labels,
            gallery=gallery,
            gallery_labels=None if data.gallery is None else data.gallery.labels,
            recall_at=data.recall_at,
        ).as_dict()

    alone = [metrics(slice(k, k + 1)) for k in range(len(models))]
    return metrics(slice(None)), {name: statistics.fmean(one[name] for one in alone) for name in alone[0]}


def _image_counts(data: RetrievalData) -> dict[str, int]:
    """Images that train and test, and how many of the published ones are not there."""
    whole = len(data.train) + (0 if data.validation is None else len(data.validation))
    published, missing = BENCHMARKS.get(data.name), 0
    if published is not None:
        missing = max(published.train[0] - whole, 0) + max(published.test[0] - len(data.test), 0)
    return {"train": len(data.train), "test": len(data.test), "missing": missing}


def write_figures(run: Path, data: RetrievalData, out: Path, *, seed: int = 0) -> list[Path]:
    """Write retrieval.png and map.png of the run's last model on the unseen classes into `out`; their paths."""
    out.mkdir(parents=True, exist_ok=True)
    embedder = load_embedder(run / "model").to(resolve_device("auto"))
    points, labels = embed(embedder, data.test).cpu(), data.test.labels
    gallery = None if data.gallery is None else embed(embedder, data.gallery).cpu()
    gallery_labels = None if data.gallery is None else data.gallery.labels
    items = None if gallery is None else directions(gallery, "gallery")
    scores = query_scores(directions(points, "embeddings"), labels, items, gallery_labels)
    queries = choose_queries(scores, labels, random=QUERIES, seed=seed)
    found = retrieve(points, labels, queries, k=FOUND, gallery=gallery, gallery_labels=gallery_labels)
    is_small = isinstance(data.test.images, Tensor)
    side = data.test.images.shape[-1] if isinstance(data.test.images, Tensor) else 128
    sheet = plot_retrievals(found, data.test, data.gallery, side=side, zoom=2 if is_small else 1)
    write_atomically(out / "retrieval.png", sheet)
    chosen = choose_images(labels, classes=MAP_CLASSES, per_class=MAP_IMAGES, seed=seed)
    coordinates = project(points[chosen], seed=seed)
    tiles = thumbnails(data.test, chosen, side=46)
    plot_map = plot_glyph_map if is_small else plot_photo_map
    write_atomically(out / "map.png", plot_map(coordinates, labels[chosen], tiles, LIGHT))
    return [out / "retrieval.png", out / "map.png"]
