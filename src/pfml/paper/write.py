"""The paper's tables beside our results, as Markdown, LaTeX or one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from pfml.pages.page import Figure, Page, Section, Table, render
from pfml.paper import paper_tables
from pfml.paper.ablation import draw_ablation
from pfml.paper.cells import Record
from pfml.paper.fill import FilledTable, filled_tables, latest, other_runs, tables_named
from pfml.paper.grid import EMPTY, Entry, Grid, grid_of, other_grid, settings_grid
from pfml.paper.latex import latex
from pfml.paper.markdown import markdown
from pfml.paper.noise_curves import draw_noise, noise_curves
from pfml.plots.theme import LIGHT, Theme, in_both_themes, png_of_figure
from pfml.storage.files import write_atomically
from pfml.typos import did_you_mean

__all__ = ["Format", "Report", "format_of", "report_of", "write_report"]

Format = Literal["md", "latex", "html"]
ENDINGS: dict[str, Format] = {".md": "md", ".markdown": "md", ".tex": "latex", ".html": "html", ".htm": "html"}
SUPERSCRIPTS = str.maketrans("0123456789,", "⁰¹²³⁴⁵⁶⁷⁸⁹˒")


@dataclass(frozen=True)
class Drawing:
    """A picture of the report: the end of its file's name, what is said of it, and the matplotlib figure in a theme."""

    name: str
    title: str
    caption: str
    alt: str
    draw: Callable[[Theme], Any]


@dataclass(frozen=True)
class Report:
    """What is reported: tables with our results, and everything as texts."""

    title: str
    lead: str
    tables: tuple[FilledTable, ...]
    grids: tuple[Grid, ...]

    @property
    def panels(self) -> tuple[FilledTable, ...]:
        """Those of Figure 3."""
        return tuple(one for one in self.tables if one.table.sweep is not None)

    def drawings(self) -> list[Drawing]:
        """The pictures for which there are numbers."""
        found = []
        curves = noise_curves([one for one in self.tables if one.table.id == "noise"])
        if curves:
            caption = "Ours on unseen classes after the last epoch, with the standard deviation over seeds."
            title, alt = "Label noise", "Recall@1 against the share of wrong training labels"
            found.append(Drawing("noise", title, caption, alt, partial(draw_noise, curves)))
        if self.panels:
            caption = (
                "Recall@1 on unseen classes. Hollow points on dashed lines: the paper's, read off its figure; "
                "filled points: ours after the last epoch, with the standard deviation over seeds."
            )
            title, alt = "Figure 3: ablations", "Recall@1 against M, delta, alpha and delta_rep - delta_att"
            found.append(Drawing("ablation", title, caption, alt, partial(draw_ablation, self.panels)))
        return found


def report_of(records: Sequence[Record], *, experiment: str | None = None) -> Report:
    """A report on the runs of a store, or of one of its experiments; without records, the paper's tables alone."""
    names = list(dict.fromkeys(record["experiment"] for record in records))
    if experiment is not None and experiment not in names and (names or not tables_named(experiment)):
        known = names or list(dict.fromkeys(table.experiment for table in paper_tables() if table.kind != "settings"))
        hint = did_you_mean(experiment, known)
        raise ValueError(f"the experiment must be one of {', '.join(known)}, got {experiment!r}{hint}")
    tables = filled_tables(records, experiment=experiment)
    grids = [grid_of(one) for one in tables]
    chosen = [one for one in latest(records) if experiment in (None, one["experiment"])]
    if experiment is None:
        settings = [table for table in paper_tables() if table.kind == "settings"]
        grids += [settings_grid(table, [one for one in chosen if one["status"] == "done"]) for table in settings]
    other = other_grid(other_runs(records, experiment=experiment))
    lead = _lead(chosen)
    title = "The paper's results and ours" + ("" if experiment is None else f": {experiment}")
    return Report(title, lead, tuple(tables), (*grids, *([other] if other is not None else [])))


def format_of(name: str | None, out: Path | None) -> Format:
    """The format that is asked for, or that the ending of the file says; Markdown without either."""
    if name is None:
        if out is not None and out.suffix not in ENDINGS:
            raise ValueError(f"the file must end in {', '.join(ENDINGS)}, or the format be named, got {out}")
        return ENDINGS[out.suffix] if out is not None else "md"
    chosen: dict[str, Format] = {one: one for one in get_args(Format)}
    if name not in chosen:
        raise ValueError(f"the format must be one of {', '.join(chosen)}, got {name!r}")
    return chosen[name]


def write_report(report: Report, form: Format, out: Path | None) -> str:
    """The report as text, which is also written to `out`; beside it the pictures, which HTML has inside."""
    if form == "html":
        text = render(_page(report))
    else:
        pictures = {}
        for drawing in report.drawings() if out is not None else ():
            assert out is not None
            file = out.with_name(f"{out.stem}-{drawing.name}.png")
            out.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, png_of_figure(drawing.draw(LIGHT)))
            pictures[drawing.title] = file.name
        write: Callable[..., str] = {"md": markdown, "latex": latex}[form]
        text = write(report.title, report.lead, report.grids, pictures=pictures)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, text.encode())
    return text


def _lead(records: Sequence[Record]) -> str:
    done = [one for one in records if one["status"] == "done"]
    if not records:
        return "No runs: the paper's numbers, and empty cells where ours will be."
    failed = len(records) - len(done)
    failures = f", {failed} failed" if failed else ""
    devices = ", ".join(sorted({one["device"] for one in done})) or "no device"
    commits = ", ".join(sorted({_short(one["commit"]) for one in done})) or "unknown"
    runs = "run is" if len(done) == 1 else "runs are"
    return f"{len(done)} {runs} done{failures}; on {devices}; code: {commits}."


def _short(commit: str) -> str:
    """The first digits of a commit, and what is said of it ("-changed")."""
    digits, dash, remark = commit.partition("-")
    return f"{digits[:10]}{dash}{remark}"


def _page(report: Report) -> Page:
    sections = [_section(grid) for grid in report.grids]
    for drawing in report.drawings():
        light, dark = in_both_themes(drawing.draw)
        sections.append(Section(drawing.title, (Figure(light, drawing.caption, drawing.alt, dark=dark),)))
    return Page(report.title, report.lead, tuple(sections), footer="Written by pfml report.")


def _section(grid: Grid) -> Section:
    blocks: list[Any] = [grid.caption]
    for part in grid.sections:
        rows: list[tuple[str, ...]] = []
        strong: set[tuple[int, int]] = set()
        for row in part.rows:
            for number, line in enumerate(row.lines):
                if line.whose == "ours, last":
                    strong |= {(len(rows), 2 + k) for k, entry in enumerate(line.entries) if entry.text != EMPTY}
                rows.append((row.name if number == 0 else "", line.whose, *(_cell(entry) for entry in line.entries)))
        heads = (part.title or "method", "", *grid.headings)
        blocks.append(Table(heads, tuple(rows), strong=frozenset(strong), is_dense=True))
    blocks += [f"{str(number).translate(SUPERSCRIPTS)} {note}" for number, note in enumerate(grid.notes, start=1)]
    return Section(grid.title, tuple(blocks))


def _cell(entry: Entry) -> str:
    return entry.text + ",".join(map(str, entry.notes)).translate(SUPERSCRIPTS)
