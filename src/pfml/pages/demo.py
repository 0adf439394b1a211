"""The page of the demo."""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import yaml
from torch import Tensor

from pfml.data import RetrievalData
from pfml.data.image_set import ImageSet
from pfml.evaluation import embed, query_scores
from pfml.evaluation.nearest_neighbors import directions
from pfml.losses import PotentialFieldLoss
from pfml.methods import LossConfig
from pfml.models import load_embedder
from pfml.pages.page import Figure, Gallery, Listing, Page, Section, Table
from pfml.plots.curves import loss_curve, mean_loss_curve, metric_curve, plot_loss, plot_metric
from pfml.plots.field_slice import FieldSlice, measure_field, neighboring_classes, plot_field_slice
from pfml.plots.grids import choose_queries, image_grid, plot_retrievals, retrieve, thumbnails
from pfml.plots.maps import choose_images, plot_glyph_map, project
from pfml.plots.theme import in_both_themes
from pfml.runs.config import RunConfig
from pfml.runs.config_files import plain
from pfml.runs.folder import RunFolder
from pfml.terminal import shell_words
from pfml.training.environment import resolve_device
from pfml.training.saved_loss import load_loss
from pfml.version import __version__

__all__ = ["Contender", "Demo", "Trained", "demo_losses", "demo_page", "describe", "scores_table"]


