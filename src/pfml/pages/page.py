"""One self-contained HTML page: text, tables and pictures in a single file that opens anywhere, also without a network.

Every text is escaped, pictures are data: URIs, and there is no script.
"""

from __future__ import annotations

import base64
import struct
from dataclasses import dataclass
from html import escape
from pathlib import Path

from pfml.plots.theme import DARK, LIGHT, PIXEL_DENSITY, Theme
from pfml.storage.files import write_atomically
from pfml.terminal import readable

__all__ = ["Figure", "Gallery", "Listing", "Page", "Section", "Table", "render", "write_page"]

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Figure:
    """A picture with a caption.

    Args:
        light: The picture as PNG, with `PIXEL_DENSITY` pixels per CSS pixel.
        caption: Says what is drawn.
        alt: The same in short, for those who do not see it.
        dark: The picture for readers who prefer dark pages; None for the same one.
        title: Above the picture.
    """

    light: bytes
    caption: str
    alt: str
    dark: bytes | None = None
    title: str = ""

    def __post_init__(self) -> None:
        for name, picture in (("light", self.light), ("dark", self.dark)):
            if picture is not None and not picture.startswith(PNG_SIGNATURE):
                raise ValueError(f"{name} must be a PNG file, got bytes that begin with {picture[:8]!r}")
        if not self.alt:
            raise ValueError("alt must describe the picture in words, got an empty text")


@dataclass(frozen=True)
class Gallery:
    """Pictures side by side, below each other on narrow screens, with a caption for all of them.

    Args:
        figures: The pictures.
        caption: What they have in common.
        narrowest: CSS pixels that a picture needs beside another one.
    """

    figures: tuple[Figure, ...]
    caption: str = ""
    narrowest: int = 340


@dataclass(frozen=True)
class Table:
    """Rows of texts; the first column names the row.

    Args:
        columns: Headings.
        rows: As many texts each as there are columns.
        caption: Says what the numbers are.
        strong: (row, column) of cells to emphasize, counted from 0.
        is_dense: Whether to set it small, for many columns; rows without a name belong to the one above.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    strong: frozenset[tuple[int, int]] = frozenset()
    is_dense: bool = False

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(f"a row must have {len(self.columns)} cells, got {len(row)} in row {number}")


@dataclass(frozen=True)
class Listing:
    """Text as it was typed, such as a command or a file; folded behind `summary` unless that is empty."""

    text: str
    summary: str = ""


Block = str | Figure | Gallery | Table | Listing


@dataclass(frozen=True)
class Section:
    """A heading and what comes under it; a plain text is a paragraph."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Page:
    """A whole page.

    Args:
        title: Heading and title.
        lead: The paragraph below it.
        sections: In order.
        footer: Small print.
    """

    title: str
    lead: str
    sections: tuple[Section, ...]
    footer: str = ""


def write_page(path: Path, page: Page) -> None:
    """Write the page so that a reader finds the old file or the new one, never half of one."""
    write_atomically(path, readable(render(page)).encode())


