"""The data of a run: listed and checked once, divided, its labels corrupted and corrected as the configuration says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pfml.data import Corruption, RetrievalData, corrupt, load_data, with_validation
from pfml.data.corrections import Corrections
from pfml.data.decoding import KEPT_BYTES, Track
from pfml.data.own_images import is_own, own_images
from pfml.memory import available_memory
from pfml.runs.config import DataConfig, RunConfig, StorageConfig
from pfml.runs.config_files import read_config
from pfml.runs.folder import RunFolder

__all__ = [
    "PreparedData",
    "config_of_run",
    "data_of_run",
    "held_bytes",
    "load_checked",
    "load_listed",
    "names_data",
    "prepare_data",
]


class PreparedData(NamedTuple):
    """What a run trains and is evaluated on.

    Args:
        data: Divided into training, validation and test classes, with the labels that the run trains on.
        corruption: The record of the label noise that was added; None without noise.
    """

    data: RetrievalData
    corruption: Corruption | None = None


def data_of_run(run: Path) -> DataConfig | None:
    """The data that a run's configuration names, also for a model inside of the run's folder; None without one."""
    folders = (folder for folder in (run, run.parent) if RunFolder(folder).config.is_file())
    return next((config_of_run(folder).data for folder in folders), None)


def config_of_run(run: Path) -> RunConfig:
    """The configuration of a run, also of one whose folder was moved, with its list of corrections in it."""
    folder = RunFolder(run)
    config = read_config(folder.config)
    given = config.data.corrections
    if given is None or given.is_file() or not folder.corrections.is_file():
        return config
    return replace(config, data=replace(config.data, corrections=folder.corrections))


def names_data(config: DataConfig, name: str, root: Path | None) -> bool:
    """Whether a name and a root, as typed, are those of a run's own images: then they are divided as the run did."""
    return is_own(config.name) and is_own(name) and _place(config.name, config.root) == _place(name, root)


def _place(name: str, root: Path | None) -> Path:
    return (root if root is not None and name in ("folder", "csv") else Path(name)).expanduser().resolve()


def load_listed(config: DataConfig) -> RetrievalData:
    """The data set as listed and divided into training and test images; no file has been opened."""
    return load_data(config.name, config.root, split=config.split, seed=config.split_seed, added=config.added)


def load_checked(
    config: DataConfig, track: Track | None = None, *, storage: StorageConfig | None = None
) -> RetrievalData:
    """The data of `load_listed` without unreadable files, if these are skipped.

    No validation classes are set apart yet, and labels are as they were given.

    Args:
        config: Which images.
        track: Shows the progress, as track(iterable, description, total).
        storage: Of the run that will hold the images; None if none will.
    """
    keep_bytes = KEPT_BYTES if storage is None else held_bytes(storage)
    return own_images(config.name, load_listed(config), config.unreadable, track, keep_bytes=keep_bytes)


def held_bytes(storage: StorageConfig) -> int:
    """Bytes of decoded images that a check keeps for a run: what the run will hold, if half of the free memory does."""
    if storage.storage == "files" or storage.short_side is not None or storage.cache is not None:
        return KEPT_BYTES
    budget, free = int(storage.budget_gib * 2**30), available_memory()
    return max(KEPT_BYTES, budget if free is None else min(budget, free // 2))


def prepare_data(
    config: DataConfig, track: Track | None = None, *, loaded: RetrievalData | None = None
) -> PreparedData:
    """The data of a run, in four steps: load and check, set validation classes apart, corrupt labels, correct labels.

    Noise changes labels within the training classes only, so that validation stays clean. Corrections come last and
    leave the record of noise as it is.

    Args:
        config: Which images, and what happens to them.
        track: Shows the progress, as track(iterable, description, total).
        loaded: What `load_checked` returned for the same images, so that they are not listed and checked again.
    """
    data = with_validation(load_checked(config, track) if loaded is None else loaded, config.validation)
    data, corruption = _corrupted(data, config)
    if config.corrections is None:
        return PreparedData(data, corruption)
    corrections = Corrections.read(config.corrections, data.train)
    relabeled = len(corrections) - corrections.dropped
    images = "image" if relabeled == 1 else "images"
    remark = f"{config.corrections} gives {relabeled:,} {images} another label and leaves {corrections.dropped:,} out"
    if corrections.classes:
        remark += f"; {len(corrections.classes):,} classes have another name or are left out"
    parts = {"train": corrections.apply(data.train)}
    if data.protocol == "images":  # it tests on the training classes
        parts["test"] = data.test.renamed(corrections.classes)
    data = data.with_parts(parts)
    return PreparedData(replace(data, remarks=(*data.remarks, remark)), corruption)


def _corrupted(data: RetrievalData, config: DataConfig) -> tuple[RetrievalData, Corruption | None]:
    noise = config.noise
    if not noise.rate and noise.variant != "list":
        return data, None
    if noise.variant == "list" and config.validation != "none":
        raise ValueError(
            f"a list of label noise counts all training classes, so data.validation must be none, "
            f"got {config.validation!r}"
        )
    train_images, corruption = corrupt(data.train, noise)
    data = data.with_parts({"train": train_images})
    return replace(data, remarks=(*data.remarks, *corruption.remarks)), corruption
