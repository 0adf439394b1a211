"""Training: configurations, the loop, checkpoints, results."""

from typing import TYPE_CHECKING

from pfml.lazy import lazy_names

if TYPE_CHECKING:
    from pfml.methods import METHODS, LossConfig
    from pfml.runs.config import (
        BatchConfig,
        DataConfig,
        OptimizerConfig,
        RunConfig,
        ScheduleConfig,
        StorageConfig,
        TrainConfig,
    )
    from pfml.runs.saved_loss import TrainedField, load_field, load_loss
    from pfml.training.loop import NonFiniteLossError
    from pfml.training.progress import Monitor, ProgressMonitor
    from pfml.training.runner import run, train
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "pfml.methods": ("METHODS", "LossConfig"),
            "pfml.runs.config": (
                "BatchConfig",
                "DataConfig",
                "OptimizerConfig",
                "RunConfig",
                "ScheduleConfig",
                "StorageConfig",
                "TrainConfig",
            ),
            "pfml.runs.saved_loss": ("TrainedField", "load_field", "load_loss"),
            "pfml.training.loop": ("NonFiniteLossError",),
            "pfml.training.progress": ("Monitor", "ProgressMonitor"),
            "pfml.training.runner": ("run", "train"),
        },
    )

__all__ = [
    "METHODS",
    "BatchConfig",
    "DataConfig",
    "LossConfig",
    "Monitor",
    "NonFiniteLossError",
    "OptimizerConfig",
    "ProgressMonitor",
    "RunConfig",
    "ScheduleConfig",
    "StorageConfig",
    "TrainConfig",
    "TrainedField",
    "load_field",
    "load_loss",
    "run",
    "train",
]
