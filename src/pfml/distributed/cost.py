"""What one forward pass of a sharded loss costs a rank: pairs, bytes sent and received, bytes held.

A model, and no measurement: it follows from the sizes alone, so that it also tells about machines that are not there.
`ShardedPotentialFieldLoss.last_step` has the measured numbers; tests compare the two. docs/SCALING.md has the formulas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pfml.backends.tile_groups import PREPARED_BYTES
from pfml.distributed.schedule import length, num_pairs, schedule, shard_sizes
from pfml.distributed.sharded_field import block_counts, has_effect
from pfml.distributed.sharded_filter import cuts
from pfml.superposition import Field, PairWeights

__all__ = ["RECORD_NUMBERS", "ShardedProblem", "StepCost", "step_cost"]

#: int64 numbers by which ranks agree before a step: failed, batch size, type, gradient wanted, digest.
RECORD_NUMBERS = 5


class StepCost(NamedTuple):
    """What a rank computes, sends and holds in one forward pass; the backward pass does none of it."""

    pairs: int
    bytes_sent: int
    bytes_received: int
    bytes_held: int


@dataclass(frozen=True)
class ShardedProblem:
    """The sizes of a sharded loss and of a global batch.

    Args:
        batch_sizes: How many samples each rank brings; there are as many ranks as numbers.
        num_classes: C.
        proxies_per_class: M.
        embedding_dim: D.
        field: The law and its normalization.
        weights: How much pairs count; a kind that counts nothing is not computed.
        number_bytes: 4 for float32, 8 for float64.
        with_gradient: False for a forward pass that nobody will differentiate.
        samples_on_sphere, proxies_on_sphere: Whether they are normalized by the loss.
        trusted_sizes: How many samples of each rank are trusted, in training mode of a loss with `trust`, which the
            values decide; None where all labels count.
    """

    batch_sizes: Sequence[int]
    num_classes: int
    proxies_per_class: int
    embedding_dim: int
    field: Field
    weights: PairWeights = dataclasses.field(default_factory=PairWeights)
    number_bytes: int = 4
    with_gradient: bool = True
    samples_on_sphere: bool = True
    proxies_on_sphere: bool = True
    trusted_sizes: Sequence[int] | None = None

    @property
    def field_sizes(self) -> Sequence[int]:
        """How many samples of each rank are in the field."""
        return self.batch_sizes if self.trusted_sizes is None else self.trusted_sizes

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return len(self.batch_sizes)

    @property
    def proxy_sizes(self) -> list[int]:
        """How many proxies each rank holds."""
        return shard_sizes(self.num_classes * self.proxies_per_class, self.world)

    @property
    def sweeps(self) -> int:
        """How many passes over all pairs a step makes."""
        return 1 + (self.with_gradient and not self.field.rule.linear)


def step_cost(problem: ShardedProblem, rank: int) -> StepCost:
    """What the forward pass costs `rank`."""
    sent, received = _traffic(problem, rank)
    return StepCost(_pairs(problem, rank), sent, received, _held(problem, rank))


def _pairs(problem: ShardedProblem, rank: int) -> int:
    num_samples, proxy_sizes = sum(problem.field_sizes), problem.proxy_sizes
    for_trust = 0 if problem.trusted_sizes is None else sum(problem.batch_sizes) * proxy_sizes[rank]
    of_samples, of_mixed, of_proxies = block_counts(problem.field, problem.weights)
    once = (
        has_effect(of_samples) * num_pairs(shard_sizes(num_samples, problem.world), rank)
        + has_effect(of_mixed) * num_samples * proxy_sizes[rank]
        + has_effect(of_proxies) * num_pairs(proxy_sizes, rank)
    )
    return problem.sweeps * once + for_trust


def _visits(problem: ShardedProblem, rank: int) -> list[tuple[int, int]]:
    """For each round, how many of the rank's proxies are sent away, and how many remote ones it receives."""
    if not has_effect(block_counts(problem.field, problem.weights)[2]):
        return []
    sizes, world = problem.proxy_sizes, problem.world
    return [
        (length(schedule(sizes, (rank - shift) % world)[shift - 1].remote_rows), length(here.remote_rows))
        for shift, here in enumerate(schedule(sizes, rank), start=1)
    ]


