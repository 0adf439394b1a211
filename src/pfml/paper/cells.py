"""Cell lookup: which run belongs in which table, section, row and columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pfml.paper.tables import EMPTY, Row, Section, Table, result_tables

__all__ = [
    "Frozen",
    "Record",
    "RowKey",
    "RunCells",
    "SectionKey",
    "find_cells",
    "latest",
    "measured",
    "other_runs",
    "records_by_table",
    "row_key",
    "same",
    "section_key",
    "tables_named",
    "tables_of",
    "with_swept_columns",
    "without_repetitions",
]

#: A line of `pfml.experiments.store.ResultsStore`.
Record = Mapping[str, Any]
Frozen = tuple[tuple[str, Any], ...]

#: Names of one backbone.
SAME_BACKBONE: dict[str, str] = {"dino_vits16": "dino_small"}
#: The experiment that draws figures of a run.
FIGURES = "figures"


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
class RunCells:
    """The cells that a run fills: section, row, and numbers of columns."""

    section: SectionKey
    row: RowKey
    columns: tuple[int, ...]


def find_cells(table: Table, record: Record) -> RunCells | None:
    """The cells that the run fills, in the table as it is or with a new row or section; None if there are none."""
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
    return RunCells(section, row, tuple(fitting[rest_key]))


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


def section_key(section: Section) -> SectionKey:
    """The key of a section."""
    return SectionKey(section.backbone or "", section.dim, _frozen(section.settings))


def row_key(row: Row) -> RowKey:
    """The key of a row."""
    return RowKey(row.method or "", row.dataset, _frozen(row.settings), row.is_tuned)


def latest(records: Sequence[Record]) -> list[Record]:
    """The records that count: of several with one experiment and key the last that is done, else the last."""
    chosen: dict[tuple[str, str], Record] = {}
    for record in records:
        identity = (record["experiment"], record["key"])
        before = chosen.get(identity)
        if before is None or record["status"] == "done" or before["status"] != "done":
            chosen[identity] = record
    return list(chosen.values())


def without_repetitions(records: Sequence[Record]) -> list[Record]:
    """The records without those of `figures` whose run another experiment has: figures of it, and no other numbers."""
    others = {_result(one) for one in records if one["experiment"] != FIGURES and one["status"] == "done"}
    return [one for one in records if one["experiment"] != FIGURES or _result(one) not in others]


def tables_named(experiment: str) -> list[Table]:
    """The tables that an experiment is run for ("mlrc": mlrc-cub and mlrc-cars), by its name or by theirs."""
    return [table for table in result_tables() if experiment in (table.experiment, table.id)]


def tables_of(experiment: str) -> list[Table]:
    """The tables that runs of an experiment may fill: those that it is run for, or all if there are none."""
    return tables_named(experiment) or result_tables()


def records_by_table(experiment: str, records: Sequence[Record]) -> list[tuple[Table, list[Record]]]:
    """The tables that the runs of one experiment fill, each with its runs.

    A run is in every table of the paper that has its row, else in the first with columns for it. Runs on a data set
    that the paper does not have get a copy of the table, without the paper's rows.
    """
    tables = tables_of(experiment)
    chosen: dict[str, list[Record]] = {}
    foreign: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        exact = [table for table in tables if _has_row(table, record)]
        near = [table for table in tables if _fits(table, record)][:1]
        for table in exact or near:
            if record["dataset"] in _datasets(table) or table.sweep is not None:
                chosen.setdefault(table.id, []).append(record)
            else:
                foreign.setdefault((table.id, record["dataset"]), []).append(record)
    by_id = {table.id: table for table in tables}
    found = [(table, chosen[table.id]) for table in tables if table.id in chosen]
    return found + [(_for_dataset(by_id[key], dataset), runs) for (key, dataset), runs in foreign.items()]


def other_runs(records: Sequence[Record], *, experiment: str | None = None) -> list[Record]:
    """The runs that have a cell in no table."""
    return [
        record
        for record in latest(records)
        if experiment in (None, record["experiment"])
        and not any(_fits(table, record) for table in tables_of(record["experiment"]))
    ]


def with_swept_columns(table: Table, records: Sequence[Record]) -> Table:
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

    def widened(row: Row) -> Row:
        cells = [
            row.cells[own.index(value)]
            if value in own
            else replace(row.cells[0], printed=EMPTY, value=None, std=None, settings={sweep: value})
            for value in values
        ]
        return replace(row, cells=tuple(cells), as_printed=tuple(cell.printed for cell in cells))

    return replace(
        table,
        columns=tuple({**table.columns[0], "settings": {sweep: value}} for value in values),
        headings=tuple(f"{value:g}" for value in values),
        sections=tuple(replace(one, rows=tuple(widened(row) for row in one.rows)) for one in table.sections),
    )


def same(one: Any, other: Any) -> bool:
    """Whether two settings are equal but for rounding."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)
    return bool(one == other)


def _has_row(table: Table, record: Record) -> bool:
    """Whether the paper has the section and row of the run, tuned or not."""
    cells = find_cells(table, record)
    if cells is None:
        return False
    own = replace(cells.row, is_tuned=False)
    return any(
        section_key(section) == cells.section and row_key(row) == own
        for section in table.sections
        for row in section.rows
        if row.method is not None
    )


def _fits(table: Table, record: Record) -> bool:
    """Whether the run has a cell in the table, be it in a new row, section or column, or in a copy for its data set."""
    if record["dataset"] not in _datasets(table):
        table = _for_dataset(table, record["dataset"])
    if table.sweep is not None:
        swept = record["settings"].get(table.sweep)
        return isinstance(swept, int | float) and len(record["settings"]) == 1
    return find_cells(table, record) is not None


def _for_dataset(table: Table, dataset: str) -> Table:
    """The same columns for a data set that the paper does not have; without rows, as the paper has none."""
    if table.sweep is not None:
        return table
    first = table.columns[0]["dataset"]
    what = table.title.partition(",")[0]  # behind a comma stand the paper's data sets
    kept = [number for number, column in enumerate(table.columns) if column["dataset"] == first]
    return replace(
        table,
        title=f"{what}: {dataset}, which the paper does not have",
        columns=tuple({**table.columns[number], "dataset": dataset} for number in kept),
        headings=tuple(f"{dataset} {table.headings[number].partition(' ')[2]}" for number in kept),
        sections=(),
    )


def _datasets(table: Table) -> set[str]:
    return {cell.dataset for cell in table.cells()}


def _result(record: Record) -> str:
    """What runs of several experiments have in common if they have the same result: the first part of a key."""
    return str(record["key"]).partition("-")[0]


def _holds(settings: Mapping[str, Any], required: Mapping[str, Any]) -> bool:
    return all(name in settings and same(settings[name], value) for name, value in required.items())


def _frozen(settings: Mapping[str, Any]) -> Frozen:
    """Settings as something that can be compared; numbers that differ by rounding only are the same."""
    return tuple((name, _plain(settings[name])) for name in sorted(settings))


def _plain(value: Any) -> Any:
    return round(value, 9) if isinstance(value, float) else value if isinstance(value, int) else str(value)
