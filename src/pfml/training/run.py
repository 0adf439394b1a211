"""From a configuration to a trained embedder."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pfml.data import (
    Corruption,
    RetrievalData,
    corrupt,
    load_data,
    with_validation,
)
from pfml.data.corrections import Corrections
from pfml.data.datasets import DATASETS
from pfml.data.decoding import Track, listing_all_unreadable
from pfml.data.own_images import own_images
from pfml.distributed import World
from pfml.methods import METHODS
from pfml.models import Embedder
from pfml.runs.config import DataConfig, RunConfig, StorageConfig, TrainConfig
from pfml.runs.config_files import plain, read_config, write_config
from pfml.runs.folder import ReadOnlyRunFolder, RunFolder
from pfml.storage.files import write_atomically
from pfml.training.checkpoint import has_checkpoint
from pfml.training.environment import resolve_device, seeded
from pfml.training.loop import Training
from pfml.training.progress import Monitor
from pfml.training.resume import refuse_other_pixels, write_image_states
from pfml.training.setup import open_sources
from pfml.training.untrained import evaluate_untrained, without_layer

__all__ = [
    "prepare_data",
    "run",
    "train",
    "with_absolute_paths",
]


def run(
    config: RunConfig,
    out: str | Path,
    *,
    resume: bool = False,
    monitor: Monitor | None = None,
    world: World | None = None,
) -> dict[str, Any]:
    """Train as `config` says in the folder `out`; the results (see `pfml.runs.results`).

    The other arguments are those of `train`.
    """
    world = world or World()
    monitor = (monitor or Monitor()) if world.is_first else Monitor()
    config = with_absolute_paths(config)
    data, corruption = prepare_data(config.data, monitor.track)
    if not METHODS[config.loss.name].trains:
        resume = resume and is_begun(config, Path(out))
        with listing_all_unreadable(data, track=monitor.track):
            return evaluate_untrained(config, data, RunFolder(Path(out)), monitor, world, resume=resume)
    with seeded(config.seed):
        embedder = Embedder(config.model)
    if corruption is not None:
        changed = f"{corruption.wrong:,} of {len(data.train):,} training labels"
        monitor.remark(f"{changed} are wrong on purpose, listed in {RunFolder(Path(out)).noise}")
    return _train(embedder, data, config, Path(out), resume, config.storage, monitor, corruption, world)


def is_begun(config: RunConfig, out: Path) -> bool:
    """Whether the folder `out` holds a run of this configuration, finished or not; one of another is refused."""
    folder = RunFolder(out)
    if not folder.config.is_file():
        return False
    stored = read_config(folder.config)
    # a run keeps a copy of its list of corrections
    given = with_absolute_paths(config)
    given = replace(given, data=replace(given.data, corrections=stored.data.corrections))
    if plain(stored) != plain(given if METHODS[config.loss.name].trains else without_layer(given)):
        raise ValueError(f"{out} holds a run of another configuration: choose another folder")
    return True


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Paths that mean the same from another working directory, where the run may be resumed."""
    data, name = config.data, config.data.name
    if name and name not in DATASETS and Path(name).expanduser().exists():
        name = str(Path(name).expanduser().absolute())
    root, corrections, noise_file = (
        None if path is None else path.expanduser().absolute()
        for path in (data.root, data.corrections, data.noise.file)
    )
    data = replace(data, name=name, root=root, corrections=corrections, noise=replace(data.noise, file=noise_file))
    teachers = tuple(str(Path(each).expanduser().absolute()) for each in config.teachers)
    return replace(config, data=data, teachers=teachers)


def prepare_data(config: DataConfig, track: Track | None = None) -> tuple[RetrievalData, Corruption | None]:
    """The data set with validation classes set apart and training labels changed as asked, and the record of noise.

    Labels are corrupted within the classes that train, so that validation stays clean. Corrections come last, and the
    record of noise stays what it was without them. Files that cannot be read are left out before anything else.

    Args:
        config: Which images.
        track: Shows the progress of reading them, as track(iterable, description, total).
    """
    data, corruption = _with_noise(config, track)
    if config.corrections is None:
        return data, corruption
    corrections = Corrections.read(config.corrections, data.train)
    relabeled = len(corrections) - corrections.dropped
    remark = f"{config.corrections} gives {relabeled:,} images another label and leaves {corrections.dropped:,} out"
    return replace(data, train=corrections.apply(data.train), remarks=(*data.remarks, remark)), corruption