def render(page: Page) -> str:
    """The page as HTML."""
    sections = "\n".join(_section(section) for section in page.sections)
    footer = f"<footer><p>{escape(page.footer)}</p></footer>\n" if page.footer else ""
    # the policy makes a browser refuse whatever would come from elsewhere
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(page.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<header>\n<h1>{escape(page.title)}</h1>\n<p class="lead">{escape(page.lead)}</p>\n</header>\n'
        f"{sections}\n</main>\n{footer}</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    blocks = "\n".join(_block(block) for block in section.blocks)
    return f"<section>\n<h2>{escape(section.title)}</h2>\n{blocks}\n</section>"


def _block(block: Block) -> str:
    match block:
        case str():
            return f"<p>{escape(block)}</p>"
        case Figure():
            return _figure(block)
        case Gallery():
            return _gallery(block)
        case Table():
            return _table(block)
        case Listing():
            return _listing(block)
    raise TypeError(f"a block must be a text, Figure, Gallery, Table or Listing, got {type(block).__name__}")


def _figure(figure: Figure) -> str:
    width, height = (side // PIXEL_DENSITY for side in struct.unpack(">II", figure.light[16:24]))
    image = f'<img src="{_data(figure.light)}" alt="{escape(figure.alt)}" width="{width}" height="{height}">'
    if figure.dark is not None:
        source = f'<source srcset="{_data(figure.dark)}" media="(prefers-color-scheme: dark)">'
        image = f"<picture>{source}{image}</picture>"
    title = f"<h3>{escape(figure.title)}</h3>" if figure.title else ""
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>" if figure.caption else ""
    return f"<figure>{title}{image}{caption}</figure>"


def _data(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _gallery(gallery: Gallery) -> str:
    figures = "\n".join(_figure(figure) for figure in gallery.figures)
    caption = f'<p class="caption">{escape(gallery.caption)}</p>' if gallery.caption else ""
    return f'<div class="gallery" style="--narrowest: {gallery.narrowest}px">\n{figures}\n</div>\n{caption}'


def _table(table: Table) -> str:
    heads = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "\n".join(_row(table, number) for number in range(len(table.rows)))
    # beside the table, since on a narrow screen the table scrolls and its caption should not
    caption = f'<p class="caption">{escape(table.caption)}</p>' if table.caption else ""
    classes = "table dense" if table.is_dense else "table"
    # focusable, so that the keyboard can scroll it too
    return (
        f'<div class="{classes}"><div class="scroll" tabindex="0"><table>\n<thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>{caption}</div>"
    )


def _row(table: Table, number: int) -> str:
    name, *values = table.rows[number]
    cells = [f'<th scope="row">{escape(name)}</th>']
    for column, value in enumerate(values, start=1):
        content = f"<strong>{escape(value)}</strong>" if (number, column) in table.strong else escape(value)
        cells.append(f"<td>{content}</td>")
    return f"<tr>{''.join(cells)}</tr>"


def _listing(listing: Listing) -> str:
    text = f'<pre tabindex="0">{escape(listing.text)}</pre>'
    return f"<details><summary>{escape(listing.summary)}</summary>{text}</details>" if listing.summary else text


def _variables(theme: Theme) -> str:
    names = ("page", "paper", "ink", "muted", "line", "accent")
    return " ".join(f"--{name}: {getattr(theme, name)};" for name in names)


STYLE = f"""
:root {{ color-scheme: light dark; {_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  -webkit-text-size-adjust: 100%; }}
main, footer {{ max-width: 1060px; margin: 0 auto; padding: 0 clamp(16px, 4vw, 40px); }}
header {{ padding: clamp(32px, 6vw, 64px) 0 8px; }}
h1 {{ margin: 0 0 12px; font-size: clamp(1.7rem, 4.5vw, 2.5rem); line-height: 1.15; letter-spacing: -0.02em; }}
h2 {{ margin: 0 0 12px; font-size: 1.3rem; line-height: 1.3; letter-spacing: -0.01em; }}
h3 {{ margin: 0 0 10px; font-size: 0.95rem; font-weight: 600; }}
p {{ margin: 0 0 14px; max-width: 74ch; }}
.lead {{ font-size: 1.1rem; color: var(--muted); }}
section {{ padding: 26px 0 14px; }}
section + section {{ border-top: 1px solid var(--line); }}
figure {{ margin: 0 0 16px; padding: 16px; background: var(--paper); border: 1px solid var(--line);
  border-radius: 12px; }}
figure img {{ display: block; max-width: 100%; height: auto; margin: 0 auto; }}
figcaption, .caption {{ color: var(--muted); font-size: 0.875rem; line-height: 1.5; }}
figcaption {{ margin-top: 12px; overflow-wrap: anywhere; }}
.gallery {{ display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, var(--narrowest)), 1fr)); }}
.gallery figure {{ margin: 0; }}
.gallery img {{ width: 100%; }}
.gallery + .caption {{ margin: 12px 0 16px; max-width: 90ch; }}
.gallery + .gallery {{ margin-top: 16px; }}
.scroll {{ overflow-x: auto; }}
.table {{ margin: 0 0 16px; background: var(--paper); border: 1px solid var(--line);
  border-radius: 12px; }}
table {{ border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }}
.table .caption {{ max-width: none; margin: 0; padding: 12px 16px; border-top: 1px solid var(--line); }}
th, td {{ padding: 9px 16px; text-align: right; white-space: nowrap; }}
th:first-child {{ text-align: left; }}
thead th {{ color: var(--muted); font-size: 0.85rem; font-weight: 600; border-bottom: 1px solid var(--line); }}
tbody th {{ font-weight: 500; }}
tbody tr + tr > * {{ border-top: 1px solid var(--line); }}
td strong {{ color: var(--accent); }}
main:has(.dense) {{ max-width: 1440px; }}
.dense th, .dense td {{ padding: 4px 8px; font-size: 0.8rem; }}
.dense td:nth-child(2) {{ text-align: left; color: var(--muted); }}
.dense tbody tr:has(th:empty) > * {{ border-top: 0; padding-top: 0; }}
.dense + .dense {{ margin-top: 16px; }}
pre {{ margin: 0 0 16px; padding: 14px 16px; overflow-x: auto; background: var(--paper);
  border: 1px solid var(--line); border-radius: 12px; font: 0.85rem/1.5 ui-monospace, Menlo, Consolas, monospace; }}
details {{ margin: 0 0 12px; }}
summary {{ cursor: pointer; padding: 4px 0 8px; font-weight: 500; }}
footer {{ padding-top: 8px; padding-bottom: 40px; color: var(--muted); font-size: 0.875rem; }}
@media (max-width: 600px) {{
  figure {{ padding: 10px; }}
  th, td {{ padding: 8px 10px; font-size: 0.9rem; }}
  tbody th {{ white-space: normal; min-width: 7.5em; }}
}}
@media print {{ section {{ break-inside: avoid; }} }}
"""
