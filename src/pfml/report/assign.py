"""Which runs go into which of the paper's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pfml.paper import PaperTable, paper_tables
from pfml.report.aggregate import FilledTable, fill, latest
from pfml.report.places import Record, is_in_paper, place_of

__all__ = ["filled_tables", "other_runs", "tables_named", "tables_of"]

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
