"""From records of runs to the cells of the paper's tables: mean and standard deviation over seeds.

Nothing is lost and nothing is invented: a run fills the cells whose data set, method, backbone, dimensions and settings
are its own; runs for which the paper has no row, section or point get one. See `pfml.paper.fill` for which runs go
into which table.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pfml.paper import PaperCell, PaperTable, paper_tables
from pfml.paper.cells import (
    Frozen,
    Record,
    RowKey,
    SectionKey,
    is_in_paper,
    measured,
    place_of,
    row_key,
    section_key,
    with_swept_columns,
)

__all__ = [
    "FilledRow",
    "FilledSection",
    "FilledTable",
    "OurCell",
    "Summary",
    "fill",
    "filled_tables",
    "latest",
    "other_runs",
    "summary",
    "tables_named",
    "tables_of",
]

FOLDS = 4
#: Settings that have a shorter name in the paper.
SYMBOLS = {"proxies_per_class": "M", "delta_rep_minus_delta_att": "delta_rep - delta_att"}


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation (None for a single run) in the paper's units, and the number of seeds."""

    mean: float
    std: float | None
    seeds: int


@dataclass(frozen=True)
class OurCell:
    """What we measured: after the last epoch, at the best on test, at the one that validation chose; None if not run.

    `notes` say what must be known of the runs; a cell may have notes without numbers, if all its runs failed.
    """

    last: Summary | None = None
    best: Summary | None = None
    validation_selected: Summary | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FilledRow:
    """A method: the paper's cells (None for those that it does not have) and ours.

    Runs with tuned hyper-parameters have a row of their own, so that no mean is over both kinds.
    """

    name: str
    method: str | None
    paper: tuple[PaperCell | None, ...]
    ours: tuple[OurCell, ...]
    note: str = ""
    is_tuned: bool = False


@dataclass(frozen=True)
class FilledSection:
    """Methods with the same backbone, embedding size and settings, which `key` holds."""

    title: str
    rows: tuple[FilledRow, ...]
    key: SectionKey


@dataclass(frozen=True)
class FilledTable:
    """A table of the paper (with columns for points that only we have) and our results.

    `experiment` names whose runs they are, None without any.
    """

    table: PaperTable
    sections: tuple[FilledSection, ...]
    experiment: str | None = None


Runs = Mapping[tuple[SectionKey, RowKey, int], list[Record]]


