"""The benchmark itself, at a size where it takes seconds; its exact rows are checked against the dense backend."""

from __future__ import annotations

import csv
import io
import math

import pytest
import torch
from rich.console import Console

import measure as measurement
from charge_sets import CLUSTERS, DELTA, charge_set, share_inside
from exact_rows import exact_gradient_rows
from field import benchmark, cases
from measure import Case, measure
from methods import METHODS
from report import COLUMNS, results_table, verdict_table

SMALL = 200

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def rows(out):
    todo = cases(sizes=[SMALL], states=["trained", "crowded"], methods=list(METHODS), repeats=1, seconds=0.1)
    return benchmark(todo, out, run=measure, console=Console(quiet=True))


def test_the_csv_has_a_row_per_case_with_all_columns(rows, out):
    with (out / "bench.csv").open() as file:
        lines = list(csv.DictReader(file))
    required = {"method", "state", "points", "dims", "share_inside_delta", "p20_ms", "p50_ms", "p80_ms"}
    required |= {"ratio_to_product", "peak_extra_mib", "force_error"}
    required |= {"torch", "pfml", "python", "cores", "cpu", "date"}
    assert required <= set(COLUMNS) == set(lines[0])
    assert [line["method"] for line in lines] == [row.method for row in rows]
    assert set(METHODS) == {line["method"] for line in lines}
    for line in lines:
        assert 0 < float(line["p20_ms"]) <= float(line["p50_ms"]) <= float(line["p80_ms"])
        assert float(line["ratio_to_product"]) > 0
        assert line["torch"] == torch.__version__


def test_every_field_method_is_checked_and_right(rows):
    for row in rows:
        if METHODS[row.method].field is None:
            assert math.isnan(row.force_error)
        elif row.method == "naive":  # its distances come from a product, and so do its errors
            assert row.force_error < 1e-2, row
        else:
            assert row.force_error < 1e-4, row


def test_the_states_hold_the_share_of_pairs_that_they_promise():
    shares = {state: share_inside(charge_set(1_600, state), DELTA) for state in CLUSTERS}
    assert shares == pytest.approx({"random": 0.0, "trained": 0.01, "crowded": 0.2}, rel=0.1)


@pytest.mark.parametrize("method", ["tiled", "tiled-log", "tiled-anchor"])
def test_exact_rows_are_the_dense_gradient_in_float64(method):
    charges, field = charge_set(SMALL, "crowded"), METHODS[method].field
    rows = torch.tensor([0, 99, 100, 150, 199])
    expected = measurement._dense_gradient(charges, field)[rows]
    torch.testing.assert_close(exact_gradient_rows(charges, field, rows), expected, rtol=1e-9, atol=1e-9)


def test_the_force_error_of_a_large_set_sees_a_wrong_gradient(monkeypatch):
    monkeypatch.setattr(measurement, "CHECKED_FULLY", 0)
    charges, method = charge_set(SMALL, "crowded"), METHODS["tiled"]
    method.step(charges)()
    assert measurement._force_error(charges, method.field) < 1e-4
    charges.proxies.points.grad.mul_(1.01)
    assert measurement._force_error(charges, method.field) > 1e-3


def test_a_case_that_does_not_fit_is_reported_and_not_run(monkeypatch):
    monkeypatch.setattr(measurement, "available_bytes", lambda: 10**6)
    row = measure(Case("dense", "random", SMALL))
    assert row.note.startswith("not attempted: needs about")
    assert math.isnan(row.p50_ms)


def test_the_tables_and_the_plot_show_every_method(rows, out):
    text = io.StringIO()
    Console(width=200, file=text).print(results_table(rows), verdict_table(rows))
    assert all(name in text.getvalue() for name in METHODS)
    assert "not run" in text.getvalue()  # the targets at 11,100 and at 22,736 points
    assert (out / "bench.png").stat().st_size > 10_000
