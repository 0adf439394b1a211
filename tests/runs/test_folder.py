import json

import pytest

from pfml.runs.folder import RunFolder


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
    pytest.importorskip("tensorboard")
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
