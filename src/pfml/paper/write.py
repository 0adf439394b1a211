"""The paper's tables beside our results, as Markdown, LaTeX or one HTML page.

A table becomes lines of texts first (`TextTable`): for each method the paper's line and ours. The three formats differ
only in how they set these lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from pfml.evaluation.metrics import find_metric, metric_label, shown_metrics
from pfml.methods import is_untrained
from pfml.pages import page as html
from pfml.paper import tables as paper
from pfml.paper.figures import noise_curves, plot_ablation, plot_noise
from pfml.paper.fill import Record, filled_tables, latest, measured, other_runs, tables_named
from pfml.paper.tables import Cell, Row, Summary, Table, paper_tables, result_tables
from pfml.plots.theme import LIGHT, Theme, png_of_figure
from pfml.storage.files import write_atomically
from pfml.templates import markdown_escaped
from pfml.typos import did_you_mean

__all__ = [
    "Format",
    "Line",
    "Report",
    "Text",
    "TextTable",
    "format_of",
    "report_of",
    "text_table",
    "write_report",
]

Format = Literal["md", "latex", "html"]
ENDINGS: dict[str, Format] = {".md": "md", ".markdown": "md", ".tex": "latex", ".html": "html", ".htm": "html"}
#: A cell that was not run, or that the paper does not have.
EMPTY = "\u2013"
#: Which of our results -> the name of its line.
LINES = {"last": "ours, last", "best": "ours, best", "validation_selected": "ours, by validation"}


@dataclass(frozen=True)
class Text:
    """The text of a cell, and the numbers of the notes that belong to it."""

    text: str
    notes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Line:
    """One line: the method (empty below its first line), whose numbers they are, and a text for each column."""

    name: str
    whose: str
    cells: tuple[Text, ...]


@dataclass(frozen=True)
class TextTable:
    """A table as lines of texts; each section is its title and its lines, `notes` are numbered from 1."""

    title: str
    caption: str
    headings: tuple[str, ...]
    sections: tuple[tuple[str, tuple[Line, ...]], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReportFigure:
    """A figure: the end of its file's name, what is said of it, and how it is plotted in a theme."""

    name: str
    title: str
    caption: str
    alt: str
    plot: Callable[[Theme], Any]


@dataclass(frozen=True)
class Report:
    """What is reported: tables with our results, and everything as texts."""

    title: str
    lead: str
    tables: tuple[Table, ...]
    texts: tuple[TextTable, ...]

    def figures(self) -> list[ReportFigure]:
        """The figures for which there are numbers."""
        found = []
        curves = noise_curves([table for table in self.tables if table.id == "noise"])
        if curves:
            caption = "Ours on unseen classes after the last epoch, with the standard deviation over seeds."
            title, alt = "Label noise", "Recall@1 against the rate of label noise in training"
            found.append(ReportFigure("noise", title, caption, alt, partial(plot_noise, curves)))
        panels = [table for table in self.tables if table.sweep is not None]
        if panels:
            caption = (
                "Recall@1 on unseen classes. Hollow points on dashed lines: the paper's, read off its figure; "
                "filled points: ours after the last epoch, with the standard deviation over seeds."
            )
            title, alt = "Figure 3: ablations", "Recall@1 against M, delta, alpha and delta_rep - delta_att"
            found.append(ReportFigure("ablation", title, caption, alt, partial(plot_ablation, panels)))
        return found


def report_of(records: Sequence[Record], *, experiment: str | None = None) -> Report:
    """A report on the runs of a store, or of one of its experiments; without records, the paper's tables alone."""
    names = list(dict.fromkeys(record["experiment"] for record in records))
    if experiment is not None and experiment not in names and (names or not tables_named(experiment)):
        known = names or list(dict.fromkeys(table.experiment for table in result_tables()))
        hint = did_you_mean(experiment, known)
        raise ValueError(f"the experiment must be one of {', '.join(known)}, got {experiment!r}{hint}")
    tables = filled_tables(records, experiment=experiment)
    texts = [text_table(table) for table in tables]
    chosen = [one for one in latest(records) if experiment in (None, one["experiment"])]
    if experiment is None:
        done = [one for one in chosen if one["status"] == "done"]
        texts += [_settings_table(table, done) for table in paper_tables() if table.kind == "settings"]
    others = other_runs(records, experiment=experiment)
    if others:
        texts.append(_other_table(others))
    title = "The paper's results and ours" + ("" if experiment is None else f": {experiment}")
    return Report(title, _lead(chosen), tuple(tables), tuple(texts))


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
    """The report as text, which is also written to `out`; figures lie beside it, and in it for HTML."""
    if form == "html":
        text = _page(report)
    else:
        figures = {}
        for figure in report.figures() if out is not None else ():
            assert out is not None
            file = out.with_name(f"{out.stem}-{figure.name}.png")
            out.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, png_of_figure(figure.plot(LIGHT)))
            figures[figure.title] = file.name
        write = {"md": markdown, "latex": latex}[form]
        text = write(report.title, report.lead, report.texts, figures=figures)
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
    """The first digits of a commit, and the remark behind it ("-changed")."""
    digits, dash, remark = commit.partition("-")
    return f"{digits[:10]}{dash}{remark}"


