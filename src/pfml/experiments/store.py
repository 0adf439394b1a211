"""Results of many runs in one file: a line of JSON for each, appended by any number of processes at once.

A line is written under a lock, in one piece, and forced to disk. What a kill or a full disk leaves of a line is
ignored when the file is read, and cut off by the next append.

JSON lines and no database: results are committed, and people diff and merge them.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any, NotRequired, TypedDict, get_origin, get_type_hints

from pfml.storage.lock import locked_file

__all__ = ["FORMAT", "Record", "ResultsStore", "TornLineWarning"]


#: Version of a record (`versions` are those of packages); records without one are of the first.
FORMAT = 1


class TornLineWarning(UserWarning):
    """A line of a store is not whole."""


class Record(TypedDict):
    """One run.

    Args:
        experiment: What it was run for.
        key: Hash of everything that the result depends on, see `pfml.experiments.run_key`.
        dataset, method, backbone, dim, seed, epochs: What was run.
        settings: Swept values, such as {"noise": 0.2} or {"proxies_per_class": 15}; empty for none.
        config: The whole configuration, plain.
        results: "last", "best" (with "epoch") and "validation_selected" (or None): metrics by their names in
            `RetrievalMetrics.as_dict`; "alignment" ({"paper", "wasserstein2"}) and "seconds_per_epoch" may be absent.
        images: {"train", "test", "missing"}: numbers.
        seconds: That it took.
        device, commit, versions: Where and with what.
        status: "done" or "failed".
        error: Why it failed.
        finished: ISO time.
        tuning: Only of runs with tuned hyper-parameters: the study's metric, split, space, epochs, trials, score and
            values, see `pfml.experiments.tune.Study`.
        format: `FORMAT`; absent in the oldest records.
    """

    experiment: str
    key: str
    dataset: str
    method: str
    backbone: str
    dim: int
    seed: int
    epochs: int
    settings: dict[str, Any]
    config: dict[str, Any]
    results: dict[str, Any]
    images: dict[str, int]
    seconds: float
    device: str
    commit: str
    versions: dict[str, str]
    status: str
    error: str | None
    finished: str
    tuning: NotRequired[dict[str, Any]]
    format: NotRequired[int]


def _type(hint: Any) -> Any:
    """What `isinstance` takes for a type of `Record`."""
    return int | float if hint is float else hint if isinstance(hint, UnionType) else get_origin(hint) or hint


TYPES = {name: _type(hint) for name, hint in get_type_hints(Record).items()}
#: Fields that a record may be without.
OPTIONAL = ("tuning", "format")


class ResultsStore:
    """Records in a file of JSON lines; the first append creates the file."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add a record; it is on disk when this returns."""
        _check(record)
        # NaN is not JSON, and other readers would refuse the whole file
        line = json.dumps(_without_nan(dict(record)), ensure_ascii=False, allow_nan=False).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            with locked_file(self.path, descriptor):
                self._cut_torn_line(descriptor)
                end = os.fstat(descriptor).st_size
                try:
                    _write_all(descriptor, line)
                    os.fsync(descriptor)
                except OSError:
                    os.ftruncate(descriptor, end)
                    raise
        finally:
            os.close(descriptor)

    def records(self) -> list[dict[str, Any]]:
        """All records, oldest first; none if there is no file."""
        content = self.path.read_bytes() if self.path.exists() else b""
        whole, newline, torn = content.rpartition(b"\n")
        if torn:
            self._remark(content.count(b"\n") + 1, "is not whole and was ignored; the next append cuts it off")
        return [
            record
            for number, line in enumerate(whole.split(b"\n") if newline else [], start=1)
            if line.strip() and (record := self._parsed(line, number)) is not None
        ]

    def experiments(self) -> list[str]:
        """The names of all experiments, in the order of their first record."""
        return list(dict.fromkeys(record["experiment"] for record in self.records()))

    def finished_keys(self, experiment: str | None = None) -> set[str]:
        """Keys of all runs that are done, of one experiment or of all; a failed run is not."""
        return {
            record["key"]
            for record in self.records()
            if record["status"] == "done" and experiment in (None, record["experiment"])
        }

    def _parsed(self, line: bytes, number: int) -> dict[str, Any] | None:
        """A line as a record; None with a remark if it is not one, so that one bad line does not hide the others."""
        try:
            record = json.loads(line)
            _check(record)
        except (ValueError, TypeError, RecursionError) as error:
            self._remark(number, f"is not a record and was ignored: {error}")
            return None
        return record

    def _cut_torn_line(self, descriptor: int) -> None:
        """End the file after its last whole line."""
        size = os.fstat(descriptor).st_size
        end = _end_of_last_line(descriptor, size)
        if end < size:
            os.ftruncate(descriptor, end)
            warnings.warn(
                f"{self.path}: {size - end:,} bytes of a line that was not whole were cut off", TornLineWarning, 3
            )

    def _remark(self, line: int, what: str) -> None:
        warnings.warn(f"{self.path}: line {line} {what}", TornLineWarning, 3)


def _check(record: Any) -> None:
    """Raise unless `record` has the fields of `Record`."""
    if not isinstance(record, Mapping):
        raise TypeError(f"a record must be a mapping, got {type(record).__name__}")
    version = record.get("format", 1)
    if version != FORMAT:
        raise ValueError(f"a record must have format {FORMAT}, got {version!r}: read it with the pfml that wrote it")
    missing = [name for name in TYPES if name not in record and name not in OPTIONAL]
    unknown = [name for name in record if name not in TYPES]
    if missing or unknown:
        raise ValueError(f"a record must have the fields of Record, got missing {missing} and unknown {unknown}")
    for name, value in record.items():
        types = TYPES[name]
        if not isinstance(value, types) or isinstance(value, bool):
            raise TypeError(f"{name} of a record must be {getattr(types, '__name__', types)}, got {value!r}")
    if record["status"] not in ("done", "failed"):
        raise ValueError(f"status must be 'done' or 'failed', got {record['status']!r}")
    if record["status"] == "done" and not isinstance(record["results"].get("last"), Mapping):
        raise ValueError(f"a record that is done must have results of its last epoch, got {list(record['results'])}")


def _without_nan(value: Any) -> Any:
    """`value` with None for NaN and Inf."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _without_nan(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(one) for one in value]
    return value


def _write_all(descriptor: int, content: bytes) -> None:
    written = 0
    while written < len(content):
        written += os.write(descriptor, content[written:])


def _end_of_last_line(descriptor: int, size: int) -> int:
    """Bytes up to and with the last newline."""
    step = 1 << 16
    for stop in range(size, 0, -step):
        start = max(stop - step, 0)
        os.lseek(descriptor, start, os.SEEK_SET)
        newline = os.read(descriptor, stop - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
    return 0
