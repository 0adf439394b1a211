"""Our results in the cells of the paper's tables: mean and standard deviation over seeds.

A run fills the cells whose data set, method, backbone, dimensions and settings are its own. Runs for which the paper
has no row, section or column get one, so that no run is left out. The first half of this module fills the cells; the
second finds the cells of a run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pfml.methods import is_untrained
from pfml.paper.tables import EMPTY, Cell, Measured, Row, Section, Summary, Table, paper_tables, result_tables

__all__ = [
    "Record",
    "RunCells",
    "fill",
    "filled_tables",
    "find_cells",
    "latest",
    "measured",
    "other_runs",
    "summary",
    "tables_named",
    "without_repetitions",
]

#: A line of `pfml.experiments.store.ResultsStore`.
Record = Mapping[str, Any]
Frozen = tuple[tuple[str, Any], ...]

#: Names of one backbone.
SAME_BACKBONE: dict[str, str] = {"dino_vits16": "dino_small"}
#: The experiment that draws figures of a run.
FIGURES = "figures"
FOLDS = 4
#: Settings that have a shorter name in the paper.
SYMBOLS = {"proxies_per_class": "M", "delta_rep_minus_delta_att": "delta_rep - delta_att"}


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


Runs = Mapping[tuple[SectionKey, RowKey, int], list[Record]]


def filled_tables(records: Sequence[Record], *, experiment: str | None = None) -> list[Table]:
    """The paper's tables with our results; runs of different experiments are never in one cell.

    A table that several experiments have runs for comes once for each; after all of these come, with empty cells, the
    tables of the paper that none has.

    Args:
        records: All runs of a store.
        experiment: Leave out all others, and the tables that have none of its runs.
    """
    counted = without_repetitions(latest(records)) if experiment is None else latest(records)
    names = _names()
    found: dict[str, list[Table]] = {}
    for name in dict.fromkeys(record["experiment"] for record in counted):
        if experiment in (None, name):
            own = [record for record in counted if record["experiment"] == name]
            for table, runs in records_by_table(name, own):
                found.setdefault(table.id, []).append(fill(table, runs, names=names))
    with_runs: list[Table] = []
    without: list[Table] = []
    for table in result_tables():
        filled = found.get(table.id, [])
        with_runs += filled
        wanted = experiment is None or (not found and table in tables_of(experiment))
        if wanted and not any(section.in_paper for one in filled for section in one.sections):
            without.append(table)
    return with_runs + without


def fill(table: Table, records: Sequence[Record], *, names: Mapping[str, str] | None = None) -> Table:
    """The table with our results.

    Args:
        table: A table of results or a figure of the paper.
        records: Runs of one experiment, each once (see `latest`).
        names: Method -> name of a row that the table does not have; by default the method's key.
    """
    table = with_swept_columns(table, records)
    runs: dict[tuple[SectionKey, RowKey, int], list[Record]] = {}
    new: dict[SectionKey, dict[RowKey, None]] = {}  # rows in the order of their first run
    for record in records:
        cells = find_cells(table, record)
        if cells is None:
            continue
        new.setdefault(cells.section, {})[cells.row] = None
        for column in cells.columns:
            runs.setdefault((cells.section, cells.row, column), []).append(record)
    names = {**{row.method: row.name for row in table.rows() if row.method and not row.settings}, **(names or {})}
    sections = []
    for section in table.sections:
        key = section_key(section)
        own = [row_key(row) for row in section.rows]
        rows = [
            replace(row, cells=_filled_cells(table, key, one, row.cells, runs))
            for row, one in zip(section.rows, own, strict=True)
        ]
        rows += _new_rows(table, key, [one for one in new.get(key, ()) if one not in own], runs, names)
        sections.append(replace(section, rows=tuple(rows)))
    have = {section_key(section) for section in table.sections}
    for key in _in_order(key for key in new if key not in have):
        rows = _new_rows(table, key, new[key], runs, names)
        title = _section_title(table, key)
        sections.append(Section(title, key.backbone, key.dim, tuple(rows), dict(key.settings), in_paper=False))
    runs_of = records[0]["experiment"] if records else None
    return replace(table, sections=tuple(sections), runs_of=runs_of)


def summary(values: Sequence[float]) -> Summary | None:
    """Mean and sample standard deviation; None of nothing.

    Example:
        >>> summary([1.0, 3.0])
        Summary(mean=2.0, std=1.4142135623730951, seeds=2)
    """
    if not values:
        return None
    return Summary(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def _in_order(keys: Iterable[SectionKey]) -> list[SectionKey]:
    """Backbones as they come, and of each the values of a setting from small to large."""
    listed = list(keys)
    first = {(key.backbone, key.dim): number for number, key in reversed(list(enumerate(listed)))}
    return sorted(listed, key=lambda key: (first[key.backbone, key.dim], key.settings))


def _new_rows(
    table: Table, section: SectionKey, rows: Iterable[RowKey], runs: Runs, names: Mapping[str, str]
) -> list[Row]:
    """Rows for runs whose method or settings the paper does not have there."""
    # a tuned row has the numbers that the paper has for the method
    paper = {
        row_key(row): row for one in table.sections if section_key(one) == section for row in one.rows if row.method
    }
    found = []
    for key in rows:
        own = paper.get(replace(key, is_tuned=False))
        name = _row_name(table, key, names) if own is None else own.name
        cells = _empty_cells(table, section, key) if own is None else own.cells
        filled = Row(
            name=f"{name}, tuned" if key.is_tuned else name,
            method=key.method,
            dataset=key.dataset,
            settings=dict(key.settings),
            cells=_filled_cells(table, section, key, cells, runs),
            in_paper=own is not None,
            is_tuned=key.is_tuned,
        )
        found.append(filled)
    return found


def _empty_cells(table: Table, section: SectionKey, row: RowKey) -> tuple[Cell, ...]:
    """The cells of a row that the paper does not have."""
    return tuple(
        Cell(
            printed=EMPTY,
            value=None,
            std=None,
            bold=False,
            dataset=column.get("dataset", row.dataset),
            metric=column["metric"],
            backbone=section.backbone,
            dim=column.get("dim", section.dim),
            method=row.method,
            settings={**dict(section.settings), **column.get("settings", {}), **dict(row.settings)},
        )
        for column in table.columns
    )


def _filled_cells(
    table: Table, section: SectionKey, row: RowKey, cells: Sequence[Cell], runs: Runs
) -> tuple[Cell, ...]:
    return tuple(
        replace(cell, ours=_measured(table, column, runs.get((section, row, number), []) if row.method else []))
        for number, (cell, column) in enumerate(zip(cells, table.columns, strict=True))
    )


def _measured(table: Table, column: Mapping[str, Any], records: Sequence[Record]) -> Measured:
    metric, average = column["metric"], column.get("average")
    done = [one for one in records if one["status"] == "done" and measured(one, metric) is not None]
    runs = {(one["seed"], one["settings"].get(average)): one for one in done}  # the latest of each
    seeds = sorted({seed for seed, _ in runs})

    def over_seeds(epoch: str) -> Summary | None:
        means = []
        for seed in seeds:
            values = [measured(run, metric, epoch) for (of, _), run in runs.items() if of == seed]
            if all(value is not None for value in values):
                means.append(statistics.fmean(value for value in values if value is not None))
        return summary(means)

    notes = _run_notes(table, list(runs.values()), seeds)
    if average is not None:
        parts = [seed for seed in seeds if sum(of == seed for of, _ in runs) < FOLDS]
        notes += [f"fewer than {FOLDS} folds: {_seeds(parts)}"] if parts else []
    if len(runs) < len(done):
        notes.append(
            f"run more than once, with other configurations: {_seeds(_repeated(done, average))}; the latest counts"
        )
    failed = [
        one for one in records if one["status"] == "failed" and (one["seed"], one["settings"].get(average)) not in runs
    ]
    notes += _failure_notes(failed)
    return Measured(over_seeds("last"), over_seeds("best"), over_seeds("validation_selected"), tuple(notes))


def _repeated(done: Sequence[Record], average: str | None) -> list[int]:
    identities = [(one["seed"], one["settings"].get(average)) for one in done]
    return sorted({seed for seed, fold in identities if identities.count((seed, fold)) > 1})


def _run_notes(table: Table, runs: list[Record], seeds: list[int]) -> list[str]:
    notes = list(dict.fromkeys(_tuning_note(run["tuning"]) for run in runs if "tuning" in run))
    epochs = sorted({run["epochs"] for run in runs if not is_untrained(run["method"])})
    if table.epochs is not None and epochs and epochs != [table.epochs]:
        notes.append(f"{_listed(epochs)} {'epoch' if epochs == [1] else 'epochs'}, the paper {table.epochs}")
    if table.seeds is not None and seeds and len(seeds) != table.seeds:
        notes.append(f"{len(seeds)} {'seed' if len(seeds) == 1 else 'seeds'}, the paper {table.seeds}")
    missing = sorted({run["images"].get("missing") or 0 for run in runs} - {0})
    if missing:
        notes.append(f"{_listed(missing)} {'image' if missing == [1] else 'images'} missing")
    if table.device is not None and runs:
        notes.append(f"measured on {_listed(sorted({run['device'] for run in runs}))}, the paper on {table.device}")
    return notes


def _tuning_note(tuning: Mapping[str, Any]) -> str:
    values = ", ".join(f"{name.rpartition('.')[2]} {value:.3g}" for name, value in tuning["values"].items())
    return f"tuned on validation classes ({tuning['trials']} trials, split {tuning['split']}): {values}"


def _failure_notes(failed: list[Record]) -> list[str]:
    if not failed:
        return []
    reason = next(
        (one["error"].strip().splitlines()[-1] for one in failed if (one["error"] or "").strip()), "no reason given"
    )
    return [f"failed: {_seeds(sorted({one['seed'] for one in failed}))} ({reason[:160]})"]


def _row_name(table: Table, row: RowKey, names: Mapping[str, str]) -> str:
    """The paper's name of the method where it has one, and what is special about the row."""
    name = names.get(row.method, row.method)
    if row.dataset is not None:
        dataset = next((one.name for one in table.rows() if one.dataset == row.dataset), row.dataset)
        usual = {one.method for one in table.rows()}
        name = dataset if row.method in usual else f"{dataset}, {row.method}"
    return ", ".join([name, *_settings(row.settings)])


