"""The key under which the result of a run is stored: a hash of everything that the result depends on."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from pfml.methods import LossConfig, method_of
from pfml.runs.config import OPTIMIZER_OPTIONS, RunConfig
from pfml.runs.config_files import plain
from pfml.storage.files import sha256_of

__all__ = ["all_options", "deciding_values", "digest", "result_key", "stable_config"]

#: Fields of a configuration that say where and how a run computes, not what comes out.
FREE = ("device", "compile", "log_every", "checkpoint_every", "trackers")
#: Options that came after results had been stored, by their names from the top -> the value that changes nothing.
LATER: dict[str, Any] = {
    "average": 0.0,
    "warm_up_after": 0,
    "freeze": "none",
    "lora": 0,
    "optimizer.layer_decay": 1.0,
    "batch.mini_batch_size": None,
    "teachers": [],
    "data.unreadable": "auto",
    "data.split": "classes",
    "data.split_seed": 0,
    "data.added": [],
    "augmentation.color_jitter": [0.0, 0.0, 0.0, 0.0],
    "augmentation.grayscale": 0.0,
    "augmentation.rotation": 0.0,
    "augmentation.rand_augment": 0,
    "augmentation.rand_augment_magnitude": 9,
    "augmentation.erasing": 0.0,
    "batch.per_epoch": None,
    "schedule.milestones": [],
    "model.resize": None,
    "model.flip_test": False,
    "model.parts": 1,
    "model.relations": 1,
    "model.sub_blocks": 1,
    "batch.neighbors": 0,
    "effort": None,
    "start": None,
    "teacher_dims": None,
    "test_image_size": None,
    "trackers": ["tensorboard"],
}
#: The same of losses: method -> options.
LATER_OF_LOSS: dict[str, dict[str, Any]] = {
    "proxy-anchor": {"trust": 0.0},
    **{
        method: {"published_start": False}
        for method in ("proxy-nca", "proxy-nca++", "normalized-softmax", "cosface", "arcface", "soft-triple")
    },
}


def result_key(key: str) -> str:
    """The first part of a key."""
    return key.partition("-")[0]


def deciding_values(config: RunConfig) -> dict[str, Any]:
    """The values of a configuration that the result depends on, defaults of the loss included."""
    whole = {name: value for name, value in stable_config(config).items() if name not in FREE}
    later = LATER_OF_LOSS.get(config.loss.name, {})
    options = {name: value for name, value in all_options(config.loss).items() if later.get(name, ...) != value}
    whole["loss"] = {"name": config.loss.name, "options": options}
    whole["data"] = {name: value for name, value in whole["data"].items() if name != "root"}
    # options of other optimizers change nothing; without them, keys outlive new ones
    foreign = {name for names in OPTIMIZER_OPTIONS.values() for name in names} - {
        *OPTIMIZER_OPTIONS[config.optimizer.name]
    }
    whole["optimizer"] = {name: value for name, value in whole["optimizer"].items() if name not in foreign}
    whole["storage"] = {"short_side": config.storage.short_side}
    weights = Path(config.model.weights)
    if weights.is_file():
        whole["model"] = {**whole["model"], "weights": _file_digest(weights, weights.stat().st_mtime_ns)}
    return whole


def stable_config(config: RunConfig) -> dict[str, Any]:
    """A configuration in plain values without later options that are off, so that stored results stay valid."""
    values = _without_later(plain(config))
    return values if config.teachers else {name: each for name, each in values.items() if name != "teacher_dims"}


def _without_later(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    return {
        name: _without_later(value, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in values.items()
        if isinstance(value, dict) or LATER.get(f"{prefix}{name}", ...) != value
    }


def all_options(loss: LossConfig) -> dict[str, Any]:
    """Every option of the loss with the value that it will have."""
    return {**method_of(loss.name).options(), **loss.options}


def digest(value: Any, digits: int) -> str:
    """The first hexadecimal digits of a hash of plain values; the order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


@lru_cache(maxsize=32)
def _file_digest(path: Path, modified: int) -> str:
    return sha256_of(path)
