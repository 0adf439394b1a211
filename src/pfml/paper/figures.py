"""Figures of the report: the paper's ablations (Figure 3) beside ours, and Recall@1 under label noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pfml.evaluation.metrics import metric_label
from pfml.paper.tables import Row, Summary, Table
from pfml.plots.theme import Theme, add_legend, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["NoiseCurve", "noise_curves", "plot_ablation", "plot_noise"]

DASHES = (0, (4, 3))
MARKERS = "osD^v"
#: Setting on the x-axis -> its label, in the order of the panels.
ABLATIONS = {
    "proxies_per_class": "(a) proxies per class $M$",
    "delta": r"(b) radius $\delta$",
    "alpha": r"(c) decay $\alpha$",
    "delta_rep_minus_delta_att": r"(d) $\delta_{rep} - \delta_{att}$",
}


def plot_ablation(tables: Sequence[Table], theme: Theme, *, width: int = 980) -> Figure:
    """Four panels: the paper's values hollow on dashed lines, ours as points with a standard deviation.

    Args:
        tables: The four panels as `filled_tables` gives them; of several for one panel, all are plotted.
        theme: Colors.
        width: In CSS pixels.
    """
    panels = {sweep: [table for table in tables if table.sweep == sweep] for sweep in ABLATIONS}
    if not any(panels.values()):
        raise ValueError("there must be a table of Figure 3 to plot, got none")
    figure = new_figure(theme, width=width, height=round(0.34 * width))
    names = list(dict.fromkeys(name for table in tables for name, _ in _named_rows(table)))
    styles = {name: _style(theme, number) for number, name in enumerate(names)}
    for axes, (sweep, filled) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        style_axes(axes, theme)
        axes.set_xlabel(ABLATIONS[sweep], fontsize=9)
        for table in filled:
            values = [column["settings"][sweep] for column in table.columns]
            for name, row in _named_rows(table):
                color, marker = styles[name]
                _plot_row(axes, values, row, name, color=color, marker=marker, paper=theme.paper)
    figure.axes[0].set_ylabel(f"{metric_label('recall_at_1')} in %", fontsize=9)
    add_legend(figure, theme, columns=4)
    return figure


def _named_rows(table: Table) -> list[tuple[str, Row]]:
    """Every row with its name in the legend; rows of sections that the paper does not have are told apart by them."""
    return [
        (row.name if section.in_paper else f"{row.name}, {section.title.removesuffix(', not in the paper')}", row)
        for section in table.sections
        for row in section.rows
    ]


def _plot_row(axes: Axes, values: Sequence[float], row: Row, name: str, *, color: str, marker: str, paper: str) -> None:
    printed = [(x, cell.value) for x, cell in zip(values, row.cells, strict=True) if cell.value is not None]
    if printed:
        axes.plot(
            *zip(*printed, strict=True),
            color=color,
            linewidth=1.1,
            linestyle=DASHES,
            marker=marker,
            markersize=5,
            markerfacecolor=paper,
            label=f"{name}, paper (read off its figure)",
        )
    ours = [(x, cell.ours.last) for x, cell in zip(values, row.cells, strict=True) if cell.ours.last is not None]
    if ours:
        _plot_ours(axes, [x for x, _ in ours], [one for _, one in ours], f"{name}, ours", color=color, marker=marker)


@dataclass(frozen=True)
class NoiseCurve:
    """Recall@1 in percent of one method at rising rates of label noise.

    Args:
        panel: Data set, backbone and dimensions.
        name: Of the method.
        rates: Fractions of noisy labels.
        recalls: At each of them, after the last epoch.
    """

    panel: str
    name: str
    rates: tuple[float, ...]
    recalls: tuple[Summary, ...]


def noise_curves(tables: Sequence[Table]) -> list[NoiseCurve]:
    """The curves of our runs with two or more rates of noise; a single rate is a number in a table."""
    points: dict[tuple[str, tuple[str, bool]], dict[float, Summary]] = {}
    names: dict[tuple[str, bool], str] = {}  # the last one counts: the paper's own section calls its method "Ours"
    for table in tables:
        for section in table.sections:
            rate = section.settings.get("noise")
            if rate is None:
                continue
            for row in section.rows:
                for cell in row.cells:
                    if cell.metric == "recall_at_1" and cell.ours.last is not None and row.method is not None:
                        method = (row.method, row.is_tuned)
                        names[method] = row.name
                        panel = f"{cell.dataset}, {section.backbone}, {section.dim} dim"
                        points.setdefault((panel, method), {})[float(rate)] = cell.ours.last
    return [
        NoiseCurve(panel, names[method], tuple(sorted(found)), tuple(found[rate] for rate in sorted(found)))
        for (panel, method), found in points.items()
        if len(found) > 1
    ]


def plot_noise(curves: Sequence[NoiseCurve], theme: Theme, *, width: int = 460) -> Figure:
    """A panel of this width, in CSS pixels, for each data set and backbone."""
    if not curves:
        raise ValueError("there must be a curve to plot, got none")
    panels = list(dict.fromkeys(curve.panel for curve in curves))
    names = list(dict.fromkeys(curve.name for curve in curves))
    figure = new_figure(theme, width=width * len(panels), height=round(0.74 * width))
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        style_axes(axes, theme)
        for curve in (one for one in curves if one.panel == panel):
            color, marker = _style(theme, names.index(curve.name))
            rates = [100 * rate for rate in curve.rates]
            _plot_ours(axes, rates, curve.recalls, curve.name, color=color, marker=marker)
        axes.set_xlabel(f"label noise in %: {panel}", fontsize=9)
        axes.set_ylabel(f"{metric_label('recall_at_1')} in %", fontsize=9)
        axes.set_ylim(bottom=0)
    add_legend(figure, theme, columns=3)
    return figure


def _style(theme: Theme, number: int) -> tuple[str, str]:
    """Color and marker of a line."""
    return theme.series[1 + number % (len(theme.series) - 1)], MARKERS[number % len(MARKERS)]


def _plot_ours(
    axes: Axes, x: Sequence[float], summaries: Sequence[Summary], name: str, *, color: str, marker: str
) -> None:
    axes.errorbar(
        x,
        [one.mean for one in summaries],
        yerr=[one.std or 0.0 for one in summaries],
        color=color,
        linewidth=2,
        marker=marker,
        markersize=5,
        capsize=3,
        label=name,
    )
