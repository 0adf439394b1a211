"""The world that torchrun has started this process in."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from pfml.distributed.communicator import LostRankError
from pfml.distributed.heartbeat import ARRIVAL, Heartbeat
from pfml.distributed.torchrun import Launch
from pfml.distributed.world import Ranks, World
from pfml.losses.checks import CollapseWarning

__all__ = ["FailedElsewhereError", "Launch", "decided_by_first", "open_world", "rendezvous_store"]

#: Longer than a rank may work on its own while the others wait for it; one that is gone is noticed by `Heartbeat`.
LONGEST_WAIT = timedelta(minutes=60)
RENDEZVOUS_TIMEOUT = timedelta(seconds=ARRIVAL)


class FailedElsewhereError(ConnectionError):
    """The work cannot continue because of another rank: it is gone, or it failed, and said why."""


@contextmanager
def open_world(device: torch.device) -> Iterator[World]:
    """The world of this process: `Ranks` if torchrun has started it beside others, else `World`, one by itself.

    Within the block a rank that is gone is noticed by the others within half a minute, and an error of one rank ends
    all of them.

    Args:
        device: A CPU, where ranks talk by gloo, or "cuda": then rank after rank of a machine gets a GPU, and they talk
            by NCCL.

    Raises:
        FailedElsewhereError: Instead of what torch raises where another rank is gone or has failed.
    """
    launch = Launch.of_process()
    if launch.size == 1:
        yield World()
        return
    own_device = _rank_device(device, launch)
    store = _store(launch)
    holder = "torchrun" if launch.by_agent else "rank 0"
    with (
        Heartbeat(store.clone(), launch.rank, launch.size, holder=holder) as heartbeat,
        warnings_of_the_first(launch.rank),
    ):
        backend, device_id = ("nccl", own_device) if own_device.type == "cuda" else ("gloo", None)
        dist.init_process_group(
            backend, store=store, rank=launch.rank, world_size=launch.size, timeout=LONGEST_WAIT, device_id=device_id
        )
        try:
            control: Any = dist.new_group(backend="gloo", timeout=LONGEST_WAIT) if backend == "nccl" else None
            yield from _guarded(Ranks(control=control, device=own_device), heartbeat)
        finally:
            dist.destroy_process_group()


def decided_by_first(name: str, decide: Callable[[], str], launch: Launch | None = None) -> str:
    """What `decide` returns on the first rank at the first of torchrun's starts: the same on all ranks, at all starts.

    For what is decided before `open_world`, and would come out otherwise on another rank or at another time.

    Args:
        name: What it is, by a name of its own.
        decide: Called on the first rank only, and once; everywhere by a process that is alone.
        launch: That of this process if None.

    Raises:
        FailedElsewhereError: If the first rank has ended before it could say it.
    """
    launch = launch or Launch.of_process()
    if launch.size == 1 and not launch.by_agent:
        return decide()
    store = PrefixStore("decided by first", rendezvous_store(launch))
    if launch.rank == 0 and not store.check([name]):
        store.set(name, decide())
    try:
        store.wait([name], LONGEST_WAIT)
        return str(store.get(name).decode())
    except RuntimeError as error:
        said = str(error).split("\n")[0]
        raise FailedElsewhereError(f"rank 0 has ended before it could say {name} ({said})") from error


def _store(launch: Launch) -> Any:
    """The store that the ranks of one start share."""
    # without a name of its own for each start, ranks would look for those that have ended
    return PrefixStore(f"start {launch.restarts}", rendezvous_store(launch))


@cache  # where rank 0 keeps the store itself, it ends with this object
def rendezvous_store(launch: Launch) -> Any:
    """What all ranks can reach before they are connected; torchrun keeps one for all its starts."""
    return next(rendezvous("env://", launch.rank, launch.size, timeout=RENDEZVOUS_TIMEOUT))[0]


def _guarded(world: Ranks, heartbeat: Heartbeat) -> Iterator[World]:
    """The world, with errors of one rank made known to all, and all ranks at the end of the block together."""
    try:
        yield world
        world.all_reduce_max(0)
    except (LostRankError, dist.DistError) as error:
        reason = heartbeat.explanation() or f"another rank is gone: {error}"
        raise FailedElsewhereError(reason) from error
    except BaseException as error:
        if heartbeat.reason is None:
            heartbeat.report(f"rank {world.rank} failed: {str(error) or type(error).__name__}")
        raise


def _rank_device(device: torch.device, launch: Launch) -> torch.device:
    """The device that this rank computes on."""
    if device.type != "cuda":
        return device
    if device.index is not None:
        raise ValueError(f"each rank takes a GPU of its own: device must be cuda or cpu, got {device}")
    if launch.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"each rank needs a GPU of its own, and this machine has {torch.cuda.device_count()}: "
            f"start as many with --nproc-per-node, or choose --device cpu"
        )
    own = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(own)
    return own


@contextmanager
def warnings_of_the_first(rank: int) -> Iterator[None]:
    """What is said of the global batch is said once."""
    with warnings.catch_warnings() if rank else nullcontext():
        if rank:
            warnings.simplefilter("ignore", CollapseWarning)
        yield
