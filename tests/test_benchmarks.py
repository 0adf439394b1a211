"""The benchmarks themselves, at sizes where they take seconds: what they measure, check, write and admit."""

from __future__ import annotations

import csv
import inspect
import io
import json
import math
import re
import subprocess
import sys
import tomllib
import types
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from string import ascii_uppercase
from unittest import mock

import pytest
import torch
from rich.console import Console

import commands
import evaluation
import field as field_benchmark
import gpu
import gpu_teachers
import gpu_trees
import growth
import measure
import method_cost
import photos
import plain_loop
import quick
import training
from charge_sets import CLUSTERS, DELTA, charge_set, share_inside
from exact_rows import exact_gradient_rows
from gpu_field import FIELDS, beside, field_bound, force_error
from gpu_measure import Recorder, Setting, gpu_environment
from gpu_measure import Row as GpuRow
from gpu_rates import Bound, Rates
from methods import METHODS, backend_step
from pfml.data import RetrievalData, draw_glyphs
from pfml.data.decoding import read_rgb
from report import COLUMNS, results_table, verdict_table

ROOT = Path(__file__).parents[1]
SMALL = 200

pytestmark = pytest.mark.usefixtures("one_thread")
needs_pml = pytest.mark.skipif(find_spec("pytorch_metric_learning") is None, reason="needs pytorch_metric_learning")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


