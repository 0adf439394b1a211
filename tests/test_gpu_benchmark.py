"""The benchmark of the GPU, on a CPU at a size where it takes seconds."""

from __future__ import annotations

import csv
import inspect
import io
import sys
import types
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import gpu
from charge_sets import charge_set
from gpu_field import FIELDS, beside, field_bound, force_error
from gpu_measure import Recorder, Row, Setting, gpu_environment
from gpu_rates import Bound, Rates
from methods import backend_step

RATES = Rates(low=1e12, tf32=5e11, fp32=1e11, bandwidth=1e10, kernel=1e-5)
CPU = Setting(torch.device("cpu"), quick=True, repeats=1, seconds=0.0, longest=0.0)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def lines(out, quick_interpreter):
    others = [name for name in gpu.SECTIONS if name != "training"]
    arguments = ["--device", "cpu", "--quick", "--repeats", "1", "--commit", "abc", "--out", str(out)]
    assert gpu.main([*arguments, "--sections", *others]) == 0
    with (out / "gpu.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_every_section_has_rows_and_every_row_says_where_it_was_measured(lines):
    assert {line["section"] for line in lines} == set(gpu.SECTIONS) - {"training"}
    for line in lines:
        assert line["note"] == ""
        assert 0 < float(line["p20_ms"]) <= float(line["p50_ms"]) <= float(line["p80_ms"])
        assert line["torch"] == torch.__version__
        assert line["commit"] == "abc"
        assert line["device"]
        assert line["triton"]


@pytest.mark.slow
def test_all_states_and_normalizations_are_checked_against_float64(lines):
    checked = [line for line in lines if line["section"] == "field" and line["target_error"] != "nan"]
    assert len(checked) == 9
    assert all(float(line["error"]) <= 1e-4 for line in checked)
    assert {line["verdict"] for line in checked} == {"met"}


@pytest.mark.slow
def test_every_measured_row_says_what_bounds_it(lines):
    for line in lines:
        assert line["bound"]
        expected = float(line["bound_ms"]) / float(line["p50_ms"])
        assert float(line["share_of_bound"]) == pytest.approx(expected)


@pytest.mark.slow
def test_the_picture_is_drawn(lines, out):
    assert (out / "gpu.png").stat().st_size > 10_000


def test_the_force_error_sees_a_wrong_gradient():
    charges = charge_set(200, "crowded")
    backend_step("tiled", FIELDS["none"])(charges)()
    assert force_error(charges, FIELDS["none"]) < 1e-4
    charges.proxies.points.grad.mul_(1.01)
    assert force_error(charges, FIELDS["none"]) > 1e-3


def test_a_row_that_fails_is_reported_and_the_next_one_runs(tmp_path):
    recorder = Recorder(tmp_path / "gpu.csv", gpu_environment(CPU.device, "abc"))

    def broken():
        raise RuntimeError("out of memory\nand more")

    recorder.attempt("field", "first", broken, points=3)
    recorder.attempt("field", "second", lambda: Row("field", "second", p50_ms=1.0, target_ms=2.0))
    first, second = recorder.rows
    assert first.verdict == "failed"
    assert first.note == "failed: RuntimeError: out of memory"
    assert first.points == 3
    assert second.verdict == "met"
    with (tmp_path / "gpu.csv").open() as file:
        assert [line["verdict"] for line in csv.DictReader(file)] == ["failed", "met"]


def test_a_verdict_names_every_promise_that_was_not_kept():
    row = Row("field", "what", target_ms=1.0, p50_ms=2.0, target_mib=5.0, mib=4.0, target_error=0.1)
    assert row.verdict == "missed: time, error"  # an error that was not measured is none that was kept
    assert Row("field", "what", p50_ms=2.0).verdict == ""
    assert Row("training", "what", ratio=0.8, target_ratio=0.85).verdict == "missed: ratio"


def test_the_bound_is_the_longest_of_products_memory_and_kernels():
    assert RATES.explain(Bound(1e12, 1e9), 2_000.0)["bound"] == "16-bit products"
    assert RATES.explain(Bound(1e12, 1e9), 2_000.0)["share_of_bound"] == pytest.approx(0.5)
    assert RATES.explain(Bound(1e9, 1e9, "fp32"), 200.0)["bound"] == "memory"
    assert RATES.explain(Bound(1e6, 1e3), 2.0, kernels=50)["bound"] == "50 kernels"


def test_the_work_of_a_field_grows_with_the_pairs_within_reach():
    random, crowded = (field_bound(charge_set(200, state), FIELDS["none"]) for state in ("random", "crowded"))
    product = 2 * 200**2 * 512
    assert random.flops == pytest.approx(product / 2)
    assert crowded.flops == pytest.approx(product * (0.5 + 4.5 * 0.2), rel=0.1)
    of_samples = 2 * (2 * 100 * 200) * 512  # 100 of the 200 points are samples
    assert field_bound(charge_set(200, "random"), FIELDS["anchor"]).flops == pytest.approx(6 * of_samples)


def test_rows_of_training_are_appended_if_there_are_any(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path / "gpu.csv", gpu_environment(CPU.device, "abc"))
    monkeypatch.setitem(sys.modules, "training", None)
    gpu.training_section(recorder, CPU, RATES)
    assert recorder.rows[-1].note.startswith("left out")
    module = types.ModuleType("training")

    def train(arguments):
        print("a table")
        rows = ["method,network,classes,batch,step_ms,loss_ms,ratio,note", "pfml,eager,8,16,2.5,nan,0.9,"]
        rows += ["pfml,loss,8,16,nan,1.5,nan,", "pfml,compiled,8,16,nan,nan,nan,failed: why"]
        (tmp_path / "training.csv").write_text("\n".join(rows))

    module.main = train
    monkeypatch.setitem(sys.modules, "training", module)
    gpu.training_section(recorder, replace(CPU, quick=False), RATES)
    step, loss, failed = recorder.rows[-3:]
    assert (step.p50_ms, step.ratio, step.verdict) == (2.5, 0.9, "met")
    assert (loss.p50_ms, loss.verdict) == (1.5, "")
    assert failed.failed
    module.main = lambda arguments: sys.exit(2)
    gpu.training_section(recorder, CPU, RATES)
    assert recorder.rows[-1].note == "failed: SystemExit: 2"


def test_training_can_be_run():
    training = pytest.importorskip("training")
    assert callable(training.main)
    for option in gpu._TRAINING[::2]:
        assert f'"{option}"' in inspect.getsource(training.main)


@pytest.mark.slow
def test_the_table_shows_every_row(lines, out):
    rows = [Row("field", "first", p50_ms=1.0, target_ms=2.0), Row("small", "second", note="failed: why")]
    text = io.StringIO()
    Console(width=200, file=text).print(gpu.results_table(rows, gpu_environment(CPU.device, "abc"), RATES))
    assert all(word in text.getvalue() for word in ("first", "second", "met", "failed: why", "2 ms", "1 ms"))


def test_a_method_that_would_not_fit_is_left_out(tmp_path):
    recorder = Recorder(tmp_path / "gpu.csv", gpu_environment(CPU.device, "abc"))
    beside(recorder, CPU, RATES, "naive", 100_000, "random", "ieee", "plot")
    assert recorder.rows[-1].note.startswith("left out: needs about 307 GiB")
