"""`pfml train --final RUN`: the settings that a run has proved, once more on all of its images.

Nothing evaluates a final model, since nothing is held out. What is known of its settings are the figures of RUN, and
its card says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pfml.data import RetrievalData
from pfml.data.corrections import Corrections
from pfml.data.decoding import Track
from pfml.data.own_images import is_own
from pfml.models.embedder import learned_by
from pfml.runs.config import DataConfig, RunConfig
from pfml.runs.config_files import read_config
from pfml.runs.data import load_checked, prepare_data
from pfml.runs.final import Validated, final_folder, write_validated
from pfml.runs.folder import RunFolder, of_model
from pfml.terminal import shell_words

__all__ = ["Final", "begin_final", "moved_corrections", "plan_final", "steps_alike"]


@dataclass(frozen=True, eq=False)
class Final:
    """A final model that is to be trained, resumed, or done.

    Args:
        config: Its settings.
        folder: Where.
        is_begun: Whether it is to be resumed.
        is_done: Whether nothing is left to train.
        loaded: Its images, listed and checked, if they were needed here.
        description: A sentence on how long it trains, and why.
        validated: The figures of the run, for one that is not begun yet.
        corrections: Those of the run for all of its images, likewise; None if there are none.
    """

    config: RunConfig
    folder: Path
    is_begun: bool = False
    is_done: bool = False
    loaded: RetrievalData | None = None
    description: str = ""
    validated: Validated | None = None
    corrections: Corrections | None = None

    def begin(self) -> None:
        """Give its folder the figures of the run and its corrections, unless it has them."""
        if self.validated is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_validated(self.folder, self.validated)
        if self.corrections is not None and self.loaded is not None:
            self.corrections.write(RunFolder(self.folder).corrections, self.loaded.train)


def begin_final(run: str | Path, track: Track | None = None) -> Final:
    """`plan_final`, whose folder now has the figures of the run and its corrections."""
    final = plan_final(run, track)
    final.begin()
    return final


def plan_final(run: str | Path, track: Track | None = None) -> Final:
    """The final model of the run in the folder `run`; nothing is written before `Final.begin`.

    Its settings are those of the run, with these differences:

    - data: nothing is held out (data.split none, data.validation none).
    - epochs: as many as the run's model has seen; validation may have chosen an earlier epoch than the last. The
      schedule reaches over these.
    - steps: as many per class as in the run, see `steps_alike`.

    Args:
        run: A run that has ended, on images of one's own.
        track: Shows the progress, as track(iterable, description, total).

    Raises:
        ValueError: If there can be no final model of this run; the message says why.
    """
    source = RunFolder(Path(run))
    config = _checked_config(source)
    out = RunFolder(final_folder(source.path))
    if out.config.is_file():
        return Final(read_config(out.config), out.path, is_begun=True, is_done=out.results.is_file())
    learned = learned_by(source.path)
    classes = 0 if learned is None else len(learned.class_names)
    data = replace(config.data, split="none", validation="none")
    if config.effort is not None:
        validated = Validated.of(source, classes=classes, steps=0)
        return Final(replace(config, data=data), out.path, validated=validated)
    epochs, per_epoch = _trained_length(source)
    loaded = load_checked(data, track)
    corrections = _corrections_of_all(config.data, loaded, track)
    train = prepare_data(replace(data, corrections=None), loaded=loaded).data.train
    if corrections is not None:
        train = corrections.apply(train)
        data = replace(data, corrections=out.corrections.absolute())
    now = len(train.labels.unique())
    steps = steps_alike(per_epoch, classes, now)
    filled = max(len(train) // config.batch.size, 1)
    batch = replace(config.batch, per_epoch=None if steps == filled else steps)
    ending = "" if epochs == config.epochs else f", as many as validation chose of {config.epochs}"
    return Final(
        replace(config, data=data, epochs=epochs, batch=batch),
        out.path,
        loaded=loaded,
        description=(
            f"all {len(train):,} images of {now:,} classes train, {epochs} epochs{ending}, of {steps:,} steps each: "
            f"as many per class as {per_epoch:,} for the {classes:,} classes of {source.path}"
        ),
        validated=Validated.of(source, classes=classes, steps=epochs * per_epoch),
        corrections=corrections,
    )


def steps_alike(steps: int, classes: int, more_classes: int) -> int:
    """The steps of an epoch on `more_classes` classes that give each as many as `steps` on `classes` classes did.

    A step of P x K sampling shows P classes. So a class comes steps * P / classes times in an epoch, and steps grow
    with the number of classes, whatever the number of images. Random batches follow the same rule.

    Example:
        >>> steps_alike(7, 10, 20)
        14
    """
    return max(round(steps * more_classes / max(classes, 1)), 1)


def _checked_config(source: RunFolder) -> RunConfig:
    """The configuration of a run of which there can be a final model."""
    run = source.path
    if not source.config.is_file():
        raise FileNotFoundError(f"--final must be the folder of a run, with config.yaml in it, but {run} has none")
    config = read_config(source.config)
    if not source.results.is_file() or not (source.model / "model.json").is_file():
        raise ValueError(
            f"{run} has not ended, so that nothing is known of its settings: finish it first, "
            f"pfml train --resume {shell_words(str(run))}"
        )
    if not is_own(config.data.name):
        raise ValueError(
            f"{config.data.name} is published with test classes that stay unseen: --final is for images of your own"
        )
    if config.data.split == "none":
        raise ValueError(f"{run} was trained on everything already: its model is the final one")
    if config.teachers or RunFolder(run).ensemble.is_file():
        raise ValueError(
            f"{run} is the student of teachers, who know a part of the images only: "
            f"train the final model of a run on labels"
        )
    if config.data.noise.rate or config.data.noise.variant == "list":
        raise ValueError(
            f"the labels of {run} are noisy on purpose (data.noise), which is an experiment: "
            f"a final model takes a run without data.noise"
        )
    if config.effort is None and not config.loss.trains:
        raise ValueError(
            f"{run} has trained nothing ({config.loss.name}): its model knows no image, and is the final one already"
        )
    return config


def moved_corrections(
    before: DataConfig, loaded: RetrievalData, out: RunFolder, track: Track | None = None
) -> Path | None:
    """The list of corrections of a run, written to `out` for all of its images; None if there is none.

    Args:
        before: The data of the run.
        loaded: All of its images.
        out: The folder of the final run.
        track: Shows the progress.
    """
    corrections = _corrections_of_all(before, loaded, track)
    if corrections is None:
        return None
    corrections.write(out.corrections, loaded.train)
    return out.corrections.absolute()


def _corrections_of_all(before: DataConfig, loaded: RetrievalData, track: Track | None) -> Corrections | None:
    if before.corrections is None:
        return None
    train = prepare_data(replace(before, corrections=None), track).data.train
    return Corrections.read(before.corrections, train).moved(train, loaded.train)


def _trained_length(source: RunFolder) -> tuple[int, int]:
    """The epochs that a run's model has seen, and the steps of each."""
    epochs = int(of_model(source.read_results())["epoch"])
    evaluations = [entry for entry in source.entries("evaluation") if entry["epoch"]]
    if not evaluations:
        raise ValueError(f"{source.log} must tell how many steps an epoch had, but has no evaluation: train it again")
    return epochs, round(evaluations[-1]["step"] / evaluations[-1]["epoch"])