def csv_lines(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def printed(*tables):
    text = io.StringIO()
    Console(width=200, file=text).print(*tables)
    return text.getvalue()


# benchmarks/field.py


@pytest.fixture(scope="module")
def field_rows(out):
    todo = field_benchmark.cases(sizes=[SMALL], states=["crowded"], methods=list(METHODS), repeats=1, seconds=0.1)
    return field_benchmark.benchmark(todo, out, run=measure.measure, console=Console(quiet=True))


def test_the_csv_of_the_field_has_a_row_per_case_with_all_columns(field_rows, out):
    lines = csv_lines(out / "bench.csv")
    required = {"method", "state", "points", "dims", "share_inside_delta", "p20_ms", "p50_ms", "p80_ms"}
    required |= {"ratio_to_product", "peak_extra_mib", "force_error"}
    required |= {"torch", "pfml", "python", "cores", "cpu", "date"}
    assert required <= set(COLUMNS) == set(lines[0])
    assert [line["method"] for line in lines] == [row.method for row in field_rows]
    assert set(METHODS) == {line["method"] for line in lines}
    for line in lines:
        assert 0 < float(line["p20_ms"]) <= float(line["p50_ms"]) <= float(line["p80_ms"])
        assert float(line["ratio_to_product"]) > 0
        assert line["torch"] == torch.__version__


def test_every_field_method_is_checked_and_right(field_rows):
    for row in field_rows:
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
    expected = measure._dense_gradient(charges, field)[rows]
    torch.testing.assert_close(exact_gradient_rows(charges, field, rows), expected, rtol=1e-9, atol=1e-9)


def test_the_force_error_of_a_large_set_of_charges_sees_a_wrong_gradient(monkeypatch):
    monkeypatch.setattr(measure, "CHECKED_FULLY", 0)
    charges, method = charge_set(SMALL, "crowded"), METHODS["tiled"]
    method.step(charges)()
    assert measure._force_error(charges, method.field) < 1e-4
    charges.proxies.points.grad.mul_(1.01)
    assert measure._force_error(charges, method.field) > 1e-3


def test_a_case_that_does_not_fit_is_reported_and_not_run(monkeypatch):
    monkeypatch.setattr(measure, "available_bytes", lambda: 10**6)
    row = measure.measure(measure.Case("dense", "random", SMALL))
    assert row.note.startswith("not attempted: needs about")
    assert math.isnan(row.p50_ms)


def test_the_tables_and_the_plot_show_every_method(field_rows, out):
    text = printed(results_table(field_rows), verdict_table(field_rows))
    assert all(name in text for name in METHODS)
    assert "not run" in text  # the targets at 11,100 and at 22,736 points
    assert (out / "bench.png").stat().st_size > 10_000


# benchmarks/evaluation.py


@pytest.fixture(scope="module")
def evaluation_rows(out):
    return evaluation.benchmark(
        [evaluation.Case(method, 300, 60, repeats=1) for method in evaluation.METHODS], out, run=evaluation.measure
    )


@needs_pml
def test_the_metrics_of_all_methods_agree(evaluation_rows):
    ours, *others = evaluation_rows
    compared = [row for row in others if row.method != evaluation.DEFAULT_SEARCH]
    assert len(compared) == 2
    assert all(row.largest_difference <= 1e-6 for row in compared)
    assert sum(line.startswith("ok: metrics") for line in evaluation.verdict(evaluation_rows)) == 2
    assert {f"recall_at_{k}" for k in (1, 10, 100, 1000)} <= set(ours.metrics)
    assert 0 < ours.metrics["map_at_r"] < 1


@needs_pml
def test_the_csv_of_the_metrics_has_a_row_per_case(evaluation_rows, out):
    lines = csv_lines(out / "evaluation.csv")
    assert [line["method"] for line in lines] == list(evaluation.METHODS)
    assert float(lines[0]["seconds"]) > 0
    assert json.loads(lines[0]["metrics"]) == evaluation_rows[0].metrics
    assert {"torch", "cpu", "cores", "date"} <= set(lines[0])


@needs_pml
def test_the_table_of_the_metrics_shows_every_method(evaluation_rows):
    text = printed(evaluation.results_table(evaluation_rows))
    assert all(name in text for name in evaluation.METHODS)


@needs_pml
def test_a_wrong_metric_is_seen(evaluation_rows, out):
    def run(case):
        row = evaluation.Row(
            case.method, case.points, case.classes, seconds=1.0, metrics=dict(evaluation_rows[0].metrics)
        )
        return replace(row, metrics=row.metrics | {"map_at_r": 0.5}) if case.method != "pfml" else row

    wrong = evaluation.benchmark(
        [evaluation.Case(method, 300, 60) for method in evaluation.METHODS], out / "wrong", run=run
    )
    assert wrong[1].largest_difference == pytest.approx(abs(0.5 - evaluation_rows[0].metrics["map_at_r"]))
    assert any(line.startswith("NOT OK: metrics") for line in evaluation.verdict(wrong))


@needs_pml
def test_memory_is_measured_in_its_own_run():
    row = evaluation.measure(evaluation.Case("pfml", 2_000, 400, memory=True))
    assert 1 < row.peak_extra_mib < 500


@needs_pml
def test_a_failing_case_is_reported(monkeypatch):
    monkeypatch.setattr(evaluation.sys, "executable", "/bin/false")
    assert evaluation.measure_in_fresh_processes(evaluation.Case("pfml", 300, 60)).note.startswith("failed")


# benchmarks/gpu.py


RATES = Rates(low=1e12, tf32=5e11, fp32=1e11, bandwidth=1e10, kernel=1e-5)
CPU = Setting(torch.device("cpu"), quick=True, repeats=1, seconds=0.0, longest=0.0)


@pytest.fixture(scope="module")
def gpu_lines(out, quick_interpreter):
    others = [name for name in gpu.SECTIONS if name != "training"]
    arguments = ["--device", "cpu", "--quick", "--repeats", "1", "--commit", "abc", "--out", str(out)]
    assert gpu.main([*arguments, "--sections", *others]) == 0
    return csv_lines(out / "gpu.csv")


@pytest.mark.slow
def test_every_section_of_the_gpu_has_rows_and_every_row_says_where_it_was_measured(gpu_lines):
    assert {line["section"] for line in gpu_lines} == set(gpu.SECTIONS) - {"training"}
    for line in gpu_lines:
        assert line["note"] == ""
        assert 0 < float(line["p20_ms"]) <= float(line["p50_ms"]) <= float(line["p80_ms"])
        assert line["torch"] == torch.__version__
        assert line["commit"] == "abc"
        assert line["device"]
        assert line["triton"]


@pytest.mark.slow
def test_all_states_and_normalizations_are_checked_against_float64(gpu_lines):
    checked = [line for line in gpu_lines if line["section"] == "field" and line["target_error"] != "nan"]
    assert len(checked) == 9
    assert all(float(line["error"]) <= 1e-4 for line in checked)
    assert {line["verdict"] for line in checked} == {"met"}


@pytest.mark.slow
def test_every_measured_row_says_what_bounds_it(gpu_lines):
    for line in gpu_lines:
        assert line["bound"]
        expected = float(line["bound_ms"]) / float(line["p50_ms"])
        assert float(line["share_of_bound"]) == pytest.approx(expected)


@pytest.mark.slow
def test_the_plot_of_the_gpu_is_written(gpu_lines, out):
    assert (out / "gpu.png").stat().st_size > 10_000


def test_the_force_error_of_a_gpu_sees_a_wrong_gradient():
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
    recorder.attempt("field", "second", lambda: GpuRow("field", "second", p50_ms=1.0, target_ms=2.0))
    first, second = recorder.rows
    assert first.verdict == "failed"
    assert first.note == "failed: RuntimeError: out of memory"
    assert first.points == 3
    assert second.verdict == "met"
    assert [line["verdict"] for line in csv_lines(tmp_path / "gpu.csv")] == ["failed", "met"]


def test_a_verdict_names_every_promise_that_was_not_kept():
    row = GpuRow("field", "what", target_ms=1.0, p50_ms=2.0, target_mib=5.0, mib=4.0, target_error=0.1)
    assert row.verdict == "missed: time, error"  # an error that was not measured is none that was kept
    assert GpuRow("field", "what", p50_ms=2.0).verdict == ""
    assert GpuRow("training", "what", ratio=0.8, target_ratio=0.85).verdict == "missed: ratio"


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


@pytest.mark.slow
def test_a_step_with_teachers_is_compared_with_one_without(tmp_path, monkeypatch):
    def times_ms(step, *_, **options):
        step()
        return [4.0 if getattr(step, "__name__", "") == "with_teachers" else 1.0] * 3

    monkeypatch.setattr(gpu_teachers, "times_ms", times_ms)
    recorder = Recorder(tmp_path / "gpu.csv", gpu_environment(CPU.device, "abc"))
    gpu.SECTIONS["teachers"](recorder, CPU, RATES)
    *others, both = recorder.rows
    assert not any(row.failed for row in recorder.rows), [row.note for row in recorder.rows]
    assert len(others) == 4
    assert all(row.p50_ms > 0 for row in others)
    assert both.ratio == 0.25, "without / with"
    assert math.isnan(both.target_ratio), "a promise about ResNet-50 on a GPU"
    assert both.verdict == ""


def test_a_student_follows_the_teachers_that_it_is_measured_with():
    student = gpu_teachers.Student(gpu_teachers.SMALL, 8, CPU)
    assert len(student.teachers) == gpu_teachers.NUMBER
    before = [parameter.clone() for parameter in student.embedder.parameters()]
    assert student.said.shape == (8, gpu_teachers.NUMBER * 8)
    student.with_teachers()
    assert any(not torch.equal(a, b) for a, b in zip(before, student.embedder.parameters(), strict=True))


# benchmarks/gpu_trees.py


@pytest.mark.slow
def test_two_trees_are_timed_in_turns(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_trees, "cases", lambda device: [gpu_trees.Case(200, "random", "none")])
    source = str(ROOT / "src")
    out = tmp_path / "trees.jsonl"
    timed = mock.Mock(side_effect=gpu_trees.compare)
    monkeypatch.setattr(gpu_trees, "compare", timed)
    arguments = [source, source, "--device", "cpu", "--rounds", "2", "--seconds", "0", "--out", str(out)]
    assert gpu_trees.main(arguments) == 0
    (line,) = map(json.loads, out.read_text().splitlines())
    assert len(line["before_ms"]) == len(line["after_ms"]) == 2
    assert line["after_over_before"] > 0
    assert "none, random, n = 200" in capsys.readouterr().out
    assert [tree.package for tree in timed.call_args.args[0]] == 2 * [str(ROOT / "src" / "pfml")]


def test_a_tree_without_the_package_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="must hold the folder pfml"):
        gpu_trees.Tree(tmp_path, "cpu", 0.0)


