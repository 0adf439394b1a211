"""Training: configurations, the loop, checkpoints, results."""

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
