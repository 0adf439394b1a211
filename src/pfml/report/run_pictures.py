"""The sections with pictures on the page about a run."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pfml.losses import PotentialFieldLoss
from pfml.report.curves import Curve, draw_loss, draw_metric, loss_curve, mean_loss_curve
from pfml.report.field_slice import draw_field_slice, measure_field, neighbouring_classes
from pfml.report.maps import choose_images, flatten
from pfml.report.page import Block, Figure, Gallery, Section
from pfml.report.photo_map import draw_photo_map, draw_proxy_map
from pfml.report.retrieval_grid import choose_queries, draw_retrievals, retrieve
from pfml.report.run_facts import Facts
from pfml.report.run_measures import HardPair, best_queries, hard_pairs
from pfml.report.theme import in_both_themes
from pfml.report.tiles import image_sheet, thumbnails
from pfml.terminal import visible

__all__ = ["curves_section", "map_section", "pairs_section", "proxies_section", "retrieval_section"]

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
    light, dark = in_both_themes(partial(draw_loss, steps, means, colour=2, width=470))
    figures = []
    for metric, name in TITLES.items():
        curves = [_curve(facts, entries, role, metric) for role in ROLES if role in entries[0]]
        pictures = in_both_themes(partial(draw_metric, curves))
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
    worst = choose_queries(
        search.embeddings,
        search.labels,
        random=0,
        worst=QUERIES,
        gallery=search.gallery,
        gallery_labels=search.gallery_labels,
    )
    for title, queries in (("Best queries", best_queries(search, QUERIES)), ("Worst queries", worst)):
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
        picture = draw_retrievals(answers, facts.data.test, facts.data.gallery, side=SIDE)
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
    places, tiles = flatten(search.embeddings[chosen], seed=seed), thumbnails(test, chosen, side=MAP_SIDE)
    light, dark = in_both_themes(partial(draw_photo_map, places, search.labels[chosen], tiles))
    count = len(search.labels[chosen].unique())
    caption = (
        f"t-SNE of {len(chosen):,} images of {count} unseen classes, framed in the colour of their class. Near images "
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
        places = flatten(torch.cat([facts.train_points[chosen], stars.float()]), seed=seed)
        star_labels = classes.repeat_interleave(per_class)
        names = {label: short(facts.data.train.class_names[label]) for label in classes.tolist()}
        draw = partial(draw_proxy_map, places[: len(chosen)], labels[chosen], places[len(chosen) :], star_labels, names)
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
    classes = neighbouring_classes(facts.train_points, labels, first=first, count=3)
    field = measure_field(loss, facts.train_points, labels, classes)
    names = {label: short(facts.data.train.class_names[label]) for label in classes}
    light, dark = in_both_themes(partial(draw_field_slice, field, names))
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
    return Figure(image_sheet(tiles, gap=6), caption, alt=alt, title=f"{one} and {other}")


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
