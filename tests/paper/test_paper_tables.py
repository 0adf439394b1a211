import copy
import re
from pathlib import Path

import pytest
import yaml

from pfml.methods import METHODS
from pfml.paper import paper_tables, tables
from pfml.runs.config_files import shipped_config

SOURCE = Path(__file__).parents[3] / "shared" / "paper" / "pfml.tex"
needs_source = pytest.mark.skipif(not SOURCE.is_file(), reason="the paper's LaTeX source is not in ../shared")

TABLES = {table.id: table for table in paper_tables()}
PRINTED = [table for table in paper_tables() if table.kind != "figure"]
#: Numbers, standard deviations included, in the body of each tabular.
NUMBERS = {
    "retrieval": 278 + 36,
    "noise": 24 + 4,
    "alignment": 10,
    "small-embedding": 84 + 8,
    "small-embedding-sop": 33 + 4,
    "mlrc-cars": 204,
    "mlrc-cub": 204,
    "timing": 10,
    "hyper-parameters": 30,
}


def numbers(text):
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", text)]


def tabular_rows(lines):
    """(line of its first cell, name, texts of the other cells) of each row that is not a heading; LaTeX alone."""
    source = SOURCE.read_text().splitlines()
    begins = [n for n in range(lines[0], lines[1] + 1) if re.search(r"\\begin\{tabularx?\}", source[n - 1])]
    assert len(begins) == 1
    end = next(n for n in range(begins[0], lines[1] + 1) if re.search(r"\\end\{tabularx?\}", source[n - 1]))
    # every sign remembers its line, so that rows may run over several
    text = [(sign, n) for n in range(begins[0] + 1, end) for sign in source[n - 1].strip() + " "]
    rows, row = [], []
    for number, (sign, line) in enumerate(text):
        row.append((sign, line))
        if sign == "\\" and number and text[number - 1][0] == "\\":
            rows.append(row[:-2])
            row = []
    for row in rows:
        plain = "".join(sign for sign, _ in row)
        is_heading = re.search(r"multicolumn|R@1|P@ 1|Arch/Dim|Average|Avg\.", plain)
        name, *cells = [cleaned(cell) for cell in plain.split("&")]
        if is_heading or not any(cells):
            continue
        kept = re.sub(r"\\hline", "      ", plain)
        yield row[len(kept) - len(kept.lstrip())][1], name, cells


def cleaned(cell):
    cell = re.sub(r"\\cite\{[^}]*\}|\(Sec\. *\\ref\{[^}]*\}\)|\\hline|\\textbf|[~${}]", "", cell)
    return " ".join(cell.replace(r"\pm", " ± ").replace("e^-", "e-").split())


def test_the_data_has_every_table_and_every_panel_of_the_ablation_figure():
    assert list(TABLES) == [*list(NUMBERS), "ablation-proxies", "ablation-delta", "ablation-alpha", "ablation-reach"]
    for table in PRINTED:
        assert sum(len(numbers(text)) for row in table.rows() for text in row.as_printed) == NUMBERS[table.id]


@needs_source
@pytest.mark.parametrize("table", PRINTED, ids=lambda table: table.id)
def test_every_number_of_the_source_is_in_the_data_in_its_cell(table):
    rows = list(table.rows())
    found = list(tabular_rows(table.lines))
    assert sum(len(numbers(cell)) for _, _, cells in found for cell in cells) == NUMBERS[table.id]
    assert [row.name for row in rows] == [name for _, name, _ in found]
    for row, (line, name, cells) in zip(rows, found, strict=True):
        assert row.line == line, name
        assert list(row.as_printed) == cells, name
        if name != "Proxy NCA++":
            assert [cell.printed for cell in row.cells] == cells


