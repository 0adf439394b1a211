"""Tables of results: one hierarchy (table, section, row, cell) for the paper's numbers and for ours.

`paper_tables` reads the paper's numbers from tables.yaml and checks them. `pfml.paper.fill` puts our results into the
cells, `pfml.paper.write` writes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

from pfml.evaluation.metrics import find_metric, metric_label
from pfml.typos import did_you_mean

__all__ = [
    "Cell",
    "Measured",
    "Row",
    "Section",
    "Summary",
    "Table",
    "paper_tables",
    "result_tables",
]

Kind = Literal["results", "figure", "settings"]
Settings = Mapping[str, Any]

#: The paper's own sign for a cell without a number.
EMPTY = "-"
NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"
PRINTED = re.compile(rf"({NUMBER})(?: ± ({NUMBER}))?")
DATASETS = ("cub", "cars", "sop")
#: What cells inherit: from the table, then the section, the column, the row.
ATTRIBUTES = ("dataset", "metric", "backbone", "dim", "method")


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation (None for a single run) in the paper's units, and the number of seeds."""

    mean: float
    std: float | None
    seeds: int


@dataclass(frozen=True)
class Measured:
    """Our results for a cell: after the last epoch, at the best on test, at the one that validation chose.

    Each is None if it was not run. `notes` say what a reader must know of the runs; a cell may have notes without
    numbers, if all its runs failed.
    """

    last: Summary | None = None
    best: Summary | None = None
    validation_selected: Summary | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """A cell: the paper's number, and ours.

    Args:
        printed: As the paper has it, "73.4 ± 0.3"; "-" where it has nothing.
        value: The number; None for "-", and for words.
        std: Its printed standard deviation, if any.
        bold: Whether it is printed in bold.
        dataset, metric, backbone, dim, method, settings: What it belongs to; `method` is our key, None without one.
        ours: Our results; empty in `paper_tables`.
    """

    printed: str
    value: float | None
    std: float | None
    bold: bool
    dataset: str
    metric: str
    backbone: str
    dim: int
    method: str | None
    settings: Settings = field(default_factory=dict)
    ours: Measured = Measured()


@dataclass(frozen=True)
class Row:
    """A row: a method, or a data set in a figure.

    Runs with tuned hyper-parameters have a row of their own, so that no mean is over both kinds.

    Args:
        name: As printed.
        method: Our key, None without one.
        dataset, settings: What the row alone says of its cells.
        cells: One for each column.
        as_printed: Their texts; they differ from the cells where the paper put numbers into the wrong columns.
        line: Where it begins in the LaTeX source.
        note: A remark.
        in_paper: Whether the paper has it.
        is_tuned: Whether our runs in it have tuned hyper-parameters.
    """

    name: str
    method: str | None
    dataset: str | None
    settings: Settings
    cells: tuple[Cell, ...]
    as_printed: tuple[str, ...] = ()
    line: int | None = None
    note: str = ""
    in_paper: bool = True
    is_tuned: bool = False


@dataclass(frozen=True)
class Section:
    """Rows that share a backbone and embedding size, under a heading; `settings` are those of the whole table."""

    title: str
    backbone: str | None
    dim: int | None
    rows: tuple[Row, ...]
    settings: Settings = field(default_factory=dict)
    in_paper: bool = True


@dataclass(frozen=True)
class Table:
    """A table, or a panel of a figure; `pfml.paper.fill` puts our results into its cells.

    Args:
        id: Our name.
        experiment: What is run for it; several tables may have one.
        number: "Table 1".
        label, lines: Where it stands in the LaTeX source.
        title: What it shows.
        kind: results, figure (digitized, not printed), or settings (hyper-parameters).
        headings: Of the columns.
        columns: What each column says of its cells; `average` names a setting, such as the fold, whose values are
            averaged before the mean over seeds.
        sections: The rows; none for a data set that the paper does not have, before it is filled.
        epochs, seeds, device: How the paper ran it, as far as it says.
        compared: Which of our results corresponds to the paper's: after the last epoch, or as validation chose.
        better: Whether higher or lower numbers are better.
        settings: What was changed for all cells, such as {"noise": 0.2}.
        sweep: The setting on the x-axis of a figure.
        note: A remark.
        runs_of: The experiment whose runs are in the cells; None without any.
    """

    id: str
    experiment: str
    number: str
    label: str
    lines: tuple[int, int]
    title: str
    kind: Kind
    headings: tuple[str, ...]
    columns: tuple[Settings, ...]
    sections: tuple[Section, ...]
    epochs: int | None = None
    seeds: int | None = None
    device: str | None = None
    compared: Literal["last", "validation_selected"] = "last"
    better: Literal["higher", "lower"] = "higher"
    settings: Settings = field(default_factory=dict)
    sweep: str | None = None
    note: str = ""
    runs_of: str | None = None

    def rows(self) -> Iterator[Row]:
        """All rows, section after section."""
        for section in self.sections:
            yield from section.rows

    def cells(self) -> Iterator[Cell]:
        """All cells, row after row."""
        for row in self.rows():
            yield from row.cells


@cache
def paper_tables() -> tuple[Table, ...]:
    """All tables of the paper, and the panels of its ablation figure, in their order.

    Example:
        >>> retrieval = paper_tables()[0]
        >>> next(cell.printed for cell in retrieval.cells() if cell.method == "pfml")
        '73.4 ± 0.3'
    """
    tables = tuple(_table(entry) for entry in _content()["tables"])
    _refuse_repeated([table.id for table in tables])
    return tables


def result_tables() -> list[Table]:
    """The tables that runs can fill: all but that of hyper-parameters."""
    return [table for table in paper_tables() if table.kind != "settings"]


@cache
def _content() -> dict[str, Any]:
    import yaml

    return yaml.safe_load((resources.files("pfml.paper") / "tables.yaml").read_text(encoding="utf-8"))


def _table(entry: dict[str, Any]) -> Table:
    where = f"table {entry.get('id')!r}"
    known = {name for name in Table.__dataclass_fields__ if name not in ("headings", "runs_of")}
    _refuse_unknown(entry, known, where)
    kind = entry.get("kind", "results")
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {kind!r} in {where}")
    columns = entry["columns"]
    for column in columns:
        _refuse_unknown(column, {*ATTRIBUTES, "settings", "heading", "average"}, f"a column of {where}")
    sections = tuple(_section(section, entry, where) for section in entry["sections"])
    values = {
        "experiment": entry["id"],
        **entry,
        "kind": kind,
        "lines": tuple(entry["lines"]),
        "columns": tuple(columns),
        "headings": tuple(column.get("heading") or _heading(column) for column in columns),
        "sections": sections,
    }
    return Table(**values)


def _section(entry: dict[str, Any], table: dict[str, Any], where: str) -> Section:
    _refuse_unknown(entry, {"title", "line", "backbone", "dim", "rows"}, f"a section of {where}")
    rows = tuple(_row(row, entry, table, f"row {row.get('name')!r} of {where}") for row in entry["rows"])
    return Section(entry["title"], entry.get("backbone"), entry.get("dim"), rows, table.get("settings", {}))


def _row(entry: dict[str, Any], section: dict[str, Any], table: dict[str, Any], where: str) -> Row:
    known = {*ATTRIBUTES, "name", "line", "bold", "settings", "values", "as_printed", "note"}
    _refuse_unknown(entry, known, where)
    texts, columns = entry["values"], table["columns"]
    as_printed = entry.get("as_printed", texts)
    for row in (texts, as_printed):
        if len(row) != len(columns):
            raise ValueError(f"there must be {len(columns)} values, got {len(row)} in {where}")
    words = table.get("kind") == "settings"
    cells = tuple(
        _cell(text, [table, section, column, entry], words=words, where=where)
        for text, column in zip(texts, columns, strict=True)
    )
    return Row(
        name=entry["name"],
        method=entry.get("method"),
        dataset=entry.get("dataset"),
        settings=entry.get("settings", {}),
        cells=cells,
        as_printed=tuple(as_printed),
        line=entry.get("line"),
        note=entry.get("note", ""),
    )


def _cell(text: str, levels: list[dict[str, Any]], *, words: bool, where: str) -> Cell:
    merged: dict[str, Any] = {"settings": {}, "method": None}
    for level in levels:
        merged |= {name: level[name] for name in ATTRIBUTES if name in level}
        merged["settings"] = {**merged["settings"], **level.get("settings", {})}
    missing = [name for name in ATTRIBUTES if name not in merged]
    if missing:
        raise ValueError(f"a cell must have {', '.join(missing)}, got none in {where}")
    if merged["dataset"] not in DATASETS:
        raise ValueError(f"dataset must be one of {', '.join(DATASETS)}, got {merged['dataset']!r} in {where}")
    if not words and find_metric(merged["metric"]) is None:
        raise ValueError(f"metric must be one that we measure, got {merged['metric']!r} in {where}")
    value, std = _numbers(text, words=words, where=where)
    return Cell(printed=text, value=value, std=std, bold=levels[-1].get("bold", False), **merged)


def _numbers(text: Any, *, words: bool, where: str) -> tuple[float | None, float | None]:
    """Value and standard deviation of a printed text."""
    if not isinstance(text, str):
        raise TypeError(f"a value must be a text as printed, got {text!r} in {where}")
    match = PRINTED.fullmatch(text)
    if match is None:
        if text == EMPTY or words:
            return None, None
        raise ValueError(f"a value must be a number, a number ± a number, or {EMPTY}, got {text!r} in {where}")
    return float(match[1]), None if match[2] is None else float(match[2])


def _heading(column: Settings) -> str:
    """What a column shows, in short: "CUB R@1"."""
    names = {"cub": "CUB", "cars": "Cars", "sop": "SOP", "resnet50": "R50", "bn_inception": "IBN"}
    metric = column.get("metric", "")
    short = metric_label(metric) if find_metric(metric) is not None else metric.replace("_", " ")
    dim = str(column["dim"]) if "dim" in column else ""
    parts = [names[column["dataset"]], names.get(column.get("backbone", ""), ""), dim, short]
    return " ".join(part for part in parts if part)


def _refuse_unknown(entry: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in entry:
        if name not in known:
            raise ValueError(f"{name!r} must not be in {where}{did_you_mean(name, known)}")


def _refuse_repeated(ids: list[str]) -> None:
    for number, name in enumerate(ids):
        if name in ids[:number]:
            raise ValueError(f"each table must have a name of its own, got {name!r} twice")
