"""One self-contained page about a run: `pfml report RUN`."""

from __future__ import annotations

import math
import platform
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from pfml.data.decoding import Track
from pfml.losses import PotentialFieldLoss
from pfml.pages.page import Block, Figure, Gallery, Listing, Page, Section, Table, write_page
from pfml.pages.run_facts import Facts, HardPair, class_scores, hard_pairs, read_facts
from pfml.plots.curves import Curve, loss_curve, mean_loss_curve, plot_loss, plot_metric
from pfml.plots.field_slice import measure_field, neighboring_classes, plot_field_slice
from pfml.plots.grids import choose_queries, image_grid, plot_retrievals, retrieve, thumbnails
from pfml.plots.maps import choose_images, plot_photo_map, plot_proxy_map, project
from pfml.plots.theme import in_both_themes
from pfml.runs.config_files import plain
from pfml.suggest.comparison import comparison
from pfml.terminal import visible
from pfml.version import __version__

__all__ = [
    "curves_section",
    "map_section",
    "pairs_section",
    "proxies_section",
    "retrieval_section",
    "run_page",
    "write_run_report",
]

TITLES = {"recall_at_1": "R@1", "map_at_r": "MAP@R"}
ROLES = {"test": "test classes", "validation": "validation classes"}
QUERIES, FOUND, SIDE = 6, 7, 88
MAP_CLASSES, MAP_IMAGES, MAP_SIDE = 24, 16, 64
PAIRS, EXAMPLES = 6, 4


def curves_section(facts: Facts) -> Section:
    """Loss, R@1 and MAP@R over epochs."""
    title, entries = "Learning curves", facts.folder.entries("evaluation")
    if not facts.folder.entries("step") or not entries or entries[0]["epoch"] == 0:
        return Section(title, ("There are none: the log of this run holds no step of training.",))
    steps, means = loss_curve(facts.folder, "loss"), mean_loss_curve(facts.folder, "loss")
    light, dark = in_both_themes(partial(plot_loss, steps, means, color=2, width=470))
    figures = []
    for metric, name in TITLES.items():
        curves = [_curve(facts, entries, role, metric) for role in ROLES if role in entries[0]]
        pictures = in_both_themes(partial(plot_metric, curves))
        figures.append(Figure(pictures[0], "", alt=f"{name} over epochs", dark=pictures[1], title=name))
    loss = Figure(light, "", alt="Training loss over epochs", dark=dark, title="Training loss")
    caption = (
        "Loss: logged steps (faint) and their mean in each epoch. Metrics: on classes that are not trained on, in %."
    )
    return Section(title, (Gallery((loss, *figures), caption, narrowest=300),))


def _curve(facts: Facts, entries: list[dict[str, Any]], role: str, metric: str) -> Curve:
    """A metric at each evaluation; of the test classes also before training, if that was measured."""
    start = [] if facts.untrained is None or role != "test" else [(0.0, facts.untrained.scores[metric])]
    points = [*start, *((float(entry["epoch"]), entry[role][metric]) for entry in entries)]
    return Curve(ROLES[role], tuple(x for x, _ in points), tuple(y for _, y in points))


def retrieval_section(facts: Facts) -> Section:
    """The best and the worst queries, and what they find."""
    search, found = facts.search, []
    best = choose_queries(search.scores, search.labels, best=QUERIES)
    worst = choose_queries(search.scores, search.labels, worst=QUERIES)
    for title, queries in (("Best queries", best), ("Worst queries", worst)):
        answers = retrieve(
            search.embeddings,
            search.labels,
            queries,
            k=FOUND,
            gallery=search.gallery,
            gallery_labels=search.gallery_labels,
        )
        names = ", ".join(short(facts.data.test.class_names[label]) for label in search.labels[queries].tolist())
        share = answers.correct.double().mean().item()
        picture = plot_retrievals(answers, facts.data.test, facts.data.gallery, side=SIDE)
        alt = f"{title} and their nearest images; {share:.0%} are right"
        found.append(Figure(picture, f"{share:.0%} of these are right. From the top: {names}.", alt=alt, title=title))
    caption = (
        "Query left (blue), its nearest images right: green is the same class, red with a cut corner is another one. "
        "Best and worst by average precision at R over all queries, no two of one class."
    )
    return Section("What a query finds", (Gallery(tuple(found), caption, narrowest=420),))