@dataclass(frozen=True, eq=False)
class Contender:
    """A way to compare images, and how well it finds unseen letters.

    Args:
        name: For tables and pictures.
        embeddings: (N, D) of the test images, on the CPU.
        scores: Names and numbers, as `RetrievalMetrics.as_dict` gives them.
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
    """What a demo did.

    Args:
        out: Its folder.
        data: The letters.
        config: How all methods were trained, but for the loss.
        pixels, untrained: What needs no training.
        trained: By method, a key of `pfml.training.METHODS`.
    """

    out: Path
    data: RetrievalData
    config: RunConfig
    pixels: Contender
    untrained: Contender
    trained: dict[str, Trained]

    @property
    def contenders(self) -> tuple[Contender, ...]:
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
        f"{data.name}: {len(train):,} images of {train.num_classes} letters to train on, "
        f"{len(test):,} images of {test.num_classes} other letters to search among.",
        "Each image is a letter in one of several typefaces, turned, slanted, scaled, shifted and noisy; "
        "nothing is downloaded.",
    )


def scores_table(demo: Demo) -> Table:
    """Method, recalls, MAP@R, proxy alignment and training time of every contender after the last epoch."""
    recall_at = demo.data.recall_at
    columns = ("method", *(f"R@{k}" for k in recall_at), "MAP@R", "W2", "time")
    keys = (*(f"recall_at_{k}" for k in recall_at), "map_at_r")
    shares = [[contender.scores[key] for key in keys] for contender in demo.contenders]
    baseline = demo.trained["proxy-anchor"].images_per_second
    rows = []
    for contender, values in zip(demo.contenders, shares, strict=True):
        extra = ("-", "-")
        if isinstance(contender, Trained):
            extra = (f"{contender.alignment:.2f}", f"{baseline / contender.images_per_second:.2f}")
        rows.append((contender.name, *(f"{100 * value:.1f}" for value in values), *extra))
    best = [max(column) for column in zip(*shares, strict=True)]
    strong = {(r, c) for r, row in enumerate(shares) for c, value in enumerate(row, start=1) if value == best[c - 1]}
    return Table(columns, tuple(rows), _table_caption(demo), frozenset(strong))


def _table_caption(demo: Demo) -> str:
    return (
        f"Unseen letters, in percent: R@K is the share of images with an image of the same letter among the K nearest; "
        f"MAP@R also asks for the order of all of them. W2: distance between proxies and training images as the paper "
        f"defines it (0 to 2, small is close; with Proxy Anchor's single proxy, the distance to the nearest image). "
        f"Time: of a training step, Proxy Anchor's being 1, measured in this run. Measured after the last epoch, one "
        f"run each with seed {demo.config.seed}, so that differences of about a point may be chance; all methods share "
        f"network, start, batches and learning rates."
    )


SIDE = 32  # pixels of a letter
MAP_SIDE = 46  # pixels of a letter in a map
MAP_CLASSES, MAP_IMAGES = 20, 24
RANDOM_QUERIES, WORST_QUERIES, FOUND = 6, 3, 8
FIELD_CLASSES = 3


def demo_page(demo: Demo) -> Page:
    """Table and pictures of everything that the demo measured."""
    preset = demo.trained["pfml-log"]
    lead = (
        f"Can images of letters that were never trained on be found by example? "
        f"{preset.name} puts a right one first for {preset.scores['recall_at_1']:.1%} of the unseen images, "
        f"Proxy Anchor for {demo.trained['proxy-anchor'].scores['recall_at_1']:.1%}, "
        f"raw pixels for {demo.pixels.scores['recall_at_1']:.1%}."
    )
    sections = (
        Section("Results", (scores_table(demo),)),
        _letters(demo),
        _curves(demo),
        _maps(demo),
        _fields(demo),
        _retrievals(demo),
        _origin(demo),
    )
    return Page("Potential field metric learning: the demo", lead, sections, footer=f"Written by pfml {__version__}.")


def _letters(demo: Demo) -> Section:
    data = demo.data
    halves = [_letter_rows(images, demo.config.seed) for images in (data.train, data.test)]
    rows, columns = min(map(len, halves)), min(half.shape[1] for half in halves)
    tiles = torch.cat([half[:rows, :columns] for half in halves], dim=1)
    figure = Figure(
        image_grid(tiles, zoom=3, column_gaps=(columns,)),
        f"Left: {rows} of the letters to train on, a row each. Right: {rows} of the unseen letters. "
        f"Letters and images are drawn at random.",
        alt="Noisy images of letters, of the training set on the left, unseen ones on the right",
    )
    return Section("The data", (" ".join(describe(data)), figure))


def _letter_rows(images: ImageSet, seed: int) -> Tensor:
    """Up to 9 images each of up to 8 letters, (letters, images, 3, side, side)."""
    chosen = choose_images(images.labels, classes=8, per_class=9, seed=seed)
    fewest = int(images.labels[chosen].unique(return_counts=True)[1].min())
    chosen = choose_images(images.labels, classes=8, per_class=fewest, seed=seed)
    return thumbnails(images, chosen, side=SIDE).unflatten(0, (-1, fewest))


def _curves(demo: Demo) -> Section:
    figures = []
    for metric, title in (("recall_at_1", "R@1 on unseen letters"), ("map_at_r", "MAP@R on unseen letters")):
        start, level = (one.scores[metric] for one in (demo.untrained, demo.pixels))
        curves = [metric_curve(c.folder, c.name, metric, untrained=start) for c in demo.trained.values()]
        light, dark = in_both_themes(partial(plot_metric, curves, levels={demo.pixels.name: level}))
        figures.append(Figure(light, "", alt=f"{title} over epochs, a line per method", dark=dark, title=title))
    losses = []
    for number, contender in enumerate(demo.trained.values(), start=1):
        steps, means = loss_curve(contender.folder, contender.name), mean_loss_curve(contender.folder, contender.name)
        light, dark = in_both_themes(partial(plot_loss, steps, means, color=number))
        title = f"Loss: {contender.name}"
        losses.append(Figure(light, "", alt=f"{title} over epochs", dark=dark, title=title))
    loss_caption = (
        "Training loss: every fifth step (faint) and the mean of each epoch. Losses of different methods are not "
        "comparable, so each has a scale of its own."
    )
    caption = "Epoch 0 is the untrained net, the same for all methods; the dashed line needs no training."
    galleries = (Gallery(tuple(figures), caption), Gallery(tuple(losses), loss_caption, narrowest=260))
    return Section("Learning curves", galleries)


def _shown(demo: Demo) -> tuple[Contender, ...]:
    return (demo.pixels, *demo.trained.values())


def _maps(demo: Demo) -> Section:
    labels, seed = demo.data.test.labels, demo.config.seed
    chosen = choose_images(labels, classes=MAP_CLASSES, per_class=MAP_IMAGES, seed=seed)
    tiles = thumbnails(demo.data.test, chosen, side=MAP_SIDE)
    figures = []
    for contender in _shown(demo):
        places = project(contender.embeddings[chosen], seed=seed)
        light, dark = in_both_themes(partial(plot_glyph_map, places, labels[chosen], tiles))
        alt = f"t-SNE map of unseen letters by {contender.name}"
        figures.append(Figure(light, "", alt=alt, dark=dark, title=contender.name))
    caption = (
        f"t-SNE of {len(chosen):,} images of {len(labels[chosen].unique())} unseen letters drawn at random, the same "
        f"in each map: every image stands where its embedding was put, in the color of its letter. Near images are "
        f"near in the embedding; large distances in a map mean nothing, and each map is stretched to its square."
    )
    return Section("Maps of unseen letters", (Gallery(tuple(figures), caption),))


def _fields(demo: Demo) -> Section:
    labels, names = demo.data.train.labels, demo.data.train.class_names
    generator = torch.Generator().manual_seed(demo.config.seed)
    first = int(torch.randint(len(names), (1,), generator=generator))
    figures = []
    for method in ("pfml", "pfml-log"):
        contender = demo.trained[method]
        loss = load_loss(contender.folder.path)
        assert isinstance(loss, PotentialFieldLoss)
        points = embed(load_embedder(contender.folder.path), demo.data.train)
        classes = neighboring_classes(points, labels, first=first, count=FIELD_CLASSES)
        field = measure_field(loss, points, labels, classes)
        letters = {label: spelled(names[label]) for label in classes}
        light, dark = in_both_themes(partial(plot_field_slice, field, letters))
        figures.append(
            Figure(
                light,
                _field_caption(field, loss),
                alt=f"Potential field around three letters with samples and proxies, {contender.name}",
                dark=dark,
                title=contender.name,
            )
        )
    text = (
        f"Each class has several proxies, and every one of them is a charge: it attracts its own class and repels the "
        f"others. Drawn is the potential Psi_j (Eqs. 3 to 5) of all proxies of all {len(names)} classes, as class "
        f"j = {letter_of(names[first])}, a letter drawn at random, feels it."
    )
    caption = (
        f"A slice of the sphere of embeddings: the unit vectors of the three-dimensional subspace that fits the "
        f"samples and proxies of {letter_of(names[first])} and of its two nearest letters best (main directions "
        f"without removing the mean). Color is the exact potential on the slice, without the constant that repulsion "
        f"has out of reach. Small marks are training images and stars are proxies, both moved onto the slice along the "
        f"shortest way, so that the color below a mark is the potential of the slice, not of the mark. Distances "
        f"from the middle of the picture are angles."
    )
    return Section("Proxies in the field", (text, Gallery(tuple(figures), caption)))


def _field_caption(field: FieldSlice, loss: PotentialFieldLoss) -> str:
    samples, proxies = (
        torch.rad2deg(field.slice.nearness(points).clamp(max=1).acos()).median()
        for points in (field.samples, field.proxies)
    )
    law = ", ".join(f"{name} {value:g}" for name, value in asdict(loss.field.law).items() if value is not None)  # type: ignore[call-overload]
    log = (
        " The loss takes the logarithms of the two parts of this potential."
        if loss.field.normalization == "log"
        else ""
    )
    return (
        f"{law}; {loss.proxies_per_class} proxies per class. The picture is {2 * math.degrees(field.edge):.0f} degrees "
        f"wide; half of the samples were moved by less than {samples:.0f} degrees, half of the proxies by less than "
        f"{proxies:.0f}.{log}"
    )


def spelled(class_name: str) -> str:
    """The letter and its name, since some letters look alike."""
    return f"{letter_of(class_name)}  {class_name.partition(' ')[2].replace('LETTER ', '').lower()}".strip()


def letter_of(class_name: str) -> str:
    """The letter itself of a class such as "U+0041 LATIN CAPITAL LETTER A"; other names as they are."""
    code = class_name.split(" ")[0].removeprefix("U+")
    return chr(int(code, 16)) if class_name.startswith("U+") else class_name


def _retrievals(demo: Demo) -> Section:
    test, seed = demo.data.test, demo.config.seed
    preset = demo.trained["pfml-log"]
    scores = query_scores(directions(preset.embeddings, "embeddings"), test.labels)
    queries = choose_queries(scores, test.labels, random=RANDOM_QUERIES, worst=WORST_QUERIES, seed=seed)
    figures = []
    for contender in _shown(demo):
        found = retrieve(contender.embeddings, test.labels, queries, k=FOUND)
        share = found.correct.double().mean().item()
        figures.append(
            Figure(
                plot_retrievals(found, test, side=SIDE, zoom=2),
                f"{share:.0%} of these {found.correct.numel()} are right.",
                alt=f"Queries and their {FOUND} nearest images by {contender.name}; {share:.0%} are right",
                title=contender.name,
            )
        )
    caption = (
        f"Query left (blue), its {FOUND} nearest among all other unseen images right: green is the same letter, red "
        f"with a cut corner is another one. The first {RANDOM_QUERIES} queries are drawn at random; the last "
        f"{WORST_QUERIES} are the worst of all for {preset.name} (least average precision at R), no two of one letter."
    )
    return Section("What a query finds", (Gallery(tuple(figures), caption),))


def _origin(demo: Demo) -> Section:
    config = demo.config
    command = ["pfml", "demo", "--out", str(demo.out), "--epochs", str(config.epochs), "--seed", str(config.seed)]
    losses = {method: plain(loss) for method, (_, loss) in demo_losses(config).items()}
    settings = {**plain(config), "loss": losses}
    device = resolve_device(config.device).type
    versions = (
        f"pfml {__version__}, torch {torch.__version__}, Python {platform.python_version()}, on {device} with "
        f"{torch.get_num_threads()} threads. The same seed gives the same numbers, but for times, on the same machine "
        f"with as many threads."
    )
    listing = Listing(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True), "Configuration of all runs")
    return Section("How this page was made", (Listing(shell_words(*command)), versions, listing))
