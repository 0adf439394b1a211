"""Who this process is among those that work on one task: alone, or one rank of several.

What asks a `World` need not know which of the two it is. `World` itself is one process by itself, and does nothing;
`Ranks` are the ranks of a process group, which all call the same methods in the same order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pfml.distributed.communicator import Communicator, LostRankError, lost_rank_errors
from pfml.distributed.schedule import shard_sizes, shard_slice

__all__ = ["Ranks", "World"]

T = TypeVar("T")
#: Bytes of tensors that travel in one message.
BUCKET_BYTES = 32 * 2**20


class World:
    """One process by itself.

    Attributes:
        rank: Its number among all.
        size: How many there are.
        device: Where it must compute; None leaves the choice to whoever asks.
    """

    rank: int = 0
    size: int = 1
    device: torch.device | None = None

    @property
    def is_first(self) -> bool:
        """Whether it is this process that writes files and speaks to the user."""
        return self.rank == 0

    def shard(self, total: int) -> slice:
        """Which of `total` things in a row are this rank's."""
        return slice(0, total)

    def all_gather(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """The rows of all ranks one after the other; `sizes` are their numbers, by rank."""
        return rows

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over ranks, the same bits on all."""

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by that of the first rank."""

    def all_reduce_max(self, number: int) -> int:
        """The largest number that any rank has; all of them wait here for each other."""
        return number

    def by_first(self, action: Callable[[], Any]) -> Any:
        """What `action` returns on the first rank, the only one to do it; its error is raised on all.

        What it returns must be something that JSON can hold.
        """
        return action()

    def in_step(self, items: Iterable[T]) -> Iterable[T]:
        """The items; where getting one fails on one rank, it fails on all."""
        return items

    @contextmanager
    def together(self) -> Iterator[None]:
        """What one rank raises within the block is raised on all at its end."""
        yield

    @contextmanager
    def first_before_others(self, wanted: bool = True) -> Iterator[None]:
        """The first rank passes the block before the others enter it, if that is wanted."""
        yield

    @contextmanager
    def own_draws(self, seed: int, count: int) -> Iterator[None]:
        """Torch's random numbers of this rank alone within the block, and as they were after it."""
        yield


class Ranks(World):
    """One rank of a process group.

    Args:
        group: For tensors; None for the default group.
        control: A gloo group of the same ranks for a few numbers and texts, which then need not wait for a GPU; None if
            `group` is one.
        device: Where this rank computes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        control: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.communicator = Communicator(group)
        self.control = self.communicator if control is None else Communicator(control)
        self.rank, self.size, self.device = self.communicator.rank, self.communicator.world, device

    @property
    def group(self) -> dist.ProcessGroup:
        """The group for tensors."""
        assert self.communicator.group is not None
        return self.communicator.group

    def shard(self, total: int) -> slice:
        return shard_slice(shard_sizes(total, self.size), self.rank)

    def all_gather(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        return self.communicator.all_gather(rows, sizes)

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        self._in_buckets(tensors, lambda flat: dist.all_reduce(flat, group=self.group))

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        self._in_buckets(tensors, lambda flat: dist.broadcast(flat, group=self.group, group_src=0))

    def all_reduce_max(self, number: int) -> int:
        return max(numbers[0] for numbers in self.control.all_gather_numbers([number]))

    def by_first(self, action: Callable[[], Any]) -> Any:
        result = None
        with self.together():
            result = action() if self.is_first else None
        return json.loads(self.control.all_gather_texts(json.dumps(result))[0])

    def in_step(self, items: Iterable[T]) -> Iterator[T]:
        iterator, end = iter(items), object()
        item: Any = None
        while item is not end:
            with self.together():
                item = next(iterator, end)
            if item is not end:
                yield item

    @contextmanager
    def together(self) -> Iterator[None]:
        error = None
        try:
            yield
        except LostRankError:
            raise
        except Exception as caught:  # whatever it is, the others must not wait for this rank
            error = caught
        self.control.all_gather_numbers([], error)

    @contextmanager
    def first_before_others(self, wanted: bool = True) -> Iterator[None]:
        if wanted and not self.is_first:
            self.all_reduce_max(0)
        yield
        if wanted and self.is_first:
            self.all_reduce_max(0)

    @contextmanager
    def own_draws(self, seed: int, count: int) -> Iterator[None]:
        devices = [self.device] if self.device is not None and self.device.type == "cuda" else []
        digest = hashlib.sha256(repr((seed, count, self.rank)).encode()).digest()
        with torch.random.fork_rng(devices):
            torch.manual_seed(int.from_bytes(digest[:7]))
            yield

    @torch.no_grad()
    def _in_buckets(self, tensors: Sequence[Tensor], send: Callable[[Tensor], Any]) -> None:
        """Send tensors together, since many small messages are slow; all ranks have tensors of the same shapes."""
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.detach().flatten() for tensor in bucket])
            with lost_rank_errors():
                send(flat)
            for tensor, piece in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(piece.view(tensor.shape))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type and device, in order, some megabytes at a time."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        bucket: list[Tensor] = []
        for tensor in alike:
            if bucket and sum(other.nbytes for other in bucket) + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket
