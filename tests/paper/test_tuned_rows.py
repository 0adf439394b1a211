"""Runs with tuned hyper-parameters: never in one mean with others, and marked."""

import pytest

from pfml.paper import paper_tables
from pfml.paper.fill import fill
from pfml.paper.grid import grid_of
from pfml.paper.noise_curves import noise_curves
from pfml.paper.write import report_of, write_report
from records import record

TABLES = {table.id: table for table in paper_tables()}
TUNING = {"trials": 12, "split": "half", "values": {"optimizer.lr": 2e-4, "loss.options.delta": 0.31}}


@pytest.fixture
def runs():
    usual = [record(recall=0.7, seed=seed) for seed in (0, 1)]
    return [*usual, record(recall=0.74, seed=0, key="tuned", tuning=TUNING)]


def named(filled, name):
    (row,) = [row for section in filled.sections for row in section.rows if row.name == name]
    return row


def test_a_tuned_run_has_a_row_of_its_own_beside_the_paper_s_numbers(runs):
    filled = fill(TABLES["retrieval"], runs)
    (usual,) = [row for row in filled.sections[0].rows if row.method == "pfml" and not row.is_tuned]
    tuned = named(filled, f"{usual.name}, tuned")
    assert usual.ours[0].last.mean == pytest.approx(70.0)
    assert usual.ours[0].last.seeds == 2
    assert tuned.ours[0].last.mean == pytest.approx(74.0)
    assert tuned.paper == usual.paper
    note = "tuned on validation classes (12 trials, split half): lr 0.0002, delta 0.31"
    assert note in tuned.ours[0].notes
    assert note not in usual.ours[0].notes
    (lines,) = [row.lines for row in grid_of(filled).sections[0].rows if row.name == tuned.name]
    assert [line.whose for line in lines] == ["paper", "ours, last", "ours, best", "difference"]


def test_a_tuned_run_of_a_method_that_the_paper_does_not_have_is_marked_too():
    filled = fill(TABLES["retrieval"], [record(method="pfml-log", tuning=TUNING)])
    assert named(filled, "pfml-log, tuned").ours[0].last is not None


@pytest.mark.parametrize("form", ["md", "latex", "html"])
def test_every_format_says_it(runs, form):
    text = write_report(report_of(runs), form, None)
    assert ", tuned" in text
    assert "12 trials, split half" in text


def test_curves_of_tuned_and_of_other_runs_are_two():
    rates = (0.1, 0.2)
    runs = [record(experiment="noise", settings={"noise": rate}, recall=0.7 - rate) for rate in rates]
    tuned = [
        record(experiment="noise", settings={"noise": rate}, recall=0.8 - rate, key=f"t{rate}", tuning=TUNING)
        for rate in rates
    ]
    curves = noise_curves([fill(TABLES["noise"], [*runs, *tuned])])
    values = {curve.name.endswith(", tuned"): [point.mean for point in curve.recalls] for curve in curves}
    assert values == {False: pytest.approx([60.0, 50.0]), True: pytest.approx([70.0, 60.0])}
