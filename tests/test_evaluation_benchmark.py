"""The benchmark of the metrics itself, at a size where it takes seconds."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

pytest.importorskip("pytorch_metric_learning")

import evaluation as evaluation_benchmark
from evaluation import DEFAULT_SEARCH, METHODS, Case, Row, benchmark, measure, results_table, verdict


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def rows(out):
    return benchmark([Case(method, 300, 60, repeats=1) for method in METHODS], out, run=measure)


def test_the_metrics_of_all_methods_agree(rows):
    ours, *others = rows
    compared = [row for row in others if row.method != DEFAULT_SEARCH]
    assert len(compared) == 2
    assert all(row.largest_difference <= 1e-6 for row in compared)
    assert sum(line.startswith("ok: metrics") for line in verdict(rows)) == 2
    assert {f"recall_at_{k}" for k in (1, 10, 100, 1000)} <= set(ours.metrics)
    assert 0 < ours.metrics["map_at_r"] < 1


def test_the_csv_has_a_row_per_case(rows, out):
    with (out / "evaluation.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["method"] for line in lines] == list(METHODS)
    assert float(lines[0]["seconds"]) > 0
    assert json.loads(lines[0]["metrics"]) == rows[0].metrics
    assert {"torch", "cpu", "cores", "date"} <= set(lines[0])


def test_the_table_shows_every_method(rows):
    text = io.StringIO()
    Console(width=200, file=text).print(results_table(rows))
    assert all(name in text.getvalue() for name in METHODS)


def test_a_wrong_metric_is_seen(rows, out):
    def run(case):
        row = Row(case.method, case.points, case.classes, seconds=1.0, metrics=dict(rows[0].metrics))
        return replace(row, metrics=row.metrics | {"map_at_r": 0.5}) if case.method != "pfml" else row

    wrong = benchmark([Case(method, 300, 60) for method in METHODS], out / "wrong", run=run)
    assert wrong[1].largest_difference == pytest.approx(abs(0.5 - rows[0].metrics["map_at_r"]))
    assert any(line.startswith("NOT OK: metrics") for line in verdict(wrong))


def test_memory_is_measured_in_its_own_run():
    row = measure(Case("pfml", 2_000, 400, memory=True))
    assert 1 < row.peak_extra_mib < 500


def test_a_failing_case_is_reported(monkeypatch):
    monkeypatch.setattr(evaluation_benchmark.sys, "executable", "/bin/false")
    assert evaluation_benchmark.measure_in_fresh_processes(Case("pfml", 300, 60)).note.startswith("failed")
