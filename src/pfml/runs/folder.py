"""The folder of a run: its configuration, its log, its model and its results.

config.yaml    the resolved configuration, with the version of this layout; `pfml train --config` takes it
log.jsonl      one JSON object per line: steps, evaluations, remarks
noise.csv      the label noise that was added, if any was
corrections.csv  the corrected labels, if there are any: a copy of the given list
checkpoints/   what training resumes from
model/         the embedder: of the epoch that validation chose, or of the last epoch without validation
model-last/    the embedder of the last epoch, where validation chose another one
loss/          the loss of the same epoch as model/: proxies, hyper-parameters, class names
final/         the final model, a run of its own on all images (`pfml.runs.final`)
results.json   last epoch, best on test, validation-selected, and which of them model/ is
ensemble.json  what the ensemble consists of, in the folder of its student (`pfml.ensemble`)
tensorboard/   the same curves, if TensorBoard is installed (`pfml.runs.trackers`)
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from pfml.runs.trackers import Trackers
from pfml.storage.files import DamagedFileError, remove_partials, write_atomically, writing
from pfml.storage.manifest import Format, digest_of, read_manifest, write_manifest
from pfml.terminal import shell_words

__all__ = ["RUN", "ReadOnlyRunFolder", "RunFolder", "free_folder", "of_model", "summarize"]


#: The layout of the folder and the lines of its log; config.yaml has the version.
RUN = Format("run", 1, "start a new run")
#: The format of results.json.
RESULTS = Format("results of a run", 1, "train it again")
#: Name of the checksum in a line of the log, and its number of digits.
SEAL, DIGITS = "sha256", 16


class RunFolder:
    """Where a run keeps its files."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.log = self.path / "log.jsonl"
        self.noise = self.path / "noise.csv"
        self.corrections = self.path / "corrections.csv"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.last_model = self.path / "model-last"
        self.loss = self.path / "loss"
        self.results = self.path / "results.json"
        self.ensemble = self.path / "ensemble.json"
        self.failed_batch = self.path / "failed_batch.json"
        self._trackers = Trackers(self.path)

    def chosen_and_last(self) -> tuple[Path, Path]:
        """The folders of the models of the chosen epoch and of the last epoch; they may be the same."""
        is_apart = (self.last_model / "model.json").is_file()
        return self.model, self.last_model if is_apart else self.model

    def start(self) -> None:
        """Make the folder; one that already holds a run is refused, so that nothing is overwritten."""
        self.refuse_run()
        self.path.mkdir(parents=True, exist_ok=True)

    def refuse_run(self) -> None:
        """Raise FileExistsError if the folder already holds a run."""
        if self.config.exists() or self.checkpoints.exists():
            command = shell_words("pfml", "train", "--resume", str(self.path))
            raise FileExistsError(f"{self.path} already holds a run: resume it ({command}), or choose another folder")

    def require_there(self) -> None:
        """Raise FileNotFoundError if the folder was removed during the run: what it writes now would be half a run."""
        if not self.config.is_file():
            raise FileNotFoundError(f"{self.path} was removed during the run, with its checkpoints: start a new run")

    def append(self, kind: str, step: int, **values: Any) -> None:
        """Add a line to the log, and its numbers to the trackers."""
        if not self.path.is_dir():
            self.require_there()
        with writing(self.log), open(self.log, "a", encoding="utf-8") as file:
            file.write(_sealed({"kind": kind, "step": step, **values}))
        self._trackers.add(_numbers(kind, values), step)

    def forget_after(self, step: int, evaluations: int) -> None:
        """Drop what a resumed run will write again: lines later than `step`, and all but so many evaluations."""
        remove_partials(self.path, "*")  # left by a kill
        if not self.log.exists():
            return
        kept = [entry for entry in self._lines() if entry["step"] <= step]
        early = [entry for entry in kept if entry["kind"] == "evaluation"][:evaluations]
        kept = [entry for entry in kept if entry["kind"] != "evaluation" or entry in early]
        write_atomically(self.log, "".join(map(_sealed, kept)).encode())

    def entries(self, kind: str) -> list[dict[str, Any]]:
        """The lines of one kind, oldest first."""
        return [entry for entry in self._lines() if entry["kind"] == kind]

    def _lines(self) -> list[dict[str, Any]]:
        """All entries. Other lines are skipped, with a warning unless it is a last one that was cut off."""
        lines = self.log.read_bytes().split(b"\n") if self.log.exists() else []
        entries = [_parsed(line) for line in lines]
        for number, (line, entry) in enumerate(zip(lines[:-1], entries, strict=False), start=1):
            if line.strip() and entry is None:
                warnings.warn(f"{self.log}, line {number} is no entry of a log and was ignored", stacklevel=3)
        if lines and entries[-1] is None and f'"{SEAL}"'.encode() in lines[-1]:  # more than a kill leaves
            warnings.warn(f"{self.log}, line {len(lines)} is no entry of a log and was ignored", stacklevel=3)
        return [entry for entry in entries if entry is not None]

    def write_results(self, results: dict[str, Any]) -> None:
        """Write results.json, with a checksum of itself."""
        write_manifest(self.results, results, RESULTS)

    def read_results(self) -> dict[str, Any]:
        """The results in results.json, after comparing its checksum.

        Raises:
            DamagedFileError: If it is not what was written.
        """
        results = read_manifest(self.results, RESULTS)
        if not {"last", "best_on_test", "validation_selected"} <= results.keys():
            raise DamagedFileError(f"{self.results} must be the results of a run, got other values")
        return results

    def track(self, names: Sequence[str], config: dict[str, Any]) -> None:
        """Send the numbers of the log to these trackers (`pfml.runs.trackers`) from now on.

        Args:
            names: Keys of `TRACKERS`.
            config: Of the run, in plain values.
        """
        self._trackers.close()
        self._trackers = Trackers(self.path, names, config)

    def close(self) -> None:
        """Close the files that are open."""
        self._trackers.close()


class ReadOnlyRunFolder(RunFolder):
    """The folder as all ranks but the first have it: only the first rank writes."""

    def require_there(self) -> None: ...

    def start(self) -> None: ...

    def track(self, names: Sequence[str], config: dict[str, Any]) -> None: ...

    def append(self, kind: str, step: int, **values: Any) -> None: ...

    def forget_after(self, step: int, evaluations: int) -> None: ...

    def write_results(self, results: dict[str, Any]) -> None: ...


def free_folder(parent: Path, name: str) -> Path:
    """A folder in `parent` that does not exist yet: name-1, name-2, ..."""
    name = name.replace(":", "-")  # of a loss of one's own
    return next(folder for number in count(1) if not (folder := parent / f"{name}-{number}").exists())


def summarize(
    history: list[dict[str, Any]], *, select_by: str = "recall_at_1", protocol: str = "classes"
) -> dict[str, Any]:
    """The evaluations to report, by name, and by which protocol they are (`pfml.data.image_set.PROTOCOLS`).

    "best_on_test" is the habit of the literature, and an optimistic one: it chooses on the classes that it reports.
    "validation_selected" chose on other classes; it is None without validation. Where nothing was held out, "last" has
    no "test", and "best_on_test" is None. "model" is the name of that one whose weights the run's model has:
    "validation_selected" where there is validation, else "last".
    """
    if not history:
        raise ValueError("there must be at least one evaluation to report")
    with_validation = [entry for entry in history if "validation" in entry]
    with_test = [entry for entry in history if "test" in entry]
    return {
        "last": history[-1],
        "best_on_test": max(with_test, key=lambda entry: entry["test"][select_by]) if with_test else None,
        "validation_selected": (
            max(with_validation, key=lambda entry: entry["validation"][select_by]) if with_validation else None
        ),
        "selected_by": select_by,
        "model": "validation_selected" if with_validation else "last",
        "protocol": protocol,
    }


def of_model(results: dict[str, Any]) -> dict[str, Any]:
    """The evaluation of the run's model: that of the epoch that validation chose, else of the last."""
    entry: dict[str, Any] = results[
        results.get("model") or ("validation_selected" if results["validation_selected"] else "last")
    ]
    return entry


def _sealed(entry: dict[str, Any]) -> str:
    """An entry as a line of the log, with a checksum of the rest of it."""
    return json.dumps({**entry, SEAL: digest_of(entry)[:DIGITS]}) + "\n"


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The entry of a line of the log, without its checksum; None for a line that is damaged or cut off."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_entry = isinstance(entry, dict) and isinstance(entry.get("kind"), str) and isinstance(entry.get("step"), int)
    if not is_entry or entry.pop(SEAL, None) != digest_of(entry)[:DIGITS]:
        return None
    return entry


def _numbers(prefix: str, values: dict[str, Any]) -> list[tuple[str, float]]:
    """Nested numbers as "prefix/name", as trackers want them."""
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _numbers(f"{prefix}/{name}", value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found.append((f"{prefix}/{name}", float(value)))
    return found
