"""The errors of verification as a curve, with its interval."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from pfml.evaluation.verification import Verification
from pfml.plots.theme import Theme, add_legend, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_verification", "rate_text"]

DASHES = (0, (4, 3))
HALO = 3  # points around a label, in the color of the paper
#: How far the axis reaches below the lowest false match rate that is reported, as a factor.
BELOW = 0.4
#: Errors from here on are labeled below their mark, since chance is above it.
HIGH = 0.95


def rate_text(rate: float) -> str:
    """A false match rate in percent, without zeros at its end: 0.001 is "0.1 %"."""
    return f"{100 * rate:.10f}".rstrip("0").rstrip(".") + " %"


def plot_verification(pairs: Verification, theme: Theme, *, width: int = 620) -> Figure:
    """The false non-match rate over the false match rate, on a logarithmic axis, with its 95 % interval as a band.

    Dots mark the rates that tables report, a diamond the equal error rate. The dashed line is chance: FNMR = 1 - FMR.

    Args:
        pairs: From `verification_metrics`.
        theme: Colors.
        width: In CSS pixels.
    """
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure = new_figure(theme, width=width, height=round(0.62 * width))
    axes = figure.subplots()
    style_axes(axes, theme)
    color = theme.accent
    lowest = max(BELOW * min(pairs.fnmr_at, default=0.0), min(1 / pairs.impostors, 0.1))
    chance = np.geomspace(lowest, 1, 200)
    axes.plot(
        chance,
        100 * (1 - chance),
        color=theme.series[0],
        linewidth=1.4,
        linestyle=DASHES,
        label="chance: random distances",
    )
    fmr, fnmr = pairs.curve.T.numpy()
    fmr = np.maximum(fmr, 0.5 / pairs.impostors)  # a rate of 0 has no logarithm
    # nothing changes between two thresholds, hence steps
    if pairs.curve_interval is not None:
        low, high = 100 * pairs.curve_interval.T.numpy()
        axes.fill_between(
            fmr, low, high, step="post", color=color, alpha=0.18, linewidth=0, label="95 % interval over classes"
        )
    axes.step(fmr, 100 * fnmr, where="post", color=color, linewidth=2, label="this model")
    marks = [(rate, estimate.value, "", "o", color) for rate, estimate in pairs.fnmr_at.items()]
    if pairs.eer.value >= lowest:
        marks.append((pairs.eer.value, pairs.eer.value, "EER ", "D", theme.series[1]))
    for rate, error, name, marker, fill in marks:
        axes.plot(rate, 100 * error, marker, color=fill, markersize=6, markeredgecolor=theme.paper, zorder=4)
        axes.annotate(
            f"{name}{100 * error:.1f} %",
            (rate, 100 * error),
            xytext=(7, 6) if error < HIGH else (5, -14),
            textcoords="offset points",
            fontsize=8.5,
            color=theme.ink,
            path_effects=[withStroke(linewidth=HALO, foreground=theme.paper)],
        )
    axes.set_xscale("log")
    axes.set_xlim(lowest, 1)
    axes.set_ylim(0, 103)
    axes.xaxis.set_major_locator(LogLocator(numticks=2 - math.floor(math.log10(lowest))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: rate_text(rate)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} %"))
    axes.set_xlabel("FMR: pairs of two classes that are accepted", fontsize=9)
    axes.set_ylabel("FNMR: pairs of one class that are rejected", fontsize=9)
    add_legend(figure, theme, columns=4)
    return figure
