"""Where a run belongs in a table: which section, which row, which columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pfml.paper import PaperRow, PaperTable

__all__ = [
    "Frozen",
    "Place",
    "Record",
    "RowKey",
    "SectionKey",
    "is_in_paper",
    "measured",
    "place_of",
    "row_key",
    "same",
    "section_key",
    "with_swept_columns",
]

#: A line of `pfml.experiments.store.ResultsStore`.
Record = Mapping[str, Any]
Frozen = tuple[tuple[str, Any], ...]

#: Names of one backbone.
SAME_BACKBONE: dict[str, str] = {"dino_vits16": "dino_small"}


@dataclass(frozen=True)
class SectionKey:
    """What the rows of a section share; `settings` are those that the whole table has, such as the noise."""

    backbone: str
    dim: int | None
    settings: Frozen


@dataclass(frozen=True)
class RowKey:
    """What tells the rows of a section apart."""

    method: str
    dataset: str | None
    settings: Frozen
    is_tuned: bool = False


@dataclass(frozen=True)
class Place:
    """Where a run belongs: its section, its row, and the columns that it fills."""

    section: SectionKey
    row: RowKey
    columns: tuple[int, ...]


def measured(record: Record, metric: str, epoch: str = "last") -> float | None:
    """A result in the paper's units, percent but for distances and seconds; None if the run does not have it."""
    results = record["results"]
    value: Any
    if metric == "alignment":
        value = (results.get("alignment") or {}).get("paper") if epoch == "last" else None
    elif metric == "seconds_per_epoch":
        value = results.get("seconds_per_epoch") if epoch == "last" else None
    else:
        share = (results.get(epoch) or {}).get(metric)
        value = None if share is None else 100 * share
    return None if value is None or not math.isfinite(value) else float(value)


def place_of(table: PaperTable, record: Record) -> Place | None:
    """Where the run belongs, in the table as it is or with a new row or section; None if nowhere."""
    settings = record["settings"]
    if not set(table.settings) <= set(settings):
        return None
    fitting: dict[Frozen, list[int]] = {}
    for number, column in enumerate(table.columns):
        required, average = column.get("settings", {}), column.get("average")
        if column.get("dataset", record["dataset"]) != record["dataset"]:
            continue
        if column.get("dim", record["dim"]) != record["dim"] or not _holds(settings, required):
            continue
        if average is not None and not isinstance(settings.get(average), int):
            continue
        if record["status"] == "done" and measured(record, column["metric"]) is None:
            continue
        taken = {*required, *table.settings, average}
        rest = {name: value for name, value in settings.items() if name not in taken}
        fitting.setdefault(_frozen(rest), []).append(number)
    if not fitting:
        return None
    # the fewest settings left over: a column that asks for a setting comes before one that does not
    rest_key = min(fitting, key=len)
    in_columns = {name for column in table.columns for name in column}
    backbone: str = record["backbone"]
    section = SectionKey(
        SAME_BACKBONE.get(backbone, backbone),
        None if "dim" in in_columns else record["dim"],
        _frozen({name: settings[name] for name in table.settings}),
    )
    dataset = None if "dataset" in in_columns else record["dataset"]
    row = RowKey(record["method"], dataset, rest_key, is_tuned="tuning" in record)
    return Place(section, row, tuple(fitting[rest_key]))


def is_in_paper(table: PaperTable, place: Place) -> bool:
    """Whether the paper has this section and row, be our runs tuned or not."""
    own = replace(place.row, is_tuned=False)
    return any(
        section_key(table, section.backbone, section.dim) == place.section and row_key(row) == own
        for section in table.sections
        for row in section.rows
        if row.method is not None
    )


def section_key(table: PaperTable, backbone: str | None, dim: int | None) -> SectionKey:
    """The key of a section of the paper."""
    return SectionKey(backbone or "", dim, _frozen(table.settings))


def row_key(row: PaperRow) -> RowKey:
    """The key of a row of the paper."""
    return RowKey(row.method or "", row.dataset, _frozen(row.settings))


def with_swept_columns(table: PaperTable, records: Sequence[Record]) -> PaperTable:
    """A figure with a column for each value that was run, in order."""
    if table.sweep is None:
        return table
    sweep = table.sweep
    own: list[float] = [column["settings"][sweep] for column in table.columns]
    values = list(own)
    for record in records:
        value = record["settings"].get(sweep)
        if isinstance(value, int | float) and not any(same(value, one) for one in values):
            values.append(value)
    if len(values) == len(own):
        return table
    values.sort()

    def widened(row: PaperRow) -> PaperRow:
        cells = [
            row.cells[own.index(value)]
            if value in own
            else replace(row.cells[0], printed="-", value=None, std=None, settings={sweep: value})
            for value in values
        ]
        return replace(row, cells=tuple(cells), as_printed=tuple(cell.printed for cell in cells))

    return replace(
        table,
        columns=tuple({**table.columns[0], "settings": {sweep: value}} for value in values),
        headings=tuple(f"{value:g}" for value in values),
        sections=tuple(replace(one, rows=tuple(widened(row) for row in one.rows)) for one in table.sections),
    )


def _holds(settings: Mapping[str, Any], required: Mapping[str, Any]) -> bool:
    return all(name in settings and same(settings[name], value) for name, value in required.items())


def same(one: Any, other: Any) -> bool:
    """Whether two settings are equal but for rounding."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
    return bool(one == other)


def _frozen(settings: Mapping[str, Any]) -> Frozen:
    """Settings as something that can be compared; numbers that differ by rounding only are the same."""
    return tuple((name, _plain(settings[name])) for name in sorted(settings))


def _plain(value: Any) -> Any:
    return round(value, 9) if isinstance(value, float) else value if isinstance(value, int) else str(value)
