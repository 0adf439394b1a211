"""Training: configurations, the loop, checkpoints, results."""

from pfml.training.config import BatchConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from pfml.training.loop import NonFiniteLossError
from pfml.training.methods import METHODS, LossConfig
from pfml.training.monitor import Monitor, ProgressMonitor
from pfml.training.run import DataConfig, RunConfig, StorageConfig, run, train
from pfml.training.saved_loss import TrainedField, load_field, load_loss

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