def summary(values: Sequence[float]) -> Summary | None:
    """Mean and sample standard deviation; None of nothing.

    Example:
        >>> summary([1.0, 3.0])
        Summary(mean=2.0, std=1.4142135623730951, seeds=2)
    """
    if not values:
        return None
    return Summary(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


def latest(records: Sequence[Record]) -> list[Record]:
    """The records that count: of several with one experiment and key the last that is done, else the last."""
    chosen: dict[tuple[str, str], Record] = {}
    for record in records:
        identity = (record["experiment"], record["key"])
        before = chosen.get(identity)
        if before is None or record["status"] == "done" or before["status"] != "done":
            chosen[identity] = record
    return list(chosen.values())


def fill(table: PaperTable, records: Sequence[Record], *, names: Mapping[str, str] | None = None) -> FilledTable:
    """The table with our results.

    Args:
        table: A table of results or a figure of the paper.
        records: Runs of one experiment, each once (see `latest`).
        names: Method -> name of a row that the table does not have; by default the method's key.
    """
    table = with_swept_columns(table, records)
    placed = [(place, record) for record in records if (place := place_of(table, record)) is not None]
    runs: dict[tuple[SectionKey, RowKey, int], list[Record]] = {}
    for place, record in placed:
        for column in place.columns:
            runs.setdefault((place.section, place.row, column), []).append(record)
    places = list(dict.fromkeys((place.section, place.row) for place, _ in placed))
    names = {**{row.method: row.name for row in table.rows() if row.method and not row.settings}, **(names or {})}
    sections = []
    for section in table.sections:
        key = section_key(table, section.backbone, section.dim)
        own = [row_key(row) for row in section.rows]
        rows = [
            FilledRow(row.name, row.method, row.cells, _our_cells(table, key, one, runs), row.note)
            for row, one in zip(section.rows, own, strict=True)
        ]
        new = [one for place, one in places if place == key and one not in own]
        sections.append(FilledSection(section.title, (*rows, *_new_rows(table, key, new, runs, names)), key))
    have = {section_key(table, section.backbone, section.dim) for section in table.sections}
    for key in _in_order(dict.fromkeys(place for place, _ in places if place not in have)):
        new = [one for place, one in places if place == key]
        sections.append(FilledSection(_section_title(table, key), _new_rows(table, key, new, runs, names), key))
    return FilledTable(table, tuple(sections), records[0]["experiment"] if records else None)


def _in_order(keys: Iterable[SectionKey]) -> list[SectionKey]:
    """Backbones as they come, and of each the values of a setting from small to large."""
    listed = list(keys)
    first = {(key.backbone, key.dim): number for number, key in reversed(list(enumerate(listed)))}
    return sorted(listed, key=lambda key: (first[key.backbone, key.dim], key.settings))


def _our_cells(table: PaperTable, section: SectionKey, row: RowKey, runs: Runs) -> tuple[OurCell, ...]:
    return tuple(
        _our_cell(table, column, runs.get((section, row, number), []) if row.method else [])
        for number, column in enumerate(table.columns)
    )


def _our_cell(table: PaperTable, column: Mapping[str, Any], records: Sequence[Record]) -> OurCell:
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
    return OurCell(over_seeds("last"), over_seeds("best"), over_seeds("validation_selected"), tuple(notes))


def _repeated(done: Sequence[Record], average: str | None) -> list[int]:
    identities = [(one["seed"], one["settings"].get(average)) for one in done]
    return sorted({seed for seed, fold in identities if identities.count((seed, fold)) > 1})


def _run_notes(table: PaperTable, runs: list[Record], seeds: list[int]) -> list[str]:
    notes = list(dict.fromkeys(_tuning_note(run["tuning"]) for run in runs if "tuning" in run))
    epochs = sorted({run["epochs"] for run in runs if run["method"] != "zero-shot"})
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


def _new_rows(
    table: PaperTable, section: SectionKey, rows: Iterable[RowKey], runs: Runs, names: Mapping[str, str]
) -> tuple[FilledRow, ...]:
    """Rows for runs whose method or settings the paper does not have there."""
    empty = (None,) * len(table.columns)
    # a tuned row stands beside the numbers that the paper has for the method
    paper = {
        row_key(row): row
        for one in table.sections
        if section_key(table, one.backbone, one.dim) == section
        for row in one.rows
        if row.method
    }
    found = []
    for row in rows:
        own = paper.get(replace(row, is_tuned=False))
        name = _row_name(table, row, names) if own is None else own.name
        cells = empty if own is None else own.cells
        name = f"{name}, tuned" if row.is_tuned else name
        ours = _our_cells(table, section, row, runs)
        found.append(FilledRow(name, row.method, cells, ours, is_tuned=row.is_tuned))
    return tuple(found)


def _row_name(table: PaperTable, row: RowKey, names: Mapping[str, str]) -> str:
    """The paper's name of the method where it has one, and what is special about the row."""
    name = names.get(row.method, row.method)
    if row.dataset is not None:
        dataset = next((one.name for one in table.rows() if one.dataset == row.dataset), row.dataset)
        usual = {one.method for one in table.rows()}
        name = dataset if row.method in usual else f"{dataset}, {row.method}"
    return ", ".join([name, *_told(row.settings)])


def _section_title(table: PaperTable, key: SectionKey) -> str:
    size = f" ({key.dim} dim)" if key.dim is not None else ""
    strange = ["not in the paper"] if table.sections else []  # else the title of the table says it
    return ", ".join([f"{key.backbone}{size}", *_told(key.settings), *strange])


def _told(settings: Frozen) -> list[str]:
    return [f"{SYMBOLS.get(name, name)} = {value}" for name, value in settings]


def _listed(values: Sequence[Any]) -> str:
    texts = [f"{value:,}" if isinstance(value, int) else str(value) for value in values]
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def _seeds(seeds: Sequence[int]) -> str:
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {_listed(seeds)}"


#: The experiment that draws pictures of a run.
DRAWING = "figures"


def tables_named(experiment: str) -> list[PaperTable]:
    """The tables that an experiment is run for ("mlrc": mlrc-cub and mlrc-cars), by its name or by theirs."""
    return [table for table in _results() if experiment in (table.experiment, table.id)]


def tables_of(experiment: str) -> list[PaperTable]:
    """The tables that runs of an experiment may fill: those that it is run for, or all if there are none."""
    return tables_named(experiment) or _results()


def filled_tables(records: Sequence[Record], *, experiment: str | None = None) -> list[FilledTable]:
    """The paper's tables with our results; runs of different experiments are never in one cell.

    A table that several experiments have runs for comes once for each; after all of these come, with empty cells, the
    tables of the paper that none has.

    Args:
        records: All runs of a store.
        experiment: Leave out all others, and the tables that have none of its runs.
    """
    counted = _without_repetitions(latest(records)) if experiment is None else latest(records)
    found: dict[str, list[FilledTable]] = {}
    for name in dict.fromkeys(record["experiment"] for record in counted):
        if experiment in (None, name):
            for filled in _of_experiment(name, [one for one in counted if one["experiment"] == name]):
                found.setdefault(filled.table.id, []).append(filled)
    with_runs: list[FilledTable] = []
    without: list[FilledTable] = []
    for table in _results():
        own = found.get(table.id, [])
        with_runs += own
        wanted = experiment is None or (not found and table in tables_of(experiment))
        if wanted and not any(one.table.sections for one in own):
            without.append(fill(table, []))
    return with_runs + without


def _without_repetitions(records: Sequence[Record]) -> list[Record]:
    """The records without those of `figures` whose run another experiment has: pictures of it, and no other numbers."""
    others = {_result(one) for one in records if one["experiment"] != DRAWING and one["status"] == "done"}
    return [one for one in records if one["experiment"] != DRAWING or _result(one) not in others]


def _result(record: Record) -> str:
    """What runs of several experiments have in common if they have the same result: the first part of a key."""
    return str(record["key"]).partition("-")[0]


def other_runs(records: Sequence[Record], *, experiment: str | None = None) -> list[Record]:
    """The runs that no table has a place for."""
    left = []
    for record in latest(records):
        name = record["experiment"]
        if experiment in (None, name) and not any(_fits(table, record) for table in tables_of(name)):
            left.append(record)
    return left


def _of_experiment(name: str, records: Sequence[Record]) -> list[FilledTable]:
    """The tables that the runs of one experiment fill."""
    tables = tables_of(name)
    chosen: dict[str, list[Record]] = {}
    foreign: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        exact = [
            table for table in tables if (place := place_of(table, record)) is not None and is_in_paper(table, place)
        ]
        near = [table for table in tables if _fits(table, record)][:1]
        for table in exact or near:
            if record["dataset"] in _datasets(table) or table.sweep is not None:
                chosen.setdefault(table.id, []).append(record)
            else:
                foreign.setdefault((table.id, record["dataset"]), []).append(record)
    by_id = {table.id: table for table in tables}
    names = _names()
    filled = [fill(by_id[key], chosen[key], names=names) for key in by_id if key in chosen]
    filled += [fill(_for_dataset(by_id[key], dataset), runs, names=names) for (key, dataset), runs in foreign.items()]
    return filled


def _fits(table: PaperTable, record: Record) -> bool:
    """Whether the table has a place for the run: in a new row, section or point, or in a copy for its data set."""
    if record["dataset"] not in _datasets(table):
        table = _for_dataset(table, record["dataset"])
    if table.sweep is not None:
        swept = record["settings"].get(table.sweep)
        return isinstance(swept, int | float) and len(record["settings"]) == 1
    return place_of(table, record) is not None


def _for_dataset(table: PaperTable, dataset: str) -> PaperTable:
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


def _results() -> list[PaperTable]:
    return [table for table in paper_tables() if table.kind != "settings"]


def _datasets(table: PaperTable) -> set[str]:
    return {cell.dataset for cell in table.cells()}


def _names() -> Mapping[str, str]:
    """Method -> the name by which Table 1 calls it."""
    rows = [row for row in paper_tables()[0].rows() if row.method and row.method != "zero-shot"]
    return {row.method: row.name.removesuffix(" (Ours)") for row in rows if row.method}
