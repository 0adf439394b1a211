"""Numbers of a run in other programs' hands, each of them for real and offline."""

import json
import time
import warnings

import pytest

from pfml.runs.folder import RunFolder
from pfml.runs.trackers import TRACKERS, TrackerRow
from pfml.training import train
from small_data import InterruptAt, few_glyphs, small_config, small_embedder


def trained(out, *names, resume=False, monitor=None):
    config = small_config(trackers=names, checkpoint_every=1)
    return train(few_glyphs(), small_embedder(), config, out=out, resume=resume, monitor=monitor)


def logged(out):
    """The curves of the log: name -> (step, value), ..."""
    curves = {}
    for entry in (entry for kind in ("step", "evaluation") for entry in RunFolder(out).entries(kind)):
        curves.setdefault(f"{entry['kind']}/loss", []).append((entry["step"], entry["loss"]))
    return curves


def records_of(content):
    """The records of a .wandb file: LevelDB's log, of blocks of 32 KiB, after a header of 7 bytes."""
    position, record = 7, b""
    while position + 7 <= len(content):
        if 2**15 - position % 2**15 < 7:
            position += 2**15 - position % 2**15
            continue
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_weights_and_biases_gets_the_log_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs the extra wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trained(tmp_path / "run", "wandb")
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    deadline, records = time.monotonic() + 60, []
    while not any(record.HasField("exit") for record in records):  # its own process writes, and is not waited for
        assert time.monotonic() < deadline, "the file of Weights & Biases has no end"
        time.sleep(0.05)
        records = [Record.FromString(data) for data in records_of(file.read_bytes())]
    curves, options = {}, {}
    for record in records:
        options |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        row = {item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
               for item in record.history.item}  # fmt: skip
        for name in ("step/loss", "evaluation/loss"):
            if name in row:
                curves.setdefault(name, []).append((row["_step"], row[name]))
    assert curves == logged(tmp_path / "run")
    assert options["epochs"] == 2
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_mlflow_gets_the_log_and_goes_on_when_a_run_resumes(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes seconds to set up
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "letters")
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "run", "mlflow", "tensorboard", monitor=InterruptAt(5))
    trained(tmp_path / "run", "mlflow", "tensorboard", resume=True)
    client = MlflowClient()
    experiment = client.get_experiment_by_name("letters").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.info.status == "FINISHED"
    assert run.data.params["loss.options.proxies_per_class"] == "2"
    for name, points in logged(tmp_path / "run").items():
        history = {(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)}
        assert history == set(points), name
    assert (tmp_path / "run" / "tensorboard").is_dir()


def test_trackio_gets_the_log(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="needs the extra trackio")
    from trackio.sqlite_storage import SQLiteStorage

    trained(tmp_path / "run", "trackio")
    (name,) = SQLiteStorage.get_runs("pfml")
    rows = SQLiteStorage.get_logs("pfml", name)
    found = [(row["step"], row["step/loss"]) for row in rows if "step/loss" in row]
    assert found == logged(tmp_path / "run")["step/loss"]


class Broken:
    """A tracker that loses its connection after two calls."""

    def __init__(self, folder, config):
        self.calls = 0

    def add(self, values, step):
        self.calls += 1
        if self.calls == 3:
            raise ConnectionError("the line is dead\nand so on")

    def close(self):
        raise AssertionError("it was dropped before")


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(TRACKERS, "broken", TrackerRow(Broken, "json", "nothing"))
    with pytest.warns(UserWarning, match=r"the tracker broken has failed.*ConnectionError: the line is dead\)"):
        results = trained(tmp_path / "run", "broken")
    assert results["last"]["epoch"] == 2


def test_a_tracker_of_ones_own_is_a_row(tmp_path, monkeypatch):
    points = []

    class Listing:
        def __init__(self, folder, config):
            points.append((folder.name, config["epochs"]))

        def add(self, values, step):
            points.extend((name, step, value) for name, value in values)

        def close(self):
            points.append("closed")

    monkeypatch.setitem(TRACKERS, "listing", TrackerRow(Listing, "json", "nothing"))
    trained(tmp_path / "run", "listing")
    assert points[0] == ("run", 2)
    assert points[-1] == "closed"
    losses = [point[1:] for point in points[1:-1] if point[0] == "step/loss"]
    assert losses == logged(tmp_path / "run")["step/loss"]


def test_none_is_needed(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trained(tmp_path / "run")
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_unknown_trackers_and_missing_packages_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="must be among tensorboard, wandb.*did you mean .wandb."):
        small_config(trackers=("wandbb",))
    monkeypatch.setitem(TRACKERS, "absent", TrackerRow(Broken, "no_such_package", "pfml[absent]"))
    with pytest.raises(ImportError, match=r"the tracker absent needs the package no-such-package: pip install"):
        trained(tmp_path / "run", "absent")
    assert not (tmp_path / "run" / "config.yaml").exists()