def _section_title(table: Table, key: SectionKey) -> str:
    size = f" ({key.dim} dim)" if key.dim is not None else ""
    absent = ["not in the paper"] if table.sections else []  # else the title of the table says it
    return ", ".join([f"{key.backbone}{size}", *_settings(key.settings), *absent])


def _settings(settings: Frozen) -> list[str]:
    return [f"{SYMBOLS.get(name, name)} = {value}" for name, value in settings]


def _listed(values: Sequence[Any]) -> str:
    texts = [f"{value:,}" if isinstance(value, int) else str(value) for value in values]
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def _seeds(seeds: Sequence[int]) -> str:
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {_listed(seeds)}"


def _names() -> Mapping[str, str]:
    """Method -> the name that Table 1 has for it."""
    rows = [row for row in paper_tables()[0].rows() if row.method and not is_untrained(row.method)]
    return {row.method: row.name.removesuffix(" (Ours)") for row in rows if row.method}


# Cell lookup: which run belongs in which table, section, row and columns


def find_cells(table: Table, record: Record) -> RunCells | None:
    """The cells that the run fills, in the table as it is or with a new row or section; None if there are none."""
    settings = record["settings"]
    if not set(table.settings) <= set(settings):
        return None
    if record["config"].get("data", {}).get("split", "classes") != "classes":
        return None  # the paper's numbers are of unseen classes
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
    """A table with the same columns, without rows, for a data set that the paper does not have."""
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
