"""The analysis of a run for the page about it: its folder read, its test images searched, confusions counted."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pfml.data import RetrievalData
from pfml.data.decoding import Track
from pfml.data.image_set import ImageSet
from pfml.evaluation import QueryScores, embed, nearest, query_scores
from pfml.evaluation.nearest_neighbors import directions
from pfml.models import Embedder, load_embedder
from pfml.runs.config import RunConfig
from pfml.runs.config_files import read_config
from pfml.runs.data import prepare_data
from pfml.runs.folder import RunFolder
from pfml.runs.saved_loss import load_loss
from pfml.suggest.comparison import Untrained
from pfml.training.environment import precision, resolve_device

__all__ = [
    "ClassScore",
    "HardPair",
    "RunAnalysis",
    "Search",
    "analyze_run",
    "class_scores",
    "hard_pairs",
    "search_unseen",
]


@dataclass(frozen=True, eq=False)
class Search:
    """Every query searched among all others, or in a gallery.

    Args:
        embeddings, labels: (N, D) and (N,) of the queries, on the CPU.
        gallery, gallery_labels: Where they are searched; None for the queries themselves.
        scores: Ranks and precisions of each query.
        first: (N,) position of the nearest item of each query in the gallery.
        similarity: (N,) its cosine.
    """

    embeddings: Tensor
    labels: Tensor
    gallery: Tensor | None
    gallery_labels: Tensor | None
    scores: QueryScores
    first: Tensor
    similarity: Tensor

    @property
    def found_labels(self) -> Tensor:
        """(N,): the class of the nearest item of each query."""
        return (self.labels if self.gallery_labels is None else self.gallery_labels)[self.first]


@dataclass(frozen=True)
class ClassScore:
    """How well the images of one class are found.

    Args:
        label: The class.
        queries: Its images that have a match.
        recall_at_1, map_at_r: Means over them.
        confused_with: The class that is most often nearest instead; None if none ever is.
        confusions: How often.
    """

    label: int
    queries: int
    recall_at_1: float
    map_at_r: float
    confused_with: int | None
    confusions: int


@dataclass(frozen=True)
class HardPair:
    """Two classes that are confused with each other.

    Args:
        labels: The classes, the lower label first.
        queries: Images of either whose nearest image is of the other, most similar first.
        share: Of the images of both classes.
    """

    labels: tuple[int, int]
    queries: tuple[int, ...]
    share: float


def search_unseen(
    embeddings: Tensor, labels: Tensor, gallery: Tensor | None = None, gallery_labels: Tensor | None = None
) -> Search:
    """Search each embedding among all others, or in a gallery."""
    points = directions(embeddings.cpu(), "embeddings")
    items = None if gallery is None else directions(gallery.cpu(), "gallery")
    labels = labels.cpu()
    gallery_labels = None if gallery_labels is None else gallery_labels.cpu()
    scores = query_scores(points, labels, items, gallery_labels)
    similarity, first = nearest(points, items, 1)
    return Search(points, labels, items, gallery_labels, scores, first[:, 0], similarity[:, 0])


def _nothing(queries: Tensor) -> Search:
    """The search of no queries, (0, D)."""
    none = torch.empty(0, dtype=torch.int64)
    scores = QueryScores(none, none, queries[:, 0].double(), queries[:, 0].double())
    return Search(queries, none, None, None, scores, none, queries[:, 0])


def class_scores(search: Search) -> list[ClassScore]:
    """One for each class that has a query with a match, worst first (R@1, then MAP@R, then label)."""
    scores, found = search.scores, search.found_labels
    matched = scores.num_matches > 0
    result = []
    queries = matched.nonzero()[:, 0]
    queries = queries[search.labels[queries].argsort(stable=True)]
    labels, counts = search.labels[queries].unique_consecutive(return_counts=True)
    # one pass: a mask of all queries for each of 10,000 classes takes seconds
    for label, mine in zip(labels.tolist(), queries.split(counts.tolist()), strict=True):
        wrong = Counter(other for other in found[mine].tolist() if other != label)
        other, times = min(wrong.items(), key=lambda item: (-item[1], item[0])) if wrong else (None, 0)
        recall = (scores.first_rank[mine] == 1).double().mean().item()
        precision = scores.average_precision_at_r[mine].mean().item()
        result.append(ClassScore(label, len(mine), recall, precision, other, times))
    return sorted(result, key=lambda one: (one.recall_at_1, one.map_at_r, one.label))


def hard_pairs(search: Search, *, count: int) -> list[HardPair]:
    """The `count` pairs of classes most often confused with each other, by the share of their images; hardest first."""
    found, members = search.found_labels, Counter(search.labels.tolist())
    matched = search.scores.num_matches > 0
    mistakes: dict[tuple[int, int], list[int]] = {}
    for query in (matched & (found != search.labels)).nonzero()[:, 0].tolist():
        low, high = sorted((int(search.labels[query]), int(found[query])))
        mistakes.setdefault((low, high), []).append(query)
    pairs = [
        HardPair(
            pair,
            tuple(sorted(queries, key=lambda query: (-float(search.similarity[query]), query))),
            len(queries) / (members[pair[0]] + members[pair[1]]),
        )
        for pair, queries in mistakes.items()
    ]
    return sorted(pairs, key=lambda pair: (-pair.share, pair.labels))[:count]


#: Training images that are plotted and diagnosed; more would only take longer.
MOST_TRAINING_IMAGES = 3000


@dataclass(frozen=True, eq=False)
class RunAnalysis:
    """A run, and what its embedder retrieves.

    Args:
        folder, config, data: Of the run.
        results: As in results.json; None if the run has not ended.
        search: Every test image, searched by the embedder that is reported; none where nothing was held out.
        moment: Which epoch that embedder is of, in words.
        loss_epoch: Which epoch the loss is of, in words.
        loss: The trained loss; None if the folder does not hold it.
        loss_remark: Why it is missing, in a sentence; empty if it is there.
        train_images: Some of the training images; none without a loss.
        train_points: (n, D) their embeddings, at the epoch of the loss.
        noisy_labels: Rows of noise.csv whose label was changed: image, true class, given class.
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
    noisy_labels: tuple[dict[str, str], ...]

    @property
    def untrained(self) -> Untrained | None:
        """The metrics before training, if the run has measured them."""
        entries = self.folder.entries("untrained")
        return Untrained(entries[-1]["test"], entries[-1].get("image_size")) if entries else None


