"""From a configuration to a trained embedder: `run` for a whole configuration, `train` for an embedder and data."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from pfml.data import Corruption, RetrievalData, load_data
from pfml.data.decoding import listing_all_unreadable
from pfml.data.image_source import ImageSource
from pfml.distributed import World
from pfml.evaluation import EmbeddedTest, embed_test
from pfml.methods import LossConfig
from pfml.models import Embedder, EmbedderConfig
from pfml.models.backbone_table import create_backbone
from pfml.models.own_network import require_storable
from pfml.own_code import reference_to
from pfml.runs.card import write_run_cards
from pfml.runs.checkpoint import has_checkpoint
from pfml.runs.config import RunConfig, StorageConfig, TrainConfig
from pfml.runs.config_files import plain, read_config, write_config
from pfml.runs.data import PreparedData, prepare_data
from pfml.runs.folder import ReadOnlyRunFolder, RunFolder, free_folder, summarize
from pfml.runs.image_states import require_same_images, write_image_states
from pfml.storage.files import write_atomically
from pfml.training.environment import precision, resolve_device, seeded
from pfml.training.loop import Training
from pfml.training.progress import Monitor, Monitors
from pfml.training.setup import open_sources, require_loss_packages
from pfml.training.start import Start, load_start

__all__ = ["create_run_embedder", "is_begun", "needed_start", "run", "train", "write_untrained"]


def run(
    config: RunConfig,
    out: str | Path,
    *,
    data: PreparedData | None = None,
    sources: dict[str, ImageSource] | None = None,
    embedder: Embedder | None = None,
    resume: bool = False,
    monitor: Monitor | None = None,
    world: World | None = None,
) -> dict[str, Any]:
    """Train as `config` says in the folder `out`; the results (see `pfml.runs.folder.summarize`).

    A method that trains nothing is evaluated only. The other arguments are those of `train`.

    Args:
        config: The whole run.
        out: Folder of the run.
        data: What `prepare_data(config.data)` returns, from a caller that has it already; None to load it here.
        sources: What an earlier run with the same data, storage and device has put there: its decoded images. An empty
            dict is filled; None keeps nothing.
        embedder: What `create_run_embedder(config)` returns, likewise; it is trained in place. A run that continues
            another one takes that run's instead.
        resume: Resume from the checkpoint in `out`.
        monitor: What to show.
        world: The ranks that train together.
    """
    if config.effort is not None:
        raise ValueError(f"run trains as the options say: effort must be None, got {config.effort!r}: use run_ladder")
    world, out, config = world or World(), Path(out), config.resolved()
    monitor = (monitor or Monitor()) if world.is_first else Monitor()
    images, corruption = data or prepare_data(config.data, monitor.track)
    start = needed_start(config, out)
    if start is not None:
        embedder = create_run_embedder(config, start)
        _require_known_classes(embedder, images, config)
    embedder = create_run_embedder(config) if embedder is None else _matching(embedder, config)
    if not config.loss.trains:
        resume = resume and is_begun(config, out)
        with listing_all_unreadable(images, track=monitor.track):
            return _evaluate_untrained(embedder, images, config, RunFolder(out), monitor, world, resume=resume)
    if corruption is not None:
        changed = f"{corruption.wrong:,} of {len(images.train):,} training labels"
        monitor.remark(f"{changed} are wrong on purpose, listed in {RunFolder(out).noise}")
    return _train(
        embedder,
        images,
        config,
        out,
        resume=resume,
        storage=config.storage,
        sources=sources,
        monitor=monitor,
        world=world,
        corruption=corruption,
        start=start,
    )


def _evaluate_untrained(
    embedder: Embedder,
    data: RetrievalData,
    config: RunConfig,
    folder: RunFolder,
    monitor: Monitor,
    world: World,
    *,
    resume: bool,
) -> dict[str, Any]:
    """Evaluate the embedder as it is; the results, as those of a run, of epoch 0.

    The folder gets config.yaml, log.jsonl, model/ and results.json, so that what reads runs reads it too. With `resume`
    it may hold what an interrupted evaluation has written; it is evaluated again, and everything is written again.
    """
    embedder = embedder.to(world.device or resolve_device(config.device))
    if config.test_image_size is not None:
        embedder.set_image_size(config.test_image_size)
    if not resume:
        world.by_first(folder.start)
    for remark in data.remarks:
        monitor.remark(remark)
    entry: dict[str, Any] = {"epoch": 0}
    for role, images in (("test", data), ("validation", data.validation)):
        if images is not None and not (role == "test" and data.protocol == "none"):
            autocast = precision(config.autocast)
            embedded = embed_test(embedder, images, autocast=autocast, track=monitor.track, world=world)
            entry |= world.by_first(lambda: _scored(embedded, role, data))  # noqa: B023 - called at once
    results: dict[str, Any] = world.by_first(lambda: write_untrained(config, data, folder, embedder, entry))
    return results


def _scored(embedded: EmbeddedTest, role: str, data: RetrievalData) -> dict[str, Any]:
    """The metrics of a role, and of held-out images of known classes also the accuracies."""
    found: dict[str, Any] = {role: embedded.retrieval(recall_at=data.recall_at).as_dict()}
    if role == "test" and data.protocol == "images":
        found["known"] = embedded.classification().as_dict()
    return found


def write_untrained(
    config: RunConfig,
    data: RetrievalData,
    folder: RunFolder,
    embedder: Embedder,
    entry: dict[str, Any],
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write the run of a model that was not trained by gradient descent; the results.

    Args:
        config: The whole run.
        data: What it was evaluated on.
        folder: Where; it has been started.
        embedder: The model.
        entry: Its evaluation, as a line of the history: "epoch", "test", and with the protocol "images" "known", which
            is `pfml.evaluation.classification_metrics(...).as_dict()`. Without "known" the images are embedded for it.
        more: What else the results say.
    """
    if data.protocol == "images" and "known" not in entry:
        embedded = embed_test(embedder, data, autocast=precision(config.autocast))
        entry = {**entry, "known": embedded.classification().as_dict()}
    folder.track(config.trackers, plain(config))
    write_config(folder.config, config, sealed=True)
    folder.forget_after(0, 0)  # the same lines, if an evaluation was interrupted here
    folder.append("evaluation", 0, **entry)
    embedder.save(folder.model)
    results = summarize([entry], select_by=config.select_by, protocol=data.protocol) | (more or {})
    folder.write_results(results)
    write_run_cards(folder, data, config, results)
    folder.close()
    return results


