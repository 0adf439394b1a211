"""The paper's Figure 3: Recall@1 against M, delta, alpha and delta_rep - delta_att, the paper's and ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pfml.paper.fill import FilledRow, FilledTable
from pfml.plots.theme import Theme, add_legend, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_ablation"]

DASHES = (0, (4, 3))
MARKERS = "osD^v"
AXES = {
    "proxies_per_class": "(a) proxies per class $M$",
    "delta": r"(b) radius $\delta$",
    "alpha": r"(c) decay $\alpha$",
    "delta_rep_minus_delta_att": r"(d) $\delta_{rep} - \delta_{att}$",
}


def draw_ablation(tables: Sequence[FilledTable], theme: Theme, *, width: int = 980) -> Figure:
    """Four panels: the paper's values hollow on dashed lines, ours as points with a standard deviation.

    Args:
        tables: The four panels as `filled_tables` gives them; of several for one panel, all are drawn.
        theme: Colors.
        width: In CSS pixels.
    """
    panels = {sweep: [one for one in tables if one.table.sweep == sweep] for sweep in AXES}
    if not any(panels.values()):
        raise ValueError("there must be a table of Figure 3 to draw, got none")
    figure = new_figure(theme, width=width, height=round(0.34 * width))
    names = list(dict.fromkeys(_name(*one) for one in _rows(tables)))
    styles = {
        name: (theme.series[1 + k % (len(theme.series) - 1)], MARKERS[k % len(MARKERS)]) for k, name in enumerate(names)
    }
    for axes, (sweep, filled) in zip(figure.subplots(1, len(panels), sharey=True), panels.items(), strict=True):
        style_axes(axes, theme)
        axes.set_xlabel(AXES[sweep], fontsize=9)
        for table in filled:
            places = [column["settings"][sweep] for column in table.table.columns]
            for section, row in _rows([table]):
                color, marker = styles[_name(section, row)]
                _draw_row(axes, places, row, _name(section, row), color=color, marker=marker, paper=theme.paper)
    figure.axes[0].set_ylabel("R@1 in %", fontsize=9)
    add_legend(figure, theme, columns=4)
    return figure


def _rows(tables: Sequence[FilledTable]) -> list[tuple[str, FilledRow]]:
    """Section and row of everything to draw; the section of the paper's own rows has no name."""
    own = {section.title for table in tables for section in table.table.sections}
    return [
        ("" if section.title in own else section.title.removesuffix(", not in the paper"), row)
        for table in tables
        for section in table.sections
        for row in section.rows
    ]


def _name(section: str, row: FilledRow) -> str:
    return f"{row.name}, {section}" if section else row.name


def _draw_row(
    axes: Axes, places: Sequence[float], row: FilledRow, name: str, *, color: str, marker: str, paper: str
) -> None:
    printed = [(x, cell.value) for x, cell in zip(places, row.paper, strict=True) if cell and cell.value is not None]
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
    ours = [(x, cell.last) for x, cell in zip(places, row.ours, strict=True) if cell.last is not None]
    if ours:
        axes.errorbar(
            [x for x, _ in ours],
            [one.mean for _, one in ours],
            yerr=[one.std or 0.0 for _, one in ours],
            color=color,
            linewidth=2,
            marker=marker,
            markersize=5,
            capsize=3,
            label=f"{name}, ours",
        )
