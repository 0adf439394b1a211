import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from pfml.cli import main
from pfml.experiments.store import ResultsStore
from pfml.paper import paper_tables
from pfml.paper.fill import fill
from pfml.paper.write import (
    EMPTY,
    Line,
    Text,
    TextTable,
    format_of,
    latex,
    latex_escaped,
    markdown,
    report_of,
    text_table,
    write_report,
)
from records import record

TABLES = {table.id: table for table in paper_tables()}


@pytest.fixture
def _small_figures(monkeypatch):
    monkeypatch.setattr("pfml.plots.theme.PIXEL_DENSITY", 0.25)


@pytest.fixture(scope="module")
def runs():
    alignment = {"alignment": {"paper": 0.171, "wasserstein2": 0.2}}
    return [
        *(record(seed=seed, recall=0.72 + seed / 100, best=0.75) for seed in range(3)),
        record(method="hist", status="failed", results={}, error="RuntimeError: 50% of {x_1} & <more> | less"),
        record(experiment="alignment", results=alignment),
        *(
            record(experiment="ablation", seed=seed, settings={"alpha": alpha}, recall=0.6 + alpha / 100 + seed / 100)
            for seed in range(2)
            for alpha in (1, 3, 5)
        ),
        record(experiment="noise", settings={"crops": 2}),
    ]


def cells(table, name):
    """Whose -> cells, of all lines of a method."""
    for _, lines in table.sections:
        names = [line.name for line in lines]
        if name in names:
            first = names.index(name)
            after = next((k for k in range(first + 1, len(names)) if names[k]), len(names))
            return {line.whose: line.cells for line in lines[first:after]}
    raise AssertionError(f"{name} is not in {table.title}")


def lines(table, name):
    return {whose: [cell.text for cell in found] for whose, found in cells(table, name).items()}


def test_ours_stands_below_the_papers_with_standard_deviation_seeds_and_difference(runs):
    table = text_table(fill(TABLES["retrieval"], runs[:4]))
    found = lines(table, "Potential Field (Ours)")
    assert found["paper"][0] == "73.4 ± 0.3"
    assert found["ours, last"][0] == "73.0 ± 1.0 (3)"
    assert found["ours, best"][0] == "75.0 ± 0.0 (3)"
    assert found["difference"][0] == "\u22120.4"
    assert found["ours, last"][3:] == [EMPTY] * 6
    assert found["difference"][3:] == [EMPTY] * 6


def test_what_was_not_run_is_empty_and_what_failed_is_noted(runs):
    table = text_table(fill(TABLES["retrieval"], runs[:4]))
    assert lines(table, "Proxy Anchor")["ours, last"] == [EMPTY] * 9
    assert set(lines(table, "HIST")) == {"paper", "ours, last"}
    hist = cells(table, "HIST")["ours, last"]
    assert hist[0].text == EMPTY
    assert "failed: seed 0" in table.notes[hist[0].notes[0] - 1]
    assert hist[3].notes == ()


def test_a_difference_of_nothing_has_no_sign():
    table = text_table(fill(TABLES["retrieval"], [record(recall=0.73399)]))
    assert lines(table, "Potential Field (Ours)")["difference"][0] == "±0.0"


def test_a_row_that_the_paper_does_not_have_has_no_line_of_the_papers():
    run = record(dataset="glyphs", backbone="convnet", dim=64)
    (table,) = report_of([run], experiment="retrieval").texts
    assert list(lines(table, "Potential Field")) == ["ours, last", "ours, best"]
    assert "paper:" not in table.caption
    own = text_table(fill(TABLES["retrieval"], [record(method="snr")]))
    assert list(lines(own, "snr")) == ["ours, last", "ours, best"]
    assert "paper: as printed" in own.caption


def test_what_holds_for_all_that_was_trained_is_said_once():
    shape = {"dataset": "glyphs", "backbone": "convnet", "dim": 64}
    few = [record(**shape, method=method, epochs=4) for method in ("pfml", "hist", "zero-shot")]
    (table,) = report_of(few, experiment="retrieval").texts
    assert table.caption.endswith("All that we trained: 4 epochs, the paper 200; 1 seed, the paper 5.")
    assert table.notes == ()
    (table,) = report_of([*few, record(**shape, method="hist", epochs=4, seed=1)], experiment="retrieval").texts
    assert table.caption.endswith("All that we trained: 4 epochs, the paper 200.")
    assert table.notes == ("1 seed, the paper 5", "2 seeds, the paper 5")


def test_distances_have_two_decimals(runs):
    found = lines(text_table(fill(TABLES["alignment"], [runs[4]])), "Ours")
    assert (found["ours, last"], found["difference"]) == (["0.17 (1)"], ["+0.01"])
    assert "Lower is better." in text_table(fill(TABLES["alignment"], [])).caption


