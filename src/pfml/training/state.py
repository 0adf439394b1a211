"""The state of a run: what a checkpoint stores, and how a run resumes from it. Independent of the world size."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pfml.data import RetrievalData
from pfml.models import Embedder, EmbedderConfig
from pfml.runs.checkpoint import by_prefix
from pfml.runs.config import TrainConfig
from pfml.runs.config_files import plain
from pfml.training.averaging import Follower, WeightAverage
from pfml.training.ranks import load_loss_state, load_optimizer_state, loss_state, optimizer_state
from pfml.training.teachers import teacher_digests

__all__ = ["TrainingState", "require_same_run", "run_identity"]

#: Options that may change when a run is resumed: where it computes, what it shows, and where its teachers lie, whose
#: weights are compared.
FREE = {"device", "compile", "log_every", "checkpoint_every", "trackers", "teachers"}


@dataclass(eq=False)
class TrainingState:
    """Everything that changes while a run trains.

    Args:
        embedder, loss, optimizer, scaler, weight_average, follower: Changed in place by each step.
        epoch: Finished epochs.
        position: Finished batches of the current epoch.
        loss_sum: Of the finished batches of the current epoch.
        term_sums: The same for each term of the loss, if it reports them.
        history: The evaluations so far.
    """

    embedder: Embedder
    loss: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    weight_average: WeightAverage
    follower: Follower
    epoch: int = 0
    position: int = 0
    loss_sum: float = 0.0
    term_sums: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Where the run computes."""
        return next(self.embedder.parameters()).device

    def end_epoch(self) -> None:
        """Move on to the first batch of the next epoch."""
        self.epoch, self.position, self.loss_sum, self.term_sums = self.epoch + 1, 0, 0.0, {}

    def model_tensors(self) -> dict[str, Tensor]:
        """Weights of the embedder and state of the loss, on the first rank; all ranks call this together."""
        tensors = {f"embedder/{name}": value for name, value in self.embedder.state_dict().items()}
        return tensors | {f"loss/{name}": value for name, value in loss_state(self.loss).items()}

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of a checkpoint, on the first rank; all ranks call this together."""
        tensors = self.model_tensors()
        tensors |= {f"average/{name}": value for name, value in self.weight_average.state_dict().items()}
        tensors |= {f"follower/{name}": value for name, value in self.follower.state_dict().items()}
        moments = optimizer_state(self.optimizer, self.loss)
        tensors |= {f"optimizer/{name}": value for name, value in moments.items()}
        tensors["generator/cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["generator/cuda"] = torch.cuda.get_rng_state(self.device)
        return tensors

    def values(self) -> dict[str, Any]:
        """The plain values of a checkpoint."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "loss_sum": self.loss_sum,
            "term_sums": self.term_sums,
            "history": self.history,
            "scaler": self.scaler.state_dict(),
        }

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take over what `tensors` and `values` returned when the checkpoint was written."""
        self.embedder.load_state_dict(by_prefix(tensors, "embedder/"))
        self.weight_average.load_state_dict(by_prefix(tensors, "average/"))
        self.follower.load_state_dict(by_prefix(tensors, "follower/"))
        load_loss_state(self.loss, by_prefix(tensors, "loss/"))
        load_optimizer_state(self.optimizer, self.loss, by_prefix(tensors, "optimizer/"))
        self.scaler.load_state_dict(values["scaler"])
        self.epoch, self.position, self.loss_sum = values["epoch"], values["position"], values["loss_sum"]
        self.term_sums, self.history = values["term_sums"], values["history"]
        torch.set_rng_state(tensors["generator/cpu"])
        if self.device.type == "cuda" and "generator/cuda" in tensors:
            torch.cuda.set_rng_state(tensors["generator/cuda"], self.device)


def run_identity(config: TrainConfig, data: RetrievalData, embedder: Embedder) -> dict[str, Any]:
    """What a run is, in plain values: a checkpoint stores it, and a resumed run must have the same."""
    whole = plain(config)
    return {
        # without what a RunConfig says of data and model beside it: both are compared by themselves
        "config": {one.name: whole[one.name] for one in fields(TrainConfig)},
        "classes": list(data.train.class_names),
        "embedding_dim": embedder.embedding_dim,
        "num_features": embedder.head.num_features,
        "network": plain(embedder.config),
        "images": data.train.fingerprint(),
        "teachers": teacher_digests(config),
    }


def require_same_run(stored: dict[str, Any], given: dict[str, Any], folder: Path) -> None:
    """Raise ValueError if the run that is to be resumed is not the one of the checkpoint.

    Args:
        stored: `run_identity` as the checkpoint in `folder` has it.
        given: The one of the run that is to be resumed.
        folder: Of the run, for messages.
    """
    if stored["classes"] != given["classes"]:
        raise ValueError(
            f"the checkpoint in {folder} was trained on {len(stored['classes'])} classes, "
            f"and the data has other ones ({len(given['classes'])}): resume with the data it was started on"
        )
    if stored["images"] != given["images"]:
        raise ValueError(
            f"the run in {folder} was started on other images or labels of these classes: "
            f"resume with the data it was started on"
        )
    if stored["teachers"] != given["teachers"]:
        raise ValueError(f"the teachers of the run in {folder} have changed since it was started: restore them")
    earlier = {"teacher_dims": None, **stored["config"]}  # students had all dimensions of their teachers at first
    if not given["config"]["teachers"]:
        earlier["teacher_dims"] = given["config"]["teacher_dims"]  # of nobody
    _require_same_options(_completed(earlier, TrainConfig()), given["config"])
    network = _completed(stored["network"], EmbedderConfig())
    _require_same_options({"network": network}, {"network": given["network"]})


def _completed(stored: dict[str, Any], default: Any) -> dict[str, Any]:
    """A stored configuration with the options that were added to the package since, at the values of `default`.

    The defaults of added options leave a run as it was without them.
    """
    values = {**plain(default), **stored}
    for one in fields(default):
        inner = getattr(default, one.name)
        if is_dataclass(inner) and isinstance(values[one.name], dict):
            values[one.name] = _completed(values[one.name], inner)
    return values


def _require_same_options(stored: dict[str, Any], given: dict[str, Any]) -> None:
    differing = [
        f"{key}: it was {stored.get(key)}, now {value}"
        for key, value in given.items()
        if key not in FREE and stored.get(key) != value
    ]
    if differing:
        raise ValueError("a run must be resumed with the configuration it started with, got " + "; ".join(differing))
