"""Tables as texts in rows and columns, the paper's number above ours, ready to be written in any format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pfml.evaluation.metrics import find_metric, metric_label, shown_metrics
from pfml.paper import PaperTable
from pfml.paper.cells import Record, measured
from pfml.paper.fill import FilledRow, FilledTable, Summary

__all__ = ["EMPTY", "Entry", "Grid", "GridRow", "GridSection", "Line", "grid_of", "other_grid", "settings_grid"]

#: A cell that was not run, or that the paper does not have.
EMPTY = "\u2013"
#: What we show of a run, and how it is called.
EPOCHS = {"last": "ours, last", "best": "ours, best", "validation_selected": "ours, by validation"}


@dataclass(frozen=True)
class Entry:
    """The text of a cell, and the numbers of the notes that belong to it."""

    text: str
    notes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Line:
    """One line of a row: whose numbers they are, and a number for each column."""

    whose: str
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class GridRow:
    """A method: the paper's line, if it has the method there, and ours."""

    name: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class GridSection:
    """Rows under a heading."""

    title: str
    rows: tuple[GridRow, ...]


@dataclass(frozen=True)
class Grid:
    """A table of texts; `notes` are numbered from 1."""

    title: str
    caption: str
    headings: tuple[str, ...]
    sections: tuple[GridSection, ...]
    notes: tuple[str, ...] = ()


class _Notes:
    """Notes in the order in which they are first needed, but for those that are said elsewhere."""

    def __init__(self, *, without: Sequence[str] = ()) -> None:
        self.texts: list[str] = []
        self.without = without

    def numbers(self, notes: Sequence[str]) -> tuple[int, ...]:
        notes = [note for note in notes if note not in self.without]
        self.texts += [note for note in dict.fromkeys(notes) if note not in self.texts]
        return tuple(sorted(self.texts.index(note) + 1 for note in set(notes)))


def grid_of(filled: FilledTable) -> Grid:
    """The table as texts: of each method the paper's line, ours after the last epoch and the best, the difference."""
    table, everywhere = filled.table, _notes_of_all(filled)
    notes = _Notes(without=everywhere)
    metrics = [column["metric"] for column in table.columns]
    sections = tuple(
        GridSection(section.title, tuple(_row(row, metrics, notes, table.compared) for row in section.rows))
        for section in filled.sections
    )
    experiment = f" (experiment {filled.experiment})" if filled.experiment is not None else ""
    said = f" All that we trained: {'; '.join(everywhere)}." if everywhere else ""
    title = f"{table.number}: {table.title}{experiment}"
    return Grid(title, _caption(table) + said, table.headings, sections, tuple(notes.texts))


def _notes_of_all(filled: FilledTable) -> tuple[str, ...]:
    """The notes that all of our cells have, if there are several, but for those of what was not trained."""
    rows = [row for section in filled.sections for row in section.rows if row.method != "zero-shot"]
    noted = [cell.notes for row in rows for cell in row.ours if cell.last is not None or cell.notes]
    if len(noted) < 2:
        return ()
    return tuple(note for note in dict.fromkeys(noted[0]) if all(note in notes for notes in noted))


def other_grid(records: Sequence[Record]) -> Grid | None:
    """Runs that have no place in the paper's tables, one by one; None without any."""
    if not records:
        return None
    names = dict.fromkeys(name for record in records for name in (record["results"].get("last") or {}))
    metrics = shown_metrics(names)
    rows = []
    for record in records:
        settings = "".join(f", {name} = {value}" for name, value in record["settings"].items())
        parts = (record["experiment"], record["method"], record["dataset"], record["backbone"])
        name = f"{', '.join(parts)}, {record['dim']} dim{settings}, seed {record['seed']}"
        values = [measured(record, metric) for metric in metrics]
        entries = tuple(
            Entry(EMPTY if value is None else _number(value, metric))
            for value, metric in zip(values, metrics, strict=True)
        )
        rows.append(GridRow(name, (Line(record["status"], entries),)))
    headings = tuple(map(metric_label, metrics))
    return Grid("Other runs", "Runs for which the paper has no table.", headings, (GridSection("", tuple(rows)),))


