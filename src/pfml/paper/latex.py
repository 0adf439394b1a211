"""Tables as LaTeX: a document that compiles on its own, its tables long enough to run over pages (booktabs)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pfml.paper.grid import Entry, Grid

__all__ = ["escaped", "latex"]

# Without lmodern, some installations draw the letters as bitmaps. \room starts a new page unless this one has room for
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


def latex(title: str, lead: str, grids: Sequence[Grid], *, pictures: Mapping[str, str] | None = None) -> str:
    """A document with all tables, and at its end pictures: title -> file name."""
    parts = [PREAMBLE, rf"\section*{{{escaped(title)}}}", escaped(lead), *(_grid(grid) for grid in grids)]
    for heading, file in (pictures or {}).items():
        size = r"width=\linewidth,height=0.8\textheight,keepaspectratio"
        picture = rf"\includegraphics[{size}]{{\detokenize{{{file}}}}}"
        parts.append(f"\\subsection*{{{escaped(heading)}}}\n\\begin{{center}}\n{picture}\n\\end{{center}}")
    return "\n\n".join([*parts, r"\end{document}"]) + "\n"


def escaped(text: str) -> str:
    """Text that LaTeX sets as it is; what the fonts of the document do not have becomes a question mark."""
    signs = (sign if sign.isprintable() else "?" for sign in " ".join(text.split()))
    plain = "".join(SPECIAL.get(sign, sign) for sign in signs)
    return plain.encode("latin-1", "replace").decode("latin-1")


def _grid(grid: Grid) -> str:
    columns = len(grid.headings)
    head = " & ".join(["method", "", *(escaped(heading) for heading in grid.headings)])
    body = []
    for place, section in enumerate(grid.sections):
        if place:
            body.append(SPACE)
        if section.title:
            # no rule below: behind one, a page could end, with the title alone above
            body.append(rf"\multicolumn{{{columns + 2}}}{{l}}{{\textbf{{{escaped(section.title)}}}}} \\*")
        for row in section.rows:
            for number, line in enumerate(row.lines):
                name = escaped(row.name) if number == 0 else ""
                # the star keeps the lines of one method on one page
                end = r"\\" if number == len(row.lines) - 1 else r"\\*"
                body.append(" & ".join([name, escaped(line.whose), *(_entry(one) for one in line.entries)]) + f" {end}")
    notes = "\n\n".join(rf"\textsuperscript{{{number}}} {escaped(note)}" for number, note in enumerate(grid.notes, 1))
    return "\n".join(
        [
            rf"\room\subsection*{{{escaped(grid.title)}}}",
            escaped(grid.caption),
            rf"\begin{{longtable}}{{ll{'r' * columns}}}",
            rf"\toprule {head} \\ \midrule \endhead",
            r"\bottomrule \endfoot",
            *body,
            r"\end{longtable}",
            notes,
        ]
    )


def _entry(entry: Entry) -> str:
    marks = rf"\textsuperscript{{{','.join(map(str, entry.notes))}}}" if entry.notes else ""
    return escaped(entry.text) + marks