# Tables as texts


class _Notes:
    """Notes in the order in which they are first needed, but for those that the caption has."""

    def __init__(self, *, without: Sequence[str] = ()) -> None:
        self.texts: list[str] = []
        self.without = without

    def numbers(self, notes: Sequence[str]) -> tuple[int, ...]:
        notes = [note for note in notes if note not in self.without]
        self.texts += [note for note in dict.fromkeys(notes) if note not in self.texts]
        return tuple(sorted(self.texts.index(note) + 1 for note in set(notes)))


def text_table(table: Table) -> TextTable:
    """The table as texts: of each method the paper's line, ours after the last epoch and the best, the difference."""
    everywhere = _common_notes(table)
    notes = _Notes(without=everywhere)
    sections = tuple(
        (section.title, tuple(line for row in section.rows for line in _result_lines(row, notes, table.compared)))
        for section in table.sections
    )
    experiment = f" (experiment {table.runs_of})" if table.runs_of is not None else ""
    said = f" All that we trained: {'; '.join(everywhere)}." if everywhere else ""
    title = f"{table.number}: {table.title}{experiment}"
    return TextTable(title, _caption(table) + said, table.headings, sections, tuple(notes.texts))


def _common_notes(table: Table) -> tuple[str, ...]:
    """The notes that all of our cells have, if there are several, but for those of what was not trained."""
    results = [cell.ours for row in table.rows() if not is_untrained(row.method) for cell in row.cells]
    noted = [ours.notes for ours in results if ours.last is not None or ours.notes]
    if len(noted) < 2:
        return ()
    return tuple(note for note in dict.fromkeys(noted[0]) if all(note in notes for notes in noted))


def _result_lines(row: Row, notes: _Notes, compared: str) -> list[Line]:
    lines: list[tuple[str, list[Text]]] = []
    note = notes.numbers([row.note] if row.note else [])
    if row.in_paper:
        lines.append(("paper", [_paper_text(cell, note) for cell in row.cells]))
    for which, whose in LINES.items():
        if which == "last" or any(getattr(cell.ours, which) for cell in row.cells):
            lines.append((whose, [_our_text(cell, which, notes) for cell in row.cells]))
    differences = [_difference(cell, compared) for cell in row.cells]
    if any(one.text != EMPTY for one in differences):
        lines.append(("difference", differences))
    return _named(row.name, lines)


def _named(name: str, lines: Sequence[tuple[str, Sequence[Text]]]) -> list[Line]:
    """Lines of which the first has the name."""
    return [Line(name if number == 0 else "", whose, tuple(cells)) for number, (whose, cells) in enumerate(lines)]


def _paper_text(cell: Cell, note: tuple[int, ...]) -> Text:
    return Text(EMPTY) if cell.printed == paper.EMPTY else Text(cell.printed, note)


def _our_text(cell: Cell, which: str, notes: _Notes) -> Text:
    one: Summary | None = getattr(cell.ours, which)
    marks = notes.numbers(cell.ours.notes) if which == "last" else ()
    if one is None:
        return Text(EMPTY, marks)
    spread = "" if one.std is None else f" ± {_number(one.std, cell.metric)}"
    return Text(f"{_number(one.mean, cell.metric)}{spread} ({one.seeds})", marks)


def _difference(cell: Cell, compared: str) -> Text:
    """Ours minus the paper's."""
    ours: Summary | None = getattr(cell.ours, compared)
    if ours is None or cell.value is None:
        return Text(EMPTY)
    difference = round(ours.mean - cell.value, _decimals(cell.metric)) + 0.0
    sign = "+" if difference > 0 else "\u2212" if difference < 0 else "±"
    return Text(f"{sign}{_number(abs(difference), cell.metric)}")


def _number(value: float, metric: str) -> str:
    return f"{value:.{_decimals(metric)}f}"


def _decimals(metric: str) -> int:
    row = find_metric(metric)
    return 1 if row is None else row.decimals


