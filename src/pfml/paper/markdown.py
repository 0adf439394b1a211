"""Tables as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from pfml.paper.grid import Entry, Grid

__all__ = ["markdown"]


def markdown(title: str, lead: str, grids: Sequence[Grid], *, pictures: Mapping[str, str] | None = None) -> str:
    """A document with all tables, and at its end pictures: title -> file name."""
    parts = [f"# {_escaped(title)}", _escaped(lead), *(_grid(grid) for grid in grids)]
    for heading, file in (pictures or {}).items():
        parts += [f"## {_escaped(heading)}", f"![{_escaped(heading)}](<{file}>)"]
    return "\n\n".join(parts) + "\n"


def _grid(grid: Grid) -> str:
    parts = [f"## {_escaped(grid.title)}", _escaped(grid.caption)]
    for section in grid.sections:
        if section.title:
            parts.append(f"### {_escaped(section.title)}")
        lines = [
            _line(["method", "", *grid.headings]),
            "|:---|:---|" + "---:|" * len(grid.headings),
        ]
        for row in section.rows:
            for number, line in enumerate(row.lines):
                name = f"**{_escaped(row.name)}**" if number == 0 else ""
                lines.append(_line([name, line.whose, *line.entries]))
        parts.append("\n".join(lines))
    if grid.notes:
        parts.append("\n".join(f"{number}. {_escaped(note)}" for number, note in enumerate(grid.notes, start=1)))
    return "\n\n".join(parts)


def _line(cells: Sequence[str | Entry]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _cell(cell: str | Entry) -> str:
    if isinstance(cell, str):
        return cell if cell.startswith("**") else _escaped(cell)
    marks = f"<sup>{','.join(map(str, cell.notes))}</sup>" if cell.notes else ""
    return _escaped(cell.text) + marks


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_\[\]<>|#~&$])", r"\\\1", " ".join(text.split()))
