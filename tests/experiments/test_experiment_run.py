import shutil
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from io import StringIO
from unittest import mock

import pytest
import torch
from PIL import Image
from rich.console import Console

from pfml.data import draw_glyphs
from pfml.data.glyphs import TRAIN_GLYPHS, Distortion
from pfml.evaluation import embed, retrieval_metrics
from pfml.experiments import run as execution
from pfml.experiments import tasks
from pfml.experiments.plan import Plan, PlanOptions, plan_experiment
from pfml.experiments.run import Estimator, execute
from pfml.experiments.store import ResultsStore
from pfml.models import load_embedder
from pfml.runs.config import DataConfig
from pfml.runs.data import prepare_data
from pfml.storage.lock import claim
from pfml.training import BatchConfig
from pfml.training.shutdown import Interrupted
from processes import CONTEXT
from small_data import InterruptAt


@pytest.fixture(scope="module")
def glyph_folder(tmp_path_factory):
    """A folder of 16 classes of glyphs, 16 images each, which other processes can read, too."""
    root = tmp_path_factory.mktemp("glyphs")
    mild = Distortion(rotation=5, scale=1.05, shear=0.05, shift=1, noise=0.05)
    images = draw_glyphs(TRAIN_GLYPHS[:16], copies=1, distortion=mild)
    for index, (pixels, label) in enumerate(zip(images.images, images.labels.tolist(), strict=True)):
        folder = root / f"glyph-{label:02}"
        folder.mkdir(exist_ok=True)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / f"{index}.png")
    return root


def small_plan(glyph_folder, *, name="retrieval", methods=("proxy-anchor", "pfml"), seeds=(0,), epochs=1):
    options = PlanOptions(datasets=("glyphs",), methods=methods, seeds=seeds, epochs=epochs, device="cpu")
    plan = plan_experiment(name, options)
    runs = []
    for run in plan.runs:
        data = replace(run.config.data, name=str(glyph_folder))
        config = replace(run.config, data=data, batch=BatchConfig(16, 4))
        runs.append(replace(run, config=config, needs=tuple(one.key for one in runs) if run.needs else ()))
    return Plan(plan.experiment, tuple(runs), plan.remarks)


def run(plan, out, **options):
    """The summary, and what was printed."""
    screen = StringIO()
    summary = execute(plan, out, console=Console(file=screen, width=160), **options)
    return summary, screen.getvalue()


def records(out):
    return ResultsStore(out / "results.jsonl").records()


@pytest.fixture(scope="module")
def finished(glyph_folder, tmp_path_factory):
    """A plan of two runs that are done, its folder, the summary, and what was printed."""
    plan, out = small_plan(glyph_folder), tmp_path_factory.mktemp("finished")
    return plan, out, *run(plan, out)


@pytest.fixture
def copied(finished, tmp_path):
    """A plan of two runs, and a folder of its own in which both are done."""
    plan, out, *_ = finished
    return plan, shutil.copytree(out, tmp_path / "copied")


@pytest.fixture
def _without_training(monkeypatch):
    """Runs end at once: for tests of which runs are done, not of what they do."""
    outcome = tasks.Outcome({"last": {"recall_at_1": 0.5, "map_at_r": 0.4}}, {"train": 1, "test": 1, "missing": 0})
    for name in ("train", "time"):
        monkeypatch.setitem(execution.TASKS, name, lambda run, context: outcome)


def test_each_run_leaves_a_record_with_everything_about_it(finished):
    plan, out, summary, printed = finished
    assert (summary.done, summary.failed, summary.left) == (2, (), ())
    first, second = records(out)
    assert [first["key"], second["key"]] == [one.key for one in plan.runs]
    assert first["method"] == "proxy-anchor"
    assert first["images"] == {"train": 128, "test": 128, "missing": 0}
    assert first["config"]["seed"] == 0
    assert first["device"] == "cpu"
    assert first["versions"]["torch"]
    assert len(first["commit"]) >= 7
    assert first["results"]["last"]["recall_at_1"] == first["results"]["best"]["recall_at_1"]
    assert first["results"]["best"]["epoch"] == 1
    assert first["results"]["validation_selected"] is None
    assert second["results"]["alignment"].keys() == {"paper", "wasserstein2"}
    assert 0 < first["results"]["seconds_per_epoch"] < first["seconds"]
    assert "[1/2] proxy-anchor" in printed
    assert "[2/2] pfml" in printed
    folder = out / "retrieval" / plan.runs[0].key
    assert (folder / "model").is_dir()
    assert not (folder / "checkpoints").exists()


