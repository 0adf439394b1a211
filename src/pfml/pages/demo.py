"""The page of the demo: methods compared on glyphs that they were not trained on."""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from pfml.data import RetrievalData
from pfml.data.image_set import ImageSet
from pfml.evaluation import embed, query_scores
from pfml.evaluation.metrics import HEADLINE, meanings, metric_label, metric_text, shown_metrics
from pfml.evaluation.nearest_neighbors import directions
from pfml.losses import PotentialFieldLoss
from pfml.methods import LossConfig
from pfml.models import load_embedder
from pfml.pages.page import Plot, Table, in_themes, render
from pfml.plots.curves import loss_curve, mean_loss_curve, metric_curve, plot_loss, plot_metric
from pfml.plots.field_slice import measure_field, neighboring_classes, plot_field_slice
from pfml.plots.grids import choose_queries, image_grid, plot_retrievals, retrieve, thumbnails
from pfml.plots.maps import choose_images, plot_glyph_map, project
from pfml.runs.config import RunConfig
from pfml.runs.config_files import plain
from pfml.runs.folder import RunFolder
from pfml.runs.saved_loss import load_loss
from pfml.terminal import shell_words
from pfml.training.environment import resolve_device
from pfml.version import __version__

__all__ = ["Contender", "Demo", "Trained", "demo_losses", "demo_page", "describe", "scores_table"]


SIDE = 32  # pixels of a glyph
MAP_SIDE = 46  # pixels of a glyph in a map
MAP_CLASSES, MAP_IMAGES = 20, 24
ROWS, COLUMNS = 8, 9  # of the grid of example images
RANDOM_QUERIES, WORST_QUERIES, NEIGHBORS = 6, 3, 8
FIELD_CLASSES = 3


@dataclass(frozen=True, eq=False)
class Contender:
    """A way to embed images, and how well it retrieves unseen glyphs.

    Args:
        name: For tables and plots.
        embeddings: (N, D) of the test images, on the CPU.
        scores: By key, as `RetrievalMetrics.as_dict` gives them.
    """

    name: str
    embeddings: Tensor
    scores: dict[str, float]


@dataclass(frozen=True, eq=False)
class Trained(Contender):
    """A contender that was trained.

    Args:
        alignment: The paper's W2 between proxies and training data.
        images_per_second: While training, median over the evaluated epochs.
        folder: Of the run.
    """

    alignment: float
    images_per_second: float
    folder: RunFolder


@dataclass(frozen=True, eq=False)
class Demo:
    """What a demo has trained and measured.

    Args:
        out: Its folder.
        data: The glyphs.
        config: How all methods were trained, but for the loss.
        pixels, untrained: Contenders that need no training.
        trained: By method, a key of `pfml.methods.METHODS`.
    """

    out: Path
    data: RetrievalData
    config: RunConfig
    pixels: Contender
    untrained: Contender
    trained: dict[str, Trained]

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """All contenders, in the order of the table."""
        return (self.pixels, self.untrained, *self.trained.values())


def demo_losses(config: RunConfig) -> dict[str, tuple[str, LossConfig]]:
    """Method -> its name for people and its loss; both fields have as many proxies as the configuration says."""
    proxies = {"proxies_per_class": config.loss.options["proxies_per_class"]}
    return {
        "proxy-anchor": ("Proxy Anchor", LossConfig("proxy-anchor")),
        "pfml": ("PFML (paper's text)", LossConfig("pfml", proxies)),
        "pfml-log": ("PFML (our preset)", LossConfig("pfml-log", proxies)),
    }


def describe(data: RetrievalData) -> tuple[str, str]:
    """What the data is, in two sentences."""
    train, test = data.train, data.test
    return (
        f"{data.name}: {len(train):,} images of {train.num_classes} glyphs to train on, "
        f"{len(test):,} images of {test.num_classes} other glyphs to search among.",
        "Each image is a glyph in one of several typefaces, rotated, sheared, scaled, shifted and noisy; "
        "nothing is downloaded.",
    )