def test_validation_selected_is_a_line_where_there_is_one():
    run = record(results={"validation_selected": {"recall_at_1": 0.71, "epoch": 2}})
    found = lines(text_table(fill(TABLES["retrieval"], [run])), "Potential Field (Ours)")
    assert found["ours, by validation"][0] == "71.0 (1)"


def test_the_mlrc_tables_compare_what_validation_chose():
    chosen = {"precision_at_1": 0.711, "r_precision": 0.4, "map_at_r": 0.3, "epoch": 2}
    run = record(settings={"fold": "concatenated"}, backbone="bn_inception", results={"validation_selected": chosen})
    table = text_table(fill(TABLES["mlrc-cub"], [run]))
    assert lines(table, "Ours")["difference"][0] == "+1.0"
    assert "difference: ours, by validation, minus the paper's" in table.caption


def test_hyper_parameters_of_our_runs_stand_beside_the_papers(runs):
    table = report_of(runs).texts[-2]
    assert lines(table, "learning rate") == {"paper": ["1e-4"] * 6, "ours": ["0.0001", *[EMPTY] * 5]}


@pytest.fixture
def nasty():
    line = Line(r"a_b & 50% {x} $y$ #1 ~^ \z <b> [q] *s*", "ours, last", (Text("1 | 2", (1, 2)), Text(EMPTY)))
    return TextTable("A_title & more", "100% | all", ("R@1", "x_y"), (("R_50", (line,)),), ("n_1", "<n2>"))


def test_markdown_escapes_what_it_would_read(nasty):
    text = markdown("t", "l", [nasty])
    body = [one for one in text.splitlines() if one.startswith("| **a")]
    assert body == [
        r"| **a\_b \& 50% \{x\} \$y\$ \#1 \~^ \\z \<b\> \[q\] \*s\*** | ours, last | 1 \| 2<sup>1,2</sup> | "
        + f"{EMPTY} |"
    ]
    widths = {len(re.findall(r"(?<!\\)\|", one)) for one in text.splitlines() if one.startswith("|")}
    assert widths == {5}
    assert "1. n\\_1\n2. \\<n2\\>" in text


def test_latex_escapes_what_it_would_read(nasty):
    text = latex("t_1", "50%", [nasty])
    assert (
        r"a\_b \& 50\% \{x\} \$y\$ \#1 \textasciitilde{}\textasciicircum{} \textbackslash{}z \textless{}b"
        r"\textgreater{} {[}q{]} *s* & ours, last & 1 \textbar{} 2\textsuperscript{1,2} & -- \\" in text
    )
    assert latex_escaped("1 ± 2 \u2212 3 \x07 雪") == r"1 $\pm$ 2 $-$ 3 ? ?"


def unescaped(text):
    """LaTeX without its escaped signs."""
    return re.sub(r"\\[&%$#_{}]", "", text)


def test_latex_is_a_whole_document_of_balanced_parts(runs):
    text = write_report(report_of(runs), "latex", None)
    assert text.startswith("\\documentclass")
    assert text.rstrip().endswith("\\end{document}")
    begins, ends = (re.findall(rf"\\{word}\{{(\w+)\}}", text) for word in ("begin", "end"))
    assert sorted(begins) == sorted(ends)
    assert begins.count("longtable") == len(report_of(runs).texts)
    plain = unescaped(text)
    assert plain.count("{") == plain.count("}")
    assert plain.count("$") % 2 == 0
    assert "#" not in plain
    assert "_" not in plain
    assert "%" not in plain
    assert text.isascii()
    for rule in ("toprule", "midrule", "bottomrule"):
        assert text.count(f"\\{rule}") >= begins.count("longtable")


def test_every_row_of_a_latex_table_has_as_many_cells_as_columns(runs):
    text = write_report(report_of(runs), "latex", None)
    for columns, body in re.findall(r"\\begin\{longtable\}\{(l+r+)\}\n(.*?)\\end\{longtable\}", text, re.DOTALL):
        for line in body.splitlines():
            if "&" in unescaped(line):
                assert unescaped(line).count("&") == len(columns) - 1


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no pdflatex to compile the report with")
def test_latex_compiles_with_every_sign_and_figure(runs, nasty, tmp_path):
    report = report_of(runs)
    signs = Text("".join(chr(code) for code in range(32, 0x180)) + "\u2013\u2019\u2212\u96ea")
    odd = TextTable("signs", "", ("R@1",), (("", (Line("all", "ours, last", (signs,)),)),))
    long = tuple(Line("" if k else "many", "paper", (Text("1"), Text("2"))) for k in range(120))
    texts = (*report.texts, nasty, odd, TextTable("Long", "", ("a", "b"), (("top", ()), ("", long))))
    write_report(replace(report, texts=texts), "latex", tmp_path / "my_report.tex")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "my_report.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=600)
    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "my_report.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.usefixtures("_small_figures")
