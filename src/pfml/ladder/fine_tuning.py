"""The last rung: the whole model trained at low rates from the best head, by the loop of any run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pfml.data import Augmentation, ImageSet, RetrievalData
from pfml.methods import LossConfig
from pfml.models import Embedder
from pfml.runs.config import BatchConfig, OptimizerConfig, RunConfig, ScheduleConfig, TrainConfig
from pfml.runs.folder import RunFolder
from pfml.sphere import unit
from pfml.training import train
from pfml.training.environment import resolve_device
from pfml.training.progress import Monitor

__all__ = ["FineTuning", "fine_tuning_config"]

#: Device -> steps, and classes in a batch at most. The same images get the same plan, however fast the machine is.
STEPS = {"cpu": 150, "cuda": 400}
MOST_CLASSES = {"cpu": 8, "cuda": 25}
PER_CLASS = 4
#: Learning rates of backbone and head, and of the proxies.
LR, PROXY_LR = 3e-5, 0.01


def fine_tuning_config(labels: Tensor, loss: LossConfig, config: RunConfig, *, steps: int | None = None) -> TrainConfig:
    """How to fine-tune on images with these labels: low rates, frozen BatchNorm statistics, averaged weights.

    Args:
        labels: (N,) int64.
        loss: What to minimize.
        config: The run of the ladder, for seed, device and precision.
        steps: Another number of steps than usual for the device.
    """
    device = resolve_device(config.device).type
    classes = min(len(labels.unique()), MOST_CLASSES[device])
    each = min(PER_CLASS, max(len(labels) // classes, 1))
    steps = STEPS[device] if steps is None else steps
    return TrainConfig(
        epochs=1,
        warm_up_epochs=0,
        batch_norm="freeze-statistics",
        loss=loss,
        batch=BatchConfig(classes * each, each, per_epoch=steps),
        optimizer=OptimizerConfig("adamw", lr=LR, proxy_lr=PROXY_LR, weight_decay=1e-4),
        schedule=ScheduleConfig("cosine"),
        augmentation=Augmentation(scale=(0.4, 1.0)),
        average=0.98,
        checkpoint_every=50,
        seed=config.seed,
        device=config.device,
        autocast=config.autocast,
        compile=False,
    )


@dataclass(frozen=True, eq=False)
class FineTuning:
    """Fine-tunes embedders on parts of the training images; each training is a run, which resumes if it is there.

    Args:
        config: The run of the ladder.
        images: Its training images.
        folder: Where the runs are kept.
        loss_for: The loss for embeddings (N, D) with labels (N,) as they are at the start.
        monitor: Shows the progress.
        scale: Steps relative to the usual number.
    """

    config: RunConfig
    images: ImageSet
    folder: Path
    loss_for: Callable[[Tensor, Tensor], LossConfig]
    monitor: Monitor
    scale: float = 1.0

    def __call__(self, positions: Tensor, name: str, embedder: Embedder, embeddings: Tensor) -> Embedder:
        """`embedder` after training on the images at `positions`, whose embeddings these are."""
        some = self.images.subset(positions)
        some = some.of_classes(some.labels.unique().tolist())
        loss = self.loss_for(unit(embeddings), some.labels)
        steps = None
        if self.scale != 1.0:
            steps = round(STEPS[resolve_device(self.config.device).type] * self.scale)
        config = fine_tuning_config(some.labels, loss, self.config, steps=steps)
        out = RunFolder(self.folder / name.replace(" ", "-"))
        self.monitor.remark(f"fine-tuning on {name}: {len(some):,} images of {some.num_classes:,} classes")
        data = RetrievalData("fine-tuning", some, some.of_classes([]), protocol="none")
        with torch.enable_grad():
            train(
                data,
                embedder,
                config,
                out=out.path,
                resume=out.config.is_file(),
                storage=self.config.storage,
                monitor=_Steps(self.monitor),
            )
        embedder.trained_on = None
        return embedder.eval()


class _Steps(Monitor):
    """The steps of a training, without its remarks and evaluations, which would repeat for every part."""

    def __init__(self, shown: Monitor) -> None:
        self.track, self.start, self.step, self.stop = shown.track, shown.start, shown.step, shown.stop  # type: ignore[method-assign]
