"""The audit of a run: its training or test images, embedded by its model; a student's by its teachers too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from pfml.audit.scores import K
from pfml.audit.suspects import Audit, audit
from pfml.data import RetrievalData
from pfml.data.corrections import Corrections
from pfml.data.decoding import Track
from pfml.evaluation import embed
from pfml.losses.distillation import combined
from pfml.models import load_embedder
from pfml.runs.config_files import read_config
from pfml.runs.data import load_checked, prepare_data
from pfml.runs.folder import RunFolder
from pfml.training import DataConfig, RunConfig, load_field
from pfml.training.environment import resolve_device

__all__ = ["audit_run", "write_corrections"]


def audit_run(
    run: str | Path,
    *,
    part: Literal["train", "test"] = "train",
    model: str | Path | None = None,
    law: Literal["fitted", "run"] = "fitted",
    compare: Sequence[str] = (),
    k: int = K,
    device: str = "auto",
    track: Track | None = None,
    loaded: RetrievalData | None = None,
) -> tuple[Audit, RetrievalData]:
    """The audit of the labels of a run, those of its training images or of its test images, and the run's data.

    Args:
        run: Folder of a run; its configuration says the data. Where it has label noise, the true labels are known.
        part: "train", or "test": images of classes that the run has not seen, by the field of their embeddings alone.
        model: Folder of another embedder to judge with, such as that of an earlier or an untrained run; its
            embeddings then make the field alone, since the proxies of the run lie in another space. A student judges
            with its teachers, unless its own folder is given here.
        law: "fitted" to the embeddings, or "run": that of the run's loss, which must be a field that decays.
        compare: Other scores, keys of `pfml.audit.scores.SCORES`.
        k: Neighbors of the k-NN scores.
        device: Where to embed.
        track: Shows the progress, as track(iterable, description, total).
        loaded: What `load_checked` returned for the data of the run, from a caller that has it already.
    """
    folder = RunFolder(Path(run))
    config = read_config(folder.config)
    loaded = load_checked(config.data, track) if loaded is None else loaded
    data, _ = prepare_data(config.data, loaded=loaded)
    models = [folder.path, *_teachers(folder, config)] if model is None else [model]
    seen = part == "train"
    images = data.train if seen else data.test
    points = combined([embed(load_embedder(one).to(resolve_device(device)), images, track=track) for one in models])
    trained = config.loss.trains
    trained_field = load_field(folder.path) if trained and (model is None or law == "run") else None
    if law == "run" and (trained_field is None or not trained_field.has_own_law):
        raise ValueError(f"{run} was trained by {config.loss.name}, which has no law of its own: use the fitted one")
    return (
        audit(
            points,
            images,
            proxies=trained_field.proxies if trained_field is not None and model is None and seen else None,
            law=trained_field.law if trained_field is not None and law == "run" else "fitted",
            true_labels=_true_labels(config.data, data, loaded) if seen else None,
            compare=compare,
            k=k,
        ),
        data,
    )


def write_corrections(
    run: str | Path, path: Path, corrections: Corrections, *, loaded: RetrievalData | None = None
) -> None:
    """Write corrections of an audited run as the list to train on next, in place of the run's own list.

    They apply to the labels that the run trained on. A run that was already corrected has a list of its own, whose
    lines stay in the new one: otherwise training on the new list would undo them.

    Args:
        run: Folder of the run that was audited.
        path: The file.
        corrections: See `corrections_of`.
        loaded: What `load_checked` returned for the data of the run, from a caller that has it already.
    """
    config = read_config(RunFolder(Path(run)).config).data
    before, _ = prepare_data(replace(config, corrections=None), loaded=loaded)
    if config.corrections is not None:
        corrections = Corrections.read(config.corrections, before.train).then(corrections, before.train)
    corrections.write(path, before.train)


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
    """The labels before label noise was added, also of images that were corrected since; None without noise."""
    before, corruption = prepare_data(replace(config, corrections=None), loaded=loaded)
    if corruption is None:
        return None
    true = before.train.labels.clone()
    true[corruption.indices] = corruption.true_labels
    if config.corrections is None:
        return true
    by_name = dict(zip(map(before.train.name_of, range(len(before.train))), true.tolist(), strict=True))
    return torch.tensor([by_name[data.train.name_of(index)] for index in range(len(data.train))])
