import json

import pytest

from pfml.runs.folder import RunFolder, summarize


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.start()
    yield folder
    folder.close()


def test_a_new_folder_is_made_and_a_used_one_refused(tmp_path):
    folder = RunFolder(tmp_path / "a" / "run")
    folder.start()
    folder.config.write_text("epochs: 1")
    with pytest.raises(FileExistsError, match="already holds a run"):
        folder.start()


def test_the_log_has_one_json_object_per_line(folder):
    folder.append("step", 1, loss=2.5)
    folder.append("evaluation", 1, test={"recall_at_1": 0.5})
    lines = [json.loads(line) for line in folder.log.read_text().splitlines()]
    assert all(len(line.pop("sha256")) == 16 for line in lines)
    assert lines == [
        {"kind": "step", "step": 1, "loss": 2.5},
        {"kind": "evaluation", "step": 1, "test": {"recall_at_1": 0.5}},
    ]
    assert folder.entries("evaluation") == lines[1:]


def test_what_a_resumed_run_will_write_again_is_forgotten(folder):
    for step in range(1, 5):
        folder.append("step", step, loss=1.0)
    with folder.log.open("a") as log:
        log.write('{"kind": "st')  # a kill in the middle of a line
        log.write("\n[1]\n")
    folder.append("evaluation", 2, epoch=1)
    folder.append("evaluation", 2, epoch=2)
    (folder.path / ".results.json.partial").touch()
    folder.forget_after(2, evaluations=1)
    assert [entry["step"] for entry in folder.entries("step")] == [1, 2]
    assert [entry["epoch"] for entry in folder.entries("evaluation")] == [1]
    assert not list(folder.path.glob(".*.partial"))


def test_results_are_json(folder):
    folder.write_results({"last": {"epoch": 3}})
    content = json.loads(folder.results.read_text())
    assert len(content.pop("manifest_sha256")) == 64
    assert content == {"kind": "results of a run", "format_version": 1, "last": {"epoch": 3}}


def test_curves_reach_tensorboard_if_it_is_installed(folder):
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder.append("evaluation", 7, test={"recall_at_1": 0.5})
    folder.close()
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    (event,) = events.Scalars("evaluation/test/recall_at_1")
    assert (event.step, event.value) == (7, 0.5)


def test_the_log_needs_no_tensorboard(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorboard.compat.proto.event_pb2", None)
    folder.append("step", 1, loss=1.0)
    assert len(folder.entries("step")) == 1
    assert not (folder.path / "tensorboard").exists()


def entry(epoch, test, validation=None, map_at_r=0.0):
    found = {"epoch": epoch, "test": {"recall_at_1": test, "map_at_r": map_at_r}}
    return (
        found if validation is None else {**found, "validation": {"recall_at_1": validation, "map_at_r": -validation}}
    )


def test_the_last_and_the_best_epoch_are_told_apart():
    results = summarize([entry(1, 0.5), entry(2, 0.7), entry(3, 0.6)])
    assert results["last"]["epoch"] == 3
    assert results["best_on_test"]["epoch"] == 2
    assert results["validation_selected"] is None


def test_validation_chooses_by_its_own_score():
    results = summarize([entry(1, 0.5, 0.9), entry(2, 0.7, 0.1)])
    assert results["validation_selected"]["epoch"] == 1


def test_another_score_can_choose():
    results = summarize([entry(1, 0.5, 0.9, 0.1), entry(2, 0.7, 0.1, 0.05)], select_by="map_at_r")
    assert results["validation_selected"]["epoch"] == 2
    assert results["best_on_test"]["epoch"] == 1
    assert results["selected_by"] == "map_at_r"


def test_among_equals_the_earlier_epoch_is_chosen():
    assert summarize([entry(1, 0.7), entry(2, 0.7)])["best_on_test"]["epoch"] == 1


def test_a_run_without_evaluation_has_nothing_to_report():
    with pytest.raises(ValueError, match="at least one evaluation"):
        summarize([])
