"""Recall@1 against the share of wrong training labels, one line for each method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pfml.paper.fill import FilledTable, Summary
from pfml.plots.theme import Theme, add_legend, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["NoiseCurve", "draw_noise", "noise_curves"]

MARKERS = "osD^v"


@dataclass(frozen=True)
class NoiseCurve:
    """Recall@1 in percent of one method at rising rates of noise.

    Args:
        panel: Data set, backbone and dimensions.
        name: Of the method.
        rates: Shares of wrong labels.
        recalls: At each of them, after the last epoch.
    """

    panel: str
    name: str
    rates: tuple[float, ...]
    recalls: tuple[Summary, ...]


def noise_curves(tables: Sequence[FilledTable]) -> list[NoiseCurve]:
    """The curves of our runs with two or more rates of noise; a single rate is a number in a table."""
    points: dict[tuple[str, tuple[str, bool]], dict[float, Summary]] = {}
    names: dict[tuple[str, bool], str] = {}  # the last one counts: the paper's own section calls its method "Ours"
    for filled in tables:
        for section in filled.sections:
            rate = dict(section.key.settings).get("noise")
            if rate is None:
                continue
            for row in section.rows:
                for column, cell in zip(filled.table.columns, row.ours, strict=True):
                    if column["metric"] == "recall_at_1" and cell.last is not None and row.method is not None:
                        method = (row.method, row.is_tuned)
                        names[method] = row.name
                        panel = f"{column['dataset']}, {section.key.backbone}, {section.key.dim} dim"
                        points.setdefault((panel, method), {})[float(rate)] = cell.last
    return [
        NoiseCurve(panel, names[method], tuple(sorted(found)), tuple(found[rate] for rate in sorted(found)))
        for (panel, method), found in points.items()
        if len(found) > 1
    ]


def draw_noise(curves: Sequence[NoiseCurve], theme: Theme, *, width: int = 460) -> Figure:
    """A panel of this width, in CSS pixels, for each data set and backbone."""
    if not curves:
        raise ValueError("there must be a curve to draw, got none")
    panels = list(dict.fromkeys(curve.panel for curve in curves))
    names = list(dict.fromkeys(curve.name for curve in curves))
    figure = new_figure(theme, width=width * len(panels), height=round(0.74 * width))
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        style_axes(axes, theme)
        for curve in (one for one in curves if one.panel == panel):
            number = names.index(curve.name)
            axes.errorbar(
                [100 * rate for rate in curve.rates],
                [one.mean for one in curve.recalls],
                yerr=[one.std or 0.0 for one in curve.recalls],
                color=theme.series[1 + number % (len(theme.series) - 1)],
                linewidth=2,
                marker=MARKERS[number % len(MARKERS)],
                markersize=5,
                capsize=3,
                label=curve.name,
            )
        axes.set_xlabel(f"wrong training labels in %: {panel}", fontsize=9)
        axes.set_ylabel("R@1 in %", fontsize=9)
        axes.set_ylim(bottom=0)
    add_legend(figure, theme, columns=3)
    return figure
