"""The state of a sharded loss as that of a whole one, and back: stored state is independent of the world size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pfml.distributed.schedule import shard_sizes, shard_slice
from pfml.distributed.sharded_loss import ShardedPotentialFieldLoss, extra_state, extra_state_of

__all__ = ["gather_rows", "gather_state", "shard_rows", "shard_state"]


@torch.no_grad()
def gather_rows(loss: ShardedPotentialFieldLoss, mine: Tensor) -> Tensor | None:
    """All ranks' rows as one (C, M, ...) tensor in main memory on rank 0, None elsewhere; all ranks call it together.

    For the proxies, and for whatever an optimizer keeps for each of them.

    Args:
        loss: The loss whose proxies the rows belong to.
        mine: (n, ...), one row for each proxy of this rank.
    """
    error = None
    if mine.dim() == 0 or len(mine) != len(loss.proxies):
        error = ValueError(f"rows must be ({len(loss.proxies)}, ...), one for each proxy, got {tuple(mine.shape)}")
    loss.communicator.all_gather_numbers([], error)
    mine = mine.detach().contiguous()
    if loss.communicator.rank != 0:
        loss.communicator.exchange([(0, mine)], [])
        return None
    whole = mine.new_empty(sum(loss.proxy_sizes), *mine.shape[1:], device="cpu")
    shards = whole.split(loss.proxy_sizes)
    shards[0].copy_(mine)
    for rank in range(1, loss.communicator.world):  # one after the other: memory for one shard besides the whole
        shard = mine.new_empty(loss.proxy_sizes[rank], *mine.shape[1:])
        loss.communicator.exchange([], [(rank, shard)])
        shards[rank].copy_(shard)
    return whole.view(loss.num_classes, loss.proxies_per_class, *mine.shape[1:])


def gather_state(loss: ShardedPotentialFieldLoss) -> dict[str, Tensor] | None:
    """The state_dict of the whole `PotentialFieldLoss` on rank 0, None elsewhere; all ranks call it together."""
    proxies = gather_rows(loss, loss.proxies)
    if proxies is None:
        return None
    state = extra_state(hyperparameters=loss.hyperparameters(), proxies_ready=loss.proxies_ready)
    return {"proxies": proxies, "_extra_state": state}


def shard_rows(whole: Tensor, *, rank: int, world: int) -> Tensor:
    """The rows of a whole (C, M, ...) tensor that belong to `rank`, (n, ...); a view."""
    if not 0 <= rank < world:
        raise ValueError(f"rank must lie in [0, {world}), got {rank}")
    rows = whole.flatten(0, 1)
    return rows[shard_slice(shard_sizes(len(rows), world), rank)]


def shard_state(whole: dict[str, Any], *, rank: int, world: int) -> dict[str, Tensor]:
    """The state_dict of rank `rank` of `world`, cut from one of a `PotentialFieldLoss`; needs no process group."""
    stored = extra_state_of(whole)
    sizes = tuple(stored["hyperparameters"][name] for name in ("num_classes", "proxies_per_class", "embedding_dim"))
    proxies = whole.get("proxies")
    if not isinstance(proxies, Tensor) or tuple(proxies.shape) != sizes:
        got = tuple(proxies.shape) if isinstance(proxies, Tensor) else proxies
        raise ValueError(f"a whole state must have proxies of shape {sizes}, got {got}")
    state = extra_state(
        hyperparameters=stored["hyperparameters"],
        proxies_ready=stored["proxies_ready"],
        shard={"rank": rank, "world": world},
    )
    return {"proxies": shard_rows(proxies, rank=rank, world=world).clone(), "_extra_state": state}
