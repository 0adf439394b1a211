"""A student's step with its teachers on a GPU: the section teachers of `gpu.py`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import torch
from torch import Tensor

from gpu_measure import Recorder, Row, Setting, times_ms, timing
from gpu_rates import Bound, Rates
from methods import Step
from pfml.losses.checks import deferred_checks
from pfml.losses.distillation import RelaxedContrastiveLoss
from pfml.models import Embedder, EmbedderConfig
from pfml.models.freezing import set_trainable, start_training_mode
from pfml.training import OptimizerConfig
from pfml.training.environment import compiled, reproducible
from pfml.training.optimizer import create_optimizer
from pfml.training.setup import on_device
from pfml.training.teachers import Teachers

__all__ = ["Student", "teachers_section"]

#: A step with teachers takes at most this many times one without.
TARGET = 2.2
NUMBER = 4
LARGE, SMALL = EmbedderConfig("resnet50_he", weights="none"), EmbedderConfig("convnet", weights="none", embedding_dim=8)
#: Operations of a ResNet-50's forward pass for an image of 224 pixels; with the backward pass three times as many.
FORWARD = 8.2e9


class Student:
    """A model, four teachers of the same network, and one batch for all.

    Args:
        config: The network of all of them.
        batch: Images in a batch.
        setting: Where; networks are compiled on a GPU, unless `quick`.
    """

    def __init__(self, config: EmbedderConfig, batch: int, setting: Setting) -> None:
        device, self.compiling = setting.device, setting.on_gpu and not setting.quick
        self.embedder = on_device(Embedder(config), device)
        start_training_mode(self.embedder, batch_norm="freeze")
        set_trainable(self.embedder, batch_norm="freeze")
        self.network: Callable[[Tensor], Tensor] = compiled(self.embedder, device) if self.compiling else self.embedder
        self.loss = RelaxedContrastiveLoss()
        self.optimizer = create_optimizer(
            OptimizerConfig("adamw", lr=1e-5), self.embedder, self.loss, fused=setting.on_gpu
        )
        side = self.embedder.preprocessing.crop
        self.pixels = torch.rand(batch, 3, side, side, generator=torch.Generator().manual_seed(0)).to(device)
        others = [on_device(Embedder(config), device).eval() for _ in range(NUMBER)]
        self.teachers = Teachers(others, device, compiling=self.compiling)
        with patch("pfml.training.teachers.fuse"):
            self.not_fused = Teachers(others, device)
        self.said = self.teachers(self.pixels)

    def step(self, said: Callable[[], Tensor]) -> None:
        """One update towards what the teachers say; they are waited for after the forward pass."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.pixels.device.type, torch.bfloat16):
            embeddings = self.network(self.pixels)
        with deferred_checks():
            loss = self.loss(embeddings, said())
        loss.backward()
        self.optimizer.step()

    def with_teachers(self) -> None:
        """A step whose teachers are asked in it."""
        self.step(self.teachers.begin(self.pixels))

    def one_after_the_other(self) -> None:
        """The same, but the forward pass begins when the teachers are done."""
        said = self.teachers(self.pixels)
        self.step(lambda: said)

    def without(self) -> None:
        """A step whose teachers' embeddings are there already."""
        self.step(lambda: self.said)


def teachers_section(recorder: Recorder, setting: Setting, rates: Rates) -> None:
    """A step without teachers, four teachers alone, and a step with them, whose ratio is without / with."""
    large = setting.on_gpu and not setting.quick
    name, batch = ("ResNet-50", 100) if large else ("convnet", 8)
    title = f"{name}, batch {batch}"

    @cache
    def student() -> Student:
        return Student(LARGE if large else SMALL, batch, setting)

    def row(what: str, step: Step, passes: int) -> Row:
        times = timing(times_ms(step, setting, at_least=setting.repeats, seconds=setting.seconds, warm_up=5))
        bound = Bound(passes * batch * FORWARD if large else 1.0, 12.0 * batch)
        return Row("teachers", f"{title}, {what}", name, batch, **times, **rates.explain(bound, times["p50_ms"]))

    def compared(what: str) -> Row:
        without = row(what, student().without, 3)
        both = row(what, student().with_teachers, 3 + NUMBER)
        ratio = without.p50_ms / both.p50_ms
        return replace(both, ratio=ratio, target_ratio=1 / TARGET if large else math.nan)

    with reproducible(False):
        alone = f"{NUMBER} teachers"
        recorder.attempt("teachers", alone, lambda: row(alone, lambda: student().teachers(student().pixels), NUMBER))
        plain = f"{NUMBER} teachers, convolutions not fused"
        recorder.attempt("teachers", plain, lambda: row(plain, lambda: student().not_fused(student().pixels), NUMBER))
        without = "step without teachers"
        recorder.attempt("teachers", without, lambda: row(without, student().without, 3))
        after = f"step with {NUMBER} teachers, one after the other"
        recorder.attempt("teachers", after, lambda: row(after, student().one_after_the_other, 3 + NUMBER))
        both = f"step with {NUMBER} teachers; without / with"
        recorder.attempt("teachers", both, lambda: compared(both))
