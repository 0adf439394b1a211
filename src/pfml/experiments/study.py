"""What `pfml tune` found, for the runs of an experiment: values, and where they come from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfml.experiments.tune import with_value
from pfml.runs.config import RunConfig

__all__ = ["Study", "read_study", "study_for"]

FILE = "tuning.json"


@dataclass(frozen=True)
class Study:
    """The outcome of a study.

    Args:
        folder: Where it lies.
        method, dataset, backbone: What it trained; its values are for runs with the same.
        values: Option -> the best value, judged on validation classes.
        summary: What a record says of it: metric, split, space, epochs, trials, score, values, and the file's checksum.
    """

    folder: Path
    method: str
    dataset: str
    backbone: str
    values: Mapping[str, Any]
    summary: Mapping[str, Any]

    def fits(self, dataset: str, config: RunConfig) -> bool:
        """Whether its values are for a run of `config` on `dataset`."""
        return (self.method, self.dataset, self.backbone) == (config.loss.name, dataset, config.model.backbone)

    def applied(self, config: RunConfig) -> RunConfig:
        """`config` with the best values."""
        for name, value in self.values.items():
            config = with_value(config, name, value)
        return config

    def __str__(self) -> str:
        values = ", ".join(f"{name} {value:.4g}" for name, value in self.values.items())
        score = f"{self.summary['metric']} {100 * self.summary['score']:.2f}"
        how = f"{self.summary['trials']} trials, split {self.summary['split']}, {score} on validation classes"
        return f"{self.method} on {self.dataset}, {self.backbone}: {values} ({how})"


def read_study(folder: Path) -> Study:
    """The study in `folder`, which `pfml tune --out` has written.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It cannot be read, or none of its trials has come to an end.
    """
    file = folder / FILE
    if not file.is_file():
        raise FileNotFoundError(f"{folder} must be the folder of a study (pfml tune --out), but it has no {FILE}")
    content = file.read_bytes()
    try:
        record = json.loads(content)
        config = record["config"]
        trials = [(one["state"], one["score"], dict(one["values"])) for one in record["trials"]]
        complete = [(float(score), values) for state, score, values in trials if state == "complete"]
        about = (str(config["loss"]["name"]), str(config["data"]["name"]), str(config["model"]["backbone"]))
        told = {name: record[name] for name in ("metric", "split", "space")} | {"epochs": config["epochs"]}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} must be what pfml tune writes, but it cannot be read: {error!r}") from None
    if not complete:
        raise ValueError(
            f"{file} must have a trial that came to an end, got none of {len(trials)}: go on with pfml tune"
        )
    score, values = max(complete, key=lambda one: one[0])
    if set(values) != set(told["space"]):
        raise ValueError(f"{file} must have a value for each of {', '.join(told['space'])}, got {', '.join(values)}")
    counts = {"trials": len(trials), "complete": len(complete)}
    summary = {
        "study": folder.absolute().name,
        "sha256": hashlib.sha256(content).hexdigest(),
        **told,
        **counts,
        "score": score,
        "values": values,
    }
    return Study(folder, *about, values, summary)


def study_for(studies: Sequence[Study], dataset: str, config: RunConfig) -> Study | None:
    """The one whose values are for a run of `config` on `dataset`, if there is one."""
    fitting = [study for study in studies if study.fits(dataset, config)]
    if len(fitting) > 1:
        folders = ", ".join(str(study.folder) for study in fitting)
        raise ValueError(
            f"there must be one study at most of {config.loss.name} on {dataset}, {config.model.backbone}, "
            f"got {folders}"
        )
    return fitting[0] if fitting else None
