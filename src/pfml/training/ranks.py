"""What a run over several ranks does otherwise than one process: its loss, its gradients, what it stores.

Every rank has the whole network, and its part of each batch. The potential field is spread over the ranks with its
proxies; of any other loss each rank computes the whole. What is stored is what one process would store.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pfml.data import RetrievalData
from pfml.distributed import GatheredLoss, Ranks, ShardedPotentialFieldLoss, World
from pfml.distributed.state import gather_rows, gather_state, shard_rows, shard_state
from pfml.losses import PotentialFieldLoss
from pfml.methods import LossConfig, create_loss, method_of
from pfml.models import Embedder
from pfml.models.freezing import batch_norms
from pfml.runs.config import TrainConfig
from pfml.runs.config_files import plain
from pfml.training.optimizer import pack_optimizer, unpack_optimizer

__all__ = [
    "agree_on_gradients",
    "create_rank_loss",
    "create_scaler",
    "has_proxies",
    "load_loss_state",
    "load_optimizer_state",
    "loss_of_all",
    "loss_state",
    "optimizer_state",
    "prepare_embedder",
    "require_same_task",
    "whole_loss",
]


def require_same_task(config: TrainConfig, data: RetrievalData, world: World) -> None:
    """Refuse ranks that would train on other images or in another way than the first."""
    if not isinstance(world, Ranks):
        return
    names = {"train": "training"}
    digests = {f"the {names.get(role, role)} images or labels": each.fingerprint() for role, each in data.parts.items()}
    task = {**plain(config), **digests}
    task = {name: value for name, value in task.items() if name not in ("device", "storage")}
    by_rank = [json.loads(text) for text in world.control.all_gather_texts(json.dumps(task))]
    for rank, other in enumerate(by_rank):
        differing = [name for name, value in by_rank[0].items() if other[name] != value]
        if differing:
            raise ValueError(f"all ranks must train alike, but rank {rank} differs from rank 0 in {differing}")


def prepare_embedder(embedder: Embedder, config: TrainConfig, world: World) -> Embedder:
    """The embedder with the weights of the first rank, and statistics of BatchNorm, if they train, of all ranks."""
    if not isinstance(world, Ranks):
        return embedder
    if config.batch.size < world.size:
        raise ValueError(f"batch.size must be at least 1 for each of {world.size} ranks, got {config.batch.size}")
    if config.batch_norm == "train" and any(batch_norms(embedder)):
        if world.device is None or world.device.type != "cuda":
            raise ValueError(
                "on several ranks without GPUs, BatchNorm cannot take its statistics from all of a batch: "
                "choose --batch_norm freeze, freeze-statistics or freeze-all, or train in one process"
            )
        embedder = nn.SyncBatchNorm.convert_sync_batchnorm(embedder, world.group)
    world.broadcast(list(embedder.state_dict().values()))
    return embedder


def create_rank_loss(
    config: LossConfig, num_classes: int, embedder: Embedder, world: World, own: nn.Module | None = None
) -> nn.Module:
    """The loss that `config` describes, or this rank's part of it; `own` is a loss that is there already."""
    embedding_dim = embedder.embedding_dim
    method = method_of(config.name)
    if not isinstance(world, Ranks) or method.loss is not PotentialFieldLoss:
        loss = own or create_loss(config, num_classes, embedding_dim, embedder.head.num_features)
        return GatheredLoss(loss, world) if isinstance(world, Ranks) else loss
    options: dict[str, Any] = {**method.values, **config.options}
    known = inspect.signature(ShardedPotentialFieldLoss).parameters
    for name in options.keys() - known.keys():
        if options.pop(name) != inspect.signature(PotentialFieldLoss).parameters[name].default:
            raise ValueError(
                f"loss.options.{name} must be left out on several ranks, over which the proxies are spread: "
                f"train in one process, or without it"
            )
    try:
        return ShardedPotentialFieldLoss(
            num_classes, embedding_dim, **options, model_gradients="summed", group=world.group
        )
    except TypeError as error:
        raise ValueError(f"loss.options {config.options} do not fit {config.name}: {error}") from None


def create_scaler(config: TrainConfig, device: torch.device, world: World) -> torch.amp.GradScaler:
    """What keeps float16 gradients in range; on all ranks it skips the same steps."""
    enabled = config.autocast == "float16"
    if isinstance(world, Ranks):
        return _RankScaler(world, device, enabled)
    return torch.amp.GradScaler(device.type, enabled=enabled)


