"""The audit of a run as one HTML page: suspects with their neighbors, and how well wrong labels were found."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pfml.audit import Audit, Suspect, precision_recall
from pfml.pages.page import Figure, Gallery, Page, Section, Table, write_page
from pfml.plots.grids import Retrievals, plot_retrievals
from pfml.plots.theme import Theme, in_both_themes, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Plot

__all__ = ["about_unjudged", "audit_page", "write_audit_page"]

#: Images that are named, of those that cannot be judged.
NAMED = 20


def write_audit_page(path: Path, audit: Audit, suspects: list[Suspect], *, title: str, threshold: float) -> None:
    """Write the page of `audit_page`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_page(path, audit_page(audit, suspects, title=title, threshold=threshold))


def audit_page(audit: Audit, suspects: list[Suspect], *, title: str, threshold: float = 0.5) -> Page:
    """The page.

    Args:
        audit: The judged images.
        suspects: Those to show, most suspicious first, each with equally many neighbors.
        title: Of the page.
        threshold: The probability from which on an image is listed.
    """
    listed = len(audit.listed(threshold))
    lead = (
        f"{listed:,} of {len(audit.images):,} labels are probably wrong. The scores say that "
        f"{100 * audit.noise_rate:.1f} % are."
    )
    if audit.noise_rate == 0:
        lead = (
            f"The scores of the {len(audit.images):,} labels are one group, so that nobody can tell how "
            f"many are wrong and none is listed. Those below are the most suspicious all the same: look at them."
        )
    sections = [Section("Suspects", _suspects(audit, suspects))] if suspects else []
    if len(audit.unjudged):
        sections.append(Section("Not judged", (f"{about_unjudged(audit)}.",)))
    sections.append(Section("Scores", (_histogram(audit),)))
    if audit.detections:
        sections.append(Section("Against the truth", _comparison(audit)))
    footer = f"The field: {audit.law}, of all other images and any proxies; pfml audit."
    return Page(title, lead, tuple(sections), footer)


def about_unjudged(audit: Audit) -> str:
    """A sentence on the images that are alone in their class."""
    names = audit.unjudged_names()
    listed = "; ".join(f"{image} ({given}; the nearest class is {nearest})" for image, given, nearest in names[:NAMED])
    more = f"; and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    who = "1 image is alone in its class" if len(names) == 1 else f"{len(names):,} images are alone in their classes"
    return f"{who} and cannot be judged: {listed}{more}"


def _suspects(audit: Audit, suspects: list[Suspect]) -> tuple[str | Gallery, ...]:
    text = (
        "Left the image, right its nearest others, nearest first: green those that carry its own given "
        "label, red and with a cut corner those that carry another. Shares are parts of the attraction that acts on it."
    )
    return text, Gallery(tuple(_figure(audit, one) for one in suspects), narrowest=330)


def _figure(audit: Audit, one: Suspect) -> Figure:
    near = torch.tensor([[other.index for other in one.neighbors]])
    correct = torch.tensor([[other.label == one.given for other in one.neighbors]])
    picture = plot_retrievals(Retrievals(torch.tensor([one.index]), near, correct), audit.images, side=96)
    found = "; ".join(f"{other.label} at {other.distance:.2f} ({100 * other.share:.1f} %)" for other in one.neighbors)
    truth = ""
    if audit.true_labels is not None:
        truth = f" In truth: {audit.images.class_names[int(audit.true_labels[one.index])]}."
    caption = (
        f"{one.image}. {_certainty(audit, one)}, score {one.score:.2f}; share of "
        f"{one.given} {100 * one.given_share:.1f} %, of {one.suggested} {100 * one.suggested_share:.1f} %.{truth} "
        f"Neighbors: {found}."
    )
    alt = f"{one.image} and its nearest others"
    return Figure(picture, caption, alt=alt, title=f"{one.given}, rather {one.suggested}?")


def _certainty(audit: Audit, one: Suspect) -> str:
    return f"Wrong with probability {one.confidence:.2f}" if audit.noise_rate else "No estimate of a probability"


def _histogram(audit: Audit) -> Figure:
    light, dark = in_both_themes(partial(_draw_scores, audit))
    caption = (
        "All scores: the log of the attraction of the best other class over that of the own class. Wrong labels make "
        f"the highest bell; it is apart from the next by D = {audit.separation:.1f} (2 or more counts)."
    )
    return Figure(light, caption, alt="Histogram of the scores of all labels", dark=dark)


def _draw_scores(audit: Audit, theme: Theme) -> Plot:
    figure = new_figure(theme, width=560, height=260)
    axes = figure.subplots()
    style_axes(axes, theme)
    finite = audit.scores.score[audit.scores.score.isfinite()]
    groups, names, colors = [finite], ["all"], [theme.series[2]]
    if audit.true_labels is not None:
        wrong = (audit.true_labels != audit.images.labels)[audit.scores.score.isfinite()]
        groups, names, colors = [finite[~wrong], finite[wrong]], ["right", "wrong"], [theme.series[2], theme.series[1]]
    axes.hist([one.numpy() for one in groups], bins=60, stacked=True, color=colors, label=names)
    axes.set_xlabel("score", fontsize=9)
    axes.set_ylabel("images", fontsize=9)
    if len(groups) > 1:
        axes.legend(fontsize=8.5, frameon=False, labelcolor=theme.ink)
    return figure


def _comparison(audit: Audit) -> tuple[Table, Figure]:
    columns = ("", "precision at the number of wrong", "average precision", "recall at 90 % precision", "suggestions")
    rows = tuple(
        (
            name,
            *(
                f"{100 * value:.1f}"
                for value in (
                    one.precision_at_wrong,
                    one.average_precision,
                    one.recall_at_90,
                    one.suggestion_accuracy,
                )
            ),
        )
        for name, one in audit.detections.items()
    )
    best = {
        (max(range(len(rows)), key=lambda row, c=column: float(rows[row][c])), column)  # type: ignore[misc]
        for column in range(1, len(columns))
    }
    caption = "In %; suggestions: how many of the wrong labels have their true class suggested."
    light, dark = in_both_themes(partial(_draw_precision, audit))
    picture = Figure(
        light, "Precision over recall of each ranking.", alt="Precision over recall of each ranking", dark=dark
    )
    return Table(columns, rows, caption, strong=frozenset(best)), picture


def _draw_precision(audit: Audit, theme: Theme) -> Plot:
    assert audit.true_labels is not None
    figure = new_figure(theme, width=460, height=320)
    axes = figure.subplots()
    style_axes(axes, theme)
    wrong = audit.true_labels != audit.images.labels
    rankings = {"field": audit.scores, **audit.others}
    for (name, scores), color in zip(rankings.items(), (2, 1, 3), strict=False):
        precision, recall = precision_recall(scores.score, wrong)
        axes.plot(100 * recall, 100 * precision, color=theme.series[color], linewidth=2, label=name)
    axes.set_xlabel("recall, %", fontsize=9)
    axes.set_ylabel("precision, %", fontsize=9)
    axes.set_ylim(0, 102)
    axes.legend(fontsize=8.5, frameon=False, labelcolor=theme.ink)
    return figure