def test_training_can_be_run():
    assert callable(training.main)
    for option in gpu._TRAINING[::2]:
        assert f'"{option}"' in inspect.getsource(training.main)


@pytest.mark.slow
def test_the_table_of_the_gpu_shows_every_row(gpu_lines, out):
    rows = [GpuRow("field", "first", p50_ms=1.0, target_ms=2.0), GpuRow("small", "second", note="failed: why")]
    text = printed(gpu.results_table(rows, gpu_environment(CPU.device, "abc"), RATES))
    assert all(word in text for word in ("first", "second", "met", "failed: why", "2 ms", "1 ms"))


def test_a_method_that_would_not_fit_is_left_out(tmp_path):
    recorder = Recorder(tmp_path / "gpu.csv", gpu_environment(CPU.device, "abc"))
    beside(recorder, CPU, RATES, "naive", 100_000, "random", "ieee", "plot")
    assert recorder.rows[-1].note.startswith("left out: needs about 307 GiB")


# benchmarks/training.py


@pytest.fixture(scope="module")
def training_lines(out):
    assert training.main(["--quick", "--device", "cpu", "--networks", "eager,loss", "--out", str(out)]) == 0
    return csv_lines(out / "training.csv")


@pytest.mark.slow
def test_loop_and_step_are_measured_for_each_method(training_lines):
    timed = [line for line in training_lines if line["network"] == "eager"]
    assert [line["method"] for line in timed] == ["pfml", "proxy-anchor"]
    for line in timed:
        step, loop = float(line["step_images_per_second"]), float(line["loop_images_per_second"])
        assert float(line["ratio"]) == pytest.approx(loop / step)
        assert float(line["crops_ms"]) > 0
        assert {"device", "torch", "date"} <= set(line)


