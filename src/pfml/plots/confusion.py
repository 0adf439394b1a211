"""The confusion matrix of known classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from pfml.plots.theme import Theme, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_confusion"]

#: Up to so many classes, counts are written into the cells.
WRITTEN = 20


def plot_confusion(counts: Tensor, names: Sequence[str], theme: Theme, *, width: int = 720) -> Figure:
    """Rows are the true class, columns the predicted one; mistakes are colored apart from what is right.

    Args:
        counts: (c, c) int64.
        names: Of the c classes.
        theme: Colors.
        width: In CSS pixels.
    """
    from matplotlib.colors import to_rgb

    classes = len(names)
    found = counts.numpy()
    shares = found / np.maximum(found.sum(axis=1, keepdims=True), 1)
    paper, right, wrong = (np.array(to_rgb(color)) for color in (theme.paper, theme.accent, theme.series[1]))
    tint = np.where(np.eye(classes, dtype=bool)[..., None], right, wrong)
    depth = np.where(found > 0, 0.15 + 0.85 * shares, 0.0)[..., None]  # a single mistake is seen too
    figure = new_figure(theme, width=width, height=round(0.92 * width))
    axes = figure.subplots()
    axes.set_facecolor(theme.paper)
    axes.imshow(paper + depth * (tint - paper), interpolation="nearest")
    if classes <= WRITTEN:
        for row, column in zip(*found.nonzero(), strict=True):
            color = theme.paper if shares[row, column] > 0.5 else theme.ink
            axes.text(column, row, f"{found[row, column]:,}", ha="center", va="center", fontsize=8, color=color)
    size = max(5.0, min(8.5, 340 / classes))
    axes.set_xticks(range(classes), names, rotation=90, fontsize=size)
    axes.set_yticks(range(classes), names, fontsize=size)
    axes.set_xlabel("predicted class", fontsize=9, color=theme.ink)
    axes.set_ylabel("true class", fontsize=9, color=theme.ink)
    axes.tick_params(colors=theme.muted, length=0, pad=4)
    axes.set_xticks(np.arange(classes + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(classes + 1) - 0.5, minor=True)
    axes.tick_params(which="minor", length=0)
    axes.grid(which="minor", color=theme.line, linewidth=0.6)
    for spine in axes.spines.values():
        spine.set_color(theme.line)
    return figure
