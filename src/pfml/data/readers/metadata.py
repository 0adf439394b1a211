"""What a CSV table says of images beside path and label: typed columns of texts, numbers, dates and lists."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pfml.data.readers.table import table_lines
from pfml.storage.columns import Column, Table, column_of
from pfml.storage.values import KINDS, Kind, Value, parse_date, parse_number
from pfml.typos import did_you_mean

__all__ = ["IGNORE", "ImageMetadata", "parse_columns", "read_metadata"]

#: In place of a type: the column is left out.
IGNORE = "ignore"
#: Columns that say which image it is, and what it shows.
TAKEN = ("path", "label", "class")
#: A whole number that begins with 0 is a code, and so is one that float64 would change.
CODE = re.compile(r"[+-]?(0\d+|\d{16,})")
SEPARATORS = "|;"


@dataclass(frozen=True, eq=False)
class ImageMetadata:
    """What a table says of images.

    Args:
        file: The table.
        paths: As the table has them, one per row.
        table: The other columns.
        remarks: Sentences about the table that a user should read.
    """

    file: Path
    paths: tuple[str, ...]
    table: Table
    remarks: tuple[str, ...] = ()


def parse_columns(text: str) -> dict[str, str]:
    """Column -> type, of a text such as "price:number,taken:date".

    Example:
        >>> parse_columns("price:number, taken:date, notes:ignore")
        {'price': 'number', 'taken': 'date', 'notes': 'ignore'}
    """
    found = {}
    for part in text.split(","):
        name, colon, kind = (piece.strip() for piece in part.rpartition(":"))
        if not name or not colon or kind not in (*KINDS, IGNORE):
            raise ValueError(
                f"columns must be given as NAME:TYPE, TYPE one of {', '.join((*KINDS, IGNORE))}, got {part.strip()!r}"
                + did_you_mean(kind, (*KINDS, IGNORE))
            )
        found[name] = kind
    return found


def read_metadata(
    file: Path, *, kinds: Mapping[str, str] | None = None, known: Mapping[str, Kind] | None = None
) -> ImageMetadata:
    """The columns of a CSV table with the column `path`, without path, label and class.

    A column is a number, a date (2024-05-01, with or without a time) or a list (["a", "b"], or a|b, or a;b) if all of
    its cells are; else it is a text. Whole numbers that begin with 0, or have more than 15 digits, are texts. Empty
    cells are missing values; a column of these alone is left out.

    Args:
        file: In UTF-8.
        kinds: Column -> its type, or "ignore", in place of what its cells look like.
        known: Column -> the type that it has elsewhere; `kinds` comes first.

    Raises:
        ValueError: If a cell is not of its column's type; it names file, line and column.
    """
    kinds, known = kinds or {}, known or {}
    lines: list[int] = []
    paths: list[str] = []
    cells_of: dict[str, list[str]] = {}
    once: dict[str, str] = {}  # a text that repeats is kept once
    names: list[str] = []
    for line, header, cells in table_lines(file, ("path",)):
        if not lines:
            _require_names(file, header, kinds)
            names = [name for name in header if name not in ("", *TAKEN) and kinds.get(name) != IGNORE]
            cells_of, places = {name: [] for name in names}, {name: header.index(name) for name in ("path", *names)}
            has_class = "class" in header
        lines.append(line)
        paths.append(cells[places["path"]])
        for name in names:
            cell = cells[places[name]]
            cells_of[name].append(once.setdefault(cell, cell))
    if not lines:
        raise ValueError(f"{file} must list an image at least, got none below its first line")
    columns = {
        name: _column(name, cells, file, lines, kinds.get(name), known.get(name))
        for name, cells in cells_of.items()
        if any(cells)
    }
    remarks = (f"the column class of {file} is left out: class is the label",) if has_class else ()
    return ImageMetadata(file, tuple(paths), Table(len(paths), columns), remarks)


def _require_names(file: Path, header: Sequence[str], kinds: Mapping[str, str]) -> None:
    for name in kinds:
        if name not in header or name in TAKEN:
            rest = [one for one in header if one and one not in TAKEN]
            found = f"got {name}, and {file} has {', '.join(rest) or 'none'}"
            raise ValueError(f"the columns whose type is given must be metadata, {found}" + did_you_mean(name, rest))
    for name in header:
        if name and header.count(name) > 1 and kinds.get(name) != IGNORE:
            raise ValueError(f"{file} must have one column {name}, got {header.count(name)}")


def _column(
    name: str, cells: Sequence[str], file: Path, lines: Sequence[int], given: str | None, known: Kind | None
) -> Column:
    kind = given or known or _looks_like([cell for cell in cells if cell])
    values: list[Value | None] = []
    for cell, line in zip(cells, lines, strict=True):
        value = _value(kind, cell) if cell else None
        if cell and value is None and kind != "list":
            why = " as in the index" if given is None and known is not None else ""
            raise ValueError(
                f"{file}, line {line}, column {name} must be a {kind}{why}, got {cell!r}: correct it, leave it empty, "
                f"or give the column another type with --columns {name}:text"
            )
        values.append(value)
    return column_of(next(one for one in KINDS if one == kind), values)


def _looks_like(cells: Sequence[str]) -> str:
    """The type of which all cells are."""
    if all(parse_number(cell) is not None and not CODE.fullmatch(cell) for cell in cells):
        return "number"
    if all(parse_date(cell) for cell in cells):
        return "date"
    if all(_json_list(cell) is not None for cell in cells):
        return "list"
    return "list" if any(_is_divided(cell, mark, cells) for mark in SEPARATORS for cell in cells) else "text"


def _is_divided(cell: str, mark: str, cells: Sequence[str]) -> bool:
    """Whether a cell has items between marks; prose has blanks after them."""
    return mark in cell.strip(mark) and not any(f"{mark} " in one or f" {mark}" in one for one in cells)


def _value(kind: str, cell: str) -> Value | None:
    """The value of a cell that is not empty; None if it is not of this type."""
    if kind == "number":
        return parse_number(cell)
    if kind == "date":
        return parse_date(cell)
    if kind == "list":
        items = _json_list(cell)
        if items is None:
            mark = next((one for one in SEPARATORS if one in cell), SEPARATORS[0])
            items = [item.strip() for item in cell.split(mark)]
        return tuple(item for item in items if item) or None
    return cell


def _json_list(cell: str) -> list[str] | None:
    """The texts of a JSON list; None if it is none."""
    if not cell.startswith("["):
        return None
    try:
        found = json.loads(cell)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and all(isinstance(item, str) for item in found) else None