class _RankScaler(torch.amp.GradScaler):
    """A scaler that skips a step on all ranks if the gradients of one overflow.

    torch has one in `torch.distributed.fsdp`, but fused optimizers of torch 2.15 cannot read what it finds.
    """

    def __init__(self, world: Ranks, device: torch.device, enabled: bool) -> None:
        super().__init__(device.type, enabled=enabled)
        self._world = world

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        if self.is_enabled():
            found = list(self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
            self._world.all_reduce(found)
            for each in found:
                each.clamp_(max=1)  # torch compares with 1, whatever the number of ranks


def agree_on_gradients(embedder: nn.Module, loss: nn.Module, world: World) -> None:
    """Give every rank the gradients of the global batch: of the network the sum, of a loss that all have, the first's.

    A loss that each rank computes as a whole has the same gradients everywhere, but a GPU may add up in another order.
    """
    world.all_reduce([parameter.grad for parameter in embedder.parameters() if parameter.grad is not None])
    if isinstance(loss, GatheredLoss):
        world.broadcast([parameter.grad for parameter in loss.parameters() if parameter.grad is not None])


def whole_loss(loss: nn.Module, config: LossConfig, num_classes: int, embedding_dim: int) -> nn.Module | None:
    """The loss of one process, on the first rank; None elsewhere if it is spread over ranks, which all call this."""
    if isinstance(loss, GatheredLoss):
        return loss.whole
    if not isinstance(loss, ShardedPotentialFieldLoss):
        return loss
    state = gather_state(loss)
    if state is None:
        return None
    with torch.random.fork_rng([]):  # it draws where it is made, in main memory
        whole = create_loss(config, num_classes, embedding_dim)
    whole.load_state_dict(state)
    return whole


def loss_of_all(loss: nn.Module) -> nn.Module:
    """The loss that each rank computes of the whole batch, or this one."""
    return loss.whole if isinstance(loss, GatheredLoss) else loss


def has_proxies(loss: nn.Module) -> bool:
    """Whether there are proxies anywhere."""
    if isinstance(loss, ShardedPotentialFieldLoss):
        return loss.proxies_per_class > 0
    points = getattr(loss_of_all(loss), "proxy_points", None)
    return points is not None and points().shape[1] > 0


def loss_state(loss: nn.Module) -> dict[str, Tensor]:
    """The state_dict of one process, on the first rank; all ranks call this."""
    if isinstance(loss, ShardedPotentialFieldLoss):
        return gather_state(loss) or {}
    return loss_of_all(loss).state_dict()


def load_loss_state(loss: nn.Module, state: dict[str, Tensor]) -> None:
    """Give the loss of this rank what it has of the state_dict of one process."""
    if isinstance(loss, ShardedPotentialFieldLoss):
        state = shard_state(state, rank=loss.communicator.rank, world=loss.communicator.world)
    loss_of_all(loss).load_state_dict(state)


def optimizer_state(optimizer: torch.optim.Optimizer, loss: nn.Module) -> dict[str, Tensor]:
    """`pack_optimizer` of one process, on the first rank; all ranks call this."""
    packed = pack_optimizer(optimizer)
    for key in _keys_of_proxies(packed, optimizer, loss):
        assert isinstance(loss, ShardedPotentialFieldLoss)
        if packed[key].shape == loss.proxies.shape:
            rows = gather_rows(loss, packed[key])
            packed[key] = packed[key] if rows is None else rows
    return packed


def load_optimizer_state(optimizer: torch.optim.Optimizer, loss: nn.Module, packed: dict[str, Tensor]) -> None:
    """Give the optimizer of this rank what it has of what one process has packed."""
    mine = dict(packed)
    for key in _keys_of_proxies(packed, optimizer, loss):
        assert isinstance(loss, ShardedPotentialFieldLoss)
        if packed[key].dim():  # but for the count of steps there is one row for each proxy
            mine[key] = shard_rows(packed[key], rank=loss.communicator.rank, world=loss.communicator.world)
    unpack_optimizer(optimizer, mine)


def _keys_of_proxies(packed: dict[str, Tensor], optimizer: torch.optim.Optimizer, loss: nn.Module) -> Iterator[str]:
    """What an optimizer keeps for proxies that are spread over ranks, in the same order on all."""
    if not isinstance(loss, ShardedPotentialFieldLoss):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    number = next((k for k, parameter in enumerate(parameters) if parameter is loss.proxies), None)
    yield from sorted(key for key in packed if key.startswith(f"{number}/"))
