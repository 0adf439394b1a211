"""One run of an experiment, and the key under which its result is known."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pfml.methods import METHODS, LossConfig
from pfml.runs.config import OPTIMIZER_OPTIONS, RunConfig
from pfml.runs.config_files import plain
from pfml.storage.files import sha256_of

__all__ = ["PlannedRun", "all_options", "known_before", "result_key"]

#: Fields of a configuration that say where and how a run computes, not what comes out.
FREE = ("device", "compile", "log_every", "checkpoint_every")
#: Options that came after results had been stored, by their names from the top -> the value that changes nothing.
LATER: dict[str, Any] = {
    "average": 0.0,
    "warm_up_after": 0,
    "teachers": [],
    "data.unreadable": "auto",
    "batch.per_epoch": None,
    "schedule.milestones": [],
    "model.resize": None,
}
#: The same of losses: method -> options.
LATER_OF_LOSS: dict[str, dict[str, Any]] = {
    "proxy-anchor": {"trust": 0.0},
    **{
        method: {"published_start": False}
        for method in ("proxy-nca", "proxy-nca++", "normalized-softmax", "cosface", "arcface", "soft-triple")
    },
}


@dataclass(frozen=True)
class PlannedRun:
    """A run that an experiment consists of.

    Args:
        experiment: A key of `pfml.experiments.catalog.EXPERIMENTS`.
        dataset: As in `pfml.data.DATASETS`.
        method: A key of `pfml.training.METHODS`.
        backbone: As in the names of the shipped configurations.
        dim: D of the embedding.
        seed: Of everything that is random.
        epochs: Passes over the training images.
        settings: What tells this run from others of the same method, such as a noise rate.
        config: All of it.
        task: What is done, a key of `pfml.experiments.tasks.TASKS`.
        needs: Keys of runs that must be done before.
        tuning: Summary of the study that its hyper-parameters come from (`pfml.experiments.study`); None without one.
    """

    experiment: str
    dataset: str
    method: str
    backbone: str
    dim: int
    seed: int
    epochs: int
    settings: dict[str, Any]
    config: RunConfig = field(repr=False)
    task: str = "train"
    needs: tuple[str, ...] = ()
    tuning: Mapping[str, Any] | None = field(default=None, repr=False)

    @cached_property
    def key(self) -> str:
        """Everything that changes the result, a dash, and what the run is for: RESULT-PURPOSE, hexadecimal.

        Runs of different experiments with the same first part have the same result, and are computed once.
        """
        return f"{self.result_key}-{_digest([self.experiment, self.settings], 6)}"

    @cached_property
    def result_key(self) -> str:
        """A hash of everything that changes the result; paths, devices and the experiment's name do not."""
        # drawing pictures of a run does not change it; a time is worth nothing if it was taken beside other work
        task = "train" if self.task == "draw" else self.task
        return _digest([task, self.needs, _what_counts(self.config)], 12)

    def __str__(self) -> str:
        settings = "".join(f", {name} {value}" for name, value in self.settings.items())
        tuned = ", tuned" if self.tuning is not None else ""
        return f"{self.method} on {self.dataset}, {self.backbone}, {self.dim}-d, seed {self.seed}{settings}{tuned}"


def result_key(key: str) -> str:
    """The first part of a key."""
    return key.partition("-")[0]


def _what_counts(config: RunConfig) -> dict[str, Any]:
    """The parts of a configuration that the result depends on, defaults of the loss included."""
    whole = {name: value for name, value in known_before(config).items() if name not in FREE}
    later = LATER_OF_LOSS.get(config.loss.name, {})
    options = {name: value for name, value in all_options(config.loss).items() if later.get(name, ...) != value}
    whole["loss"] = {"name": config.loss.name, "options": options}
    whole["data"] = {name: value for name, value in whole["data"].items() if name != "root"}
    # what an optimizer does not have changes nothing; without it, keys outlive new options of other optimizers
    foreign = {name for names in OPTIMIZER_OPTIONS.values() for name in names} - {
        *OPTIMIZER_OPTIONS[config.optimizer.name]
    }
    whole["optimizer"] = {name: value for name, value in whole["optimizer"].items() if name not in foreign}
    whole["storage"] = {"short_side": config.storage.short_side}
    weights = Path(config.model.weights)
    if weights.is_file():
        whole["model"] = {**whole["model"], "weights": _file_digest(weights, weights.stat().st_mtime_ns)}
    return whole


def known_before(config: RunConfig) -> dict[str, Any]:
    """A configuration in plain values, without options that came later and are off: what was done stays done."""
    return _without_later(plain(config))


def _without_later(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    return {
        name: _without_later(value, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in values.items()
        if isinstance(value, dict) or LATER.get(f"{prefix}{name}", ...) != value
    }


def all_options(loss: LossConfig) -> dict[str, Any]:
    """Every option of the loss with the value that it will have."""
    return {**METHODS[loss.name].options(), **loss.options}


def _digest(value: Any, digits: int) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


@lru_cache(maxsize=32)
def _file_digest(path: Path, modified: int) -> str:
    return sha256_of(path)
