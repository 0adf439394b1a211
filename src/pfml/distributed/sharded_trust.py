"""Which of all ranks' samples fit their labels; each rank has a part of the proxies (see `pfml.losses.sample_filter`).

The proxies are laid class by class, so that only the ends of a rank's part may cut a class:

    rank 0    a a a b b      whole: a,   tail: b
    rank 1    b c c c d      head: b,    whole: c,   tail: d
    rank 2    d d e e e      head: d,    whole: e

A class is at home on the rank that has its first proxy. What others have of it, the head of their part, is sent there
as its strength at every sample: B numbers. Then every class is whole at its home, and the strengths of a sample's own
class and of the strongest other one are the largest that any rank has found: 2 B numbers. There is never a message with
a number for each sample and each class.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pfml.distributed.peers import Peers
from pfml.distributed.schedule import part_slice
from pfml.field import DecayLaw
from pfml.losses.sample_filter import fit_of, own_and_strongest, proxy_strengths, some_of, strengths
from pfml.superposition import Charges

__all__ = ["Cuts", "cuts", "sharded_fit"]


class Cuts(NamedTuple):
    """How the ends of a rank's part cut the classes."""

    head: int  # proxies of a class that is at home elsewhere, the first ones of the part
    tail: int  # proxies of a class that is at home here and goes on elsewhere, the last ones
    home: int | None  # the rank where the class of the head is at home
    guests: list[int]  # the ranks that have the rest of the tail's class


def cuts(proxy_sizes: Sequence[int], per_class: int, rank: int) -> Cuts:
    """The cuts of the part of `rank`, if each rank has so many proxies of a whole with `per_class` of each class."""
    homes = [_home(proxy_sizes, per_class, other) for other in range(len(proxy_sizes))]
    rows = part_slice(proxy_sizes, rank)
    head = min(-rows.start % per_class, proxy_sizes[rank])
    tail = (proxy_sizes[rank] - head) % per_class
    return Cuts(head, tail, homes[rank], [other for other, home in enumerate(homes) if home == rank])


def _home(proxy_sizes: Sequence[int], per_class: int, rank: int) -> int | None:
    """Where the class is at home with which the part of `rank` begins; None if that is here."""
    first = part_slice(proxy_sizes, rank).start
    if first % per_class == 0 or proxy_sizes[rank] == 0:
        return None
    begins = first - first % per_class
    return next(other for other, end in enumerate(accumulate(proxy_sizes)) if end > begins)


@torch.no_grad()
def sharded_fit(
    peers: Peers, samples: Charges, proxies: Charges, proxy_sizes: Sequence[int], per_class: int, law: DecayLaw
) -> Tensor:
    """`pfml.losses.sample_filter.fit` of all ranks' samples and proxies, (B,), the same bits on every rank.

    Args:
        peers: All ranks, which call this together.
        samples: Those of all ranks.
        proxies: This rank's.
        proxy_sizes: How many proxies each rank has.
        per_class: How many proxies a class has.
        law: What the strength of a class follows from.
    """
    cut = cuts(proxy_sizes, per_class, peers.rank)
    end = len(proxies.points) - cut.tail
    head, whole, tail = (
        some_of(proxies, rows) for rows in (slice(0, cut.head), slice(cut.head, end), slice(end, None))
    )
    felt = strengths(samples, whole, per_class, law)
    of_head, of_tail = (proxy_strengths(samples, piece, law).sum(dim=1) for piece in (head, tail))

    of_guests = [torch.empty_like(of_tail) for _ in cut.guests]
    going_home = [] if cut.home is None else [(cut.home, of_head)]
    peers.exchange(going_home, list(zip(cut.guests, of_guests, strict=True)))
    for more in of_guests:
        of_tail += more
    if cut.tail:
        felt = felt.maximum(own_and_strongest(of_tail[:, None], samples.labels, tail.labels[:1]))
    return fit_of(peers.largest(felt))
