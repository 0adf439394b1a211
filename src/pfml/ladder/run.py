"""A run that works up the ladder: `pfml train --data FOLDER`."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pfml.data import RetrievalData
from pfml.data.image_set import PROTOCOLS
from pfml.evaluation import EmbeddedTest
from pfml.evaluation.metrics import summary
from pfml.ladder import fine_tuning
from pfml.ladder.fine_tuning import FineTuning
from pfml.ladder.heads import STEPS, LinearHead, train_head
from pfml.ladder.ladder import RUNGS, Candidate, Climb, Features, climb, fit
from pfml.methods import LossConfig
from pfml.models import Embedder
from pfml.models.embedder import learned_by
from pfml.runs.config import RunConfig
from pfml.runs.config_files import plain, read_config, write_config
from pfml.runs.data import PreparedData, load_checked, prepare_data
from pfml.runs.folder import RunFolder, of_model
from pfml.runs.layers import flattened
from pfml.suggest.comparison import about_chance, untrained_embedder
from pfml.suggest.preview import distances_of
from pfml.suggest.suggestion import suggest_loss
from pfml.training.environment import precision, resolve_device
from pfml.training.final import moved_corrections
from pfml.training.progress import Monitor
from pfml.training.runner import write_untrained
from pfml.training.setup import open_sources, require_matches

__all__ = [
    "LadderRun",
    "described_ladder",
    "finish_ladder",
    "ignored_by_ladder",
    "kept_rung",
    "leaves_to_ladder",
    "refuse_other_options",
    "run_ladder",
    "used_by_ladder",
]

#: What may be decided beside the effort; the ladder decides the rest.
FREE = ("effort", "data", "storage", "seed", "device", "autocast", "trackers", "model.backbone", "model.weights")
#: What of a configuration the ladder uses, as names or groups; of the model, what the pretrained backbone has.
USED = ("effort", "seed", "device", "autocast", "data", "model", "storage")
USED_OF_MODEL = ("backbone", "weights", "pooling", "layer_norm", "freeze_patch_embedding")
#: Images whose distances choose the radii of the field.
MOST_COMPARED = 2000
#: Where the trainings of the last rung are kept until the run is done.
TRAININGS = "fine-tuning"


@dataclass(frozen=True, eq=False)
class LadderRun:
    """What `run_ladder` leaves.

    Args:
        results: As those of any run.
        conclusion: A sentence that says what was kept, and what it does on the test images.
        embeddings: Of the test images and the gallery, by the model that is kept; None for a run that was finished.
    """

    results: dict[str, Any]
    conclusion: str
    embeddings: Mapping[str, Tensor] | None = None


def leaves_to_ladder(given: Collection[str]) -> bool:
    """Whether these options leave to the ladder what it decides."""
    return not any(map(_is_decided_here, given))


def refuse_other_options(given: Collection[str], effort: str | None = "--effort") -> None:
    """Refuse options that decide what the ladder decides.

    Args:
        given: Options, without their hyphens.
        effort: What asks for the ladder, and may be left out instead; None if nothing may.
    """
    others = [option for option in given if _is_decided_here(option)]
    if others:
        shown = ", ".join(f"--{option}" for option in sorted(others))
        instead = "" if effort is None else f", or leave out {effort} to train directly"
        raise ValueError(f"the ladder decides by itself how to train: leave out {shown}{instead}")


def _is_decided_here(option: str) -> bool:
    return not option.startswith(FREE) or option == "data.validation"  # the ladder cross-fits


def used_by_ladder(config: RunConfig) -> dict[str, Any]:
    """What of a configuration the ladder uses, as plain values: a configuration of these works up the same ladder."""
    values = plain(config)
    return {name: values[name] for name in USED} | {"model": {name: values["model"][name] for name in USED_OF_MODEL}}


def ignored_by_ladder(config: RunConfig) -> list[str]:
    """Options that have another value than by default, in a configuration file say, and that the ladder decides."""
    default = RunConfig() if config.loss.trains else replace(RunConfig(), loss=config.loss)  # as a ladder stores it
    values, defaults = flattened(plain(config)), flattened(plain(default))
    used = set(flattened(used_by_ladder(config)))
    return [name for name in values if name not in used and values[name] != defaults.get(name)]


def described_ladder(config: RunConfig) -> list[str]:
    """Lines that say which rungs a run with an effort tries, and what the ladder decides for each."""
    assert config.effort is not None
    device = resolve_device(config.device).type
    steps, classes = fine_tuning.STEPS[device], fine_tuning.MOST_CLASSES[device]
    about = {
        "pretrained": f"{config.model.backbone} as it is",
        "views": "generalized mean pooling" + ("" if config.effort == "seconds" else ", larger crops, flip test"),
        "closed form": "a linear head computed from the features",
        "trained head": f"a linear head, {STEPS} steps of the potential field on the features",
        "fine-tuned": (
            f"the whole model, {steps} steps of up to {classes} classes x {fine_tuning.PER_CLASS} images, "
            f"learning rate {fine_tuning.LR:g}, {fine_tuning.PROXY_LR:g} of the proxies"
        ),
    }
    return [
        f"effort {config.effort}: these rungs are tried, and the best that validation proves is kept",
        *(f"  {name}: {about[name]}" for name in RUNGS[config.effort]),
        "the ladder uses the values below; it decides all others by the images",
    ]


def run_ladder(
    config: RunConfig,
    out: str | Path,
    *,
    data: PreparedData | None = None,
    resume: bool = False,
    monitor: Monitor | None = None,
) -> LadderRun:
    """Work up the ladder on the data of `config`, and store what is kept as a run in the folder `out`.

    Args:
        config: With an effort, images and a backbone with pretrained weights.
        out: Folder of the run, which must not hold one.
        data: What `prepare_data(config.data)` returns, from a caller that has it already.
        resume: Resume what is in `out`: all rungs are computed again but finished trainings of the last one.
        monitor: What to show.
    """
    monitor, config = monitor or Monitor(), config.resolved()
    folder = RunFolder(Path(out))
    if resume and folder.results.is_file():
        results = folder.read_results()
        return LadderRun(results, f"{out} is finished: {_about(results)}")
    if not resume:
        folder.refuse_run()
    folder.track(config.trackers, plain(config))  # before anything is computed: a package may be missing
    backbone = _backbone(config)
    if config.effort is None:
        raise ValueError("the ladder needs an effort, such as minutes: set effort")
    images, corruption = data or prepare_data(config.data, monitor.track)
    for remark in images.remarks:
        monitor.remark(remark)
    require_matches(images)
    features = _features(backbone, images, config, monitor)
    if not resume:
        folder.start()
    write_config(folder.config, config, sealed=True)
    fine_tune = FineTuning(config, images.train, folder.path / TRAININGS, _fitting_field, monitor)
    found = climb(
        backbone,
        images,
        _fitting_field,
        effort=config.effort,
        seed=config.seed,
        fine_tune=fine_tune,
        monitor=monitor,
        keep=lambda embedder: embedder.save(folder.model),
        features=features,
    )
    if corruption is not None:
        corruption.write(folder.noise)
    ladder = {"kept": found.chosen.as_dict(), "rungs": [rung.as_dict() for rung in found.rungs]}
    results = _written(config, images, folder, found.embedder, found, {"ladder": ladder})
    return LadderRun(results, _conclusion(found, images), found.embeddings)


def finish_ladder(run: str | Path, out: str | Path, *, monitor: Monitor | None = None) -> dict[str, Any]:
    """What the ladder of a run has kept, fitted once more to all of its images, as a run in `out`; the results.

    Trainings have the same number of steps for each class. Nothing is held out, so that nothing evaluates the model.

    Args:
        run: Folder of a run with an effort.
        out: Folder of the final run.
        monitor: What to show.
    """
    source, folder, monitor = RunFolder(Path(run)), RunFolder(Path(out)), monitor or Monitor()
    config, kept = read_config(source.config), kept_rung(source.path)
    candidate = Candidate.of(kept["settings"])
    learned = learned_by(source.path)
    everything = replace(config.data, split="none", validation="none", corrections=None)
    loaded = load_checked(everything, monitor.track, storage=config.storage)
    folder.start()
    everything = replace(everything, corrections=moved_corrections(config.data, loaded, folder, monitor.track))
    config = replace(config, data=everything)
    images, _ = prepare_data(everything, loaded=loaded)
    scale = 1.0 if learned is None else images.train.num_classes / len(learned.class_names)
    write_config(folder.config, config, sealed=True)

    def train(some: Tensor, labels: Tensor, start: LinearHead) -> LinearHead:
        return train_head(some, labels, start, _fitting_field, seed=config.seed, steps=round(STEPS * scale))

    features = _features(_backbone(config), images, config, monitor)
    fine_tune = FineTuning(config, images.train, folder.path / TRAININGS, _fitting_field, monitor, scale)
    embedder = fit(features, candidate, train, fine_tune)
    return _written(config, images, folder, embedder, None, {"ladder": {"kept": kept}})


def kept_rung(run: Path) -> dict[str, Any]:
    """The rung that a run with an effort has kept, as its log has it."""
    kept = [rung for rung in RunFolder(run).entries("rung") if rung["is_kept"]]
    if not kept:
        raise ValueError(f"{run} has not chosen a rung of its ladder yet: resume it first")
    return kept[-1]


def _backbone(config: RunConfig) -> Embedder:
    backbone = untrained_embedder(config)
    if backbone is None:
        raise ValueError("the ladder needs a backbone with pretrained weights: set model.weights")
    return backbone.to(resolve_device(config.device))


def _features(backbone: Embedder, images: RetrievalData, config: RunConfig, monitor: Monitor) -> Features:
    sources = open_sources(images, resolve_device(config.device), config.storage, monitor)
    return Features(backbone, images, precision(config.autocast), monitor, sources)


def _written(
    config: RunConfig,
    data: RetrievalData,
    folder: RunFolder,
    embedder: Embedder,
    found: Climb | None,
    more: dict[str, Any],
) -> dict[str, Any]:
    """The results, after writing all that a run has; the trainings of the last rung are no longer needed."""
    entry: dict[str, Any] = {"epoch": 0}
    if found is not None and found.after is not None:
        entry["test"] = found.after.as_dict()
    if found is not None and data.protocol == "images" and data.gallery is not None:
        points = found.embeddings
        tested = EmbeddedTest(points["test"], data.test.labels, points["gallery"], data.gallery.labels)
        entry["known"] = tested.classification().as_dict()
    stored = replace(config, loss=LossConfig("zero-shot"))
    results = write_untrained(stored, data, folder, embedder, entry, more)
    if found is not None:
        for rung in found.rungs:
            folder.append("rung", 0, **rung.as_dict(), is_kept=rung is found.chosen)
    if found is not None and found.before is not None:
        folder.append("untrained", 0, test=found.before.as_dict(), image_size=found.rungs[0].candidate.view.image_size)
    folder.close()
    shutil.rmtree(folder.path / TRAININGS, ignore_errors=True)
    return results


def _conclusion(found: Climb, data: RetrievalData) -> str:
    is_base = found.chosen is found.rungs[0]
    what = "the pretrained backbone, since nothing proved to be better" if is_base else str(found.chosen.candidate)
    if found.before is None or found.after is None:
        judge = "only validation by cross-fitting" if found.chosen.scores else "nothing"
        return f"kept: {what}; {PROTOCOLS[data.protocol]}, so that {judge} says how good it is"
    before, after = (summary(scores.as_dict()) for scores in (found.before, found.after))
    if is_base:
        return f"kept: {what}; {PROTOCOLS[data.protocol]}: {before}"
    first, last = (round(scores.recall[1], 3) for scores in (found.before, found.after))
    chance = about_chance(first, last, found.after.num_queries)
    return f"kept: {what}; {PROTOCOLS[data.protocol]}: {before} before, {after} after{chance}"


def _about(results: dict[str, Any]) -> str:
    scores = of_model(results).get("test")
    kept = results.get("ladder", {}).get("kept", {}).get("candidate", "its model")
    return f"it kept {kept}" + ("" if scores is None else f", {summary(scores)}")


def _fitting_field(points: Tensor, labels: Tensor) -> LossConfig:
    """The logarithmic field with radii that fit these embeddings."""
    step = -(-len(points) // MOST_COMPARED)
    distances = distances_of(points[::step], labels[::step])
    return suggest_loss(labels, distances)[0]
