"""The optimizer: parameter groups for backbone, head and loss, learning rates and their schedule, gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pfml.distributed import World
from pfml.models import Embedder
from pfml.runs.config import OPTIMIZER_OPTIONS, OptimizerConfig, ScheduleConfig

__all__ = [
    "OPTIMIZERS",
    "Algorithm",
    "clip_gradients",
    "create_optimizer",
    "gradient_norm",
    "learning_rate_factor",
    "pack_optimizer",
    "set_learning_rates",
    "unpack_optimizer",
]


@dataclass(frozen=True)
class Algorithm:
    """A row of `OPTIMIZERS`.

    Args:
        create: Torch's optimizer.
        is_fused: Whether torch has one kernel for all parameters of a group; only such a kernel reads `hold`.
        renamed: Options of ours that torch calls otherwise.
    """

    create: Callable[..., torch.optim.Optimizer]
    is_fused: bool = True
    renamed: dict[str, str] = field(default_factory=dict)


OPTIMIZERS: dict[str, Algorithm] = {
    "adam": Algorithm(torch.optim.Adam),
    "adamw": Algorithm(torch.optim.AdamW),
    "sgd": Algorithm(torch.optim.SGD),
    "rmsprop": Algorithm(torch.optim.RMSprop, is_fused=False, renamed={"smoothing": "alpha"}),
}


def create_optimizer(
    config: OptimizerConfig, embedder: Embedder, loss: nn.Module, *, hold: Tensor | None = None, fused: bool = False
) -> torch.optim.Optimizer:
    """The optimizer over backbone, head and the loss's own parameters, in this order.

    Args:
        config: Which one, and its rates.
        embedder: Gives backbone and head.
        loss: Gives the rest.
        hold: A scalar on the device; while it is 1.0, steps change nothing, without a synchronization.
            Needs `fused`, and an optimizer that has it.
        fused: One kernel for all parameters of a group, where the optimizer has one.
    """
    proxy_lr = 100 * config.lr if config.proxy_lr is None else config.proxy_lr
    groups = [
        *_backbone_groups(config, embedder),
        {
            "params": list(embedder.head_parameters()),
            "lr": config.lr if config.head_lr is None else config.head_lr,
            "weight_decay": config.weight_decay,
        },
        *_loss_groups(loss, proxy_lr, config.proxy_weight_decay),
    ]
    groups = [{**group, "base_lr": group["lr"]} for group in groups if group["params"]]
    if not groups:
        raise ValueError("there is nothing to train: the model has no head and the loss no parameters")
    algorithm = OPTIMIZERS[config.name]
    if hold is not None and not (fused and algorithm.is_fused):
        raise ValueError(f"hold needs fused=True and an optimizer that has it, got {fused} and {config.name}")
    options = {algorithm.renamed.get(name, name): getattr(config, name) for name in OPTIMIZER_OPTIONS[config.name]}
    if algorithm.is_fused:
        options["fused"] = fused or None
    optimizer = algorithm.create(groups, **options)
    if isinstance(optimizer, torch.optim.SGD) and config.momentum:
        _start_from_rest(optimizer)
    if hold is not None:
        optimizer.found_inf = hold  # type: ignore[attr-defined]  # where GradScaler puts it too
    return optimizer


def _backbone_groups(config: OptimizerConfig, embedder: Embedder) -> list[dict[str, Any]]:
    """The parameters of the backbone that train at all, by layer if its layers have rates of their own."""
    frozen = set(embedder.frozen_parameters())
    one = [[parameter for parameter in embedder.backbone_parameters() if parameter not in frozen]]
    layers = one if config.layer_decay == 1 else [
        [parameter for parameter in layer if parameter not in frozen] for layer in embedder.backbone.parameter_layers()
    ]  # fmt: skip
    above = range(len(layers), 0, -1) if config.layer_decay != 1 else [0]
    return [
        {"params": layer, "lr": config.lr * config.layer_decay**number, "weight_decay": config.weight_decay}
        for layer, number in zip(layers, above, strict=True)
    ]


def _start_from_rest(optimizer: torch.optim.SGD) -> None:
    """Give every parameter a momentum of zero, which changes no step.

    Torch's fused SGD would make it of uninitialized memory in the first step, and leave it so if that step is held back
    or skipped by a scaler; and it refuses parameters that join later than others of their group.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _loss_groups(loss: Any, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    if hasattr(loss, "param_groups"):
        return loss.param_groups(lr=lr, weight_decay=weight_decay)
    return [{"params": list(loss.parameters()), "lr": lr, "weight_decay": weight_decay}]


def set_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Each group's own learning rate times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def gradient_norm(optimizer: torch.optim.Optimizer, world: World) -> Tensor:
    """The norm of all gradients together, a scalar; not finite if any of them is not.

    Of groups that are spread over ranks each rank has a part; the norm is that of the whole, the same on all ranks.
    """
    whole, parts = (
        [p.grad for p in _with_gradient(optimizer, sharded) if p.grad is not None] for sharded in (False, True)
    )
    norm = nn.utils.get_total_norm(whole)
    if not parts:
        return norm
    square = nn.utils.get_total_norm(parts).double().square()
    world.all_reduce([square])
    return (norm.to(square.device).double().square() + square).sqrt().to(parts[0].dtype)


def clip_gradients(optimizer: torch.optim.Optimizer, config: OptimizerConfig, norm: Tensor, world: World) -> None:
    """Bound the gradients, whose `gradient_norm` is given, as `config` says: components first, then the norm."""
    parameters = [*_with_gradient(optimizer, False), *_with_gradient(optimizer, True)]
    if config.clip_value is not None:
        nn.utils.clip_grad_value_(parameters, config.clip_value)
    if config.clip_norm is not None:
        norm = norm if config.clip_value is None else gradient_norm(optimizer, world)
        nn.utils.clip_grads_with_norm_(parameters, config.clip_norm, norm)


def _with_gradient(optimizer: torch.optim.Optimizer, sharded: bool) -> list[nn.Parameter]:
    """Parameters of the groups that every rank has, or of those of which it has a part."""
    groups = [group for group in optimizer.param_groups if group.get("sharded", False) == sharded]
    return [p for group in groups for p in group["params"] if p.grad is not None]


def pack_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's moments as "parameter number/moment" -> tensor; learning rates follow from the schedule."""
    state = optimizer.state_dict()["state"]
    return {f"{number}/{name}": value for number, moments in state.items() for name, value in moments.items()}


def unpack_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Give the optimizer back what `pack_optimizer` took."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, name = key.split("/", 1)
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for parameter, moments in optimizer.state.items():
        for name, value in moments.items():
            if name != "step":  # in the parameter's memory format, which files do not keep
                moments[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


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