def _caption(table: Table) -> str:
    metric = find_metric(table.columns[0]["metric"])
    unit = "Percent" if metric is None else metric.unit_name
    source = "read off its figure, to about 0.1 (first and last: 0.2)" if table.kind == "figure" else "as printed"
    ours = "ours: this code, mean ± standard deviation over seeds (number of seeds)"
    in_paper = any(section.in_paper for section in table.sections)
    if in_paper:
        difference = f"difference: {LINES[table.compared]}, minus the paper's"
        parts = [f"{unit}. paper: {source}; {ours}; {difference}; {EMPTY}: not run, or not in the paper."]
    else:
        parts = [f"{unit}. {ours}; {EMPTY}: not run."]
    if table.better == "lower":
        parts.append("Lower is better.")
    if table.note and in_paper:
        parts.append(f"The paper: {table.note}.")
    return " ".join(parts)


def _other_table(records: Sequence[Record]) -> TextTable:
    """Runs that have no cell in the paper's tables, one by one."""
    metrics = shown_metrics(dict.fromkeys(name for one in records for name in (one["results"].get("last") or {})))
    lines = []
    for record in records:
        settings = "".join(f", {name} = {value}" for name, value in record["settings"].items())
        parts = (record["experiment"], record["method"], record["dataset"], record["backbone"])
        name = f"{', '.join(parts)}, {record['dim']} dim{settings}, seed {record['seed']}"
        values = [(measured(record, metric), metric) for metric in metrics]
        cells = [Text(EMPTY if value is None else _number(value, metric)) for value, metric in values]
        lines.append(Line(name, record["status"], tuple(cells)))
    headings = tuple(map(metric_label, metrics))
    return TextTable("Other runs", "Runs for which the paper has no table.", headings, (("", tuple(lines)),))


def _settings_table(table: Table, records: Sequence[Record]) -> TextTable:
    """The paper's hyper-parameters beside those that our runs of the same data set and backbone had."""
    lines = []
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
            ours.append(Text(" or ".join(values) or EMPTY))
        lines += _named(row.name, [("paper", [Text(cell.printed) for cell in row.cells]), ("ours", ours)])
    caption = "Ours are read from the configurations of the runs with the paper's settings."
    return TextTable(f"{table.number}: {table.title}", caption, table.headings, (("", tuple(lines)),))


def _config_value(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config


# Markdown


def markdown(title: str, lead: str, tables: Sequence[TextTable], *, figures: Mapping[str, str] | None = None) -> str:
    """A document with all tables, and at its end the figures: title -> file name."""
    parts = [f"# {markdown_escaped(title)}", markdown_escaped(lead), *(_markdown_table(table) for table in tables)]
    for heading, file in (figures or {}).items():
        parts += [f"## {markdown_escaped(heading)}", f"![{markdown_escaped(heading)}](<{file}>)"]
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: TextTable) -> str:
    parts = [f"## {markdown_escaped(table.title)}", markdown_escaped(table.caption)]
    for title, lines in table.sections:
        if title:
            parts.append(f"### {markdown_escaped(title)}")
        rows = [
            _markdown_row(["method", "", *map(markdown_escaped, table.headings)]),
            "|:---|:---|" + "---:|" * len(table.headings),
        ]
        for line in lines:
            name = f"**{markdown_escaped(line.name)}**" if line.name else ""
            rows.append(_markdown_row([name, markdown_escaped(line.whose), *map(_markdown_cell, line.cells)]))
        parts.append("\n".join(rows))
    if table.notes:
        parts.append("\n".join(f"{number}. {markdown_escaped(note)}" for number, note in enumerate(table.notes, 1)))
    return "\n\n".join(parts)


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _markdown_cell(cell: Text) -> str:
    marks = f"<sup>{','.join(map(str, cell.notes))}</sup>" if cell.notes else ""
    return markdown_escaped(cell.text) + marks


# LaTeX: a document that compiles on its own, its tables long enough to run over pages (booktabs)

# Without lmodern, some installations set the font as bitmaps. \room starts a new page unless this one has room for
# a heading, its text and a few lines of the table.
PREAMBLE = r"""\documentclass[a4paper]{article}
\usepackage[T1]{fontenc}
\usepackage[utf8]{inputenc}
\IfFileExists{lmodern.sty}{\usepackage{lmodern}}{}
\usepackage[landscape,margin=1.2cm]{geometry}
\usepackage{booktabs,longtable,graphicx}
\setlength{\tabcolsep}{4pt}
\setlength{\parindent}{0pt}
\newcommand{\room}{\par\ifdim\dimexpr\pagegoal-\pagetotal\relax<12\baselineskip\newpage\fi}
\begin{document}
\footnotesize
"""
SPACE = r"\addlinespace[6pt]"
SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # behind \\ it would be read as a length
    "]": "{]}",
    '"': r"\textquotedbl{}",
    "±": r"$\pm$",
    "\u2212": "$-$",
    "\u2013": "--",
    "\u2019": "'",
}