def scores_table(demo: Demo) -> Table:
    """Metrics, proxy alignment and training time of every contender after the last epoch."""
    keys = shown_metrics(demo.pixels.scores)
    columns = ("method", *map(metric_label, keys), metric_label("alignment"), "time")
    shares = [[contender.scores[key] for key in keys] for contender in demo.contenders]
    baseline = demo.trained["proxy-anchor"].images_per_second
    rows = []
    for contender, values in zip(demo.contenders, shares, strict=True):
        extra = ("-", "-")
        if isinstance(contender, Trained):
            time = baseline / contender.images_per_second
            extra = (metric_text("alignment", contender.alignment), f"{time:.2f}")
        rows.append((contender.name, *map(metric_text, keys, values), *extra))
    best = [max(column) for column in zip(*shares, strict=True)]
    strong = {(r, c) for r, row in enumerate(shares) for c, value in enumerate(row, start=1) if value == best[c - 1]}
    return Table(columns, tuple(rows), frozenset(strong))


def demo_page(demo: Demo) -> str:
    """The page as HTML: metrics and plots of everything that the demo measured."""
    return render(
        "demo.html",
        title="Potential field metric learning: the demo",
        preset=demo.trained["pfml-log"],
        baseline=demo.trained["proxy-anchor"],
        pixels=demo.pixels,
        scores=scores_table(demo),
        meanings=meanings(shown_metrics(demo.pixels.scores)),
        seed=demo.config.seed,
        data=_data(demo),
        curves=_curves(demo),
        maps=_maps(demo),
        fields=_fields(demo),
        retrievals=_retrievals(demo),
        neighbors=NEIGHBORS,
        random_queries=RANDOM_QUERIES,
        worst_queries=WORST_QUERIES,
        origin=_origin(demo),
    )


def _data(demo: Demo) -> dict[str, Any]:
    """Example images, of training glyphs on the left and of unseen ones on the right."""
    data = demo.data
    halves = [_examples(images, demo.config.seed) for images in (data.train, data.test)]
    rows, columns = min(map(len, halves)), min(half.shape[1] for half in halves)
    tiles = torch.cat([half[:rows, :columns] for half in halves], dim=1)
    alt = "Noisy images of glyphs, of the training set on the left, unseen ones on the right"
    plot = Plot(image_grid(tiles, zoom=3, column_gaps=(columns,)), alt)
    return {"description": " ".join(describe(data)), "plot": plot, "rows": rows}


def _examples(images: ImageSet, seed: int) -> Tensor:
    """Up to `COLUMNS` images each of up to `ROWS` glyphs, (glyphs, images, 3, side, side)."""
    chosen = choose_images(images.labels, classes=ROWS, per_class=COLUMNS, seed=seed)
    fewest = int(images.labels[chosen].unique(return_counts=True)[1].min())
    chosen = choose_images(images.labels, classes=ROWS, per_class=fewest, seed=seed)
    return thumbnails(images, chosen, side=SIDE).unflatten(0, (-1, fewest))


def _curves(demo: Demo) -> dict[str, Any]:
    """Headline metrics with a curve per method, and the loss of each method."""
    metrics, losses = [], []
    for key in HEADLINE:
        title = f"{metric_label(key)} on unseen glyphs"
        start, level = (one.scores[key] for one in (demo.untrained, demo.pixels))
        curves = [metric_curve(c.folder, c.name, key, untrained=start) for c in demo.trained.values()]
        plot = partial(plot_metric, curves, levels={demo.pixels.name: level})
        metrics.append((title, in_themes(plot, f"{title} over epochs, a line per method")))
    for number, contender in enumerate(demo.trained.values(), start=1):
        steps, means = loss_curve(contender.folder, contender.name), mean_loss_curve(contender.folder, contender.name)
        title = f"Loss: {contender.name}"
        losses.append((title, in_themes(partial(plot_loss, steps, means, color=number), f"{title} over epochs")))
    return {"metrics": metrics, "losses": losses}


def _shown(demo: Demo) -> tuple[Contender, ...]:
    return (demo.pixels, *demo.trained.values())


