"""The page of an audit: suspects with their neighbors, and how well mislabeled images were found."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pfml.audit import DETECTION_LABELS, Audit, Suspect, precision_recall
from pfml.pages.page import Plot, Table, in_themes, render, write_page
from pfml.plots.grids import Retrievals, plot_retrievals
from pfml.plots.theme import Theme, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["about_unjudged", "audit_page", "write_audit_page"]

#: Images that are named, of those that cannot be judged.
NAMED = 20


def write_audit_page(path: Path, audit: Audit, suspects: list[Suspect], *, title: str, threshold: float) -> None:
    """Write the page of `audit_page`."""
    write_page(path, audit_page(audit, suspects, title=title, threshold=threshold))


def audit_page(audit: Audit, suspects: list[Suspect], *, title: str, threshold: float = 0.5) -> str:
    """The page as HTML.

    Args:
        audit: The judged images.
        suspects: Those to show, most suspicious first, each with equally many neighbors.
        title: Of the page.
        threshold: The probability from which on an image is listed.
    """
    return render(
        "audit.html",
        title=title,
        images=len(audit.images),
        listed=len(audit.listed(threshold)),
        noise_rate=audit.noise_rate,
        separation=audit.separation,
        suspects=[_suspect(audit, one) for one in suspects],
        unjudged=about_unjudged(audit) if len(audit.unjudged) else "",
        histogram=in_themes(partial(_plot_scores, audit), "Histogram of the scores of all labels"),
        comparison=_comparison(audit) if audit.detections else None,
        law=str(audit.law),
    )


def about_unjudged(audit: Audit) -> str:
    """A sentence on the images that are alone in their class."""
    names = audit.unjudged_names()
    listed = "; ".join(f"{image} ({given}; the nearest class is {nearest})" for image, given, nearest in names[:NAMED])
    more = f"; and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    who = "1 image is alone in its class" if len(names) == 1 else f"{len(names):,} images are alone in their classes"
    return f"{who} and cannot be judged: {listed}{more}"


def _suspect(audit: Audit, one: Suspect) -> dict[str, Any]:
    neighbors = torch.tensor([[other.index for other in one.neighbors]])
    same_label = torch.tensor([[other.label == one.given for other in one.neighbors]])
    png = plot_retrievals(Retrievals(torch.tensor([one.index]), neighbors, same_label), audit.images, side=96)
    true_class = None
    if audit.true_labels is not None:
        true_class = audit.images.class_names[int(audit.true_labels[one.index])]
    return {"suspect": one, "plot": Plot(png, f"{one.image} and its nearest neighbors"), "true_class": true_class}


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
