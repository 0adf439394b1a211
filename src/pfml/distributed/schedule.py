"""Who computes which pairs: every two parts meet once, at one of their owners.

The proxies are cut into as many parts as there are ranks, and so are the samples of the global batch. Part r is at
home on rank r. In round k the rank r is the host of the part of rank r + k, and its own part is a guest of rank r - k;
after world / 2 rounds every two parts have met. In the last round of an even world two ranks would compute the same
block: the lower one takes the first half of its rows, the upper one the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Meeting", "meetings", "num_pairs", "part_sizes", "part_slice"]


class Meeting(NamedTuple):
    """A block of pairs: `host_rows` of the part of rank `host`, against `guest_rows` of the part of rank `guest`."""

    host: int
    guest: int
    host_rows: slice
    guest_rows: slice


def part_sizes(total: int, world: int) -> list[int]:
    """The sizes of `world` parts of `total` rows; they differ by one at most, the first ones are the larger ones."""
    least, larger = divmod(total, world)
    return [least + (rank < larger) for rank in range(world)]


def part_slice(sizes: Sequence[int], rank: int) -> slice:
    """Where the rows of `rank` lie, if the ranks' rows are laid one after the other."""
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def meetings(sizes: Sequence[int], host: int) -> list[Meeting]:
    """The meetings of different parts at `host`, one for each round."""
    world = len(sizes)
    return [
        _meeting(sizes, host, (host + shift) % world, twice=2 * shift == world) for shift in range(1, world // 2 + 1)
    ]


def _meeting(sizes: Sequence[int], host: int, guest: int, twice: bool) -> Meeting:
    half = sizes[min(host, guest)] // 2
    host_rows, guest_rows = slice(0, sizes[host]), slice(0, sizes[guest])
    if twice and host < guest:
        host_rows = slice(0, half)
    elif twice:
        guest_rows = slice(half, sizes[guest])
    return Meeting(host, guest, host_rows, guest_rows)


def num_pairs(sizes: Sequence[int], host: int) -> int:
    """How many pairs of one kind are computed at `host`: those of its own part, and those of its guests."""
    own = sizes[host] * (sizes[host] - 1) // 2
    return own + sum(length(m.host_rows) * length(m.guest_rows) for m in meetings(sizes, host))


def length(rows: slice) -> int:
    """How many rows a slice with both ends has."""
    return int(rows.stop - rows.start)