def map_section(facts: Facts, *, seed: int = 0) -> Section:
    """t-SNE of unseen images."""
    title, search, test = "Map of unseen classes", facts.search, facts.data.test
    chosen = choose_images(search.labels, classes=MAP_CLASSES, per_class=MAP_IMAGES, seed=seed)
    if len(chosen) < 4:
        return Section(title, (f"Left out: a map needs at least 4 images, and there are {len(chosen)}.",))
    places, tiles = project(search.embeddings[chosen], seed=seed), thumbnails(test, chosen, side=MAP_SIDE)
    light, dark = in_both_themes(partial(plot_photo_map, places, search.labels[chosen], tiles))
    count = len(search.labels[chosen].unique())
    caption = (
        f"t-SNE of {len(chosen):,} images of {count} unseen classes, framed in the color of their class. Near images "
        f"are near in the embedding; large distances in the map mean nothing."
    )
    return Section(title, (Figure(light, caption, alt=f"t-SNE map of {count} unseen classes", dark=dark),))


def proxies_section(facts: Facts, *, seed: int = 0) -> Section:
    """t-SNE of training images and their proxies, and the field around one class."""
    title = "Training classes and their proxies"
    if facts.loss is None:
        return Section(title, (facts.loss_remark,))
    proxies = _proxies(facts)
    labels = facts.train_images.labels
    if proxies is None:
        return Section(title, (f"Left out: {facts.config.loss.name} has no proxies.",))
    chosen = choose_images(labels, classes=MAP_CLASSES, per_class=2 * MAP_IMAGES, seed=seed)
    classes = labels[chosen].unique()
    stars, per_class = proxies[classes].flatten(0, 1), proxies.shape[1]
    blocks: list[Block] = []
    if len(chosen) + len(stars) >= 4:
        places = project(torch.cat([facts.train_points[chosen], stars.float()]), seed=seed)
        star_labels = classes.repeat_interleave(per_class)
        names = {label: short(facts.data.train.class_names[label]) for label in classes.tolist()}
        draw = partial(plot_proxy_map, places[: len(chosen)], labels[chosen], places[len(chosen) :], star_labels, names)
        light, dark = in_both_themes(draw)
        caption = (
            f"t-SNE of {len(chosen):,} training images of {len(classes)} classes (dots) and their {len(stars)} proxies "
            f"(stars), at {facts.loss_epoch}."
        )
        blocks.append(Figure(light, caption, alt="t-SNE map of training images with proxies as stars", dark=dark))
    if isinstance(facts.loss, PotentialFieldLoss) and facts.data.train.num_classes >= 2:
        blocks.append(_field(facts, facts.loss, int(classes[0])))
    return Section(title, tuple(blocks))


def _field(facts: Facts, loss: PotentialFieldLoss, first: int) -> Figure:
    """The potential around a class and its two nearest ones."""
    labels = facts.train_images.labels
    classes = neighboring_classes(facts.train_points, labels, first=first, count=3)
    field = measure_field(loss, facts.train_points, labels, classes)
    names = {label: short(facts.data.train.class_names[label]) for label in classes}
    light, dark = in_both_themes(partial(plot_field_slice, field, names))
    caption = (
        f"The potential of all proxies as {names[first]} feels it, on the slice of the sphere that fits it and its "
        f"nearest classes best; marks are training images and stars proxies, moved onto the slice."
    )
    return Figure(light, caption, alt=f"Potential field around {names[first]}", dark=dark, title="The field")


def pairs_section(facts: Facts) -> Section:
    """The classes that are most often taken for each other, with examples."""
    title, pairs = "Hardest pairs of classes", hard_pairs(facts.search, count=PAIRS)
    if not pairs:
        return Section(title, ("None: the nearest image of every query is of its own class.",))
    caption = (
        "Pairs of classes whose images are nearest to each other most often, by the share of their images. Above: a "
        "query; below: its nearest image, which is of the other class."
    )
    return Section(title, (Gallery(tuple(_pair(facts, pair) for pair in pairs), caption, narrowest=280),))


