"""What a run's folder holds, read and computed once for the page about it."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pfml.data import RetrievalData
from pfml.data.decoding import Track
from pfml.data.image_set import ImageSet
from pfml.evaluation import embed
from pfml.models import Embedder, load_embedder
from pfml.report.run_measures import Search, search_unseen
from pfml.training.comparison import Untrained
from pfml.training.config_files import read_config
from pfml.training.environment import precision, resolve_device
from pfml.training.run import RunConfig, prepare_data
from pfml.training.run_folder import RunFolder
from pfml.training.saved_loss import load_loss

__all__ = ["Facts", "read_facts"]

#: Training images whose embeddings are drawn and diagnosed; more would only take longer.
MOST_TRAINING_IMAGES = 3000


@dataclass(frozen=True, eq=False)
class Facts:
    """A run and what its embedder does.

    Args:
        folder, config, data: Of the run.
        results: As in results.json; None if the run has not ended.
        search: Every image of the unseen classes, searched by the embedder that is reported.
        moment: Which epoch that embedder is of, in words.
        loss_epoch: Which epoch the loss is of, in words.
        loss: The trained loss; None if the folder does not hold it.
        loss_remark: Why it is missing, in a sentence; empty if it is there.
        train_images: Some of the training images, if there is a loss to look at them with.
        train_points: (n, D): where the embedder of the same epoch as the loss puts them.
        wrong_labels: Rows of noise.csv: image, true class, given class.
    """

    folder: RunFolder
    config: RunConfig
    data: RetrievalData
    results: dict[str, Any] | None
    search: Search
    moment: str
    loss_epoch: str
    loss: nn.Module | None
    loss_remark: str
    train_images: ImageSet
    train_points: Tensor
    wrong_labels: tuple[dict[str, str], ...]

    @property
    def untrained(self) -> Untrained | None:
        """What the network found before training, if the run has measured it."""
        entries = self.folder.entries("untrained")
        return Untrained(entries[-1]["test"], entries[-1].get("image_size")) if entries else None


def read_facts(run: Path, *, device: str = "auto", track: Track | None = None) -> Facts:
    """Read the run in the folder `run`, and embed its unseen images.

    Args:
        run: With config.yaml and model/ in it, as `pfml train` leaves it.
        device: Where to compute.
        track: Shows the progress.
    """
    folder = RunFolder(run)
    if not folder.config.is_file():
        raise FileNotFoundError(f"{run} must be the folder of a run, with config.yaml in it, but there is none")
    if not (folder.model / "model.json").is_file():
        raise FileNotFoundError(
            f"{run} must have a model in {folder.model.name}/, but there is none: the run has not ended; "
            f"go on with pfml train --resume {run}"
        )
    config = read_config(folder.config)
    data, _ = prepare_data(config.data, track)
    place = resolve_device(device)
    model, last = folder.chosen_and_last()
    chosen = load_embedder(model).to(place)
    moment = "" if chosen.trained_on is None else chosen.trained_on.moment

    def points_of(embedder: Embedder, images: ImageSet) -> Tensor:
        return embed(embedder, images, autocast=precision(config.autocast), track=track).cpu()

    gallery = None if data.gallery is None else points_of(chosen, data.gallery)
    gallery_labels = None if data.gallery is None else data.gallery.labels
    search = search_unseen(points_of(chosen, data.test), data.test.labels, gallery, gallery_labels)
    loss, remark = _trained_loss(run)
    some, points = data.train.subset([]), torch.empty(0, chosen.embedding_dim)
    if loss is not None:
        step = -(-len(data.train) // MOST_TRAINING_IMAGES)
        some = data.train.subset(torch.arange(0, len(data.train), step))
        points = points_of(chosen if model == folder.model else load_embedder(folder.model).to(place), some)
    moment = moment or ("the last epoch" if model == last else "the epoch that validation chose")
    loss_epoch = moment.partition(",")[0] if model == folder.model else "the last epoch"
    return Facts(
        folder=folder,
        config=config,
        data=data,
        results=_results(folder),
        search=search,
        moment=moment,
        loss_epoch=loss_epoch,
        loss=loss,
        loss_remark=remark,
        train_images=some,
        train_points=points,
        wrong_labels=_wrong(folder.noise),
    )


def _trained_loss(run: Path) -> tuple[nn.Module | None, str]:
    try:
        return load_loss(run), ""
    except FileNotFoundError as error:
        return None, f"Left out: {error}."


def _results(folder: RunFolder) -> dict[str, Any] | None:
    return folder.read_results() if folder.results.is_file() else None


def _wrong(noise: Path) -> tuple[dict[str, str], ...]:
    if not noise.is_file():
        return ()
    with noise.open(encoding="utf-8", newline="", errors="surrogateescape") as file:
        rows = list(csv.DictReader(file))
    return tuple(row for row in rows if row["true class"] != row["given class"])