def test_what_is_done_is_not_done_again(copied):
    plan, out = copied
    first, _ = (out / "results.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (out / "results.jsonl").write_text(first, encoding="utf-8")
    shutil.rmtree(out / "retrieval" / plan.runs[1].key)
    _, printed = run(plan, out)
    assert "proxy-anchor" not in printed
    assert "[2/2] pfml" in printed
    assert len(records(out)) == 2
    assert run(plan, out)[1] == ""


def test_another_experiment_takes_over_a_result(glyph_folder, copied):
    _, out = copied
    summary, printed = run(small_plan(glyph_folder, name="alignment"), out)
    assert summary.done == 2
    assert printed.count("the same run as in retrieval") == 2
    found = records(out)
    assert [one["experiment"] for one in found] == ["retrieval"] * 2 + ["alignment"] * 2
    assert found[1]["results"] == found[3]["results"]


def test_an_interrupted_run_resumes_and_ends_like_an_uninterrupted_one(glyph_folder, tmp_path, monkeypatch):
    plan = small_plan(glyph_folder, methods=("pfml",), epochs=2)
    run(plan, tmp_path / "whole")

    def interrupted(planned, context):
        return tasks.train_run(planned, replace(context, monitor=InterruptAt(3)))

    with monkeypatch.context() as patch:
        patch.setitem(execution.TASKS, "train", interrupted)
        with pytest.raises(Interrupted):
            run(plan, tmp_path / "parts")
    assert records(tmp_path / "parts") == []
    assert (tmp_path / "parts" / "retrieval" / plan.runs[0].key / "checkpoints").is_dir()
    run(plan, tmp_path / "parts")
    (whole,), (parts,) = records(tmp_path / "whole"), records(tmp_path / "parts")
    assert parts["results"]["last"] == whole["results"]["last"]
    assert parts["results"]["alignment"] == whole["results"]["alignment"]


def test_a_failed_run_is_recorded_and_the_others_are_done(glyph_folder, tmp_path):
    plan = small_plan(glyph_folder)
    bad = replace(plan.runs[0], config=replace(plan.runs[0].config, batch=BatchConfig(4000, 4)))
    summary, printed = run(Plan("retrieval", (bad, plan.runs[1])), tmp_path)
    assert summary.done == 1
    ((failed, error),) = summary.failed
    assert failed is bad
    assert error.startswith("ValueError: batch.size 4000")
    assert "failed, ValueError" in printed
    first, second = records(tmp_path)
    assert (first["status"], first["error"], second["status"]) == ("failed", error, "done")
    assert "Traceback" in (tmp_path / "retrieval" / bad.key / "error.txt").read_text()
    assert len(run(Plan("retrieval", (bad,)), tmp_path)[0].failed) == 1  # the next call tries again


def test_several_processes_share_the_work_without_doubling_it(glyph_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "CONTEXT", CONTEXT)  # a fork server, which imports torch once
    plan = small_plan(glyph_folder, seeds=(0,))
    summary, _ = run(plan, tmp_path, jobs=2)
    assert summary.done == len(plan.runs) > 1
    assert sorted(one["key"] for one in records(tmp_path)) == sorted(one.key for one in plan.runs)
    assert list((tmp_path / "locks").iterdir()) == []


def hold_claim(path, holding):
    with claim(path) as is_ours:
        if is_ours:
            holding.set()
        time.sleep(600)


@pytest.fixture
def holder():
    """Starts a process that holds a lock file."""
    started = []

    def hold(path):
        holding = CONTEXT.Event()
        process = CONTEXT.Process(target=hold_claim, args=(path, holding))
        process.start()
        started.append(process)
        assert holding.wait(600)
        return process

    yield hold
    for process in started:
        process.kill()
        process.join()


@pytest.mark.usefixtures("_without_training")
def test_a_run_of_another_process_is_left_to_it_until_that_dies(glyph_folder, tmp_path, holder):
    plan = small_plan(glyph_folder)
    lock = tmp_path / "locks" / f"{plan.runs[0].result_key}.lock"
    other = holder(lock)
    summary, _ = run(plan, tmp_path)
    assert summary.done == 1
    assert summary.left == plan.runs[:1]
    other.kill()
    other.join()
    assert lock.exists()  # stale
    assert run(plan, tmp_path)[0].done == 2
    assert not lock.exists()


def test_a_claim_is_exclusive_and_frees_its_file(tmp_path):
    path = tmp_path / "one.lock"
    with claim(path) as first, claim(path) as second:
        assert (first, second) == (True, False)
    assert not path.exists()
    with claim(path) as again:
        assert again


@pytest.mark.usefixtures("_without_training")
def test_no_run_is_started_that_does_not_fit_the_budget(glyph_folder, tmp_path):
    plan = small_plan(glyph_folder)
    summary, printed = run(plan, tmp_path, budget=0.0)
    assert (summary.done, summary.left, printed) == (0, plan.runs, "")
    assert run(plan, tmp_path, budget=100.0)[0].done == 2


def test_an_estimate_comes_from_runs_of_the_same_kind(glyph_folder, tmp_path):
    (planned,) = small_plan(glyph_folder, methods=("pfml",), epochs=10).runs
    rough = Estimator([], "cpu").estimate(planned)
    assert rough.is_rough
    made = execution.record_of(planned, results={}, images={"train": 6768, "test": 6816, "missing": 0}, seconds=105.0)
    told = Estimator([made], "cpu").estimate(planned)
    assert not told.is_rough
    assert told.seconds == pytest.approx(105.0)
    assert Estimator([made], "cuda").estimate(planned).is_rough
    half = replace(planned, epochs=5, config=replace(planned.config, epochs=5))
    assert told.seconds * 0.4 < Estimator([made], "cpu").estimate(half).seconds < told.seconds * 0.7


@pytest.fixture(scope="module")
def folds(glyph_folder, tmp_path_factory):
    """The plan of the MLRC protocol, its folder with all runs done, and the summary after the first three folds."""
    plan, out = small_plan(glyph_folder, name="mlrc", methods=("proxy-anchor",)), tmp_path_factory.mktemp("mlrc")
    *folds, together = plan.runs
    early, _ = run(Plan("mlrc", (*folds[:3], together)), out)
    assert run(plan, out)[0].done == 5
    return plan, out, early


def test_the_folds_of_mlrc_are_concatenated_when_all_are_done(folds):
    plan, out, early = folds
    assert early.left == plan.runs[-1:]
    found = {one["settings"]["fold"]: one for one in records(out)}
    result = found["concatenated"]["results"]
    assert found[0]["images"]["train"] == 96
    for metric in ("precision_at_1", "map_at_r"):
        mean = sum(found[fold]["results"]["validation_selected"][metric] for fold in range(4)) / 4
        assert result["separated"][metric] == pytest.approx(mean)
    assert result["validation_selected"]["num_queries"] == 128


def test_concatenation_is_that_of_unit_vectors(glyph_folder, folds):
    plan, out, _ = folds
    data, _ = prepare_data(DataConfig(str(glyph_folder)))
    points = [embed(load_embedder(out / "mlrc" / fold.key), data.test) for fold in plan.runs[:4]]
    torch.testing.assert_close(torch.stack(points).norm(dim=-1), torch.ones(len(points), len(data.test)))
    expected = retrieval_metrics(torch.cat(points, 1), data.test.labels, recall_at=data.recall_at).as_dict()
    chosen = records(out)[-1]["results"]["validation_selected"]
    assert {name: chosen[name] for name in expected} == expected


@pytest.mark.usefixtures("_without_training")
def test_timing_does_not_share_a_device(glyph_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "_work_in_processes", lambda *given: pytest.fail("several processes"))
    plan = small_plan(glyph_folder, name="timing", methods=("proxy-anchor",), epochs=2)
    summary, printed = run(plan, tmp_path, jobs=3)
    assert summary.done == 1
    assert "1 job instead of 3" in printed


def test_a_record_does_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    execution.commit.cache_clear()
    assert execution.commit() == "unknown"
    execution.commit.cache_clear()


def test_times_sort_as_texts(monkeypatch):
    midnight = datetime(2026, 1, 1, tzinfo=UTC)
    times = [midnight + timedelta(microseconds=late) for late in (0, 5, 999_999, 1_000_000)]
    monkeypatch.setattr(execution, "datetime", mock.Mock(now=mock.Mock(side_effect=times)))
    texts = [execution.now() for _ in times]
    assert texts == sorted(set(texts))