def test_html_is_one_page_that_escapes_and_asks_for_nothing_from_elsewhere(runs):
    text = write_report(report_of(runs), "html", None)
    assert "&lt;more&gt; | less" in text
    assert "<more>" not in text
    assert not re.search(r"(?:src|href)=\"(?!data:)", text)
    assert "<script" not in text
    assert text.count('<div class="table dense">') == text.count("<table>")
    assert re.search(r"<strong>73\.0 ± 1\.0 \(3\)[¹²³]</strong>", text)
    assert f"<strong>{EMPTY}" not in text
    assert text.count('<img src="data:image/png') == 1


def test_without_runs_all_numbers_of_the_paper_and_none_of_ours_are_shown():
    report = report_of([])
    found = [line for table in report.texts for _, section in table.sections for line in section]
    for paper, ours in zip(found[::2], found[1::2], strict=True):
        assert (bool(paper.name), paper.whose) == (True, "paper")
        assert ours.whose.startswith("ours")
        assert {cell.text for cell in ours.cells} == {EMPTY}
    shown = [cell.text for line in found[::2] for cell in line.cells]
    printed = [
        cell.printed.replace("-", EMPTY) if cell.printed == "-" else cell.printed
        for table in TABLES.values()
        for cell in table.cells()
    ]
    assert sorted(shown) == sorted(printed)


def test_the_lead_counts_runs_and_names_devices_and_code():
    records = [record(commit="0123456789abcdef-changed"), record(seed=1, status="failed", results={})]
    assert report_of(records).lead == "1 run is done, 1 failed; on cpu; code: 0123456789-changed."


def test_runs_that_fit_no_table_are_listed(runs):
    other = report_of(runs).texts[-1]
    assert other.title == "Other runs"
    (_, (first,)) = other.sections[0]
    assert first.name == "noise, pfml, cub, resnet50, 512 dim, crops = 2, seed 0"


def test_an_unknown_experiment_is_refused_with_the_nearest_name(runs):
    with pytest.raises(ValueError, match="must be one of retrieval, alignment, ablation, noise, got 'retreival'"):
        report_of(runs, experiment="retreival")
    with pytest.raises(ValueError, match="got 'x'"):
        report_of([], experiment="x")
    assert [one.id for one in report_of([], experiment="mlrc").tables] == ["mlrc-cars", "mlrc-cub"]


def test_the_format_is_the_one_named_or_that_of_the_ending(tmp_path):
    assert format_of(None, None) == "md"
    assert format_of(None, tmp_path / "a.tex") == "latex"
    assert format_of("html", tmp_path / "a.txt") == "html"
    with pytest.raises(ValueError, match="must end in"):
        format_of(None, tmp_path / "a.txt")
    with pytest.raises(ValueError, match="must be one of md, latex, html"):
        format_of("pdf", None)


@pytest.fixture
def store(tmp_path, runs):
    path = tmp_path / "results.jsonl"
    for one in runs:
        ResultsStore(path).append(one)
    return path


def test_the_command_prints_markdown(store, capsys):
    main(["report", f"--store={store}", "--experiment=retrieval"])
    printed = capsys.readouterr().out
    assert "73.0 ± 1.0 (3)" in printed
    assert "Table 2" not in printed


def test_the_command_without_a_store_prints_the_papers_tables(capsys):
    main(["report"])
    printed = capsys.readouterr().out
    assert all(table.title.replace("_", "\\_") in printed for table in paper_tables())
    assert "(experiment" not in printed


@pytest.mark.usefixtures("_small_figures")
@pytest.mark.parametrize("ending", ["md", "tex", "html"])
def test_the_command_writes_a_file_and_the_figure_of_the_ablations(store, tmp_path, capsys, ending):
    out = tmp_path / "new" / f"report.{ending}"
    main(["report", f"--store={store}", f"--out={out}"])
    assert "73.0" in out.read_text(encoding="utf-8")
    figure = out.with_name("report-ablation.png")
    assert figure.exists() == (ending != "html")
    assert ending == "html" or figure.name in out.read_text(encoding="utf-8")
    assert str(out) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--store=nowhere.jsonl"], "nowhere.jsonl must be a file of results"),
        (["--format=pdf"], "the format must be one of md, latex, html, got 'pdf'"),
        (["--experiment=mrlc"], "did you mean 'mlrc"),
    ],
)
def test_mistakes_end_the_command_with_a_sentence(arguments, message):
    with pytest.raises(SystemExit) as exit_:
        main(["report", *arguments])
    assert message in str(exit_.value.code)


@pytest.mark.parametrize("form", ["md", "latex", "html"])
def test_every_format_marks_tuned_runs(form):
    tuning = {"trials": 12, "split": "half", "values": {"optimizer.lr": 2e-4, "loss.options.delta": 0.31}}
    runs = [record(recall=0.7), record(recall=0.74, key="tuned", tuning=tuning)]
    report = report_of(runs, experiment="retrieval")
    whose = ["paper", "ours, last", "ours, best", "difference"]
    assert list(lines(report.texts[0], "Potential Field (Ours), tuned")) == whose
    text = write_report(report, form, None)
    assert ", tuned" in text
    assert "12 trials, split half" in text