def settings_grid(table: PaperTable, records: Sequence[Record]) -> Grid:
    """The paper's hyper-parameters beside those that our runs of the same data set and backbone had."""
    rows = []
    for row in table.rows():
        ours = []
        for cell in row.cells:
            wanted = (cell.method, cell.dataset, cell.backbone, cell.dim)
            same = [
                one
                for one in records
                if (one["method"], one["dataset"], one["backbone"], one["dim"]) == wanted and not one["settings"]
            ]
            values = dict.fromkeys(str(_config_value(one["config"], cell.metric)) for one in same)
            ours.append(Entry(" or ".join(values) or EMPTY))
        lines = (Line("paper", tuple(Entry(cell.printed) for cell in row.cells)), Line("ours", tuple(ours)))
        rows.append(GridRow(row.name, lines))
    caption = "Ours are read from the configurations of the runs with the paper's settings."
    return Grid(f"{table.number}: {table.title}", caption, table.headings, (GridSection("", tuple(rows)),))


def _row(row: FilledRow, metrics: Sequence[str], notes: _Notes, compared: str) -> GridRow:
    note = notes.numbers([row.note] if row.note else [])
    paper = tuple(
        Entry(EMPTY) if cell is None or cell.printed == "-" else Entry(cell.printed, note) for cell in row.paper
    )
    lines = [Line("paper", paper)] if any(row.paper) else []
    for epoch, whose in EPOCHS.items():
        summaries = [getattr(cell, epoch) for cell in row.ours]
        if epoch != "last" and not any(summaries):
            continue
        entries = [
            _our_entry(one, metric, notes.numbers(cell.notes) if epoch == "last" else ())
            for one, metric, cell in zip(summaries, metrics, row.ours, strict=True)
        ]
        lines.append(Line(whose, tuple(entries)))
    differences = tuple(_difference(row, number, metric, compared) for number, metric in enumerate(metrics))
    if any(entry.text != EMPTY for entry in differences):
        lines.append(Line("difference", differences))
    return GridRow(row.name, tuple(lines))


def _our_entry(one: Summary | None, metric: str, notes: tuple[int, ...]) -> Entry:
    if one is None:
        return Entry(EMPTY, notes)
    spread = "" if one.std is None else f" ± {_number(one.std, metric)}"
    return Entry(f"{_number(one.mean, metric)}{spread} ({one.seeds})", notes)


def _difference(row: FilledRow, number: int, metric: str, compared: str) -> Entry:
    """Ours minus the paper's."""
    ours: Summary | None = getattr(row.ours[number], compared)
    paper = row.paper[number]
    if ours is None or paper is None or paper.value is None:
        return Entry(EMPTY)
    difference = round(ours.mean - paper.value, _decimals(metric)) + 0.0
    sign = "+" if difference > 0 else "\u2212" if difference < 0 else "±"
    return Entry(f"{sign}{_number(abs(difference), metric)}")


def _decimals(metric: str) -> int:
    row = find_metric(metric)
    return 1 if row is None else row.decimals


def _number(value: float, metric: str) -> str:
    return f"{value:.{_decimals(metric)}f}"


def _caption(table: PaperTable) -> str:
    metric = find_metric(table.columns[0]["metric"])
    unit = "Percent" if metric is None else metric.unit_name
    source = "read off its figure, to about 0.1 (first and last: 0.2)" if table.kind == "figure" else "as printed"
    ours = "ours: this code, mean ± standard deviation over seeds (number of seeds)"
    if table.sections:
        difference = f"difference: {EPOCHS[table.compared]}, minus the paper's"
        parts = [f"{unit}. paper: {source}; {ours}; {difference}; {EMPTY}: not run, or not in the paper."]
    else:
        parts = [f"{unit}. {ours}; {EMPTY}: not run."]
    if table.better == "lower":
        parts.append("Lower is better.")
    if table.note and table.sections:
        parts.append(f"The paper: {table.note}.")
    return " ".join(parts)


def _config_value(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config