def _traffic(problem: ShardedProblem, rank: int) -> tuple[int, int]:
    """Bytes sent and received."""
    others, mine, total = problem.world - 1, problem.batch_sizes[rank], sum(problem.batch_sizes)
    row = problem.embedding_dim * problem.number_bytes  # a point, or a force
    to_each = 8 * RECORD_NUMBERS + mine * (8 + row)  # labels are int64
    sent, received = others * to_each, others * 8 * RECORD_NUMBERS + (total - mine) * (8 + row)
    to_owner, from_others = _traffic_for_trust(problem, rank)
    sent, received = sent + to_owner, received + from_others
    mine, total = problem.field_sizes[rank], sum(problem.field_sizes)
    both = _over_ranks(1, problem.world, rank)
    rule, forces = problem.field.rule, problem.with_gradient
    if rule.linear:
        sweeps = [(row, row if forces else 0)]  # bytes of a remote proxy, and of what is returned for it
    else:
        sweeps = [(row, 16), (row + 2 * problem.number_bytes, row)][: problem.sweeps]  # sums are two float64
        both = _over_ranks(2 * total, problem.world, rank) + (both if rule.proxies_are_anchors else 0)
    for brought, returned in sweeps:
        for away, remote in _visits(problem, rank):
            sent += away * brought + remote * returned
            received += remote * brought + away * returned
    if forces:
        sent, received = sent + (total - mine) * row, received + others * mine * row
    return sent + both, received + both


def _traffic_for_trust(problem: ShardedProblem, rank: int) -> tuple[int, int]:
    """Bytes sent and received to filter the samples: split classes to their owner, then a maximum over ranks."""
    if problem.trusted_sizes is None:
        return 0, 0
    cut, strengths = cuts(problem.proxy_sizes, problem.proxies_per_class, rank), 8 * sum(problem.batch_sizes)
    both = _over_ranks(2 * sum(problem.batch_sizes), problem.world, rank)
    return both + strengths * (cut.owner is not None), both + strengths * len(cut.others)


def _over_ranks(numbers: int, world: int, rank: int) -> int:
    """Bytes sent, and as many received, to add up `numbers` float64 over ranks, or to find the largest ones."""
    mine = shard_sizes(numbers, world)[rank]
    return 8 * (numbers - mine + (world - 1) * mine)


def _held(problem: ShardedProblem, rank: int) -> int:
    """The most bytes of charges and of what is added up for them, at any time."""
    row = problem.embedding_dim * problem.number_bytes
    mine, linear = problem.field_sizes[rank], problem.field.rule.linear
    in_choice = (*problem.batch_sizes, *problem.field_sizes, problem.proxy_sizes[rank])  # two copies of those trusted
    most = 0 if problem.trusted_sizes is None else sum(in_choice) * (row + 8)
    for sweep in range(problem.sweeps):
        forces = problem.with_gradient and (linear or sweep == 1)
        samples = _group_bytes(problem, sum(problem.field_sizes), problem.samples_on_sphere, forces)
        proxies = _group_bytes(problem, problem.proxy_sizes[rank], problem.proxies_on_sphere, forces)
        returned = (0 if linear or sweep == 1 else 16) + forces * row
        remote = [
            _group_bytes(problem, remote, problem.proxies_on_sphere, forces) + away * returned
            for away, remote in _visits(problem, rank)
        ]
        summands = mine * row * problem.world if forces else 0  # of the samples' gradient, one of each rank
        most = max(most, samples + proxies + max([*remote, summands]))
    return most


def _group_bytes(problem: ShardedProblem, rows: int, on_sphere: bool, forces: bool) -> int:
    """Bytes of one `TileGroup`: points, a centered copy if it is small, forces; label, norms, sums and slopes."""
    row = problem.embedding_dim * problem.number_bytes
    copies = 1 + (rows * row <= PREPARED_BYTES) + forces
    return rows * (copies * row + 8 + 8 + 16 + 2 * problem.number_bytes + 8 * on_sphere)
