"""Who takes turns in `benchmarks/training.py --beside`: the same training by pfml, and as one writes it without.

A contestant is a process of its own: what it does to its memory and threads is its own business. It is told to train
so many steps, and says how long it took.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from machine import OthersClock

__all__ = ["CONTESTANTS", "Comparison", "Times", "compare"]

CROP, DIMENSION, PER_CLASS = 224, 512, 4
LR, PROXY_LR, WEIGHT_DECAY = 1e-4, 1e-2, 1e-4

#: Trains the steps of the epoch of this number.
Epoch = Callable[[int], None]


@dataclass(frozen=True)
class Comparison:
    """What all contestants have in common.

    Args:
        paths: JPEG files, as many of each class, one class after the other.
        classes: How many.
        backbone: By the name that pfml has for it; a model of timm's.
        batch: Images of a step.
        steps: Steps of a turn.
        workers: That read images.
        threads: Of torch.
    """

    paths: tuple[Path, ...]
    classes: int
    backbone: str
    batch: int
    steps: int
    workers: int
    threads: int

    @property
    def labels(self) -> Tensor:
        """(N,) int64."""
        return torch.arange(len(self.paths)) * self.classes // len(self.paths)

    def batches(self, epoch: int) -> list[list[int]]:
        """The images of each step of an epoch, the same for all."""
        from pfml.data import BalancedBatches

        classes = self.batch // PER_CLASS
        sampler = BalancedBatches(self.labels, classes, PER_CLASS, 0, per_epoch=self.steps)
        return [indices.tolist() for indices in sampler.batches(epoch)]


@dataclass
class Times:
    """What the turns of a contestant took.

    Args:
        start: Seconds from its start to its first turn.
        wall: Seconds of each turn.
        processor: Processor seconds of each turn, of all its processes.
    """

    start: float = 0.0
    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def medians(self) -> tuple[float, float]:
        """Of a turn: seconds, processor seconds."""
        return statistics.median(self.wall), statistics.median(self.processor)


class Photos(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Image files as torchvision's users read them."""

    def __init__(self, comparison: Comparison) -> None:
        from torchvision import transforms

        self.paths, self.labels = comparison.paths, comparison.labels.tolist()
        mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        steps = [transforms.RandomResizedCrop(CROP), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
        self.transform = transforms.Compose([*steps, transforms.Normalize(mean, std)])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        with Image.open(self.paths[index]) as image:
            return self.transform(image.convert("RGB")), self.labels[index]


def _plain_model(comparison: Comparison) -> nn.Module:
    import timm

    from pfml.models.backbone_table import create_backbone

    name = create_backbone(comparison.backbone)[0].timm_name
    backbone: Any = timm.create_model(name, num_classes=0)
    return nn.Sequential(backbone, nn.Linear(backbone.num_features, DIMENSION))


def plain(comparison: Comparison) -> Epoch:
    """timm, a DataLoader and pytorch-metric-learning."""
    from pytorch_metric_learning.losses import ProxyAnchorLoss
    from torch.utils.data import DataLoader

    model, dataset = _plain_model(comparison), Photos(comparison)
    loss_function = ProxyAnchorLoss(comparison.classes, DIMENSION)
    optimizer = torch.optim.AdamW(
        [{"params": model.parameters()}, {"params": loss_function.parameters(), "lr": PROXY_LR}],
        lr=LR,
        weight_decay=WEIGHT_DECAY,
    )
    model.train()

    def epoch(number: int) -> None:
        loader = DataLoader(dataset, batch_sampler=comparison.batches(number), num_workers=comparison.workers)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = loss_function(model(images), labels)
            loss.backward()
            optimizer.step()
            loss.item()  # which everyone prints

    return epoch


def network_alone(comparison: Comparison) -> Epoch:
    """The network as pfml has it, forward and backward on one batch of random numbers, and nothing else."""
    from pfml.memory import keep_freed_memory

    keep_freed_memory()
    model = _plain_model(comparison).train().to(memory_format=torch.channels_last)
    images = torch.rand(comparison.batch, 3, CROP, CROP)

    def epoch(_: int) -> None:
        for _ in range(comparison.steps):
            model.zero_grad()
            model(images).square().mean().backward()

    return epoch


def by_pfml(comparison: Comparison, **changes: object) -> Epoch:
    """The loop of pfml in a process that keeps its memory, as `pfml train` has it; no evaluation, no checkpoint."""
    from pfml.data import ImageSet, RetrievalData, open_images
    from pfml.memory import keep_freed_memory
    from pfml.models import create_embedder
    from pfml.runs.config_files import write_config
    from pfml.runs.folder import RunFolder
    from pfml.training import BatchConfig, LossConfig, Monitor, OptimizerConfig, TrainConfig
    from training import EpochsOnly

    keep_freed_memory()
    names = tuple(f"class {k}" for k in range(comparison.classes))
    train = ImageSet(comparison.paths, comparison.labels, names)
    test = ImageSet(comparison.paths[:4], torch.arange(4) % 2, ("x", "y"))
    config = TrainConfig(
        epochs=1_000,
        warm_up_epochs=0,
        batch_norm="train",
        loss=LossConfig("proxy-anchor"),
        batch=BatchConfig(comparison.batch, PER_CLASS, per_epoch=comparison.steps),
        optimizer=OptimizerConfig("adamw", lr=LR, proxy_lr=PROXY_LR, weight_decay=WEIGHT_DECAY),
        device="cpu",
        trackers=(),
        **changes,  # type: ignore[arg-type]
    )
    folder = RunFolder(Path(tempfile.mkdtemp(prefix="pfml-bench-")))
    write_config(folder.config, config)
    embedder = create_embedder(comparison.backbone, weights="none", embedding_dim=DIMENSION, image_size=CROP)
    sources = {"train": open_images(train, workers=comparison.workers)}
    training = EpochsOnly(embedder, RetrievalData("photos", train, test), sources, config, folder, Monitor())

    def epoch(number: int) -> None:
        training.state.epoch = number
        training.train_epoch()

    return epoch


#: Name -> what makes its epochs.
CONTESTANTS: dict[str, Callable[[Comparison], Epoch]] = {
    "plain loop": plain,
    "pfml": by_pfml,
    "pfml bfloat16": lambda comparison: by_pfml(comparison, autocast="bfloat16"),
    "pfml compiled": lambda comparison: by_pfml(comparison, compile=True),
    "pfml compiled bfloat16": lambda comparison: by_pfml(comparison, autocast="bfloat16", compile=True),
    "network alone": network_alone,
}


def compare(comparison: Comparison, names: Sequence[str], rounds: int) -> tuple[dict[str, Times], float]:
    """The times of each contestant in so many turns after one to warm up, and the cores that others kept busy."""
    context = get_context("spawn")
    pipes, processes, times = {}, [], {name: Times() for name in names}
    try:
        for name in names:  # one after the other, so that starting disturbs none
            pipes[name], theirs = context.Pipe()
            processes.append(context.Process(target=_serve, args=(name, comparison, theirs)))
            processes[-1].start()
            theirs.close()
            times[name].start = pipes[name].recv()
        others = OthersClock()
        busy = 0.0
        for number in range(rounds):
            for name in names:
                pipes[name].send(number + 1)
                wall, processor = pipes[name].recv()
                times[name].wall.append(wall)
                times[name].processor.append(processor)
                busy += processor
        total = sum(sum(each.wall) for each in times.values())
        return times, max(others.cores_busy() - busy / total, 0.0)
    finally:
        for pipe in pipes.values():
            pipe.close()  # which ends them
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.terminate()


def _serve(name: str, comparison: Comparison, pipe: Connection) -> None:
    """Train an epoch whenever its number arrives; a process that ends is seen as the end of the pipe."""
    torch.set_num_threads(comparison.threads)
    torch.manual_seed(0)
    start = time.perf_counter()
    epoch = CONTESTANTS[name](comparison)
    epoch(0)
    pipe.send(time.perf_counter() - start)
    while True:
        try:
            number = pipe.recv()
        except EOFError:
            return
        start, before = time.perf_counter(), _processor_seconds()
        epoch(number)
        pipe.send((time.perf_counter() - start, _processor_seconds() - before))


def _processor_seconds() -> float:
    """Of this process and of those of its children that have ended."""
    return sum(os.times()[:4])
