"""What was tried on CUB: every run has a line, every line a candidate; the docs' tables and plots come from them."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from pfml.methods import METHODS, create_loss

ROOT = Path(__file__).parents[1]
STORED = {stage: ROOT / "results" / f"cub-{stage}.jsonl" for stage in ("validation", "test")}


@pytest.fixture(scope="module")
def research():
    """The scripts as modules; `trial` adds a method to the table, which is taken off again."""
    before = dict(METHODS)
    sys.path.insert(0, str(ROOT / "research"))
    names = ("trial", "candidates", "tables", "plots", "choose", "cub", "transfer")
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(ROOT / "research"))
        METHODS.clear()
        METHODS.update(before)
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def lines():
    return {stage: [json.loads(line) for line in path.read_text().splitlines()] for stage, path in STORED.items()}


def test_every_candidate_can_be_trained_unless_its_lines_say_why_not(research, lines):
    refused = {line["candidate"] for line in lines["validation"] if "beyond float32" in str(line["error"])}
    for name in research["candidates"].CANDIDATES:
        config = research["candidates"].candidate_config(name)
        try:
            create_loss(config.loss, 5, 8)
        except ValueError as error:
            assert "beyond float32" in str(error)
            assert name in refused


def test_every_line_is_a_run_of_a_candidate(research, lines):
    for stage, stored in lines.items():
        for line in stored:
            assert line["stage"] == stage
            assert line["candidate"] in research["candidates"].CANDIDATES
            assert line["commit"] != "unknown"
            assert line["device"]
            if line["status"] == "done":
                assert line["history"][-1]["epoch"] == line["epochs"], "the last epoch is evaluated"
            else:
                assert line["error"]


def test_no_test_run_was_made_twice(lines):
    made = [(line["candidate"], line["seed"], line["noise"]) for line in lines["test"]]
    assert len(set(made)) == len(made)


def test_the_tables_have_the_numbers_of_the_documentation(research, lines):
    three = [line for line in lines["test"] if line["seed"] in research["plots"].SEEDS]
    rows = {row[1:3]: row for row in research["tables"].rows_of(three)}
    text = (ROOT / "docs" / "REPRODUCTION.md").read_text(encoding="utf-8")
    for (noise, name), row in rows.items():
        if name.startswith(("f ", "g ")):
            runs, recall, precision = row[3:6]
            assert runs == "3", (name, noise)
            shown = any(recall in line and precision in line for line in text.splitlines() if line.startswith("|"))
            assert shown, f"{name} at {noise}: R@1 {recall}, MAP@R {precision} are not in docs/REPRODUCTION.md"


def test_the_recipe_is_what_validation_chose(research, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["choose.py", str(STORED["validation"]), "--among", "7 log"])
    research["choose"].main()
    assert capsys.readouterr().out.strip() == "7 log, trust .3, samples 1"
    monkeypatch.setattr(sys, "argv", ["choose.py", str(STORED["validation"]), "--among", "8 recipe, average"])
    research["choose"].main()
    assert capsys.readouterr().out.strip() == "8 recipe, average 0.99"


def test_the_plots_are_written(research, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["plots.py", *map(str, reversed(STORED.values())), "--out", str(tmp_path)])
    research["plots"].main()
    assert {path.name for path in tmp_path.iterdir()} == {
        "cub-test.png", "cub-eq6.png", "cub-paper.png", "cub-ablation.png",
    }  # fmt: skip


def test_every_line_of_students_is_one_of_the_tried_and_the_documentation_has_its_numbers(research):
    transfer = research["transfer"]
    path = ROOT / "results" / "transfer-validation.jsonl"
    for text in path.read_text().splitlines():
        line = json.loads(text)
        assert line["commit"] != "unknown"
        known = {"student": transfer.STUDENTS, "ensemble": transfer.ENSEMBLES}.get(line["kind"])
        assert known is None or line["candidate"] in known
    for spec in transfer.STUDENTS.values():
        config = transfer.student_config(spec, "cub")
        create_loss(config.loss, 5, 8)
        assert set(config.teachers) == set(spec.teachers)
    table = transfer.table(path)
    assert "| student 1 rc | 0 % | 2 | 81.8 | 45.0 |" in table
    documentation = (ROOT / "docs" / "STUDENTS.md").read_text(encoding="utf-8")
    assert "| **student of these four, 30 epochs** | 2 | **81.8** | **45.0** |" in documentation
    assert (
        "| **student of two recipes and two Proxy Anchors with filtering** | 1 | **81.6** | **44.7** |" in documentation
    )
    assert "| student 1 rc, robust | 20 % | 1 | 81.6 | 44.7 |" in table
