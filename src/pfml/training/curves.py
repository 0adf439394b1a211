"""Curves as TensorBoard reads them, written in the thread that has the numbers: what goes wrong is raised there.

TensorBoard's own writer has a thread, which prints a traceback of its own where a disk is full.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from pfml.files import writing

__all__ = ["CurveWriter"]


class CurveWriter:
    """A file of events in `folder`; ImportError without TensorBoard."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        self.path = folder / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
        with writing(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            self.records: Any = RecordWriter(open(self.path, "wb"))  # noqa: SIM115 - open as long as the run
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
            self.records.flush()

    def add(self, values: list[tuple[str, float]], step: int) -> None:
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