@needs_source
@pytest.mark.parametrize("table", [one for one in PRINTED if one.kind == "results"], ids=lambda table: table.id)
def test_the_source_has_as_many_decimal_numbers_as_the_data(table):
    body = "\n".join(SOURCE.read_text().splitlines()[table.lines[0] - 1 : table.lines[1]])
    body = re.search(r"\\begin\{tabularx?\}(.*)\\end\{tabularx?\}", body, re.DOTALL)[1]
    assert len(re.findall(r"\d+\.\d+", body)) == NUMBERS[table.id]


@needs_source
def test_rows_that_are_bold_in_the_source_are_bold_in_the_data():
    source = SOURCE.read_text().splitlines()
    for table in PRINTED:
        for row in table.rows():
            assert (r"\textbf" in source[row.line - 1]) == all(cell.bold for cell in row.cells), (table.id, row.name)


@needs_source
def test_headings_stand_over_the_columns_that_the_data_says():
    source = SOURCE.read_text().splitlines()
    names = {"CUB-200-2011": "cub", "Cars-196": "cars", "SOP": "sop"}
    for table in PRINTED:
        head = " ".join(source[table.lines[0] - 1 : table.lines[1]])
        groups = re.findall(r"multicolumn\{(\d)\}\{[^}]*\}\{ ?\s*\\textbf\{([^}]*)\}", head)
        datasets = [names[group] for width, group in groups for _ in range(int(width)) if group in names]
        if datasets:
            assert [column["dataset"] for column in table.columns] == datasets
        recalls = re.findall(r"R@(\d+)", head)
        if recalls:
            assert [column["metric"] for column in table.columns] == [f"recall_at_{k}" for k in recalls]
        dims = [
            int(size) for width, group in groups for _ in range(int(width)) for size in re.findall(r"(\d+)-dim", group)
        ]
        if dims:
            assert [column["dim"] for column in table.columns] == dims


@needs_source
def test_no_table_and_no_figure_of_the_source_is_left_out():
    source = SOURCE.read_text()
    assert len(re.findall(r"\\begin\{tabularx?\}", source)) == len(PRINTED)
    lines = source.splitlines()
    for table in paper_tables():
        assert any(rf"\label{{{table.label}}}" in lines[n - 1] for n in range(table.lines[0], table.lines[1] + 1))
    labels = re.findall(r"\\label\{(fig:[^}]*)\}", source)
    figures = tables._content()["figures"]
    assert [figure["label"] for figure in figures] == labels
    assert all(r"\begin{figure" in lines[figure["line"] - 1] for figure in figures)
    assert "addplot" not in source  # no numbers of a figure hide in its code


@needs_source
def test_sections_of_the_main_table_are_where_the_source_has_them():
    lines = SOURCE.read_text().splitlines()
    for section in TABLES["retrieval"].sections:
        heading = next(n for n in range(section.rows[0].line - 1, 0, -1) if r"\rule{0pt}" in lines[n - 1])
        assert section.title in lines[heading - 1]
        assert str(section.dim) in section.title
        assert heading < section.rows[0].line


def cell(table, method, dataset, metric, backbone="resnet50"):
    found = [
        one
        for one in TABLES[table].cells()
        if (one.method, one.dataset, one.metric, one.backbone) == (method, dataset, metric, backbone)
    ]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("of", "value", "std"),
    [
        (("retrieval", "pfml", "cub", "recall_at_1"), 73.4, 0.3),
        (("retrieval", "pfml", "cars", "recall_at_1"), 92.7, 0.3),
        (("retrieval", "pfml", "sop", "recall_at_100", "vit_small"), 98.6, 0.1),
        (("retrieval", "zero-shot", "cars", "recall_at_1", "dino_small"), 42.9, None),
        (("retrieval", "proxy-nca++", "cars", "recall_at_1"), 85.1, None),
        (("retrieval", "proxy-nca++", "sop", "recall_at_1"), 79.6, None),
        (("retrieval", "proxy-anchor", "sop", "recall_at_1"), None, None),
        (("noise", "proxy-anchor", "cars", "recall_at_1"), 76.9, None),
        (("alignment", "pfml", "cub", "alignment"), 0.16, 0.03),
        (("small-embedding", "hist", "cub", "recall_at_8"), 89.6, None),
        (("small-embedding-sop", "pfml", "sop", "recall_at_1000"), 98.6, 0.1),
        (("timing", "proxy-nca", "cars", "seconds_per_epoch"), 14.2, 0.1),
    ],
)
def test_a_cell_is_found_by_what_it_belongs_to(of, value, std):
    found = cell(*of)
    assert (found.value, found.std) == (value, std)


