"""Learning rates as a function of the step: nothing to store, nothing to restore."""

from __future__ import annotations

import math

from pfml.training.config import ScheduleConfig

__all__ = ["learning_rate_factor"]


def learning_rate_factor(schedule: ScheduleConfig, step: int, steps_per_epoch: int, epochs: int) -> float:
    """What each group's learning rate is multiplied with at `step`, counted from 0 over the whole run."""
    progress = step / max(steps_per_epoch * epochs, 1)  # in [0, 1)
    if schedule.name == "step":
        return schedule.factor ** (step // steps_per_epoch // schedule.every)
    if schedule.name == "milestones":
        return schedule.factor ** sum(epoch <= step // steps_per_epoch for epoch in schedule.milestones)
    if schedule.name == "cosine":
        return _half_cosine(1.0, 0.0, progress)
    if schedule.name == "one-cycle":
        peak = 0.3
        if progress < peak:
            return _half_cosine(0.04, 1.0, progress / peak)
        return _half_cosine(1.0, 0.0, (progress - peak) / (1 - peak))
    return 1.0


def _half_cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
