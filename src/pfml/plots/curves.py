"""Learning curves: loss and metrics over epochs, from the log of a run."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pfml.data.image_set import PROTOCOLS
from pfml.plots.theme import Theme, new_figure, style_axes
from pfml.runs.folder import RunFolder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Curve", "loss_curve", "mean_loss_curve", "metric_curve", "plot_loss", "plot_metric"]

DASHES = (0, (4, 3))
MARKERS = "osD^v"


@dataclass(frozen=True)
class Curve:
    """A number over epochs; epoch 0 is before training.

    Args:
        name: In the legend.
        epochs, values: Its points.
        protocol: What was held out of training, a key of `pfml.data.image_set.PROTOCOLS`.
    """

    name: str
    epochs: tuple[float, ...]
    values: tuple[float, ...]
    protocol: str = "classes"


def metric_curve(
    folder: RunFolder, name: str, metric: str, *, role: str = "test", untrained: float | None = None
) -> Curve:
    """A metric at each evaluation.

    Args:
        folder: Of the run.
        name: Of the curve.
        metric: Its key, such as "recall_at_1".
        role: On which classes: "test" or "validation".
        untrained: The value before training, put at epoch 0.
    """
    points = [] if untrained is None else [(0.0, untrained)]
    points += [(float(entry["epoch"]), entry[role][metric]) for entry in _evaluations(folder)]
    protocol = folder.read_results().get("protocol", "classes") if folder.results.is_file() else "classes"
    return Curve(name, *_columns(points), protocol=protocol)


def loss_curve(folder: RunFolder, name: str) -> Curve:
    """The loss of each logged step, at the middle of the step on the axis of epochs."""
    first = _evaluations(folder)[0]
    steps_per_epoch = first["step"] / first["epoch"]
    points = [((entry["step"] - 0.5) / steps_per_epoch, entry["loss"]) for entry in folder.entries("step")]
    return Curve(name, *_columns(points))


def mean_loss_curve(folder: RunFolder, name: str) -> Curve:
    """The mean loss of the logged steps of each epoch, at the middle of the epoch."""
    losses: dict[int, list[float]] = {}
    for entry in folder.entries("step"):
        losses.setdefault(entry["epoch"], []).append(entry["loss"])
    return Curve(name, *_columns([(epoch + 0.5, statistics.fmean(values)) for epoch, values in losses.items()]))


def plot_metric(
    curves: Sequence[Curve], theme: Theme, *, levels: Mapping[str, float] | None = None, width: int = 470
) -> Figure:
    """One metric of several runs over epochs in percent, with dashed levels of what needs no training.

    Args:
        curves: Of one metric, shares; curve k has color k + 1 of the theme, color 0 is that of the levels. All have
            one protocol: numbers of unseen classes and of known ones cannot be compared.
        theme: Colors.
        levels: Name -> share.
        width: In CSS pixels.
    """
    from matplotlib.ticker import MaxNLocator

    protocols = {curve.protocol: PROTOCOLS[curve.protocol] for curve in curves}
    if len(protocols) > 1:
        raise ValueError(f"curves of one plot must have one protocol, got {' and '.join(protocols.values())}")
    figure = new_figure(theme, width=width, height=round(0.74 * width))
    axes = figure.subplots()
    style_axes(axes, theme)
    for name, level in (levels or {}).items():
        axes.axhline(100 * level, color=theme.series[0], linewidth=1.4, linestyle=DASHES, label=name)
    for curve, color, marker in zip(curves, theme.series[1:], MARKERS, strict=False):
        percent = [100 * value for value in curve.values]
        axes.plot(curve.epochs, percent, color=color, linewidth=2, marker=marker, markersize=4.5, label=curve.name)
    axes.set_xlabel("epoch", fontsize=9)
    axes.set_ylabel("%", fontsize=9, rotation=0, labelpad=8)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside upper left", ncols=2, fontsize=8.5, frameon=False, labelcolor=theme.ink)
    return figure


def plot_loss(steps: Curve, means: Curve, theme: Theme, *, color: int = 1, width: int = 300) -> Figure:
    """The loss of each logged step as a faint line, the mean of each epoch as a strong one.

    Args:
        steps: See `loss_curve`.
        means: See `mean_loss_curve`.
        theme: Colors.
        color: Which of the theme's colors.
        width: In CSS pixels.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure = new_figure(theme, width=width, height=round(0.66 * width))
    axes = figure.subplots()
    style_axes(axes, theme)
    axes.plot(steps.epochs, steps.values, color=theme.series[color], linewidth=0.8, alpha=0.45)
    axes.plot(means.epochs, means.values, color=theme.series[color], linewidth=2, marker="o", markersize=4)
    axes.set_xlabel("epoch", fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    return figure


def _evaluations(folder: RunFolder) -> list[dict[str, Any]]:
    entries = folder.entries("evaluation")
    if not entries:
        raise ValueError(f"{folder.log} must hold an evaluation, got none: the run ended before its first one")
    return entries


def _columns(points: list[tuple[float, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(x for x, _ in points), tuple(y for _, y in points)
