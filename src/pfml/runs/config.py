"""What a training run is made of. Defaults follow the paper's supplement (CUB, ResNet-50) where it speaks."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, Self

from pfml.data import LabelNoise
from pfml.data.datasets import DATASETS
from pfml.data.image_set import PROTOCOLS, Protocol
from pfml.data.own_images import UNREADABLE, is_own
from pfml.data.preprocessing import Augmentation
from pfml.data.splits import VALIDATION_SPLITS
from pfml.evaluation.metrics import METRICS
from pfml.methods import METHODS, LossConfig
from pfml.models import EmbedderConfig
from pfml.models.head_init import HEAD_STARTS
from pfml.runs.trackers import check_trackers
from pfml.typos import did_you_mean

__all__ = [
    "OPTIMIZER_OPTIONS",
    "BatchConfig",
    "DataConfig",
    "OptimizerConfig",
    "RunConfig",
    "ScheduleConfig",
    "StorageConfig",
    "TrainConfig",
]

#: Optimizer -> the options that only some of them have.
OPTIMIZER_OPTIONS: dict[str, tuple[str, ...]] = {
    "adam": ("eps",),
    "adamw": ("eps",),
    "sgd": ("momentum", "nesterov"),
    "rmsprop": ("eps", "momentum", "smoothing", "centered"),
}


#: What validation may choose an epoch by: all metrics that every evaluation computes.
SELECTABLE = tuple(
    key.format(k=1) for key, metric in METRICS.items() if metric.compute is not None and not metric.is_optional
)
SelectBy = Literal[SELECTABLE]  # type: ignore[valid-type]  # read from the table, so that a new metric is one row


@dataclass(frozen=True)
class BatchConfig:
    """How batches are drawn.

    Args:
        size: Images per batch.
        samples_per_class: K of P x K sampling, P = size / K; 0 draws images at random. The paper is silent; without
            positives in the batch only proxies attract, so the default is 4.
        per_epoch: Batches in an epoch, for recipes that count steps; None for as many as the training images fill.
        mini_batch_size: Images that pass through the network at a time, where a batch takes more memory than there is:
            the loss sees the whole batch all the same (gradient caching), for a second pass. None for the whole batch.
        neighbors: Classes that come with each anchor class of a batch, the nearest to it before the epoch, with a loss
            that says which they are (htl); 0 draws all classes at random.
    """

    size: int = 100
    samples_per_class: int = 4
    per_epoch: int | None = None
    mini_batch_size: int | None = None
    neighbors: int = 0

    def __post_init__(self) -> None:
        if self.mini_batch_size is not None and self.mini_batch_size < 1:
            raise ValueError(f"batch.mini_batch_size must be >= 1, or null for all, got {self.mini_batch_size}")
        if self.per_epoch is not None and self.per_epoch < 1:
            raise ValueError(f"batch.per_epoch must be >= 1, or null for all images once, got {self.per_epoch}")
        if self.size < 1 or self.samples_per_class < 0:
            raise ValueError(
                f"batch.size must be >= 1 and batch.samples_per_class >= 0, "
                f"got {self.size} and {self.samples_per_class}"
            )
        if self.samples_per_class and self.size % self.samples_per_class:
            raise ValueError(
                f"batch.size must be a multiple of batch.samples_per_class, "
                f"got {self.size} and {self.samples_per_class}"
            )
        group = self.samples_per_class * (self.neighbors + 1)
        if self.neighbors < 0 or (self.neighbors and (group == 0 or self.size % group)):
            raise ValueError(
                f"batch.neighbors must be >= 0, and batch.size a multiple of batch.samples_per_class * "
                f"(batch.neighbors + 1), got {self.neighbors}, {self.size} and {self.samples_per_class}"
            )


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer and learning rates.

    Args:
        name: Adam couples weight decay to the step, AdamW does not; SGD; RMSprop.
        lr: Of the backbone. The paper's text says 5e-4, its table 1e-4.
        head_lr: Of the embedding layer; None for `lr`.
        proxy_lr: Of proxies and whatever else the loss learns; None for 100 times `lr`.
        weight_decay: Of backbone and head.
        proxy_weight_decay: Of the loss's parameters; at rest a field exerts no force, and decay alone would move them.
        eps: Added to the root of the second moment (Adam, AdamW, RMSprop).
        momentum: Share of the last step that is repeated (SGD, RMSprop).
        nesterov: Whether the gradient counts before the momentum has passed it (SGD).
        smoothing: Share of the old mean of squares in the new one (RMSprop); other libraries call it alpha or rho.
        centered: Whether the mean of the gradient is taken off its second moment (RMSprop).
        clip_value: Largest gradient component, None for no bound (Proxy Anchor's code: 10).
        clip_norm: Largest gradient norm over all parameters, None for no bound.
        layer_decay: Factor of the backbone's learning rate from each layer to the one before it, so that early layers
            move less; the last one has `lr` times this. 0.75 is usual for vision transformers, 1 has one rate for all.
    """

    name: Literal["adam", "adamw", "sgd", "rmsprop"] = "adam"
    lr: float = 1e-4
    head_lr: float | None = None
    proxy_lr: float | None = None
    weight_decay: float = 5e-4
    proxy_weight_decay: float = 0.0
    eps: float = 1e-8
    momentum: float = 0.0
    nesterov: bool = False
    smoothing: float = 0.99
    centered: bool = False
    clip_value: float | None = None
    clip_norm: float | None = None
    layer_decay: float = 1.0

    def __post_init__(self) -> None:
        for name in ("lr", "head_lr", "proxy_lr", "clip_value", "clip_norm", "eps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"optimizer.{name} must be positive, got {value}")
        for name in ("weight_decay", "proxy_weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"optimizer.{name} must not be negative, got {getattr(self, name)}")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"optimizer.layer_decay must lie in (0, 1], got {self.layer_decay}")
        for name in ("momentum", "smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} must lie in [0, 1), got {getattr(self, name)}")
        if self.name not in OPTIMIZER_OPTIONS:
            known = ", ".join(OPTIMIZER_OPTIONS)
            hint = did_you_mean(self.name, OPTIMIZER_OPTIONS)
            raise ValueError(f"optimizer.name must be one of {known}, got {self.name!r}{hint}")
        for one in fields(self):
            owners = [name for name, options in OPTIMIZER_OPTIONS.items() if one.name in options]
            if owners and self.name not in owners and getattr(self, one.name) != one.default:
                raise ValueError(
                    f"optimizer.{one.name} is an option of {', '.join(owners)} and must be left out for {self.name}, "
                    f"got {getattr(self, one.name)}"
                )
        if self.nesterov and not self.momentum:
            raise ValueError("optimizer.nesterov needs a positive optimizer.momentum, got 0")


@dataclass(frozen=True)
class ScheduleConfig:
    """How learning rates change, all groups alike.

    Args:
        name: "constant"; "step": times `factor` every `every` epochs; "milestones": times `factor` after each of
            `milestones`; "cosine": to zero at the end; "one-cycle": up from 1/25 over the first 30 % of the steps, then
            down to zero, both along a cosine.
        every: Epochs between steps.
        factor: Of a step.
        milestones: Epochs after which "milestones" lowers the rates, counted from the start of the run, warm-up
            included: 19 and 39 train 19 epochs at the full rate.
    """

    name: Literal["constant", "step", "milestones", "cosine", "one-cycle"] = "constant"
    every: int = 10
    factor: float = 0.5
    milestones: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.every < 1 or not 0 < self.factor <= 1:
            raise ValueError(
                f"schedule.every must be >= 1 and schedule.factor in (0, 1], got {self.every} and {self.factor}"
            )
        object.__setattr__(self, "milestones", tuple(self.milestones))  # YAML and JSON give lists
        if (self.name == "milestones") != bool(self.milestones):
            raise ValueError(
                f"schedule.milestones are epochs of schedule.name milestones, which needs some: "
                f"got {list(self.milestones)} with {self.name}"
            )
        if any(epoch < 1 for epoch in self.milestones) or sorted(set(self.milestones)) != list(self.milestones):
            raise ValueError(f"schedule.milestones must be rising epochs >= 1, got {list(self.milestones)}")


@dataclass(frozen=True)
class TrainConfig:
    """Everything about training but the data and the model.

    Args:
        epochs: Passes over the training images.
        warm_up_epochs: First epochs in which only the embedding layer and the proxies train, at full rate.
        warm_up_after: Epochs of the whole model before the warm-up; ProxyGML's code warms up in its second epoch.
        freeze: "trunk" trains the embedding layer and the loss alone. Features of the backbone are computed once, of
            test crops, whatever `augmentation` says: epochs take seconds. "none" trains the backbone too.
        lora: Rank of adapters (LoRA) beside the linear layers of a vision transformer, which train in place of the
            backbone itself; what is saved has them added. 0 for none. Needs the package peft.
        head_start: Where the embedding layer starts: "random" (He's normal distribution, as in Proxy Anchor's code);
            "uniform" (torch's own of a linear layer); "orthogonal" (rows of length 1 at right angles, as in HIER's
            code); or from the features of the training images, "principal" or "whitened", for a backbone with
            pretrained weights.
        batch_norm: "train"; "freeze-statistics" (the affine part trains); "freeze" (Proxy Anchor's sense: statistics
            frozen, the affine part trained once a warm-up has ended); "freeze-all" (the affine part too, throughout).
        average: Share of the old mean in the running mean of the model's weights after each step, which is what is
            evaluated and saved; 0.99 averages about the last hundred steps, 0 keeps no mean. It starts when the warm-up
            ends, and reaches over half of the steps at most; what the loss learns is not averaged.
        teachers: Folders of runs whose embedders teach a student by its crops, in place of labels; for the losses that
            compare with teachers (`pfml methods`: relaxed-contrastive, ...) and no others.
        teacher_dims: Dimensions that all teachers together are reduced to, the principal ones of the training images.
            "auto" takes half of what one teacher has, at most twice what the student has, and keeps all of a single
            teacher; None always keeps all.
        evaluate_every: Epochs between evaluations on the unseen classes; the last epoch is always evaluated.
        test_image_size: Side of the crops that the model sees once it is trained, in evaluations too; None for that of
            training. Larger ones find more as a rule (9/7 of it: +2.7 R@1 on CUB), and take longer.
        select_by: What validation chooses the epoch by; MLRC uses map_at_r.
        checkpoint_every: Steps between checkpoints within an epoch; 0 saves after each epoch only.
        seed: Of everything that is random.
        device: "auto" takes the GPU if there is one.
        autocast: Precision of the backbone; the loss always computes in float32 at least.
        compile: Whether torch.compile compiles the model; "auto" does on a GPU, in runs of 5,000 steps or more that
            need not be deterministic, since it takes half a minute or so first.
        deterministic: Only operations that give the same bits each time, also on a GPU; slower.
        log_every: Steps between lines of the log.
        trackers: Where the numbers of the log go too: tensorboard (if it is installed), wandb, mlflow, trackio.
    """

    epochs: int = 200
    warm_up_epochs: int = 1
    warm_up_after: int = 0
    freeze: Literal["none", "trunk"] = "none"
    lora: int = 0
    head_start: Literal["random", "uniform", "orthogonal", "principal", "whitened"] = "random"
    batch_norm: Literal["train", "freeze-statistics", "freeze", "freeze-all"] = "freeze"
    loss: LossConfig = field(default_factory=LossConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    augmentation: Augmentation = field(default_factory=Augmentation)
    average: float = 0.0
    teachers: tuple[str, ...] = ()
    teacher_dims: int | Literal["auto"] | None = "auto"
    evaluate_every: int = 1
    test_image_size: int | None = None
    select_by: SelectBy = "recall_at_1"
    checkpoint_every: int = 0
    seed: int = 0
    device: str = "auto"
    autocast: Literal["none", "bfloat16", "float16"] = "none"
    compile: bool | Literal["auto"] = "auto"
    deterministic: bool = False
    log_every: int = 10
    trackers: tuple[str, ...] = ("tensorboard",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "trackers", tuple(self.trackers))  # YAML and JSON give lists
        check_trackers(self.trackers)
        for name, least in (
            ("epochs", 1),
            ("warm_up_epochs", 0),
            ("warm_up_after", 0),
            ("evaluate_every", 1),
            ("checkpoint_every", 0),
            ("lora", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if self.freeze not in ("none", "trunk"):
            raise ValueError(f"freeze must be none or trunk, got {self.freeze!r}")
        if self.freeze == "trunk" and self.augmentation.transforms_crops:
            raise ValueError("freeze trunk computes features once: leave out the augmentation of crops")
        dims = self.teacher_dims
        if not (dims is None or dims == "auto" or (type(dims) is int and dims >= 1)):
            raise ValueError(f"teacher_dims must be auto, null, or >= 1, got {dims}")
        if self.test_image_size is not None and self.test_image_size < 1:
            raise ValueError(f"test_image_size must be >= 1 or null, got {self.test_image_size}")
        if self.freeze == "trunk" and self.test_image_size is not None:
            raise ValueError("freeze trunk trains on crops as tests have them: set model.image_size for both")
        if self.freeze == "trunk" and self.lora:
            raise ValueError("lora trains adapters in the backbone, and freeze trunk leaves it as it is: choose one")
        if self.freeze == "trunk" and self.teachers:
            raise ValueError("freeze trunk has no crops that teachers could see: leave out teachers")
        if self.warm_up_after and not self.warm_up_epochs:
            raise ValueError(f"warm_up_after needs warm_up_epochs of at least 1, got {self.warm_up_after} and 0")
        if self.log_every < 1:
            raise ValueError(f"log_every must be >= 1, got {self.log_every}")
        if not 0 <= self.average < 1:
            raise ValueError(f"average must lie in [0, 1), got {self.average}")
        if self.head_start not in HEAD_STARTS:
            hint = did_you_mean(self.head_start, HEAD_STARTS)
            raise ValueError(f"head_start must be one of {', '.join(HEAD_STARTS)}, got {self.head_start!r}{hint}")
        if self.select_by not in SELECTABLE:
            hint = did_you_mean(self.select_by, SELECTABLE)
            raise ValueError(f"select_by must be one of {', '.join(SELECTABLE)}, got {self.select_by!r}{hint}")
        self._check_teachers()
        if not isinstance(self.compile, bool) and self.compile != "auto":
            raise ValueError(f"compile must be true, false or auto, got {self.compile!r}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in [0, 2^63), got {self.seed}")

    def _check_teachers(self) -> None:
        name, students = self.loss.name, [name for name, method in METHODS.items() if method.from_teachers]
        if name in students and not self.teachers:
            raise ValueError(f"{name} follows teachers: give the runs that teach, --teachers RUN RUN ...")
        if self.teachers and name not in students:
            raise ValueError(f"a student of teachers needs loss.name {' or '.join(students)}, got {name!r}")

    def is_warm_up(self, epoch: int) -> bool:
        """Whether only the embedding layer and the loss train in this epoch, counted from 0."""
        return self.warm_up_after <= epoch < self.warm_up_after + self.warm_up_epochs

    @property
    def settled_from(self) -> int:
        """The epoch, counted from 0, from which the whole model trains to the end."""
        return self.warm_up_after + self.warm_up_epochs


@dataclass(frozen=True)
class DataConfig:
    """Which images.

    Args:
        name: A published set (glyphs, cub, cars, sop, ...), or the path of a folder of class folders or of a CSV.
        root: The data set's folder (or CSV file); glyphs needs none.
        validation: Classes taken out of the training classes: none, half (as ProxyNCA++), fold-0 to fold-3 (MLRC).
        noise: Training labels to change on purpose.
        corrections: A list of training labels to put right, after any noise, as `pfml audit --apply` writes it.
        split: What of one's own images is held out of training: classes, half of them, as unseen classes; images, a
            fifth of every class, for classes that stay; none. Folders train and test, or the column split of a CSV,
            keep their own division. Published data sets have classes.
        split_seed: Of that division; null for the first half of the sorted classes, as runs had that are older.
        added: Folders or CSV files of images that came later, as `pfml train --from` adds them: images of known classes
            join them, new classes are divided among themselves, and the rest of the division stays.
        unreadable: Files that cannot be read: skip (left out, counted and named), refuse (the run stops and lists
            them), or auto: skip those of a folder or CSV of one's own, refuse those of a published data set.
    """

    name: str = "glyphs"
    root: Path | None = None
    validation: str = "none"
    noise: LabelNoise = field(default_factory=LabelNoise)
    corrections: Path | None = None
    split: Protocol = "classes"
    split_seed: int | None = 0
    added: tuple[str, ...] = ()
    unreadable: Literal["auto", "skip", "refuse"] = "auto"

    def __post_init__(self) -> None:
        if self.validation not in VALIDATION_SPLITS:
            known = ", ".join(VALIDATION_SPLITS)
            raise ValueError(f"data.validation must be one of {known}, got {self.validation!r}")
        if self.split not in PROTOCOLS:
            hint = did_you_mean(self.split, PROTOCOLS)
            raise ValueError(f"data.split must be one of {', '.join(PROTOCOLS)}, got {self.split!r}{hint}")
        if self.split_seed is not None and not 0 <= self.split_seed < 2**63:
            raise ValueError(f"data.split_seed must lie in [0, 2^63), got {self.split_seed}")
        if self.split != "classes" and self.validation != "none":
            raise ValueError(
                f"data.validation sets classes apart, and data.split {self.split} trains on all of them: "
                f"leave data.validation none, got {self.validation!r}"
            )
        object.__setattr__(self, "added", tuple(self.added))  # YAML and JSON give lists
        for path in (self.name, str(self.root), *self.added):
            if any("\ud800" <= letter <= "\udfff" for letter in path):  # how Python reads bytes that are not UTF-8
                shown = os.fsencode(path).decode("utf-8", "backslashreplace")
                raise ValueError(f"a run stores the path of its images as UTF-8: rename {shown}, or link to it")
        if self.added and not is_own(self.name):
            raise ValueError(f"images are added to a folder or CSV of one's own (data.added), got {self.name!r}")
        if self.unreadable not in UNREADABLE:
            raise ValueError(f"data.unreadable must be one of {', '.join(UNREADABLE)}, got {self.unreadable!r}")


@dataclass(frozen=True)
class StorageConfig:
    """Where images wait for their turn.

    Args:
        storage: Decoded on the device or in memory, or read from files by workers; auto takes the first that fits.
        budget_gib: Memory that decoded images may take.
        workers: Processes that read files.
        short_side: Shrink larger images to this short side when decoding, to save memory; None keeps them exact.
        cache: Folder that keeps decoded images for the next run.
    """

    storage: Literal["auto", "device", "memory", "files"] = "auto"
    budget_gib: float = 8.0
    workers: int = 2
    short_side: int | None = None
    cache: Path | None = None

    def __post_init__(self) -> None:
        if not self.budget_gib >= 0:
            raise ValueError(f"storage.budget_gib must not be negative, got {self.budget_gib}")
        if self.workers < 0:
            raise ValueError(f"storage.workers must not be negative, got {self.workers}")
        if self.short_side is not None and self.short_side < 1:
            raise ValueError(f"storage.short_side must be at least 1, got {self.short_side}")


#: How far up the ladder of `pfml.ladder` a run goes.
EFFORTS = ("seconds", "minutes", "hours")


@dataclass(frozen=True)
class RunConfig(TrainConfig):
    """A whole run: data, model and training.

    Args:
        effort: Work up the ladder in place of one training: "seconds" tries heads in closed form on the features of the
            pretrained backbone, "minutes" also tries larger images and trains a head, "hours" also fine-tunes the
            backbone; what validation proves to be better is kept, else the backbone itself. None trains as the other
            options say.
        start: Folder of a run whose model training starts with, and whose proxies its classes keep, as `pfml train
            --from` sets it; None for the weights of the backbone. It is needed until the first checkpoint.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: EmbedderConfig = field(default_factory=EmbedderConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    effort: Literal["seconds", "minutes", "hours"] | None = None
    start: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.effort not in (None, *EFFORTS):
            raise ValueError(f"effort must be one of {', '.join(EFFORTS)}, or null, got {self.effort!r}")

    def resolved(self) -> Self:
        """The configuration as a run stores it.

        Its paths are absolute, since a run may be resumed from another working directory. Where the method trains
        nothing, the backbone's features are the embedding: there is no embedding layer.
        """
        data, name = self.data, self.data.name
        if name and name not in DATASETS and Path(name).expanduser().exists():
            name = str(Path(name).expanduser().absolute())
        root, corrections, noise_file = (
            None if path is None else path.expanduser().absolute()
            for path in (data.root, data.corrections, data.noise.file)
        )
        added = tuple(str(Path(each).expanduser().absolute()) for each in data.added)
        data = replace(data, name=name, root=root, corrections=corrections, noise=replace(data.noise, file=noise_file))
        data = replace(data, added=added)
        start = None if self.start is None else self.start.expanduser().absolute()
        teachers = tuple(str(Path(each).expanduser().absolute()) for each in self.teachers)
        has_head = self.loss.trains or self.effort is not None
        model = self.model if has_head else replace(self.model, embedding_dim=None, relations=1)
        return replace(self, data=data, model=model, teachers=teachers, start=start)
