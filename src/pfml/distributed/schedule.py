"""Which rank computes which block of pairs: every two shards once, on the rank that owns one of them.

Proxies are split into one shard per rank, and so are the samples of the global batch. Rank r owns shard r. In round k
rank r computes the block of its own shard against the remote shard of rank r + k; after world / 2 rounds every two
shards have been paired. In the last round of an even world size two ranks would compute the same block: the lower one
takes the first half of its rows, the upper one the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Block", "length", "num_pairs", "schedule", "shard_sizes", "shard_slice"]


class Block(NamedTuple):
    """A block of pairs: `own_rows` of the shard of rank `owner` against `remote_rows` of that of rank `remote`."""

    owner: int
    remote: int
    own_rows: slice
    remote_rows: slice


def shard_sizes(total: int, world: int) -> list[int]:
    """The sizes of `world` shards of `total` rows; they differ by one at most, larger ones first."""
    least, larger = divmod(total, world)
    return [least + (rank < larger) for rank in range(world)]


def shard_slice(sizes: Sequence[int], rank: int) -> slice:
    """The rows of `rank` in the concatenation of all shards."""
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def schedule(sizes: Sequence[int], owner: int) -> list[Block]:
    """The blocks of different shards that rank `owner` computes, one for each round."""
    world = len(sizes)
    return [
        _block(sizes, owner, (owner + shift) % world, twice=2 * shift == world) for shift in range(1, world // 2 + 1)
    ]


def _block(sizes: Sequence[int], owner: int, remote: int, twice: bool) -> Block:
    half = sizes[min(owner, remote)] // 2
    own_rows, remote_rows = slice(0, sizes[owner]), slice(0, sizes[remote])
    if twice and owner < remote:
        own_rows = slice(0, half)
    elif twice:
        remote_rows = slice(half, sizes[remote])
    return Block(owner, remote, own_rows, remote_rows)


def num_pairs(sizes: Sequence[int], owner: int) -> int:
    """The number of pairs of one kind that rank `owner` computes: within its own shard and against remote shards."""
    own = sizes[owner] * (sizes[owner] - 1) // 2
    return own + sum(length(block.own_rows) * length(block.remote_rows) for block in schedule(sizes, owner))


def length(rows: slice) -> int:
    """The number of rows of a slice with both ends."""
    return int(rows.stop - rows.start)
