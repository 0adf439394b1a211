"""One self-contained page about a run: `pfml report RUN`."""

from __future__ import annotations

import math
import platform
from dataclasses import asdict
from pathlib import Path

import torch
import yaml

from pfml import __version__
from pfml.data.decoding import Track
from pfml.losses import PotentialFieldLoss
from pfml.report.page import Block, Listing, Page, Section, Table, write_page
from pfml.report.run_facts import Facts, read_facts
from pfml.report.run_measures import class_scores
from pfml.report.run_pictures import (
    curves_section,
    map_section,
    pairs_section,
    proxies_section,
    retrieval_section,
    short,
)
from pfml.training.comparison import comparison
from pfml.training.config_files import plain

__all__ = ["run_page", "write_run_report"]

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
        f"; normalisation: {facts.loss.field.normalization}."
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
