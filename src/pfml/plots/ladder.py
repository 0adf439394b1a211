"""The ladder of a run: what each rung gained over the pretrained backbone, from the log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pfml.evaluation.metrics import metric_label, metric_text
from pfml.ladder.crossfit import Gain
from pfml.plots.theme import Theme, new_figure, style_axes
from pfml.runs.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LoggedRung", "logged_rungs", "plot_ladder", "shown_gain"]

DASHES = (0, (4, 3))
FACTOR = 100  # gains are differences of fractions; points are percent
ROW, FRAME = 52, 62  # CSS pixels of one rung, and of all that is above and below them


@dataclass(frozen=True)
class LoggedRung:
    """A rung as the log of a run has it.

    Args:
        name: Such as "closed form".
        candidate: The best candidate of the rung, in words.
        scores: Metric -> its validated value; empty if nothing could be validated.
        gains: Metric -> its gain over the pretrained backbone.
        seconds: That the rung took; None if the log does not say.
        is_kept: Whether its model is that of the run.
    """

    name: str
    candidate: str
    scores: dict[str, float]
    gains: dict[str, Gain]
    seconds: float | None
    is_kept: bool


def logged_rungs(folder: RunFolder) -> list[LoggedRung]:
    """The rungs in the log of a run, from the bottom up; none for a run that did not work up the ladder."""
    return [_rung(entry) for entry in folder.entries("rung")]


def _rung(entry: dict[str, Any]) -> LoggedRung:
    """Keys that are unknown here are passed over."""
    gains = {metric: Gain(gain["mean"], gain["error"]) for metric, gain in entry.get("gains", {}).items()}
    return LoggedRung(
        name=entry["name"],
        candidate=entry.get("candidate", ""),
        scores=entry.get("scores", {}),
        gains=gains,
        seconds=entry.get("seconds"),
        is_kept=entry.get("is_kept", False),
    )


def shown_gain(metric: str, gain: Gain) -> str:
    """The gain with its sign, in the unit of the metric, such as "+2.1"."""
    text = metric_text(metric, gain.mean)
    return text if text.startswith("-") else f"+{text}"


def plot_ladder(rungs: Sequence[LoggedRung], metric: str, theme: Theme, *, width: int = 470) -> Figure:
    """The gain of each rung over the first one in a metric, a row for each from the bottom up.

    Bars are 95 % intervals, and labels the validated values with the gains. The rung that was kept is in the accent
    color. A rung without a gain has an empty row. The scale fits the gains in all metrics, so that plots of one ladder
    compare.

    Args:
        rungs: See `logged_rungs`.
        metric: Its key, such as "map_at_r".
        theme: Colors.
        width: In CSS pixels.
    """
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(theme, width=width, height=FRAME + ROW * len(rungs))
    axes = figure.subplots()
    style_axes(axes, theme)
    axes.grid(visible=False, axis="y")
    axes.axvline(0, color=theme.series[0], linewidth=1.4, linestyle=DASHES, zorder=1)
    for height, rung in enumerate(rungs):
        color, weight = (theme.accent, "bold") if rung.is_kept else (theme.series[0], "normal")
        if rung.is_kept:
            axes.axhspan(height - 0.5, height + 0.5, color=theme.accent, alpha=0.09, linewidth=0, zorder=0)
        if metric not in rung.gains or metric not in rung.scores:
            continue
        gain = rung.gains[metric]
        mean, reach = FACTOR * gain.mean, FACTOR * _reach(gain)
        axes.errorbar(
            mean,
            height,
            xerr=reach or None,
            fmt="o",
            color=color,
            markersize=8 if rung.is_kept else 6.5,
            elinewidth=2.6 if rung.is_kept else 1.8,
            capsize=4 if reach else 0,
        )
        axes.annotate(
            metric_text(metric, rung.scores[metric]) + (f" ({shown_gain(metric, gain)})" if height else ""),
            (mean, height),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
            fontweight=weight,
            color=theme.ink,
            path_effects=[withStroke(linewidth=3, foreground=theme.paper)],
        )
    ends = [gain.mean + side * _reach(gain) for rung in rungs for gain in rung.gains.values() for side in (-1, 1)]
    low, high = FACTOR * min(0.0, *ends), FACTOR * max(0.0, *ends)
    margin = max(0.08 * (high - low), 0.5)
    axes.set(xlim=(low - margin, high + margin), ylim=(-0.5, len(rungs) - 0.5))
    axes.set_yticks(range(len(rungs)), [rung.name + (" (kept)" if rung.is_kept else "") for rung in rungs])
    for label, rung in zip(axes.get_yticklabels(), rungs, strict=True):
        label.set(color=theme.ink, fontsize=9, fontweight="bold" if rung.is_kept else "normal")
    axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:+g}" if value else "0")
    axes.set_xlabel(f"gain in {metric_label(metric)}, points", fontsize=9)
    return figure


def _reach(gain: Gain) -> float:
    """How far the 95 % interval reaches to each side; 0 where the error is unknown, as with a single class."""
    return gain.interval[1] - gain.mean if math.isfinite(gain.error) else 0.0