def test_separated_and_concatenated_embeddings_differ_in_their_dimensions():
    ours = [one for one in TABLES["mlrc-cub"].cells() if one.method == "pfml" and one.metric == "map_at_r"]
    assert [(one.dim, one.value) for one in ours] == [(512, 29.4), (128, 23.1)]


def test_settings_of_table_column_and_row_are_those_of_the_cell():
    assert all(one.settings == {"noise": 0.2} for one in TABLES["noise"].cells())
    assert [one.settings for one in TABLES["timing"].cells()][2:4] == [
        {"proxies_per_class": 5},
        {"proxies_per_class": 20},
    ]
    assert [one.settings for one in TABLES["ablation-alpha"].cells()][3] == {"alpha": 3}


def test_the_digitized_figure_agrees_with_the_printed_headline_numbers():
    defaults = {"ablation-proxies": 15, "ablation-delta": 0.2, "ablation-alpha": 3, "ablation-reach": 0}
    for name, value in defaults.items():
        table = TABLES[name]
        points = {one.dataset: one.value for one in table.cells() if one.settings[table.sweep] == value}
        assert points == {"cars": 92.7, "cub": 73.4}


def test_every_method_key_of_the_data_is_a_method_of_ours():
    keys = {row.method for table in paper_tables() for row in table.rows() if row.method}
    unknown = keys - set(METHODS)
    assert not unknown


def test_a_run_belongs_in_one_row():
    for table in paper_tables():
        for section in table.sections:
            keys = [
                (row.method, row.dataset, str(row.settings))
                for row in section.rows
                if row.method and row.cells[0].metric
            ]
            if table.kind != "settings":
                assert len(keys) == len(set(keys)), table.id


@pytest.mark.parametrize("dataset", ["cub", "cars", "sop"])
@pytest.mark.parametrize("backbone", ["resnet50", "bn_inception"])
def test_the_shipped_configurations_have_the_papers_hyper_parameters(dataset, backbone):
    config = shipped_config(f"{dataset}-{backbone}-512")
    words = {"Yes": "freeze", "No": "train", "Adam": "adam"}
    for one in TABLES["hyper-parameters"].cells():
        if (one.dataset, one.backbone) == (dataset, backbone):
            value = config
            for name in one.metric.split("."):
                value = getattr(value, name)
            assert value == (words[one.printed] if one.value is None else one.value), one.metric


def damaged(change):
    content = copy.deepcopy(yaml.safe_load(Path(tables.__file__).with_name("tables.yaml").read_text(encoding="utf-8")))
    change(content["tables"][0])
    return content["tables"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["sections"][0]["rows"][0]["values"].pop(), "9 values, got 8 in row 'ESPHN'"),
        (lambda t: t["sections"][0]["rows"][0]["values"].__setitem__(0, "6x"), "a number ± a number, or -, got '6x'"),
        (lambda t: t["sections"][0].pop("backbone"), "must have backbone"),
        (lambda t: t.__setitem__("epoch", 3), "did you mean 'epochs'"),
        (lambda t: t["columns"][0].__setitem__("metric", "recal_at_1"), "metric must be one that we measure"),
        (lambda t: t["columns"][0].__setitem__("dataset", "birds"), "dataset must be one of cub, cars, sop"),
        (lambda t: t.__setitem__("kind", "picture"), "kind must be one of results, figure, settings"),
    ],
)
def test_damaged_data_is_refused_by_a_sentence(change, message):
    with pytest.raises(ValueError) as error:
        tables._table(damaged(change))
    assert message in str(error.value)
