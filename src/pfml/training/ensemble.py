"""An ensemble: several teachers and the student that replaces them, in one folder.

teachers/1, 2, ...   runs of one configuration on labels, each with a seed of its own
.                    the run of the student, which is what the folder's model is
ensemble.json        what the ensemble consists of
teachers.yaml        how teachers are trained
comparison.json      at the end: each teacher, all of them side by side, and the student

An interrupted ensemble resumes: finished runs are kept, a started one resumes from its checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pfml.data import ImageSet, RetrievalData
from pfml.distributed import World
from pfml.evaluation import embed, retrieval_metrics
from pfml.losses.distillation import combined
from pfml.methods import LossConfig
from pfml.models import load_embedder
from pfml.runs.config import OptimizerConfig, RunConfig, ScheduleConfig
from pfml.runs.config_files import read_config, write_config
from pfml.runs.data import PreparedData, prepare_data
from pfml.runs.folder import RunFolder
from pfml.storage.files import DamagedFileError, write_atomically
from pfml.storage.manifest import Format, read_manifest, write_manifest
from pfml.training.environment import precision, resolve_device
from pfml.training.progress import Monitor
from pfml.training.runner import run

__all__ = ["Ensemble", "is_ensemble", "read_ensemble", "run_ensemble", "student_config"]

#: A student trains so many times as long as a teacher, at so many times its learning rate: chosen on validation
#: classes of CUB (docs/STUDENTS.md).
LONGER, FASTER = 4, 2.0
#: The format of ensemble.json.
ENSEMBLE = Format("ensemble", 1, "train it again")


@dataclass(frozen=True)
class Ensemble:
    """What an ensemble consists of.

    Args:
        teachers: How many, with the seeds of the configuration and those after it.
        student_epochs: How long the student trains; None for four times as long as a teacher.
        student_loss: A loss that compares with teachers.
    """

    teachers: int = 4
    student_epochs: int | None = None
    student_loss: str = "relaxed-contrastive"

    def __post_init__(self) -> None:
        if self.teachers < 1:
            raise ValueError(f"an ensemble needs at least one teacher, got {self.teachers}")
        if self.student_epochs is not None and self.student_epochs < 1:
            raise ValueError(f"student_epochs must be >= 1, got {self.student_epochs}")


def student_config(config: RunConfig, teachers: Sequence[Path], ensemble: Ensemble) -> RunConfig:
    """How the student of these teachers is trained, who were trained as `config` says."""
    optimizer: OptimizerConfig = config.optimizer
    head_lr = None if optimizer.head_lr is None else FASTER * optimizer.head_lr
    return replace(
        config,
        loss=LossConfig(ensemble.student_loss),
        teachers=tuple(str(each) for each in teachers),
        epochs=ensemble.student_epochs or LONGER * config.epochs,
        optimizer=replace(optimizer, lr=FASTER * optimizer.lr, head_lr=head_lr),
        schedule=ScheduleConfig("cosine"),
    )


def is_ensemble(folder: Path) -> bool:
    """Whether the folder holds an ensemble, finished or not."""
    return (folder / "ensemble.json").is_file()


def read_ensemble(folder: Path) -> tuple[RunConfig, Ensemble]:
    """How the teachers of the ensemble in `folder` are trained, and what it consists of."""
    file = folder / "ensemble.json"
    try:
        ensemble = Ensemble(**read_manifest(file, ENSEMBLE))
    except DamagedFileError:
        raise
    except (ValueError, TypeError) as error:
        raise DamagedFileError(f"{file} must say what an ensemble consists of: {error}") from None
    return read_config(folder / "teachers.yaml"), ensemble


def run_ensemble(
    config: RunConfig,
    out: str | Path,
    ensemble: Ensemble | None = None,
    *,
    data: PreparedData | None = None,
    resume: bool = False,
    monitor: Monitor | None = None,
    world: World | None = None,
) -> dict[str, Any]:
    """Train teachers as `config` says and a student of them in the folder `out`; their scores on the unseen classes.

    Args:
        config: How teachers are trained, on labels.
        out: The folder, which must not hold a run yet.
        ensemble: What it consists of; four teachers if None.
        data: What `prepare_data(config.data)` returns, from a caller that has it already; None to load it here.
        resume: Resume what is in `out`; `config` and `ensemble` must be those of `read_ensemble`.
        monitor: What to show.
        world: The ranks that train together.
    """
    ensemble, world, out = ensemble or Ensemble(), world or World(), Path(out).absolute()
    monitor = (monitor or Monitor()) if world.is_first else Monitor()
    if not resume:
        world.by_first(lambda: _start(config, out, ensemble))
    data = data or prepare_data(config.resolved().data, monitor.track)  # once for all runs of the ensemble
    folders = [out / "teachers" / str(number) for number in range(1, ensemble.teachers + 1)]
    for number, folder in enumerate(folders):
        monitor.remark(f"teacher {number + 1} of {ensemble.teachers}: {config.loss.name}, seed {config.seed + number}")
        _finished(replace(config, seed=config.seed + number), folder, data, monitor, world)
    student = student_config(config, folders, ensemble)
    monitor.remark(f"the student: {student.loss.name}, {student.epochs} epochs, no labels")
    _finished(student, out, data, monitor, world)
    found: dict[str, Any] = world.by_first(lambda: _compared(student, folders, out, data.data))
    return found


def _start(config: RunConfig, out: Path, ensemble: Ensemble) -> None:
    folder = RunFolder(out)
    if is_ensemble(out):
        raise FileExistsError(f"{out} already holds an ensemble: resume it, or choose another folder")
    folder.start()
    write_config(out / "teachers.yaml", config, sealed=True)
    write_manifest(out / "ensemble.json", asdict(ensemble), ENSEMBLE)


def _finished(config: RunConfig, folder: Path, data: PreparedData, monitor: Monitor, world: World) -> None:
    """Train until there are results; a run that has some is left alone."""
    files = RunFolder(folder)
    is_done, is_started = world.by_first(lambda: [files.results.is_file(), files.config.is_file()])
    if not is_done:
        run(config, folder, data=data, resume=is_started, monitor=monitor, world=world)


def _compared(student: RunConfig, folders: Sequence[Path], out: Path, data: RetrievalData) -> dict[str, Any]:
    """Scores of all models on the test images, also written to comparison.json; none where nothing was held out."""
    if data.protocol == "none":
        return {}
    points, items = [], []
    scores: dict[str, dict[str, float]] = {}
    for number, folder in enumerate(folders, start=1):
        queries, gallery = _embedded(folder, data, student)
        points.append(queries)
        items.append(gallery)
        scores[f"teacher {number}"] = _scores(queries, gallery, data)
    gallery = None if items[0] is None else combined([each for each in items if each is not None])
    scores["teachers side by side"] = _scores(combined(points), gallery, data)
    scores["student"] = _scores(*_embedded(out, data, student), data)
    write_atomically(out / "comparison.json", (json.dumps(scores, indent=1) + "\n").encode())
    return scores


def _embedded(folder: Path, data: RetrievalData, config: RunConfig) -> tuple[Tensor, Tensor | None]:
    embedder = load_embedder(folder).to(resolve_device(config.device))
    mixed = precision(config.autocast)

    def points(images: ImageSet) -> Tensor:
        return embed(embedder, images, autocast=mixed)

    return points(data.test), None if data.gallery is None else points(data.gallery)


def _scores(queries: Tensor, gallery: Tensor | None, data: RetrievalData) -> dict[str, float]:
    gallery_labels = None if data.gallery is None else data.gallery.labels
    metrics = retrieval_metrics(
        queries, data.test.labels, gallery=gallery, gallery_labels=gallery_labels, recall_at=data.recall_at
    )
    return metrics.as_dict()