def _maps(demo: Demo) -> dict[str, Any]:
    """A t-SNE map of the same unseen images for each contender."""
    labels, seed = demo.data.test.labels, demo.config.seed
    chosen = choose_images(labels, classes=MAP_CLASSES, per_class=MAP_IMAGES, seed=seed)
    tiles = thumbnails(demo.data.test, chosen, side=MAP_SIDE)
    plots = []
    for contender in _shown(demo):
        coordinates = project(contender.embeddings[chosen], seed=seed)
        alt = f"t-SNE map of unseen glyphs by {contender.name}"
        plot = in_themes(partial(plot_glyph_map, coordinates, labels[chosen], tiles), alt)
        plots.append((contender.name, plot))
    return {"plots": plots, "images": len(chosen), "classes": len(labels[chosen].unique())}


def _fields(demo: Demo) -> dict[str, Any]:
    """The potential around one glyph and its two nearest, for both potential fields."""
    labels, names = demo.data.train.labels, demo.data.train.class_names
    generator = torch.Generator().manual_seed(demo.config.seed)
    first = int(torch.randint(len(names), (1,), generator=generator))
    plots = []
    for method in ("pfml", "pfml-log"):
        contender = demo.trained[method]
        loss = load_loss(contender.folder.path)
        assert isinstance(loss, PotentialFieldLoss)
        points = embed(load_embedder(contender.folder.path), demo.data.train)
        classes = neighboring_classes(points, labels, first=first, count=FIELD_CLASSES)
        field = measure_field(loss, points, labels, classes)
        alt = f"Potential field around three glyphs with samples and proxies, {contender.name}"
        plot = in_themes(partial(plot_field_slice, field, {label: spelled(names[label]) for label in classes}), alt)
        law = asdict(loss.field.law)  # type: ignore[call-overload]
        samples_moved, proxies_moved = (
            torch.rad2deg(field.slice.nearness(some).clamp(max=1).acos()).median().item()
            for some in (field.samples, field.proxies)
        )
        plots.append(
            {
                "plot": plot,
                "title": contender.name,
                "law": ", ".join(f"{name} {value:g}" for name, value in law.items() if value is not None),
                "proxies_per_class": loss.proxies_per_class,
                "degrees": 2 * math.degrees(field.edge),
                "samples_moved": samples_moved,
                "proxies_moved": proxies_moved,
                "is_log": loss.field.normalization == "log",
            }
        )
    return {"plots": plots, "classes": len(names), "glyph": glyph_of(names[first])}


def spelled(class_name: str) -> str:
    """The glyph and its name, since some glyphs look alike."""
    return f"{glyph_of(class_name)}  {class_name.partition(' ')[2].replace('LETTER ', '').lower()}".strip()


def glyph_of(class_name: str) -> str:
    """The glyph itself of a class such as "U+0041 LATIN CAPITAL LETTER A"; other names as they are."""
    code = class_name.split(" ")[0].removeprefix("U+")
    return chr(int(code, 16)) if class_name.startswith("U+") else class_name


def _retrievals(demo: Demo) -> list[dict[str, Any]]:
    """Random and worst queries with their nearest images, for each contender."""
    test, preset = demo.data.test, demo.trained["pfml-log"]
    scores = query_scores(directions(preset.embeddings, "embeddings"), test.labels)
    queries = choose_queries(scores, test.labels, random=RANDOM_QUERIES, worst=WORST_QUERIES, seed=demo.config.seed)
    shown = []
    for contender in _shown(demo):
        found = retrieve(contender.embeddings, test.labels, queries, k=NEIGHBORS)
        correct = found.correct.double().mean().item()
        alt = f"Queries and their {NEIGHBORS} nearest images by {contender.name}; {correct:.0%} are right"
        plot = Plot(plot_retrievals(found, test, side=SIDE, zoom=2), alt)
        shown.append({"plot": plot, "title": contender.name, "correct": correct, "count": found.correct.numel()})
    return shown


def _origin(demo: Demo) -> dict[str, str]:
    config = demo.config
    command = ["pfml", "demo", "--out", str(demo.out), "--epochs", str(config.epochs), "--seed", str(config.seed)]
    losses = {method: plain(loss) for method, (_, loss) in demo_losses(config).items()}
    device = resolve_device(config.device).type
    return {
        "command": shell_words(*command),
        "versions": f"pfml {__version__}, torch {torch.__version__}, Python {platform.python_version()}, on {device} "
        f"with {torch.get_num_threads()} threads",
        "config": yaml.safe_dump({**plain(config), "loss": losses}, sort_keys=False, allow_unicode=True),
    }