def _pair(facts: Facts, pair: HardPair) -> Figure:
    search, test = facts.search, facts.data.test
    queries = list(pair.queries[:EXAMPLES])
    found = search.first[queries].tolist()
    asked = thumbnails(test, queries, side=SIDE)
    answers = thumbnails(facts.data.gallery or test, found, side=SIDE)
    tiles = _padded(torch.stack([asked, answers]))
    one, other = (short(test.class_names[label]) for label in pair.labels)
    count = len(pair.queries)
    caption = f"{count} {'image' if count == 1 else 'images'}, {pair.share:.0%} of both classes."
    alt = f"Images of {one} and {other} that are taken for each other"
    return Figure(image_grid(tiles, gap=6), caption, alt=alt, title=f"{one} and {other}")


def _padded(tiles: Tensor) -> Tensor:
    """Columns up to `EXAMPLES`, the missing ones left to the page (NaN), so that all sheets have one scale."""
    rows, columns = tiles.shape[:2]
    missing = torch.full((rows, EXAMPLES - columns, *tiles.shape[2:]), torch.nan)
    return torch.cat([tiles, missing], dim=1)


def _proxies(facts: Facts) -> Tensor | None:
    """(C, M, D), or None for a loss without any."""
    points = getattr(facts.loss, "proxy_points", None)
    proxies: Tensor | None = None if points is None else points().detach().cpu()
    dim = facts.search.embeddings.shape[1]
    fits = proxies is not None and proxies.ndim == 3 and proxies.shape[1] > 0 and proxies.shape[2] == dim
    return proxies if fits else None


def short(class_name: str, length: int = 32) -> str:
    """A class name that fits into a caption, with characters that no font has written out."""
    class_name = visible(class_name)
    return class_name if len(class_name) <= length else class_name[: length - 3] + "..."


MOST_CLASSES, MOST_WRONG_LABELS = 40, 12
NAME_LENGTH = 44


def write_run_report(run: Path, out: Path | None = None, *, device: str = "auto", track: Track | None = None) -> Path:
    """Write the page about the run in the folder `run`; its path, by default RUN/report.html.

    Args:
        run: As `pfml train` leaves it.
        out: Another file.
        device: Where to embed the unseen images.
        track: Shows the progress.
    """
    path = Path(out) if out is not None else Path(run) / "report.html"
    write_page(path, run_page(read_facts(Path(run), device=device, track=track)))
    return path


def run_page(facts: Facts) -> Page:
    """Numbers and pictures of one run."""
    data = facts.data
    recall = _recall_at_1(facts)
    validation = "" if data.validation is None else f", {data.validation.num_classes:,} to choose on"
    lead = (
        f"{facts.config.loss.name} with {facts.config.model.backbone}: {recall:.1%} of {len(data.test):,} images of "
        f"{data.test.num_classes:,} unseen classes have an image of their own class nearest to them, by the run's "
        f"model ({facts.moment}). {data.train.num_classes:,} classes to train on{validation}."
    )
    sections = (
        _results(facts),
        curves_section(facts),
        retrieval_section(facts),
        map_section(facts),
        _classes(facts),
        pairs_section(facts),
        proxies_section(facts),
        _diagnostics(facts),
        _noise(facts),
        _origin(facts),
    )
    title = f"Run {facts.folder.path.absolute().name}"
    return Page(title, lead, sections, footer=f"Written by pfml {__version__}.")


def _recall_at_1(facts: Facts) -> float:
    scores = facts.search.scores
    return (scores.first_rank[scores.num_matches > 0] == 1).double().mean().item()


def _results(facts: Facts) -> Section:
    if facts.results is None:
        return Section("Results", ("Left out: the run has not written its results.json yet.",))
    names = {
        "validation_selected": "chosen on validation classes",
        "last": "last epoch",
        "best_on_test": "best on test, chosen on what it reports",
    }
    model = facts.results.get("model")
    scores = {
        f"{name} (epoch {entry['epoch']}{', the model' if key == model else ''})": entry["test"]
        for key, name in names.items()
        if (entry := facts.results.get(key)) is not None
    }
    if facts.untrained is not None:
        scores = {"the network before training": facts.untrained.scores, **scores}
    keys = [key for key in facts.results["last"]["test"] if key.startswith("recall_at_") or key == "map_at_r"]
    columns = ("", *(key.replace("recall_at_", "R@").replace("map_at_r", "MAP@R") for key in keys))
    cells = tuple((name, *(f"{100 * one[key]:.1f}" for key in keys)) for name, one in scores.items())
    caption = (
        "Unseen classes, in percent. R@K: queries with an image of their class among the K nearest; MAP@R also asks "
        "for the order of all of them."
    )
    blocks: tuple[Block, ...] = (Table(columns, cells, caption),)
    if facts.untrained is not None:
        sentence = comparison(facts.untrained, facts.results, facts.config)
        blocks = (sentence[0].upper() + sentence[1:] + ".", *blocks)
    return Section("Results", blocks)


