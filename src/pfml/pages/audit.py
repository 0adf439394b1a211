"""The page of an audit: suspects with their neighbors, and how well mislabeled images were found."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pfml.audit import DETECTION_LABELS, Audit, DuplicateGroup, Faults, Suspect, precision_recall
from pfml.audit.measures import QUALITY_FAULTS
from pfml.data.image_set import ImageSet
from pfml.pages.page import Plot, Table, in_themes, render, write_page
from pfml.plots.grids import Retrievals, image_grid, plot_retrievals, thumbnails
from pfml.plots.theme import Theme, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pfml.field import DecayLaw

__all__ = ["about_unjudged", "audit_page", "write_audit_page"]

#: Images that are named, of those that cannot be judged.
NAMED = 20
#: Groups of copies and other images that are shown, and images of one group.
SHOWN, IN_GROUP = 24, 6
#: Pixels of a side of an image.
SIDE = 96


def write_audit_page(
    path: Path,
    audit: Audit,
    suspects: list[Suspect],
    *,
    title: str,
    threshold: float,
    faults: Faults | None = None,
) -> None:
    """Write the page of `audit_page`."""
    write_page(path, audit_page(audit, suspects, title=title, threshold=threshold, faults=faults))


def audit_page(
    audit: Audit,
    suspects: list[Suspect],
    *,
    title: str,
    threshold: float = 0.5,
    faults: Faults | None = None,
) -> str:
    """The page as HTML.

    Args:
        audit: The judged images.
        suspects: Those to show, most suspicious first, each with equally many neighbors.
        title: Of the page.
        threshold: The probability from which on an image is listed.
        faults: What else was found; None if nothing else was looked for.
    """
    names = audit.images.short_names()  # a page is passed on: no folders of the machine that made it
    return render(
        "audit.html",
        title=title,
        images=len(audit.images),
        listed=len(audit.listed(threshold)),
        noise_rate=audit.noise_rate,
        noise_interval=audit.noise_interval,
        suspects=_suspects(audit, suspects, names),
        unjudged=about_unjudged(audit) if len(audit.unjudged) else "",
        histogram=in_themes(partial(_plot_scores, audit), "Histogram of the scores of all labels"),
        comparison=_comparison(audit) if audit.detections else None,
        law=_described_law(audit.law),
        duplicates=[] if faults is None else [_copies(audit, one, names) for one in faults.duplicates[:SHOWN]],
        more_duplicates=0 if faults is None else max(len(faults.duplicates) - SHOWN, 0),
        others=[] if faults is None else _others(audit, faults, names),
    )


def _described_law(law: DecayLaw) -> str:
    """Such as "PowerLaw, delta 0.691, alpha 12"."""
    values = {name: value for name, value in vars(law).items() if isinstance(value, int | float)}
    return ", ".join([type(law).__name__, *(f"{name} {value:.3g}" for name, value in values.items())])


def about_unjudged(audit: Audit) -> str:
    """A sentence on the images that are alone in their class."""
    names = audit.unjudged_names()
    listed = "; ".join(f"{image} ({given}; the nearest class is {nearest})" for image, given, nearest in names[:NAMED])
    more = f"; and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    who = "1 image is alone in its class" if len(names) == 1 else f"{len(names):,} images are alone in their classes"
    return f"{who} and cannot be judged: {listed}{more}"


def _suspects(audit: Audit, suspects: list[Suspect], names: list[str]) -> list[dict[str, Any]]:
    """What the page shows of each; an image that is near several of them is decoded once."""
    shown = sorted({index for one in suspects for index in (one.index, *(other.index for other in one.neighbors))})
    pixels = thumbnails(audit.images, shown, side=SIDE).mul(255).round().byte()
    position = {index: k for k, index in enumerate(shown)}
    return [_suspect(audit, one, ImageSet.unlabeled(pixels), position, names[one.index]) for one in suspects]


def _suspect(audit: Audit, one: Suspect, small: ImageSet, position: dict[int, int], name: str) -> dict[str, Any]:
    neighbors = torch.tensor([[position[other.index] for other in one.neighbors]])
    same_label = torch.tensor([[other.label == one.given for other in one.neighbors]])
    asked = torch.tensor([position[one.index]])
    png = plot_retrievals(Retrievals(asked, neighbors, same_label), small, side=SIDE)
    true_class = None
    if audit.true_labels is not None:
        true_class = audit.images.class_names[int(audit.true_labels[one.index])]
    plot = Plot(png, f"{name} and its nearest neighbors")
    return {"suspect": one, "name": name, "plot": plot, "true_class": true_class}


def _copies(audit: Audit, group: DuplicateGroup, names: list[str]) -> dict[str, Any]:
    """A group of copies, side by side."""
    shown = group.indices[:IN_GROUP]
    kind = "Exact copies" if group.is_exact else "Near copies"
    where = [name for name, is_so in (("classes", group.is_across_classes), ("parts", group.is_across_parts)) if is_so]
    title = kind + (f" across {' and '.join(where)}" if where else "")
    more = f"; and {len(group.indices) - IN_GROUP:,} more" if len(group.indices) > IN_GROUP else ""
    return _figure(audit, title, shown, "; ".join(_named(audit, k, names) for k in shown) + more)


def _others(audit: Audit, faults: Faults, names: list[str]) -> list[dict[str, Any]]:
    """Outliers, classes to merge or split and images of poor quality, a list of figures for each that has some."""
    classes = audit.images.class_names
    sections: dict[str, list[tuple[str, tuple[int, ...], str]]] = {"Outliers": [], "Classes": [], "Poor images": []}
    for far in faults.outliers:
        distances = f"Other images are at {far.distance:.2f}; the median is {far.usual:.2f}"
        text = f"{_named(audit, far.index, names)}. {distances}"
        sections["Outliers"].append(("Far from all others", (far.index,), text))
    for fault in faults.classes:
        parts = " and ".join(f"{size:,}" for size in fault.sizes)
        who = " and ".join(classes[label] for label in fault.classes)
        if fault.kind == "merge":
            title, text = "One class?", f"{who} ({parts} images) are mixed like one class cut at random"
        else:
            title, text = "Two classes?", f"{who} falls into parts of {parts} images"
        sections["Classes"].append((title, fault.examples, text))
    for poor in faults.quality:
        measure = f"{QUALITY_FAULTS[poor.kind]} {poor.value:.3g}; the median is {poor.usual:.3g}"
        text = f"{_named(audit, poor.index, names)}. {measure.capitalize()}"
        sections["Poor images"].append((poor.kind.capitalize(), (poor.index,), text))
    return [
        {
            "title": title,
            "more": max(len(found) - SHOWN, 0),
            "figures": [_figure(audit, *each) for each in found[:SHOWN]],
        }
        for title, found in sections.items()
        if found
    ]


def _figure(audit: Audit, title: str, indices: tuple[int, ...], text: str) -> dict[str, Any]:
    """Images side by side, with a caption."""
    png = image_grid(thumbnails(audit.images, indices, side=SIDE)[None], gap=6)
    return {"title": title, "plot": Plot(png, title), "text": text}


def _named(audit: Audit, index: int, names: list[str]) -> str:
    """Name, class and part of an image."""
    label = audit.images.class_names[int(audit.images.labels[index])]
    part = f", {audit.roles[index]}" if len({*audit.roles}) > 1 else ""
    return f"{names[index]} ({label}{part})"


def _plot_scores(audit: Audit, theme: Theme) -> Figure:
    """A histogram of all scores, by whether the label is right where that is known."""
    figure = new_figure(theme, width=560, height=260)
    axes = figure.subplots()
    style_axes(axes, theme)
    is_finite = audit.scores.score.isfinite()
    finite = audit.scores.score[is_finite]
    groups, names, colors = [finite], ["all"], [theme.series[2]]
    if audit.true_labels is not None:
        mislabeled = (audit.true_labels != audit.images.labels)[is_finite]
        groups = [finite[~mislabeled], finite[mislabeled]]
        names, colors = ["right", "mislabeled"], [theme.series[2], theme.series[1]]
    axes.hist([one.numpy() for one in groups], bins=60, stacked=True, color=colors, label=names)
    axes.set_xlabel("score", fontsize=9)
    axes.set_ylabel("images", fontsize=9)
    if len(groups) > 1:
        axes.legend(fontsize=8.5, frameon=False, labelcolor=theme.ink)
    return figure


def _comparison(audit: Audit) -> dict[str, Any]:
    """How well each ranking finds the mislabeled images."""
    columns = ("", *DETECTION_LABELS.values())
    rows = tuple(
        (name, *(f"{100 * getattr(one, field):.1f}" for field in DETECTION_LABELS))
        for name, one in audit.detections.items()
    )
    best = {
        (max(range(len(rows)), key=lambda row, c=column: float(rows[row][c])), column)  # type: ignore[misc]
        for column in range(1, len(columns))
    }
    alt = "Precision over recall of each ranking"
    plot = in_themes(partial(_plot_precision, audit), alt)
    return {"table": Table(columns, rows, strong=frozenset(best)), "plot": plot}


def _plot_precision(audit: Audit, theme: Theme) -> Figure:
    assert audit.true_labels is not None
    figure = new_figure(theme, width=460, height=320)
    axes = figure.subplots()
    style_axes(axes, theme)
    mislabeled = audit.true_labels != audit.images.labels
    rankings = {"field": audit.scores, **audit.compared}
    for (name, scores), color in zip(rankings.items(), (2, 1, 3), strict=False):
        precision, recall = precision_recall(scores.score, mislabeled)
        axes.plot(100 * recall, 100 * precision, color=theme.series[color], linewidth=2, label=name)
    axes.set_xlabel("recall, %", fontsize=9)
    axes.set_ylabel("precision, %", fontsize=9)
    axes.set_ylim(0, 102)
    axes.legend(fontsize=8.5, frameon=False, labelcolor=theme.ink)
    return figure