@pytest.mark.slow
def test_the_share_of_the_loss_is_measured_at_both_sizes(training_lines):
    shares = [line for line in training_lines if line["network"] == "loss"]
    assert [(line["method"], line["classes"]) for line in shares] == [
        ("pfml", "8"),
        ("proxy-anchor", "8"),
        ("pfml", "60"),
        ("proxy-anchor", "60"),
    ]
    assert all(0 < float(line["loss_share"]) < 1 for line in shares)


def test_a_case_that_fails_does_not_take_the_others_with_it(tmp_path):
    good, bad = training.Row("pfml", "eager", 8, 3, 16), training.Row("pfml", "compiled", 8, 3, 16)

    def fail():
        raise RuntimeError("no compiler\nand more")

    rows = training.benchmark([(bad, fail), (good, lambda: good)], tmp_path, {"device": "x"})
    assert [row.note for row in rows] == ["failed: RuntimeError: no compiler", ""]
    assert [line["network"] for line in csv_lines(tmp_path / "training.csv")] == ["compiled", "eager"]


def test_synthetic_images_have_many_sizes_and_all_classes():
    data, source = training.synthetic_data(20, 5, (30, 60), torch.device("cpu"))
    assert len(source.sizes.unique(dim=0)) > 10
    assert data.train.labels.unique().tolist() == list(range(5))
    assert training.TARGET == 0.85


# benchmarks/training.py --beside, benchmarks/photos.py, benchmarks/commands.py


def test_photographs_are_files_of_their_own_in_as_many_classes_as_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(photos, "DISTINCT", 2)
    files = photos.photographs(tmp_path / "photos", 5)
    assert len({file.read_bytes() for file in files}) == 5
    assert [read_rgb(file).shape for file in files] == [(3, 375, 500)] * 5
    folder = photos.class_folders(tmp_path / "classes", files, 2)
    assert [len(list(each.iterdir())) for each in sorted(folder.iterdir())] == [3, 2]


