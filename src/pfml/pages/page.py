"""Self-contained HTML pages: values laid out by a template of `templates/`.

A page is a function that computes values and a template that shows them. Templates extend base.html, escape every
value, and have no script; plots are data: URIs, so that the one file opens anywhere, also without a network.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfml.plots.theme import DARK, LIGHT, PIXEL_DENSITY, Theme, in_both_themes
from pfml.storage.files import write_atomically
from pfml.templates import create_environment
from pfml.terminal import readable, visible
from pfml.version import __version__

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure

__all__ = ["Plot", "Table", "in_themes", "render", "short", "write_page"]

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Plot:
    """A plot on a page.

    Args:
        light: A PNG with `PIXEL_DENSITY` pixels per CSS pixel.
        alt: What it shows, for those who do not see it.
        dark: A PNG for readers who prefer dark pages; None for the same one.
    """

    light: bytes
    alt: str
    dark: bytes | None = None

    def __post_init__(self) -> None:
        for name, png in (("light", self.light), ("dark", self.dark)):
            if png is not None and not png.startswith(PNG_SIGNATURE):
                raise ValueError(f"{name} must be a PNG file, got bytes that begin with {png[:8]!r}")
        if not self.alt:
            raise ValueError("alt must describe the plot in words, got an empty text")

    @property
    def width(self) -> int:
        """In CSS pixels, read from the PNG."""
        return int(struct.unpack(">I", self.light[16:20])[0]) // PIXEL_DENSITY

    @property
    def height(self) -> int:
        """In CSS pixels."""
        return int(struct.unpack(">I", self.light[20:24])[0]) // PIXEL_DENSITY


def in_themes(plot: Callable[[Theme], Figure | bytes], alt: str) -> Plot:
    """The plot in both themes; `plot` makes a matplotlib figure or a PNG of a theme."""
    light, dark = in_both_themes(plot)
    return Plot(light, alt, dark)


@dataclass(frozen=True)
class Table:
    """A table of texts; the first column names the row.

    Args:
        columns: Headings.
        rows: As many texts each as there are columns.
        strong: (row, column) of cells to emphasize, counted from 0.
        is_dense: Whether to set it small, for many columns; rows without a name belong to the one above.
        prose: Columns that hold words, counted from 0: these start at the left, and their lines may break.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: frozenset[tuple[int, int]] = frozenset()
    is_dense: bool = False
    prose: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(f"a row must have {len(self.columns)} cells, got {len(row)} in row {number}")


def render(template: str, **values: Any) -> str:
    """The HTML of a template such as "run.html"; a value that it needs and does not get is an error."""
    return _environment().get_template(template).render(**values)


def write_page(path: Path, html: str) -> None:
    """Write a page so that a reader finds the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, readable(html).encode())


def short(class_name: str, length: int = 32) -> str:
    """A class name that fits into a caption, with characters that no font has written out."""
    class_name = visible(class_name)
    return class_name if len(class_name) <= length else class_name[: length - 3] + "..."


@cache
def _environment() -> Environment:
    environment = create_environment("pfml.pages", html=True)
    environment.filters |= {
        "css_variables": _css_variables,
        "data_uri": _data_uri,
        "one_line": _one_line,
        "short": short,
    }
    environment.globals |= {"light": LIGHT, "dark": DARK, "version": __version__}
    return environment


def _css_variables(theme: Theme) -> str:
    names = ("page", "paper", "ink", "muted", "line", "accent")
    return " ".join(f"--{name}: {getattr(theme, name)};" for name in names)


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _one_line(text: str) -> str:
    """The text without the line breaks of its template, escaped as it was."""
    return type(text)(" ".join(text.split()))
