"""Collectives over a process group: sizes may differ by rank, sums have one order, every byte is counted.

They are built on point-to-point messages (`batch_isend_irecv`) and not on torch's collectives, for three properties:
ranks may bring different numbers of rows, or none; sums are added in the order of ranks, so equal inputs give equal
bits; `bytes_sent` and `bytes_received` are exact, which docs/SCALING.md rests on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from pfml.distributed.schedule import shard_sizes

__all__ = ["Communicator", "LostRankError", "lost_rank_errors"]

#: Errors that may be raised again on the other ranks; another one is raised there as a RuntimeError.
ERRORS: tuple[type[Exception], ...] = (RuntimeError, ValueError, TypeError, OSError)


class LostRankError(RuntimeError):
    """Another rank has ended, or does not answer."""


@contextmanager
def lost_rank_errors() -> Iterator[None]:
    """Raise LostRankError instead of what torch raises within the block where a message does not arrive."""
    try:
        yield
    except RuntimeError as error:
        said = str(error).split("\n")[0]
        raise LostRankError(f"a message from or to another rank did not arrive: {said}") from error


class Communicator:
    """Messages between this rank and the others of a process group.

    Attributes:
        rank: The number of this process within the group.
        world: How many processes there are.
        device: Where numbers and texts that are sent must lie: on a GPU for NCCL, which knows nothing else.
        bytes_sent: What this rank has sent so far.
        bytes_received: What it has received so far.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "a sharded loss needs a process group: start the program with torchrun and call "
                "torch.distributed.init_process_group first"
            )
        self.group = group if group is not None else dist.group.WORLD
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError(f"this process must belong to the group of the sharded loss, got rank {dist.get_rank()}")
        by_nccl = dist.get_backend(self.group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if by_nccl else torch.device("cpu")
        self.bytes_sent = self.bytes_received = 0

    def exchange(self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]) -> None:
        """Send tensors to ranks and fill others from ranks; nothing is sent to itself, and nothing that is empty."""
        operations = []
        for way, messages in ((dist.isend, outgoing), (dist.irecv, incoming)):
            for peer, tensor in messages:
                if peer == self.rank or not tensor.numel():
                    continue
                operations.append(dist.P2POp(way, tensor, group=self.group, group_peer=peer))
        with lost_rank_errors():
            for work in dist.batch_isend_irecv(operations) if operations else []:
                work.wait()
        self.bytes_sent += sum(tensor.nbytes for peer, tensor in outgoing if peer != self.rank)
        self.bytes_received += sum(tensor.nbytes for peer, tensor in incoming if peer != self.rank)

    def all_gather(self, mine: Tensor, sizes: Sequence[int]) -> Tensor:
        """The rows of all ranks one after the other, (sum of sizes, ...), on every rank."""
        mine = mine.contiguous()
        rows = mine.new_empty(sum(sizes), *mine.shape[1:])
        shards = rows.split(list(sizes))
        self.exchange([(peer, mine) for peer in range(self.world)], list(enumerate(shards)))
        shards[self.rank].copy_(mine)
        return rows

    def reduce_scatter(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """This rank's shard of the sum of all ranks' `rows`, (sizes[rank], ...)."""
        first, *others = self._scattered(rows, sizes)
        total = first.clone()
        for shard in others:
            total += shard
        return total

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum of all ranks' `values`, the same bits on every rank."""
        sizes = shard_sizes(values.numel(), self.world)
        return self.all_gather(self.reduce_scatter(values.flatten(), sizes), sizes).view(values.shape)

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """The largest of all ranks' `values`, element by element."""
        sizes = shard_sizes(values.numel(), self.world)
        shards = self._scattered(values.flatten(), sizes)
        return self.all_gather(torch.stack(shards).amax(dim=0), sizes).view(values.shape)

    def _scattered(self, rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """What each rank has in the rows that are this rank's, by rank."""
        outgoing = rows.contiguous().split(list(sizes))
        mine = outgoing[self.rank]
        incoming = [mine if peer == self.rank else torch.empty_like(mine) for peer in range(self.world)]
        self.exchange(list(enumerate(outgoing)), list(enumerate(incoming)))
        return incoming

    def all_gather_texts(self, mine: str) -> list[str]:
        """One text of each rank, by rank."""
        data = torch.tensor(list(mine.encode()), dtype=torch.uint8, device=self.device)
        sizes = self.all_gather(torch.tensor([len(data)], device=self.device), [1] * self.world).tolist()
        return [bytes(shard.tolist()).decode() for shard in self.all_gather(data, sizes).split(sizes)]

    def all_gather_numbers(self, mine: Sequence[int], error: Exception | None = None) -> list[list[int]]:
        """A few numbers of each rank, by rank; if any rank brings an error, all ranks raise the first one.

        It is where ranks wait for each other: one that raised on its own would leave the others waiting.
        """
        row = torch.tensor([[error is not None, *mine]], dtype=torch.int64, device=self.device)
        table = self.all_gather(row, [1] * self.world).tolist()
        failed = [rank for rank, (is_bad, *_) in enumerate(table) if is_bad]
        if failed:
            self._raise_together(failed, error)
        return [numbers for _, *numbers in table]

    def _raise_together(self, failed: list[int], error: Exception | None) -> None:
        kind = next((index for index, known in enumerate(ERRORS) if isinstance(error, known)), 0)
        name = "" if isinstance(error, ERRORS) and str(error) else f"{type(error).__name__} "
        texts = self.all_gather_texts("" if error is None else f"{kind}{name}{error}".rstrip())
        first = texts[failed[0]]
        others = f" (and {len(failed) - 1} more of {self.world} ranks)" if len(failed) > 1 else ""
        raise ERRORS[int(first[0])](f"rank {failed[0]}: {first[1:]}{others}") from error