def _classes(facts: Facts) -> Section:
    names, scores = facts.data.test.class_names, class_scores(facts.search)
    rows = tuple(
        (
            short(names[one.label], NAME_LENGTH),
            f"{one.queries:,}",
            f"{100 * one.recall_at_1:.1f}",
            f"{100 * one.map_at_r:.1f}",
            "-" if one.confused_with is None else f"{short(names[one.confused_with])} ({one.confusions})",
        )
        for one in scores[:MOST_CLASSES]
    )
    rest = len(scores) - len(rows)
    left_out = f" The {rest:,} better classes are left out." if rest else ""
    caption = (
        f"Unseen classes, worst R@1 first, in percent; the class that is nearest instead, and how often.{left_out}"
    )
    table = Table(("class", "images", "R@1", "MAP@R", "taken for"), rows, caption)
    return Section("Class by class", (table,))


def _diagnostics(facts: Facts) -> Section:
    title = f"The field of {facts.loss_epoch}"
    if facts.loss is None:
        return Section(title, (facts.loss_remark,))
    if not isinstance(facts.loss, PotentialFieldLoss):
        return Section(title, (f"Left out: {facts.config.loss.name} is not a potential field.",))
    measured = facts.loss.diagnostics(facts.train_points, facts.train_images.labels)
    explained = {
        "active_repulsions": "pairs of different classes that repel each other",
        "active_repulsion_share": "their share of all pairs of different classes",
        "same_class_inside_delta": "pairs of one class so close that they no longer attract",
        "sample_spread": "root mean square distance of images from their mean (1: all over the sphere)",
        "proxy_spread": "mean distance between proxies of one class",
        "largest_force": "largest force on an image or a proxy",
        "collapsed": "whether everything has come together",
    }
    rows = tuple((text, _number(getattr(measured, name))) for name, text in explained.items())
    law = ", ".join(f"{name} {value:g}" for name, value in asdict(facts.loss.field.law).items() if value is not None)  # type: ignore[call-overload]
    caption = (
        f"{len(facts.train_points):,} training images and {facts.loss.proxies_per_class} proxies per class; law: {law}"
        f"; normalization: {facts.loss.field.normalization}."
    )
    return Section(title, (Table(("", "value"), rows, caption),))


def _number(value: float | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if math.isnan(value) else f"{value:.3g}"


def _noise(facts: Facts) -> Section:
    wrong = facts.wrong_labels
    if not wrong:
        text = "No training label was changed on purpose. Which ones are wrong by themselves, pfml audit asks."
        return Section("Label noise", (text,))
    share = len(wrong) / max(len(facts.data.train), 1)
    text = f"{len(wrong):,} training labels, {share:.1%}, were made wrong on purpose; noise.csv lists them all."
    shown = wrong[:MOST_WRONG_LABELS]
    rows = tuple((row["image"], short(row["true class"]), short(row["given class"])) for row in shown)
    return Section("Label noise", (text, Table(("image", "shows", "is called"), rows, f"The first {len(rows)}.")))


def _origin(facts: Facts) -> Section:
    settings = yaml.safe_dump(plain(facts.config), sort_keys=False, allow_unicode=True)
    versions = f"pfml {__version__}, torch {torch.__version__}, Python {platform.python_version()}."
    remarks = " ".join(f"{remark}." for remark in facts.data.remarks)
    again = Listing("pfml train --config config.yaml --out AGAIN")
    blocks = (f"{versions} {remarks}".strip(), "The same run again, from its folder:", again)
    return Section("How it was made", (*blocks, Listing(settings, "Configuration (config.yaml)")))