def _with_noise(config: DataConfig, track: Track | None) -> tuple[RetrievalData, Corruption | None]:
    data = own_images(config.name, load_data(config.name, config.root), config.unreadable, track)
    data = with_validation(data, config.validation)
    noise = config.noise
    if not noise.rate and noise.variant != "list":
        return data, None
    if noise.variant == "list" and config.validation != "none":
        raise ValueError(
            "a list of wrong labels counts all training classes, so that data.validation must be none, "
            f"got {config.validation!r}"
        )
    train_images, corruption = corrupt(data.train, noise)
    return replace(data, train=train_images, remarks=(*data.remarks, *corruption.remarks)), corruption


def train(
    embedder: Embedder,
    data: RetrievalData,
    config: TrainConfig | None = None,
    *,
    out: str | Path,
    resume: bool = False,
    storage: StorageConfig | None = None,
    monitor: Monitor | None = None,
    world: World | None = None,
) -> dict[str, Any]:
    """Train `embedder` in place on `data` and evaluate it on the unseen classes; the results.

    Args:
        embedder: See `pfml.create_embedder`. It is left with the weights that are saved, averaged ones if they are.
        data: See `pfml.load_data`.
        config: How to train; the paper's values if None.
        out: Folder of the run, for log, checkpoints, model and results; must not hold a run yet.
        resume: Go on from the checkpoint in `out`.
        storage: Where images wait for their turn.
        monitor: What to show; None for silence, `pfml.ProgressMonitor()` for a progress bar.
        world: The ranks that train together, see `pfml.distributed.open_world`; all of them call this, the first one
            writes and shows, and all get the results. None for one process by itself.
    """
    storage, world = storage or StorageConfig(), world or World()
    monitor = (monitor or Monitor()) if world.is_first else Monitor()
    return _train(embedder, data, config or TrainConfig(), Path(out), resume, storage, monitor, None, world)


def _train(
    embedder: Embedder,
    data: RetrievalData,
    config: TrainConfig,
    out: Path,
    resume: bool,
    storage: StorageConfig,
    monitor: Monitor,
    corruption: Corruption | None,
    world: World,
) -> dict[str, Any]:
    """Open the images, then train; the folder is taken only when nothing more can be wrong with what was asked for."""
    folder = RunFolder(out) if world.is_first else ReadOnlyRunFolder(out)
    if not resume:
        world.by_first(folder.start)
    for remark in data.remarks:
        monitor.remark(remark)
    with seeded(config.seed):
        try:
            with world.first_before_others(storage.cache is not None):  # who then find a cache that is whole
                sources = open_sources(data, world.device or resolve_device(config.device), storage, monitor)
            training = Training(embedder, data, sources, config, folder, monitor, world)
        except BaseException:
            with suppress(OSError):
                folder.path.rmdir()  # which works on an empty folder only
            raise
        if resume and has_checkpoint(folder.checkpoints):
            training.restore()
        elif resume:
            world.by_first(lambda: refuse_other_pixels(folder, data))
            monitor.remark(f"{folder.path} has no checkpoint yet: training begins at its first step")
            folder.forget_after(0, 0)
        if world.is_first:
            _describe(folder, config, corruption, resume)
        if not resume:
            world.by_first(lambda: write_image_states(folder, data, max(storage.workers, 1)))
        return training.run()


def _describe(folder: RunFolder, config: TrainConfig, corruption: Corruption | None, resume: bool) -> None:
    """Write down what the run is, unless that is done."""
    if not resume:
        write_config(folder.config, _with_own_corrections(config, folder), sealed=True)
    if corruption is not None and not has_checkpoint(folder.checkpoints):
        corruption.write(folder.noise)


def _with_own_corrections(config: TrainConfig, folder: RunFolder) -> TrainConfig:
    """`config` with a copy of its list of corrections in the run's folder: others may change the list itself."""
    if not isinstance(config, RunConfig) or config.data.corrections is None:
        return config
    write_atomically(folder.corrections, config.data.corrections.read_bytes())
    return replace(config, data=replace(config.data, corrections=folder.corrections.absolute()))
