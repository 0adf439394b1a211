"""Hyper-parameters out of a study, through the command line: tuned, trained with, recorded, reported."""

import json
import sys

import pytest

from pfml.cli import main
from pfml.data import RetrievalData, draw_glyphs
from pfml.data.glyphs import TRAIN_GLYPHS, UNSEEN_GLYPHS
from pfml.experiments import tasks
from pfml.experiments.plan import PlanOptions, plan_experiment
from pfml.experiments.store import ResultsStore
from pfml.experiments.tune import read_study

SPACE = {"low": 0.5, "high": 1.5, "log": False, "whole": False}


@pytest.fixture(scope="module")
def few_glyphs():
    train, test = draw_glyphs(TRAIN_GLYPHS[:28], copies=1), draw_glyphs(UNSEEN_GLYPHS[:8], copies=1)
    return RetrievalData("glyphs", train, test)


@pytest.fixture(autouse=True)
def _few_glyphs(monkeypatch, few_glyphs):
    monkeypatch.setattr(sys.modules["pfml.runs.data"], "load_data", lambda name, root, **division: few_glyphs)
    tasks.prepared.cache_clear()
    yield
    tasks.prepared.cache_clear()


def written_study(
    folder, *, method="pfml", dataset="glyphs", backbone="convnet", trials=((0.4, 0.7), (0.6, 0.9)), version=1
):
    """A folder as `pfml tune` leaves it: trials of (score, delta); a score of None is a failure."""
    config = {"loss": {"name": method}, "data": {"name": dataset}, "model": {"backbone": backbone}, "epochs": 3}
    listed = [
        {"state": "fail" if score is None else "complete", "score": score, "values": {"loss.options.delta": delta}}
        for score, delta in trials
    ]
    space = {"loss.options.delta": SPACE}
    folder.mkdir()
    record = {
        "version": version,
        "metric": "recall_at_1",
        "split": "half",
        "space": space,
        "config": config,
        "trials": listed,
    }
    (folder / "tuning.json").write_text(json.dumps(record))
    return folder


def test_what_was_tuned_is_trained_with_recorded_and_marked_in_the_report(tmp_path, capsys):
    pytest.importorskip("optuna", reason="pfml tune needs the extra tune")
    study, out = tmp_path / "study", tmp_path / "out"
    tuning = ["--epochs=1", "--trials=2", "--space", "loss.options.delta=0.5:1.5", "optimizer.lr=log:1e-3:1e-2"]
    main(["tune", "--config=glyphs", "--device=cpu", "--batch.size=40", *tuning, f"--out={study}"])
    common = ["--datasets=glyphs", "--methods=pfml", "--epochs=1", "--seeds=0", f"--out={out}"]
    main(["experiment", "retrieval", *common])
    main(["experiment", "retrieval", *common, f"--tuned={study}"])
    printed = capsys.readouterr().out
    assert "tuned: pfml on glyphs, convnet: loss.options.delta" in printed
    assert "2 trials, split half" in printed

    records = ResultsStore(out / "results.jsonl").records()
    usual, tuned = records
    assert "tuning" not in usual
    trials = json.loads((study / "tuning.json").read_text())["trials"]
    best = max((one for one in trials if one["state"] == "complete"), key=lambda one: one["score"])
    assert tuned["config"]["loss"]["options"]["delta"] == best["values"]["loss.options.delta"]
    assert tuned["config"]["optimizer"]["lr"] == best["values"]["optimizer.lr"]
    told = tuned["tuning"]
    assert (told["values"], told["score"]) == (best["values"], best["score"])
    assert (told["trials"], told["split"], told["metric"], told["epochs"]) == (2, "half", "recall_at_1", 1)
    assert told["space"]["optimizer.lr"] == {"low": 1e-3, "high": 1e-2, "log": True, "whole": False}
    assert str(tmp_path) not in json.dumps(told)

    main(["report", f"--store={out / 'results.jsonl'}", "--experiment=retrieval"])
    printed = capsys.readouterr().out.splitlines()
    rows = [line for line in printed if line.startswith("|")]
    (plain,) = [line for line in rows if line.startswith("| **Potential Field** ")]
    (marked,) = [line for line in rows if line.startswith("| **Potential Field, tuned** ")]
    assert f" {100 * usual['results']['last']['recall_at_1']:.1f} (1)" in plain
    assert f" {100 * tuned['results']['last']['recall_at_1']:.1f} (1)<sup>" in marked
    assert any("tuned on validation classes (2 trials, split half): delta" in line for line in printed)


def test_the_best_trial_gives_the_values_to_the_same_method_data_set_and_backbone(tmp_path):
    study = read_study(written_study(tmp_path / "one", trials=((0.4, 0.7), (None, 1.1), (0.6, 0.9))))
    options = PlanOptions(datasets=("glyphs",), methods=("pfml", "cpml"), seeds=(0,), studies=(study,))
    plan = plan_experiment("retrieval", options)
    with_study, without = plan.runs
    assert with_study.config.loss.options["delta"] == 0.9
    assert with_study.tuning["complete"] == 2
    assert without.tuning is None
    plain = plan_experiment("retrieval", PlanOptions(datasets=("glyphs",), methods=("pfml", "cpml"), seeds=(0,)))
    assert without.key == plain.runs[1].key
    assert with_study.result_key != plain.runs[0].result_key


@pytest.mark.parametrize("other", [{"method": "hist"}, {"dataset": "cub"}, {"backbone": "resnet50"}])
def test_a_study_of_something_else_is_refused(tmp_path, other):
    study = read_study(written_study(tmp_path / "one", **other))
    with pytest.raises(ValueError, match="no run of retrieval is what the study"):
        plan_experiment("retrieval", PlanOptions(datasets=("glyphs",), methods=("pfml",), studies=(study,)))


def test_two_studies_of_one_thing_are_refused(tmp_path):
    studies = tuple(read_study(written_study(tmp_path / name)) for name in ("one", "two"))
    with pytest.raises(ValueError, match="one study at most of pfml on glyphs, convnet, got .*one.*two"):
        plan_experiment("retrieval", PlanOptions(datasets=("glyphs",), methods=("pfml",), studies=studies))


def test_a_folder_without_a_whole_study_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="must be the folder of a study"):
        read_study(tmp_path)
    (tmp_path / "tuning.json").write_text('{"trials": []}')
    with pytest.raises(ValueError, match="cannot be read: KeyError"):
        read_study(tmp_path)
    with pytest.raises(ValueError, match="a trial that came to an end, got none of 1"):
        read_study(written_study(tmp_path / "failed", trials=((None, 0.3),)))
    with pytest.raises(ValueError, match="must have version 1, got 2"):
        read_study(written_study(tmp_path / "newer", version=2))


def test_a_reused_result_says_where_its_own_values_come_from(tmp_path):
    study = written_study(tmp_path / "one")
    common = ["--datasets=glyphs", "--methods=pfml", "--epochs=1", "--seeds=0", f"--out={tmp_path}"]
    main(["experiment", "retrieval", *common, f"--tuned={study}"])
    main(["experiment", "alignment", *common, f"--tuned={study}"])
    first, second = ResultsStore(tmp_path / "results.jsonl").records()
    assert first["seconds"] == second["seconds"]
    assert first["tuning"] == second["tuning"]


def test_the_names_of_experiments_include_the_theory():
    with pytest.raises(ValueError, match="figures, theory, got 'theroy'; did you mean 'theory'"):
        plan_experiment("theroy")
    with pytest.raises(ValueError, match="theory has no runs to plan"):
        plan_experiment("theory")
