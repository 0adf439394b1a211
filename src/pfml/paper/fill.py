"""Our results in the cells of the paper's tables: mean and standard deviation over seeds.

A run fills the cells whose data set, method, backbone, dimensions and settings are its own (`pfml.paper.cells`). Runs
for which the paper has no row, section or column get one, so that no run is left out.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pfml.methods import is_untrained
from pfml.paper.cells import (
    Frozen,
    Record,
    RowKey,
    SectionKey,
    find_cells,
    latest,
    measured,
    records_by_table,
    row_key,
    section_key,
    tables_of,
    with_swept_columns,
    without_repetitions,
)
from pfml.paper.tables import EMPTY, Cell, Measured, Row, Section, Summary, Table, paper_tables, result_tables

__all__ = ["fill", "filled_tables", "summary"]

FOLDS = 4
#: Settings that have a shorter name in the paper.
SYMBOLS = {"proxies_per_class": "M", "delta_rep_minus_delta_att": "delta_rep - delta_att"}

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