def test_contestants_are_compared_with_the_first_by_their_medians():
    times = {
        "plain": plain_loop.Times(1.0, [2.0, 4.0, 9.0], [8.0, 8.0, 8.0]),
        "pfml": plain_loop.Times(1.0, [1.0, 1.0, 7.0], [2.0, 2.0, 2.0]),
    }
    (row,) = (line.split() for line in printed(training.beside_table(times, 100)).splitlines() if "pfml" in line)
    assert [row[k] for k in (3, 5, 7, 9)] == ["100.0", "4.00", "20.0", "4.00"]


@needs_pml
def test_both_loops_train_the_same_batches(tmp_path):
    files = photos.photographs(tmp_path, 8)
    comparison = plain_loop.Comparison(tuple(files), 2, "resnet10t", batch=8, steps=1, workers=0, threads=1)
    assert sorted(comparison.batches(0)[0]) == list(range(8))
    for name in ("plain loop", "pfml"):
        plain_loop.CONTESTANTS[name](comparison)(0)


def test_a_command_that_fails_is_not_timed():
    assert all(seconds > 0 for seconds in commands._timed([sys.executable, "-c", "sum(range(10**6))"]))
    with pytest.raises(subprocess.CalledProcessError):
        commands._timed([sys.executable, "-c", "1 / 0"])


# benchmarks/method_cost.py


def test_every_method_takes_as_many_timed_steps_as_asked_for(monkeypatch):
    data = RetrievalData("glyphs", draw_glyphs(ascii_uppercase, copies=1), draw_glyphs("ab", copies=1))
    monkeypatch.setattr("pfml.data.datasets.read_glyphs", lambda: data)
    found, per_epoch = method_cost.seconds_of_steps(["proxy-anchor", "pfml-log"], steps=2)
    assert {method: len(seconds) for method, seconds in found.items()} == {"proxy-anchor": 2, "pfml-log": 2}
    assert all(second > 0 for seconds in found.values() for second in seconds)
    assert per_epoch == len(data.train) // 100


def test_the_table_of_costs_has_proxy_anchor_as_one(monkeypatch, capsys):
    steps = {"proxy-anchor": [1.0, 1.0, 9.0], "snr": [2.0, 2.0, 2.0]}
    asked = []
    monkeypatch.setattr(method_cost, "seconds_of_steps", lambda *given: asked.append(given) or (steps, 10))
    monkeypatch.setattr(method_cost.torch, "set_num_threads", lambda number: asked.append(number))
    monkeypatch.setattr(sys, "argv", ["method_cost.py", "--methods", "snr", "--steps", "3"])
    method_cost.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "snr" in line or "proxy-anchor " in line]
    assert [[row[1], row[3], row[5]] for row in rows[-2:]] == [
        ["proxy-anchor", "10.00", "1.00"],
        ["snr", "20.00", "2.00"],
    ]
    assert asked == [1, (["proxy-anchor", "snr"], 3)]


# benchmarks/reliability.py: the table of docs/RELIABILITY.md is made of outcomes


QUICK_PROBES = (1, 2, 4, 5, 6, 7, 8, 9, 10, 15, 16, 18, 19, 21, 22)


@pytest.fixture(scope="module")
def reliability():
    pytest.importorskip("pytorch_metric_learning", reason="needs the extra methods")
    import reliability

    return reliability


@pytest.mark.parametrize("number", QUICK_PROBES)
def test_pfml_passes_the_probe(reliability, number):
    assert reliability.probed(number, reliability.PFML).startswith("pass: ")


@pytest.mark.parametrize("number", [4, 6, 7, 10, 15, 18])
def test_the_probe_tells_a_loss_that_fails(reliability, number):
    """What the scorecard says of pytorch-metric-learning."""
    assert reliability.probed(number, reliability.PML).startswith("**fail**: ")


def test_a_probe_is_run_and_not_looked_up(reliability, monkeypatch):
    from reliability_probes import PROBES
    from reliability_subjects import Outcome, Subject

    monkeypatch.setitem(PROBES, 4, lambda subject: Outcome(False, f"seen of {subject.name}"))
    assert "seen of" in reliability.probed(4, reliability.PFML)
    broken = Subject("broken", lambda classes, dim: reliability.pml.ContrastiveLoss(), "", False)
    assert "**fail**: broken: " in reliability.probed(7, [broken])