def latex(title: str, lead: str, tables: Sequence[TextTable], *, figures: Mapping[str, str] | None = None) -> str:
    """A document with all tables, and at its end the figures: title -> file name."""
    parts = [PREAMBLE, rf"\section*{{{latex_escaped(title)}}}", latex_escaped(lead), *map(_latex_table, tables)]
    for heading, file in (figures or {}).items():
        size = r"width=\linewidth,height=0.8\textheight,keepaspectratio"
        figure = rf"\includegraphics[{size}]{{\detokenize{{{file}}}}}"
        parts.append(f"\\subsection*{{{latex_escaped(heading)}}}\n\\begin{{center}}\n{figure}\n\\end{{center}}")
    return "\n\n".join([*parts, r"\end{document}"]) + "\n"


def latex_escaped(text: str) -> str:
    """Text that LaTeX sets as it is; what the fonts of the document do not have becomes a question mark."""
    signs = (sign if sign.isprintable() else "?" for sign in " ".join(text.split()))
    plain = "".join(SPECIAL.get(sign, sign) for sign in signs)
    return plain.encode("latin-1", "replace").decode("latin-1")


def _latex_table(table: TextTable) -> str:
    columns = len(table.headings)
    head = " & ".join(["method", "", *map(latex_escaped, table.headings)])
    body = []
    for number, (title, lines) in enumerate(table.sections):
        if number:
            body.append(SPACE)
        if title:
            # no rule below: behind one, a page could end, with the title alone above
            body.append(rf"\multicolumn{{{columns + 2}}}{{l}}{{\textbf{{{latex_escaped(title)}}}}} \\*")
        for line, following in zip(lines, [*lines[1:], None], strict=True):
            # the star keeps the lines of one method on one page
            end = r"\\" if following is None or following.name else r"\\*"
            cells = [latex_escaped(line.name), latex_escaped(line.whose), *map(_latex_cell, line.cells)]
            body.append(" & ".join(cells) + f" {end}")
    notes = [rf"\textsuperscript{{{number}}} {latex_escaped(note)}" for number, note in enumerate(table.notes, 1)]
    return "\n".join(
        [
            rf"\room\subsection*{{{latex_escaped(table.title)}}}",
            latex_escaped(table.caption),
            rf"\begin{{longtable}}{{ll{'r' * columns}}}",
            rf"\toprule {head} \\ \midrule \endhead",
            r"\bottomrule \endfoot",
            *body,
            r"\end{longtable}",
            "\n\n".join(notes),
        ]
    )


def _latex_cell(cell: Text) -> str:
    marks = rf"\textsuperscript{{{','.join(map(str, cell.notes))}}}" if cell.notes else ""
    return latex_escaped(cell.text) + marks


# HTML

SUPERSCRIPTS = str.maketrans("0123456789,", "⁰¹²³⁴⁵⁶⁷⁸⁹˒")


def _page(report: Report) -> str:
    figures = [
        {"title": one.title, "plot": html.in_themes(one.plot, one.alt), "caption": one.caption}
        for one in report.figures()
    ]
    tables = [
        {
            "title": table.title,
            "caption": table.caption,
            "parts": [_html_table(table, title, lines) for title, lines in table.sections],
            "notes": [f"{str(number).translate(SUPERSCRIPTS)} {note}" for number, note in enumerate(table.notes, 1)],
        }
        for table in report.texts
    ]
    return html.render("paper.html", title=report.title, lead=report.lead, tables=tables, figures=figures)


def _html_table(table: TextTable, title: str, lines: Sequence[Line]) -> html.Table:
    strong = {
        (number, 2 + column)
        for number, line in enumerate(lines)
        for column, cell in enumerate(line.cells)
        if line.whose == LINES["last"] and cell.text != EMPTY
    }
    rows = tuple((line.name, line.whose, *map(_html_cell, line.cells)) for line in lines)
    return html.Table((title or "method", "", *table.headings), rows, frozenset(strong), is_dense=True)


def _html_cell(cell: Text) -> str:
    return cell.text + ",".join(map(str, cell.notes)).translate(SUPERSCRIPTS)
