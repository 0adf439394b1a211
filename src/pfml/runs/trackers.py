"""Where curves of a run go beside its log: TensorBoard, Weights & Biases, MLflow, trackio.

A new one is a class with `add` and `close`, and a row of `TRACKERS`.
"""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Protocol

from pfml.packages import require_packages
from pfml.runs.layers import flattened
from pfml.storage.files import writing
from pfml.typos import did_you_mean

__all__ = ["TRACKERS", "TensorBoard", "Tracker", "TrackerRow", "Trackers", "check_trackers"]

#: The project, or experiment, that runs are filed under; WANDB_PROJECT and MLFLOW_EXPERIMENT_NAME name another.
PROJECT = "pfml"
#: Parameters that MLflow takes at once.
MLFLOW_BATCH = 100


class Tracker(Protocol):
    """Takes the numbers of a run as they come."""

    def add(self, values: Sequence[tuple[str, float]], step: int) -> None:
        """Points of some curves, such as ("test/recall_at_1", 0.68), after `step` updates."""

    def close(self) -> None:
        """The run has ended, or this process of it."""


class TensorBoard:
    """A file of events in RUN/tensorboard.

    Args:
        folder: Of the run.
        config: Of the run, in plain values; TensorBoard has no place for it.
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        self.path = folder / "tensorboard" / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.records: Any = RecordWriter(open(self.path, "wb"))  # noqa: SIM115 - open as long as the run
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
            self.records.flush()

    def add(self, values: Sequence[tuple[str, float]], step: int) -> None:
        """Add a point to each of these curves; it is in the file when this returns."""
        with writing(self.path):
            points = [self._summary.Value(tag=name, simple_value=value) for name, value in values]
            self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=points)))
            self.records.flush()

    def close(self) -> None:
        """Close the file."""
        with writing(self.path):
            self.records.close()

    def _write(self, event: Any) -> None:
        self.records.write(event.SerializeToString())


class WeightsAndBiases:
    """A run of Weights & Biases, its files in RUN/wandb; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        import wandb

        project = os.environ.get("WANDB_PROJECT", PROJECT)
        self._run = wandb.init(
            project=project, name=folder.name, id=_identity(folder), resume="allow", dir=folder, config=config
        )

    def add(self, values: Sequence[tuple[str, float]], step: int) -> None:
        """See `Tracker`."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()


class MLflow:
    """A run of MLflow, where MLFLOW_TRACKING_URI says, else where MLflow keeps runs by itself."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._client = Metric, MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        identity = _identity(folder)
        begun = self._client.search_runs([experiment], f"tags.pfml_run = '{identity}'", max_results=1)
        if begun:
            self._run = begun[0].info.run_id
            self._client.update_run(self._run, "RUNNING")
            return
        tags = {"pfml_run": identity, "mlflow.runName": folder.name}
        self._run = self._client.create_run(experiment, tags=tags).info.run_id
        params = [Param(name, str(value)[:500]) for name, value in flattened(config).items()]
        for first in range(0, len(params), MLFLOW_BATCH):
            self._client.log_batch(self._run, params=params[first : first + MLFLOW_BATCH])

    def add(self, values: Sequence[tuple[str, float]], step: int) -> None:
        """See `Tracker`."""
        now = int(1000 * time.time())
        self._client.log_batch(self._run, metrics=[self._metric(name, value, now, step) for name, value in values])

    def close(self) -> None:
        """See `Tracker`."""
        self._client.set_terminated(self._run)


class Trackio:
    """A run of trackio, in its folder of this machine (TRACKIO_DIR)."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        import trackio

        name = f"{folder.name}-{_identity(folder)[:6]}"
        known = signature(trackio.init).parameters  # not every trackio logs the machine by itself
        quiet = {option: False for option in ("auto_log_gpu", "auto_log_cpu") if option in known}
        self._run = trackio.init(project=PROJECT, name=name, config=config, resume="allow", embed=False, **quiet)

    def add(self, values: Sequence[tuple[str, float]], step: int) -> None:
        """See `Tracker`."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()


@dataclass(frozen=True)
class TrackerRow:
    """A row of `TRACKERS`.

    Args:
        create: Opens the tracker, given the folder of the run and its configuration in plain values.
        module: The package that it needs.
        install: What pip installs that by.
    """

    create: Callable[[Path, dict[str, Any]], Tracker]
    module: str
    install: str


TRACKERS: dict[str, TrackerRow] = {
    "tensorboard": TrackerRow(TensorBoard, "tensorboard", "pfml[tensorboard]"),
    "wandb": TrackerRow(WeightsAndBiases, "wandb", "pfml[wandb]"),
    "mlflow": TrackerRow(MLflow, "mlflow", "pfml[mlflow]"),
    "trackio": TrackerRow(Trackio, "trackio", "pfml[trackio]"),
}
#: What is used where it is installed, and is no error where it is not.
USUAL = ("tensorboard",)


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError for a tracker that there is not."""
    for name in names:
        if name not in TRACKERS:
            hint = did_you_mean(name, TRACKERS)
            raise ValueError(f"trackers must be among {', '.join(TRACKERS)}, got {name!r}{hint}")


class Trackers:
    """The trackers of a run, opened with the first numbers.

    What goes wrong with one of another program's, such as a lost connection, ends its curves with a warning, and not
    the run.

    Args:
        folder: Of the run.
        names: Keys of `TRACKERS`.
        config: Of the run, in plain values.

    Raises:
        ImportError: If a package is missing, unless it is that of the usual tracker.
    """

    def __init__(self, folder: Path, names: Sequence[str] = USUAL, config: dict[str, Any] | None = None) -> None:
        for name in names:
            if tuple(names) != USUAL:
                row = TRACKERS[name]
                require_packages(row.module, purpose=f"the tracker {name}", install=row.install)
        self._folder, self._names, self._config = folder, tuple(names), config or {}
        self._open: dict[str, Tracker] | None = None

    def add(self, values: Sequence[tuple[str, float]], step: int) -> None:
        """Hand points of some curves on to all trackers."""
        if self._open is None:
            self._open = {}
            for name in self._names:
                self._try(name, lambda name=name: self._begin(name))  # type: ignore[misc]
        for name, tracker in list(self._open.items()):
            self._try(name, lambda tracker=tracker: tracker.add(values, step))  # type: ignore[misc]

    def close(self) -> None:
        """End all of them."""
        for name, tracker in (self._open or {}).items():
            self._try(name, tracker.close)
        self._open = None

    def _begin(self, name: str) -> None:
        assert self._open is not None
        self._open[name] = TRACKERS[name].create(self._folder, self._config)

    def _try(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except ImportError:  # of the usual one, whose curves only repeat the log
            pass
        except Exception as error:
            if name == "tensorboard":
                raise  # its files are the run's own: a full disk ends it
            if self._open is not None:
                self._open.pop(name, None)
            reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            warnings.warn(f"the tracker {name} has failed and gets no more of this run ({reason})", stacklevel=2)


def _identity(folder: Path) -> str:
    """What a run is called by trackers, so that a resumed run continues its own curves."""
    return hashlib.sha256(str(folder.absolute()).encode(errors="surrogateescape")).hexdigest()[:16]