def test_every_item_has_two_cells_and_a_line_in_the_document(reliability):
    assert list(reliability.ITEMS) == list(range(1, 29))
    assert reliability.rows(1).keys() == reliability.ITEMS.keys()
    listed = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "RELIABILITY.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {int(number) for number in listed} >= set(reliability.ITEMS)


def test_every_dependency_has_a_line_in_the_list_of_licenses():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: needed for name, needed in project["optional-dependencies"].items() if name not in ("all", "dev")}
    listed = (ROOT / "docs" / "LICENSES.md").read_text(encoding="utf-8")
    for requirement in [*project["dependencies"], *(one for needed in extras.values() for one in needed)]:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)[0]
        assert f"| {name} |" in listed, f"{name}: python tools/licenses.py > docs/LICENSES.md"


# benchmarks/quick.py


def test_a_row_beyond_the_tolerance_is_named_and_one_within_it_is_not():
    baseline = {"fast": 1.0, "slow": 2.0}
    assert quick.regressions({"fast": 1.24, "slow": 2.0}, baseline) == []
    assert quick.regressions({"fast": 0.5, "slow": 2.6}, baseline) == [
        "slow: 2.60 products, 30% above its baseline of 2.00"
    ]
    assert len(quick.regressions({"fast": math.nan, "new": 1.0}, baseline)) == 2


def test_the_guard_fails_on_slower_code_and_says_which_row(monkeypatch, tmp_path, capsys):
    work = torch.randn(128, 128)

    def product():
        return [work @ work for _ in range(20)]

    def twice():
        return product(), product()

    monkeypatch.setattr(quick, "ROWS", {"same": lambda: (product, product), "other": lambda: (product, product)})
    arguments = ["--baseline", str(tmp_path / "baseline.json"), "--rounds", "15"]
    assert quick.main([*arguments, "--write"]) == 0
    monkeypatch.setitem(quick.ROWS, "other", lambda: (twice, product))
    capsys.readouterr()
    assert quick.main(arguments) == 1
    assert re.search(r"^other: .* above its baseline", capsys.readouterr().out, re.MULTILINE)


def test_the_stored_baseline_has_every_row():
    assert set(json.loads(quick.BASELINE.read_text())) == set(quick.ROWS)


@pytest.mark.slow
def test_no_row_is_slower_than_its_baseline():
    assert quick.regressions(quick.ratios(), json.loads(quick.BASELINE.read_text())) == []


# benchmarks/growth.py


def test_the_exponent_of_a_power_is_fitted():
    sizes = [10, 100, 1_000, 10_000]
    assert growth.exponent(sizes, [9.0, *(size**1.5 for size in sizes[1:])]) == pytest.approx(1.5)


def test_sizes_that_would_take_too_long_are_estimated_and_marked(monkeypatch):
    monkeypatch.setattr(growth, "_cost", lambda size: size**2 / 1e6)
    curve = growth.Curve("square", lambda size: size, (100, 1_000, 10_000), dims=1)
    points = growth.measured(curve, seconds=10.0)
    assert [point.estimated for point in points] == [False, False, True]
    assert [point.cost for point in points] == pytest.approx([1.0, 1e2, 1e4])


def test_the_growth_of_small_sizes_is_tabulated_and_drawn(monkeypatch, tmp_path, capsys):
    small = tuple(replace(curve, sizes=(200, 400)) for curve in growth.CURVES)
    monkeypatch.setattr(growth, "CURVES", small)
    assert growth.main(["--out", str(tmp_path)]) == 0
    lines = csv_lines(tmp_path / "growth.csv")
    assert {line["curve"] for line in lines} == {curve.name for curve in small}
    assert all(float(line["seconds"]) > 0 for line in lines)
    assert (tmp_path / "growth.png").stat().st_size > 5_000
    assert "exact search" in capsys.readouterr().out