def needed_start(config: RunConfig, out: Path) -> Start | None:
    """What the run in `out` takes over from the run that it continues; None if it continues none, or has checkpoints.

    Args:
        config: Of the run.
        out: Its folder.
    """
    if config.start is None or has_checkpoint(RunFolder(out).checkpoints):
        return None
    return load_start(config.start, config.loss)


def create_run_embedder(config: RunConfig, start: Start | None = None) -> Embedder:
    """The embedder that a run of this configuration starts with, its random weights drawn from the run's seed.

    Args:
        config: Of the run.
        start: See `needed_start`; its embedder is the one.
    """
    config = config.resolved()
    if start is not None:
        _see_as_in_training(start.embedder, config.model)
        return _matching(start.embedder, config)
    with seeded(config.seed):
        return Embedder(config.model)


def _see_as_in_training(embedder: Embedder, model: EmbedderConfig) -> None:
    """Undo the `test_image_size` of the run that left this embedder."""
    if (embedder.config.image_size, embedder.config.resize) == (model.image_size, model.resize):
        return
    _, embedder.preprocessing = create_backbone(model.backbone, image_size=model.image_size, resize=model.resize)
    embedder.config = replace(embedder.config, image_size=model.image_size, resize=model.resize)


def _require_known_classes(embedder: Embedder, data: RetrievalData, config: RunConfig) -> None:
    """Refuse to continue a run whose classes are no longer among the training classes."""
    known = () if embedder.trained_on is None else embedder.trained_on.class_names
    lost = sorted({*known} - {*data.train.class_names})
    if lost:
        raise ValueError(
            f"the classes that {config.start} was trained on must train again, but {lost[0]} does not: the images of "
            f"{config.data.name} have changed; restore them, or start a new run"
        )


def _matching(embedder: Embedder, config: RunConfig) -> Embedder:
    """`embedder`, which must be the one that `config.model` describes."""
    if embedder.config != config.model:
        raise ValueError(
            f"the embedder must be the one of config.model, {config.model}, got {embedder.config}: "
            f"build it with create_run_embedder(config)"
        )
    return embedder


def is_begun(config: RunConfig, out: Path) -> bool:
    """Whether the folder `out` holds a run of this configuration, finished or not; one of another is refused."""
    folder = RunFolder(out)
    if not folder.config.is_file():
        return False
    stored, given = read_config(folder.config), config.resolved()
    # a run keeps a copy of its list of corrections
    given = replace(given, data=replace(given.data, corrections=stored.data.corrections))
    if plain(stored) != plain(given):
        raise ValueError(f"{out} holds a run of another configuration: choose another folder")
    return True


