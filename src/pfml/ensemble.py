"""An ensemble: several teachers and the student that replaces them, in one folder.

judge/               if labels are corrected: a small ensemble, whose student says which of them are noise
teachers/1, 2, ...   runs on labels; those of one configuration have seeds of their own
.                    the run of the student, which is what the folder's model is
ensemble.json        what the ensemble consists of
teachers.yaml        how teachers are trained; teachers-2.yaml, ...: those of other configurations
comparison.json      at the end: each teacher, all of them side by side, and the student

An interrupted ensemble resumes: finished runs are kept, a started one resumes from its checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfml.audit import audit
from pfml.data import ImageSet, RetrievalData
from pfml.data.corrections import Corrections
from pfml.data.image_source import ImageSource
from pfml.distributed import World
from pfml.evaluation import embed, retrieval_metrics
from pfml.losses.distillation import combined
from pfml.methods import LossConfig, create_loss
from pfml.models import load_embedder
from pfml.models.backbone_table import default_weights, refuse_unknown
from pfml.own_code import is_reference
from pfml.runs.config import OptimizerConfig, RunConfig, ScheduleConfig
from pfml.runs.config_files import (
    create_config,
    plain,
    read_changes,
    read_config,
    shipped_config,
    shipped_configs,
    write_config,
)
from pfml.runs.data import PreparedData, prepare_data
from pfml.runs.folder import RunFolder
from pfml.runs.layers import with_changes
from pfml.storage.files import DamagedFileError, write_atomically
from pfml.storage.manifest import Format, read_manifest, write_manifest
from pfml.terminal import shell_words
from pfml.training.environment import precision, resolve_device
from pfml.training.progress import Monitor
from pfml.training.runner import create_run_embedder, run
from pfml.training.setup import create_batches, open_sources, prepare_backbone, require_loss_packages
from pfml.training.teachers import require_fewer
from pfml.typos import did_you_mean

__all__ = [
    "Ensemble",
    "TeacherGroup",
    "is_ensemble",
    "other_config",
    "read_ensemble",
    "run_ensemble",
    "student_config",
]

#: A student trains this many times as long as a teacher, at this multiple of its learning rate: chosen on validation
#: classes of CUB (docs/STUDENTS.md).
LONGER, FASTER = 4, 2.0
#: The judge of labels is a student of so many teachers, trained for this fraction of the student's epochs. It need not
#: be accurate, only must not have memorized labels (docs/STUDENTS.md).
JUDGE_TEACHERS, JUDGE_TIME = 2, 0.4
#: A judge that lists a larger fraction of the labels corrects none: one that tells no classes apart lists most of them.
MOST_CORRECTED = 0.6
#: Fields of the run's configuration that all teachers share.
SHARED = ("data", "storage", "device", "deterministic", "seed", "trackers")
#: Fields that only the student sets, as teachers have them: they see the student's crops, and have no teachers.
OF_STUDENT: dict[str, Any] = {"test_image_size": None, "teacher_dims": None}
#: The format of ensemble.json.
ENSEMBLE = Format("ensemble", 1, "train it again")


@dataclass(frozen=True)
class TeacherGroup:
    """Teachers of one configuration.

    Args:
        config: How they are trained, as `other_config` makes it; data, storage, device, seeds and trackers are those
            of the run.
        teachers: How many, with the seed of the run and those after it.
    """

    config: RunConfig
    teachers: int = 1

    def __post_init__(self) -> None:
        if self.teachers < 1:
            kind = _kind(self.config)
            raise ValueError(f"teachers of another configuration ({kind}) must be at least one, got {self.teachers}")


@dataclass(frozen=True)
class Ensemble:
    """What an ensemble consists of.

    Args:
        teachers: How many of the run's configuration, with its seed and those after it.
        student_epochs: How long the student trains; None for four times as long as a teacher.
        student_loss: A loss that compares with teachers.
        student_options: Keyword arguments of that loss, such as {"sigma": 1.3}.
        others: Further teachers, of other configurations.
        correct_labels: Whether teachers train on corrected labels: two teachers and a student of them train first, and
            the images that an audit by that student lists as mislabeled get the class that it suggests.

    Example:
        >>> config = RunConfig()
        >>> lite = other_config(config, "efficientnet_lite0")
        >>> Ensemble(4, others=(TeacherGroup(lite, 2),)).size
        6
    """

    teachers: int = 4
    student_epochs: int | None = None
    student_loss: str = "relaxed-contrastive"
    student_options: dict[str, Any] = field(default_factory=dict)
    others: tuple[TeacherGroup, ...] = ()
    correct_labels: bool = False

    def __post_init__(self) -> None:
        if self.teachers < 1:
            raise ValueError(f"an ensemble needs at least one teacher, got {self.teachers}")
        if self.student_epochs is not None and self.student_epochs < 1:
            raise ValueError(f"student_epochs must be >= 1, got {self.student_epochs}")
        if not isinstance(self.correct_labels, bool):
            raise ValueError(f"correct_labels must be true or false, got {self.correct_labels!r}")
        if not isinstance(self.student_options, dict):
            raise ValueError(f"student_options must be names and values, got {self.student_options!r}")
        LossConfig(self.student_loss, self.student_options)  # which refuses unknown names

    @property
    def size(self) -> int:
        """How many teachers there are in all."""
        return self.teachers + sum(group.teachers for group in self.others)

    def judge(self, epochs: int) -> Ensemble:
        """The ensemble that judges labels, where a student of this one trains for so many epochs."""
        return Ensemble(JUDGE_TEACHERS, max(1, round(JUDGE_TIME * epochs)), self.student_loss, self.student_options)


def other_config(config: RunConfig, name: str) -> RunConfig:
    """The configuration of further teachers, by the NAME that `--ensemble N NAME=N` gives them.

    Args:
        config: Of the run.
        name: A backbone: `config` with it, and with the weights and image size that are usual for it. A file that ends
            in .yaml or .yml: `config` with the changes in it. A configuration of the package: that one alone.
    """
    from jsonargparse import ArgumentError

    shipped = shipped_configs()
    if Path(name).suffix in (".yaml", ".yml"):
        try:
            return _changed(config, read_changes(Path(name)))
        except (ArgumentError, TypeError) as error:
            raise ValueError(f"{name} must be a configuration, or a part of one: {error}") from None
    if name not in shipped:
        try:
            if not is_reference(name):
                refuse_unknown(name)
        except ValueError as error:
            kinds = "a file that ends in .yaml, a configuration of the package, or a backbone"
            raise ValueError(f"further teachers need {kinds}: {error}{did_you_mean(name, shipped)}") from None
        return _changed(config, {"model": {"backbone": name}})
    found = shipped_config(name)
    if found.model.backbone == config.model.backbone and found.model.weights == "default":
        return replace(found, model=replace(found.model, weights=config.model.weights))  # which may be a file
    return found


def _changed(config: RunConfig, changes: dict[str, Any]) -> RunConfig:
    """`config` with changes; another backbone has the weights and the size of images that are usual for it."""
    content, model = plain(config), config.model
    if changes.get("model", {}).get("backbone", model.backbone) != model.backbone:
        is_from_scratch = model.weights == "none" != default_weights(model.backbone)
        usual = {"weights": "none" if is_from_scratch else "default", "image_size": None, "resize": None}
        content["model"] |= usual
    return create_config(with_changes(content, changes))


def student_config(config: RunConfig, teachers: Sequence[Path], ensemble: Ensemble) -> RunConfig:
    """The configuration of the student of these teachers, which `config` has trained."""
    optimizer: OptimizerConfig = config.optimizer
    head_lr = None if optimizer.head_lr is None else FASTER * optimizer.head_lr
    return replace(
        config,
        loss=LossConfig(ensemble.student_loss, ensemble.student_options),
        teachers=tuple(str(each) for each in teachers),
        epochs=ensemble.student_epochs or LONGER * config.epochs,
        optimizer=replace(optimizer, lr=FASTER * optimizer.lr, head_lr=head_lr),
        schedule=ScheduleConfig("cosine"),
    )


def is_ensemble(folder: Path) -> bool:
    """Whether the folder holds an ensemble, finished or not."""
    return RunFolder(folder).ensemble.is_file()


def read_ensemble(folder: Path) -> tuple[RunConfig, Ensemble]:
    """The configuration of the teachers of the ensemble in `folder`, and what the ensemble consists of."""
    file = RunFolder(folder).ensemble
    values = read_manifest(file, ENSEMBLE)
    try:
        counts = enumerate(values.pop("others", ()), start=2)
        others = tuple(TeacherGroup(read_config(_config_file(folder, number)), count) for number, count in counts)
        ensemble = Ensemble(**values, others=others)
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
    loaded: RetrievalData | None = None,
    sources: dict[str, ImageSource] | None = None,
    resume: bool = False,
    monitor: Monitor | None = None,
    world: World | None = None,
) -> dict[str, Any]:
    """Train teachers, and a student of them in the folder `out`; the scores of all of them on the test images.

    Args:
        config: How teachers train, but for `ensemble.others`. The student differs in what `student_config` changes.
        out: The folder, which must not hold a run yet.
        ensemble: What it consists of; four teachers if None.
        data: What `prepare_data(config.data)` returns, from a caller that has it already; None to load it here.
        loaded: What `load_checked` returned for the same images, so that they are not listed and checked again.
        sources: The images of `data`, from a caller that has opened them, or will need them; see `run`.
        resume: Resume what is in `out`; `config` and `ensemble` must be those of `read_ensemble`.
        monitor: What to show.
        world: The ranks that train together.
    """
    ensemble, world, out = ensemble or Ensemble(), world or World(), Path(out).absolute()
    monitor = (monitor or Monitor()) if world.is_first else Monitor()
    groups = _groups(config, ensemble)
    folders = [out / "teachers" / str(number) for number in range(1, ensemble.size + 1)]
    student = student_config(config, folders, ensemble)
    prepared = data or prepare_data(config.resolved().data, monitor.track, loaded=loaded)
    shared = _Shared(prepared, loaded, {} if sources is None else sources, monitor, world)
    if not resume:
        world.by_first(lambda: _start(out, groups, student, ensemble, prepared.data))
    if ensemble.correct_labels:
        corrected = _correct_labels(config, out, ensemble.judge(student.epochs), shared)
        config = replace(config, data=replace(config.data, corrections=corrected))
        shared = replace(shared, data=prepare_data(config.resolved().data, monitor.track, loaded=loaded))
        groups, student = _groups(config, ensemble), student_config(config, folders, ensemble)
    teachers = [
        replace(each.config, seed=config.seed + k, **OF_STUDENT) for each in groups for k in range(each.teachers)
    ]
    for number, (teacher, folder) in enumerate(zip(teachers, folders, strict=True), start=1):
        monitor.remark(f"teacher {number} of {ensemble.size}: {_kind(teacher)}, seed {teacher.seed}")
        _finish(teacher, folder, shared)
    monitor.remark(f"the student: {student.loss.name}, {student.epochs} epochs, no labels")
    _finish(student, out, shared)
    named = dict(zip(_titles(groups), folders, strict=True))
    found: dict[str, Any] = world.by_first(lambda: _compared(student, named, out, shared))
    return found


@dataclass(frozen=True)
class _Shared:
    """What all runs of an ensemble share: images are listed, checked and opened once. See `run_ensemble`."""

    data: PreparedData
    loaded: RetrievalData | None
    sources: dict[str, ImageSource]
    monitor: Monitor
    world: World


def _groups(config: RunConfig, ensemble: Ensemble) -> list[TeacherGroup]:
    """All groups of teachers, that of the run first; a configuration that occurs twice is refused."""
    shared = {name: getattr(config, name) for name in SHARED} | OF_STUDENT
    groups = [TeacherGroup(config, ensemble.teachers)]
    for group in ensemble.others:
        other = replace(group.config, **shared)
        if other in [replace(each.config, **OF_STUDENT) for each in groups]:
            again = f"got {group.teachers} more, which would be the same"
            raise ValueError(f"teachers of one configuration ({_kind(other)}) must be counted once, {again}")
        groups.append(TeacherGroup(other, group.teachers))
    return groups


def _kind(config: RunConfig) -> str:
    return f"{config.model.backbone}, {config.loss.name}"


def _titles(groups: Sequence[TeacherGroup]) -> list[str]:
    """The name of each teacher: its number, and what tells its configuration from the others."""
    kinds = [[each.config.model.backbone for each in groups], [each.config.loss.name for each in groups]]
    differing = [names for names in kinds if len(set(names)) > 1]
    if len(set(zip(*differing, strict=True))) < len(groups) > 1:
        differing.append([_config_file(Path(), number).name for number in range(1, len(groups) + 1)])
    notes = [", ".join(names[k] for names in differing) for k, each in enumerate(groups) for _ in range(each.teachers)]
    return [f"teacher {number}" + (f" ({note})" if note else "") for number, note in enumerate(notes, start=1)]


def _config_file(folder: Path, number: int) -> Path:
    """The file of the configuration of a group of teachers; groups are counted from 1."""
    return folder / ("teachers.yaml" if number == 1 else f"teachers-{number}.yaml")


def _start(
    out: Path, groups: Sequence[TeacherGroup], student: RunConfig, ensemble: Ensemble, data: RetrievalData
) -> None:
    """Start the folder with what the ensemble consists of; what would end it later is refused before."""
    folder = RunFolder(out)
    if is_ensemble(out):
        command = shell_words("pfml", "train", "--resume", str(out))
        raise FileExistsError(f"{out} already holds an ensemble: resume it ({command}), or choose another folder")
    for group in groups[1:]:
        _require_trainable(group.config, data.train)
    embedder = create_run_embedder(student)  # whose loss and size of images no teacher has
    prepare_backbone(embedder, student)
    create_loss(student.loss, data.train.num_classes, embedder.embedding_dim, embedder.head.num_features)
    if isinstance(student.teacher_dims, int):
        dims = [each.teachers * create_run_embedder(each.config).embedding_dim for each in groups]
        require_fewer(student.teacher_dims, sum(dims))
    folder.start()
    for number, group in enumerate(groups, start=1):
        write_config(_config_file(out, number), group.config, sealed=True)
    content = {name: getattr(ensemble, name) for name in ("teachers", "student_epochs", "student_loss")}
    if ensemble.student_options:
        content["student_options"] = ensemble.student_options
    if ensemble.others:
        content["others"] = [group.teachers for group in ensemble.others]
    if ensemble.correct_labels:
        content["correct_labels"] = True
    write_manifest(folder.ensemble, content, ENSEMBLE)


def _require_trainable(config: RunConfig, images: ImageSet) -> None:
    """Refuse what would end the ensemble hours later, when the teachers of other configurations have trained."""
    if config.effort is not None:
        raise ValueError(f"teachers ({_kind(config)}) train as the options say: leave out effort {config.effort}")
    require_loss_packages(config.loss)
    try:
        embedder = create_run_embedder(config)
        if config.loss.trains:
            prepare_backbone(embedder, config)
            create_batches(images, config)
    except (ValueError, OSError) as error:
        advice = "a file of --ensemble N FILE.yaml=N says what they need otherwise, as in model: {weights: ...}"
        raise ValueError(f"teachers ({_kind(config)}) cannot be trained so: {error}; {advice}") from error


def _correct_labels(config: RunConfig, out: Path, judge: Ensemble, shared: _Shared) -> Path:
    """The list of corrections by the audit of a judge, which is trained unless the list exists."""
    data, sources, monitor, world = shared.data, shared.sources, shared.monitor, shared.world
    folder = out / "judge"
    path = folder / "corrected-labels.csv"
    is_done, is_begun = world.by_first(lambda: [path.is_file(), is_ensemble(folder)])
    if not is_done:
        monitor.remark(f"the judge of labels: {judge.teachers} teachers and a student of them")
        judging = replace(config, test_image_size=None, teacher_dims="auto")
        run_ensemble(judging, folder, judge, data=data, sources=sources, resume=is_begun, monitor=monitor, world=world)
        if not sources:  # the judge was trained before this process
            sources |= open_sources(data.data, resolve_device(config.device), config.storage, monitor)
        world.by_first(lambda: _write_corrections(config, folder, path, shared))
    return path


def _write_corrections(config: RunConfig, folder: Path, path: Path, shared: _Shared) -> None:
    """Write the list `path`: the training labels that an audit by the model in `folder` corrects; no class is emptied.

    A judge that disagrees with too many of the labels corrects none.
    """
    images, monitor = shared.data.data.train, shared.monitor
    embedder = load_embedder(folder).to(resolve_device(config.device))
    points = embed(embedder, shared.sources["train"], autocast=precision(config.autocast), track=monitor.track)
    found, given = audit(points, images), images.labels
    listed, labels = found.listed(), given.clone()
    if len(listed) > MOST_CORRECTED * len(images):
        disagrees = f"the judge disagrees with {len(listed):,} of {len(images):,} labels"
        monitor.remark(f"{disagrees}, too many to believe it (train teachers longer): labels stay as they are")
        listed = listed[:0]
    labels[listed] = found.scores.suggested[listed]
    while emptied := _emptied(given, labels):
        labels = torch.where(torch.isin(given, torch.tensor(emptied)), given, labels)
    changed = (labels != given).nonzero()[:, 0].tolist()
    corrections = Corrections({index: int(labels[index]) for index in changed})
    monitor.remark(f"{len(corrections):,} of {len(images):,} labels are corrected: {path}")
    if config.data.corrections is not None:  # the list is about labels as they were before the run's own
        before = prepare_data(replace(config.resolved().data, corrections=None), loaded=shared.loaded).data.train
        corrections = Corrections.read(config.data.corrections, before).then(corrections, before)
        images = before
    corrections.write(path, images)


def _emptied(given: Tensor, labels: Tensor) -> list[int]:
    """Classes that `labels` have no image of, and `given` had."""
    return sorted(set(given.tolist()) - set(labels.tolist()))


def _finish(config: RunConfig, folder: Path, shared: _Shared) -> None:
    """Train until there are results; a finished run is left alone."""
    data, sources, monitor, world = shared.data, shared.sources, shared.monitor, shared.world
    files = RunFolder(folder)
    is_done, is_started = world.by_first(lambda: [files.results.is_file(), files.config.is_file()])
    if not is_done:
        run(config, folder, data=data, sources=sources, resume=is_started, monitor=monitor, world=world)


def _compared(student: RunConfig, teachers: Mapping[str, Path], out: Path, shared: _Shared) -> dict[str, Any]:
    """Scores of all models on the test images, also written to comparison.json; none where nothing was held out."""
    data = shared.data.data
    if data.protocol == "none":
        return {}
    whole = {"test": data.test} | ({} if data.gallery is None else {"gallery": data.gallery})
    images: Mapping[str, ImageSet | ImageSource] = shared.sources or whole  # a resumed ensemble may have opened none
    points, items = [], []
    scores: dict[str, dict[str, float]] = {}
    for title, folder in teachers.items():
        queries, gallery = _embedded(folder, images, student)
        points.append(queries)
        items.append(gallery)
        scores[title] = _scores(queries, gallery, data)
    gallery = None if items[0] is None else combined([each for each in items if each is not None])
    scores["teachers side by side"] = _scores(combined(points), gallery, data)
    scores["student"] = _scores(*_embedded(out, images, student), data)
    write_atomically(out / "comparison.json", (json.dumps(scores, indent=1) + "\n").encode())
    return scores


def _embedded(
    folder: Path, images: Mapping[str, ImageSet | ImageSource], config: RunConfig
) -> tuple[Tensor, Tensor | None]:
    embedder = load_embedder(folder).to(resolve_device(config.device))
    mixed = precision(config.autocast)

    def points(role: str) -> Tensor:
        return embed(embedder, images[role], autocast=mixed)

    return points("test"), points("gallery") if "gallery" in images else None


def _scores(queries: Tensor, gallery: Tensor | None, data: RetrievalData) -> dict[str, float]:
    gallery_labels = None if data.gallery is None else data.gallery.labels
    metrics = retrieval_metrics(
        queries, data.test.labels, gallery=gallery, gallery_labels=gallery_labels, recall_at=data.recall_at
    )
    return metrics.as_dict()
