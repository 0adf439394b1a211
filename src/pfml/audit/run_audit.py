"""The audit of a run: all of its images, embedded by the pretrained backbone that it started from, or by its model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from torch import Tensor

from pfml.audit.decisions import parts_of_classes
from pfml.audit.scores import K
from pfml.audit.suspects import Audit, audit
from pfml.data import RetrievalData
from pfml.data.corrections import Corrections
from pfml.data.decoding import Track
from pfml.evaluation import embed
from pfml.losses.distillation import combined
from pfml.models import Embedder, load_embedder
from pfml.models.backbone_table import default_weights
from pfml.runs.data import config_of_run, load_checked, prepare_data
from pfml.runs.folder import RunFolder
from pfml.suggest.comparison import untrained_embedder
from pfml.training import DataConfig, RunConfig, load_field
from pfml.training.environment import resolve_device

__all__ = ["audit_run", "has_untrained", "of_training", "write_corrections"]


def audit_run(
    run: str | Path,
    *,
    parts: Sequence[str] = (),
    model: str | Path | None = None,
    law: Literal["fitted", "run"] = "fitted",
    compare: Sequence[str] = (),
    k: int = K,
    device: str = "auto",
    track: Track | None = None,
    loaded: RetrievalData | None = None,
) -> tuple[Audit, RetrievalData]:
    """The audit of the labels of all images of a run, in one field with all classes, and the run's data.

    A trained model has learned the labels of its training images, also those that are noise. So its backbone judges as
    it was before training, if that was pretrained, and proxies are no charges (docs/AUDIT.md has what this gains).

    Args:
        run: Folder of a run; its configuration says the data. Where it has label noise, the true labels are known.
        parts: The parts whose images are judged: train, validation, test or gallery; () for all.
        model: Folder of an embedder to judge with, such as that of the run itself. By default the pretrained backbone
            judges; without pretrained weights the model of the run, and a student together with its teachers.
        law: "fitted" to the embeddings, or "run": that of the run's loss, which must be a field that decays.
        compare: Other scores, keys of `pfml.audit.scores.SCORES`.
        k: Neighbors of the k-NN scores.
        device: Where to embed.
        track: Shows the progress, as track(iterable, description, total).
        loaded: What `load_checked` returned for the data of the run, from a caller that has it already.
    """
    folder = RunFolder(Path(run))
    config = config_of_run(folder.path)
    loaded = load_checked(config.data, track) if loaded is None else loaded
    data, _ = prepare_data(config.data, loaded=loaded)
    images, roles = data.joined()
    points = combined(
        [embed(one.to(resolve_device(device)), images, track=track) for one in _judges(folder, config, model)]
    )
    trained_field = load_field(folder.path) if law == "run" and config.loss.trains else None
    if law == "run" and (trained_field is None or not trained_field.has_own_law):
        raise ValueError(f"{run} was trained by {config.loss.name}, which has no law of its own: use the fitted one")
    return (
        audit(
            points,
            images,
            law="fitted" if trained_field is None else trained_field.law,
            true_labels=_true_labels(config.data, data, loaded),
            compare=compare,
            k=k,
            roles=roles,
            parts=parts,
        ),
        data,
    )


def _judges(folder: RunFolder, config: RunConfig, model: str | Path | None) -> Iterator[Embedder]:
    """The embedders that judge together, one after the other."""
    if model is not None:
        yield load_embedder(model)
    elif has_untrained(config):
        yield _untrained(folder, config)
    else:
        yield from map(load_embedder, [folder.path, *_teachers(folder, config)])


def has_untrained(config: RunConfig) -> bool:
    """Whether a run has learned labels with a backbone that was pretrained, so that this can judge in its place."""
    model, learns = config.model, config.loss.trains or config.effort is not None
    weights = default_weights(model.backbone) if model.weights == "default" else model.weights
    return learns and weights != "none"


def _untrained(folder: RunFolder, config: RunConfig) -> Embedder:
    """The pretrained backbone of a run."""
    try:
        embedder = untrained_embedder(config)
    except (OSError, ImportError, ValueError, RuntimeError) as error:
        advice = f"pfml audit {folder.path} --model {folder.path} judges by the trained model"
        raise ValueError(
            f"the pretrained weights of {config.model.backbone} cannot be loaded ({error}): {advice}"
        ) from error
    assert embedder is not None
    return embedder


def write_corrections(
    run: str | Path, path: Path, corrections: Corrections, *, loaded: RetrievalData | None = None
) -> None:
    """Write corrections of an audited run as the list to train on next, in place of the run's own list.

    The list is about training images, with the labels that the run trained on: one whose corrected class is held out of
    training is left out. A run that was already corrected has a list of its own, whose lines stay in the new one:
    otherwise training on the new list would undo them.

    Args:
        run: Folder of the run that was audited.
        path: The file.
        corrections: See `corrections_of`; by position in `RetrievalData.joined`.
        loaded: What `load_checked` returned for the data of the run, from a caller that has it already.
    """
    config = config_of_run(Path(run)).data
    before, _ = prepare_data(replace(config, corrections=None), loaded=loaded)
    data, _ = prepare_data(config, loaded=loaded)
    corrections = of_training(corrections, data)
    if config.corrections is not None:
        corrections = Corrections.read(config.corrections, before.train).then(corrections, before.train)
    corrections.write(path, before.train)


def of_training(corrections: Corrections, data: RetrievalData) -> Corrections:
    """The corrections of training images, among those of all; one to a held-out class leaves its image out.

    Args:
        corrections: By position in `RetrievalData.joined`, where training images and their classes come first.
        data: All images.
    """
    train, names = data.train, data.joined()[0].class_names
    parts = parts_of_classes(data, corrections.classes)
    # class -> its name from now on, None unless it trains
    now = {name: corrections.classes.get(name, name) for name in names}
    now = {name: then if then is not None and "train" in parts[then] else None for name, then in now.items()}
    label_of = {now[name]: k for k, name in reversed([*enumerate(train.class_names)])}

    def trained(label: int | None) -> int | None:
        """The label of a training class that an image is corrected to."""
        if label is None or label < train.num_classes:
            return label
        then = now[names[label]]
        return None if then is None else label_of[then]

    labels = {index: trained(label) for index, label in corrections.labels.items() if index < len(train)}
    return Corrections(labels, {name: now[name] for name in train.class_names if now[name] != name})


def _teachers(folder: RunFolder, config: RunConfig) -> list[Path]:
    """The teachers of a student, also of one whose folder was moved with them."""
    found = []
    for teacher in map(Path, config.teachers):
        moved = folder.path / "teachers" / teacher.name
        if not (teacher.is_dir() or moved.is_dir()):
            alone = f"pfml audit {folder.path} --model {folder.path} judges without teachers"
            raise FileNotFoundError(f"{teacher}, a teacher of {folder.path}, is not there: {alone}")
        found.append(teacher if teacher.is_dir() else moved)
    return found


def _true_labels(config: DataConfig, data: RetrievalData, loaded: RetrievalData) -> Tensor | None:
    """The labels of all images before label noise was added, also of those corrected since; None without noise."""
    before, corruption = prepare_data(replace(config, corrections=None), loaded=loaded)
    if corruption is None:
        return None
    true = before.train.labels.clone()
    true[corruption.indices] = corruption.true_labels
    by_name = dict(zip(map(before.train.name_of, range(len(before.train))), true.tolist(), strict=True))
    classes = {} if config.corrections is None else Corrections.read(config.corrections, before.train).classes
    now = [classes.get(name, name) for name in before.train.class_names]
    position = {name: k for k, name in enumerate(data.train.class_names)}
    labels = data.joined()[0].labels.clone()
    for k in range(len(data.train)):
        then = now[by_name[data.train.name_of(k)]]
        if then is not None:  # an image whose true class was left out has no true label any more
            labels[k] = position[then]
    return labels