def analyze_run(
    run: Path,
    *,
    device: str = "auto",
    track: Track | None = None,
    data: RetrievalData | None = None,
    embedder: Embedder | None = None,
    embeddings: Mapping[str, Tensor] | None = None,
) -> RunAnalysis:
    """The analysis of the run in the folder `run`; embeds its test images.

    Args:
        run: With config.yaml and model/ in it, as `pfml train` leaves it.
        device: Where to compute.
        track: Shows the progress.
        data: The data of the run, from a caller that has them; None to load them.
        embedder: One of the run that is no longer needed, to load weights into; None to build one.
        embeddings: Those of "test" and "gallery" by the run's model, from a caller that has them; None to compute them.
    """
    folder = RunFolder(run)
    if not folder.config.is_file():
        raise FileNotFoundError(f"{run} must be the folder of a run, with config.yaml in it, but there is none")
    if not (folder.model / "model.json").is_file():
        raise FileNotFoundError(
            f"{run} must have a model in {folder.model.name}/, but there is none: the run has not ended; "
            f"resume it with pfml train --resume {run}"
        )
    config = read_config(folder.config)
    data = prepare_data(config.data, track).data if data is None else data
    where = resolve_device(device)
    model, last = folder.chosen_and_last()
    chosen = load_embedder(model, into=embedder).to(where)
    moment = "" if chosen.trained_on is None else chosen.trained_on.moment

    def points_of(embedder: Embedder, images: ImageSet) -> Tensor:
        return embed(embedder, images, autocast=precision(config.autocast), track=track).cpu()

    def held_out(role: str, images: ImageSet) -> Tensor:
        return embeddings[role].float().cpu() if embeddings else points_of(chosen, images)

    is_tested = len(data.test) > 0
    gallery = None if data.gallery is None else held_out("gallery", data.gallery)
    gallery_labels = None if data.gallery is None else data.gallery.labels
    queries = held_out("test", data.test) if is_tested else torch.empty(0, chosen.embedding_dim)
    search = search_unseen(queries, data.test.labels, gallery, gallery_labels) if is_tested else _nothing(queries)
    loss, remark = _trained_loss(run)
    some, points = data.train.subset([]), torch.empty(0, chosen.embedding_dim)
    if loss is not None:
        step = -(-len(data.train) // MOST_TRAINING_IMAGES)
        some = data.train.subset(torch.arange(0, len(data.train), step))
        last_model = chosen if model == folder.model else load_embedder(folder.model, into=chosen).to(where)
        points = points_of(last_model, some)
    moment = moment or ("the last epoch" if model == last else "the epoch that validation chose")
    loss_epoch = moment.partition(",")[0] if model == folder.model else "the last epoch"
    return RunAnalysis(
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
        noisy_labels=_noisy_labels(folder.noise),
    )


def _trained_loss(run: Path) -> tuple[nn.Module | None, str]:
    try:
        return load_loss(run), ""
    except FileNotFoundError as error:
        return None, f"Left out: {error}."


def _results(folder: RunFolder) -> dict[str, Any] | None:
    return folder.read_results() if folder.results.is_file() else None


def _noisy_labels(noise: Path) -> tuple[dict[str, str], ...]:
    if not noise.is_file():
        return ()
    with noise.open(encoding="utf-8", newline="", errors="surrogateescape") as file:
        rows = list(csv.DictReader(file))
    return tuple(row for row in rows if row["true class"] != row["given class"])
