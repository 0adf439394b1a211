"""The theme: colors of pages and plots, light and dark, and plots as PNG."""

from __future__ import annotations

import colorsys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from PIL import Image

__all__ = [
    "DARK",
    "LIGHT",
    "PIXEL_DENSITY",
    "Theme",
    "class_colors",
    "in_both_themes",
    "png_of_figure",
    "png_of_image",
    "rc_params",
]

#: Pixels of a plot per CSS pixel, so that plots are sharp on dense screens.
PIXEL_DENSITY = 2
INCH = 96  # CSS pixels


@dataclass(frozen=True)
class Theme:
    """Colors that belong together.

    Args:
        page: Behind everything.
        paper: Behind plots and tables.
        ink: Of text.
        muted: Of captions and axes.
        line: Of rules and grids.
        accent: Of what should be seen first.
        series: Of the lines of a plot, in order; they differ in lightness too, for print and color-blind readers.
    """

    page: str
    paper: str
    ink: str
    muted: str
    line: str
    accent: str
    series: tuple[str, ...]


LIGHT = Theme(
    page="#f6f7f9",
    paper="#ffffff",
    ink="#16191d",
    muted="#5a6370",
    line="#dfe3e8",
    accent="#1f4fd8",
    series=("#8a919c", "#d97706", "#1f4fd8", "#0f766e", "#9d174d"),
)
DARK = Theme(
    page="#101216",
    paper="#191c22",
    ink="#eceef1",
    muted="#a0a8b4",
    line="#2e333c",
    accent="#86a9ff",
    series=("#858d99", "#fbbf6b", "#86a9ff", "#4fd1c0", "#f28ab2"),
)


def in_both_themes(plot: Callable[[Theme], Figure | bytes]) -> tuple[bytes, bytes]:
    """A plot as PNG in light and in dark colors; `plot` returns a matplotlib figure or a PNG."""
    light, dark = (made if isinstance(made, bytes) else png_of_figure(made) for made in (plot(LIGHT), plot(DARK)))
    return light, dark


def new_figure(theme: Theme, *, width: int, height: int) -> Figure:
    """An empty figure of this size in CSS pixels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / INCH, height / INCH), dpi=INCH * PIXEL_DENSITY, layout="constrained")
    figure.set_facecolor(theme.paper)
    return figure


def rc_params(theme: Theme) -> dict[str, Any]:
    """The theme as parameters of matplotlib, for plots of your own: `plt.rcParams.update(rc_params(LIGHT))`."""
    from matplotlib.rcsetup import cycler

    return {
        "figure.facecolor": theme.paper,
        "figure.constrained_layout.use": True,
        "axes.facecolor": theme.paper,
        "axes.edgecolor": theme.line,
        "axes.labelcolor": theme.ink,
        "axes.titlecolor": theme.ink,
        "axes.titlelocation": "left",
        "axes.titlesize": 10,
        "axes.labelsize": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.prop_cycle": cycler(color=[*theme.series[2:], theme.series[1], theme.series[0]]),
        "grid.color": theme.line,
        "grid.linewidth": 0.7,
        "lines.linewidth": 2.0,
        "xtick.color": theme.line,
        "ytick.color": theme.line,
        "xtick.labelcolor": theme.muted,
        "ytick.labelcolor": theme.muted,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "text.color": theme.ink,
    }


def style_axes(axes: Axes, theme: Theme) -> None:
    """Thin axes in the colors of the theme, with a grid and without a box."""
    axes.set_facecolor(theme.paper)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme.line)
    axes.tick_params(colors=theme.muted, labelsize=8.5, length=0, pad=5)
    axes.grid(color=theme.line, linewidth=0.7)
    axes.set_axisbelow(True)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set_color(theme.ink)


def add_legend(figure: Figure, theme: Theme, *, columns: int) -> None:
    """One legend above all axes, each name once."""
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside upper left",
        ncols=columns,
        fontsize=8.5,
        frameon=False,
        labelcolor=theme.ink,
    )


def png_of_figure(figure: Figure) -> bytes:
    """A matplotlib figure as a small PNG."""
    from PIL import Image

    buffer = BytesIO()
    with warnings.catch_warnings():
        # names of classes may hold characters that no font has; the warning would send them to the terminal
        warnings.filterwarnings("ignore", message=r"(?s)Glyph \d+ .* missing from", category=UserWarning)
        figure.savefig(buffer, format="png", dpi=INCH * PIXEL_DENSITY, facecolor=figure.get_facecolor())
    return png_of_image(Image.open(buffer, formats=["PNG"]).convert("RGB"))


def png_of_image(image: Image.Image, *, transparent: np.ndarray | None = None) -> bytes:
    """An image as a PNG of at most 255 colors, a third of the size of one of all colors.

    Args:
        image: Any size and mode.
        transparent: (height, width) bool: pixels through which the page is seen; None for none.
    """
    from PIL import Image

    buffer = BytesIO()
    reduced = image.convert("RGB").quantize(255, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    if transparent is None:
        reduced.save(buffer, format="PNG", optimize=True)
        return buffer.getvalue()
    palette = reduced.getpalette() or []
    numbers = np.where(transparent, len(palette) // 3, np.asarray(reduced)).astype(np.uint8)
    cut = Image.fromarray(numbers)
    cut.putpalette([*palette, 128, 128, 128])
    cut.save(buffer, format="PNG", optimize=True, transparency=len(palette) // 3)
    return buffer.getvalue()


def class_colors(count: int, theme: Theme) -> list[tuple[float, float, float]]:
    """As many colors as there are classes: all hues, alternating in lightness, RGB in [0, 1]."""
    levels = (0.62, 0.74) if theme is DARK else (0.34, 0.46)
    return [colorsys.hls_to_rgb(k / count, levels[k % 2], 0.72) for k in range(count)]