def train(
    data: Any,
    embedder: Embedder,
    config: TrainConfig | None = None,
    *,
    loss: nn.Module | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    storage: StorageConfig | None = None,
    monitor: Monitor | Sequence[Monitor] | None = None,
    world: World | None = None,
) -> dict[str, Any]:
    """Train `embedder` in place on `data` and evaluate it on what is held out; the results.

    Args:
        data: What `pfml.load_data` returns, or takes: a folder, pairs (path, label), a torch `Dataset`, a split of
            Hugging Face `datasets`; of these, half of the classes are unseen.
        embedder: See `pfml.create_embedder`, and `Embedder.wrap` for a network of one's own. It is left with the
            weights that are saved, averaged ones if they are.
        config: How to train; the paper's values if None.
        loss: A loss of one's own, trained in place: a module whose forward(embeddings, labels) returns a scalar. Labels
            are integers from 0. None for the one of `config.loss`.
        out: Folder of the run, for log, checkpoints, model and results; must not hold a run yet. None for the next free
            one of runs/NAME-1, runs/NAME-2, ...
        resume: Resume from the checkpoint in `out`.
        storage: Where images wait for their turn.
        monitor: Receives the events of the run, one or several (see `pfml.Monitor`); None for silence,
            `pfml.ProgressMonitor()` for a progress bar.
        world: The ranks that train together, see `pfml.distributed.open_world`; all of them call this, the first one
            writes and shows, and all get the results. None for one process by itself.

    Returns:
        The results of `pfml.runs.folder.summarize`, and without `out` also "run", the folder that was chosen.
    """
    if not isinstance(embedder, Embedder):
        raise TypeError(
            f"embedder must be an Embedder, got {type(embedder).__name__}: train takes the data first; wrap a network "
            f"of your own with what its images look like, Embedder.wrap(network, Preprocessing(...))"
        )
    config, storage, world = config or TrainConfig(), storage or StorageConfig(), world or World()
    if loss is not None:
        config = replace(config, loss=_named_loss(loss, config))
    if resume and out is None:
        raise ValueError("out must name the run that is resumed, got None")
    images = data if isinstance(data, RetrievalData) else load_data(data)
    folder = Path(out or world.by_first(lambda: str(free_folder(Path("runs"), Path(images.name).stem))))
    several = [monitor] if isinstance(monitor, Monitor) else monitor or ()
    watch = Monitors(several) if world.is_first else Monitor()
    results = _train(
        embedder, images, config, folder, resume=resume, storage=storage, monitor=watch, world=world, loss=loss
    )
    return results if out is not None else {**results, "run": str(folder)}


def _named_loss(loss: nn.Module, config: TrainConfig) -> LossConfig:
    """The name of a loss of one's own in the configuration of its run; a loss that cannot be stored is refused."""
    if not isinstance(loss, nn.Module):
        raise TypeError(f"loss must be a torch.nn.Module, got {type(loss).__name__}")
    if config.loss != LossConfig() and config.loss.name != reference_to(loss):
        raise ValueError(f"give the loss once: got {reference_to(loss)} and config.loss {config.loss.name}")
    require_storable(loss, "loss")
    return LossConfig(reference_to(loss))


def _train(
    embedder: Embedder,
    data: RetrievalData,
    config: TrainConfig,
    out: Path,
    *,
    resume: bool,
    storage: StorageConfig,
    monitor: Monitor,
    world: World,
    corruption: Corruption | None = None,
    start: Start | None = None,
    loss: nn.Module | None = None,
    sources: dict[str, ImageSource] | None = None,
) -> dict[str, Any]:
    """Open the images, then train; the results. A mistake in the arguments leaves no folder behind."""
    if loss is None:
        require_loss_packages(config.loss)
    folder = RunFolder(out) if world.is_first else ReadOnlyRunFolder(out)
    if not resume:
        world.by_first(folder.start)
    folder.track(config.trackers, plain(config))
    for remark in data.remarks:
        monitor.remark(remark)
    with seeded(config.seed):
        try:
            sources = {} if sources is None else sources
            if not sources:
                with world.first_before_others(storage.cache is not None):  # who then find a cache that is whole
                    sources |= open_sources(data, world.device or resolve_device(config.device), storage, monitor)
            training = Training(embedder, data, sources, config, folder, monitor, world, start, loss)
        except BaseException:
            with suppress(OSError):
                folder.path.rmdir()  # which works on an empty folder only
            raise
        if resume and has_checkpoint(folder.checkpoints):
            training.restore()
        elif resume:
            world.by_first(lambda: require_same_images(folder, data))
            monitor.remark(f"{folder.path} has no checkpoint yet: training starts at its first step")
            folder.forget_after(0, 0)
        if world.is_first:
            _describe(folder, config, corruption, resume)
        if not resume:
            world.by_first(lambda: write_image_states(folder, data, max(storage.workers, 1)))
        try:
            return training.run()
        finally:
            folder.close()


def _describe(folder: RunFolder, config: TrainConfig, corruption: Corruption | None, resume: bool) -> None:
    """Write the configuration and the label noise of a run, unless they were written before it was resumed."""
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
