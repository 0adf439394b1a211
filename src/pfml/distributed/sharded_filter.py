"""Which of all ranks' samples fit their labels; each rank has a shard of the proxies (see `pfml.losses.sample_filter`).

Proxies are ordered by class, so only the ends of a shard may split a class:

    rank 0    a a a b b      whole: a,   tail: b
    rank 1    b c c c d      head: b,    whole: c,   tail: d
    rank 2    d d e e e      head: d,    whole: e

The owner of a class is the rank that has its first proxy. Other ranks send it what they have of that class, the head
of their shard, as its strength at every sample: B numbers. Then every class is whole at its owner. The strengths of a
sample's own class and of its strongest other class are maxima over ranks: 2 B numbers. No message has a number for each
sample and each class.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pfml.distributed.communicator import Communicator
from pfml.distributed.schedule import shard_slice
from pfml.field import DecayLaw
from pfml.losses.sample_filter import fit_of, own_and_strongest, proxy_strengths, some_of, strengths
from pfml.superposition import Charges

__all__ = ["Cuts", "cuts", "sharded_fit"]


class Cuts(NamedTuple):
    """How the ends of a shard split the classes."""

    head: int  # proxies of a class that another rank owns, the first ones of the shard
    tail: int  # proxies of a class that this rank owns and that continues elsewhere, the last ones
    owner: int | None  # the rank that owns the class of the head
    others: list[int]  # the ranks that have the rest of the tail's class


def cuts(proxy_sizes: Sequence[int], per_class: int, rank: int) -> Cuts:
    """The cuts of the shard of `rank`; `proxy_sizes` are the shards' sizes, `per_class` the proxies of a class."""
    owners = [_owner(proxy_sizes, per_class, other) for other in range(len(proxy_sizes))]
    rows = shard_slice(proxy_sizes, rank)
    head = min(-rows.start % per_class, proxy_sizes[rank])
    tail = (proxy_sizes[rank] - head) % per_class
    return Cuts(head, tail, owners[rank], [other for other, owner in enumerate(owners) if owner == rank])


def _owner(proxy_sizes: Sequence[int], per_class: int, rank: int) -> int | None:
    """The owner of the class that the shard of `rank` begins with; None if that is `rank` itself."""
    first = shard_slice(proxy_sizes, rank).start
    if first % per_class == 0 or proxy_sizes[rank] == 0:
        return None
    begins = first - first % per_class
    return next(other for other, end in enumerate(accumulate(proxy_sizes)) if end > begins)


@torch.no_grad()
def sharded_fit(
    communicator: Communicator,
    samples: Charges,
    proxies: Charges,
    proxy_sizes: Sequence[int],
    per_class: int,
    law: DecayLaw,
) -> Tensor:
    """`pfml.losses.sample_filter.fit` of all ranks' samples and proxies, (B,), the same bits on every rank.

    Args:
        communicator: All ranks, which call this together.
        samples: Those of all ranks.
        proxies: This rank's.
        proxy_sizes: How many proxies each rank has.
        per_class: How many proxies a class has.
        law: What the strength of a class follows from.
    """
    cut = cuts(proxy_sizes, per_class, communicator.rank)
    end = len(proxies.points) - cut.tail
    head, whole, tail = (
        some_of(proxies, rows) for rows in (slice(0, cut.head), slice(cut.head, end), slice(end, None))
    )
    felt = strengths(samples, whole, per_class, law)
    of_head, of_tail = (proxy_strengths(samples, piece, law).sum(dim=1) for piece in (head, tail))

    of_remote = [torch.empty_like(of_tail) for _ in cut.others]
    to_owner = [] if cut.owner is None else [(cut.owner, of_head)]
    communicator.exchange(to_owner, list(zip(cut.others, of_remote, strict=True)))
    for more in of_remote:
        of_tail += more
    if cut.tail:
        felt = felt.maximum(own_and_strongest(of_tail[:, None], samples.labels, tail.labels[:1]))
    return fit_of(communicator.all_reduce_max(felt))
