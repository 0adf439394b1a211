"""The field of a global batch and of sharded proxies: the blocks of pairs that this rank computes.

A rank has all samples and its own shard of the proxies. It computes

    its shard of the samples against itself and other shards   (`schedule`; all samples are local, nothing is sent)
    all samples against its own proxies
    its own proxies against themselves, and against the remote shards that `schedule` assigns to it

Energies and forces of a remote shard are sent back to its owner. Each pair is computed once; a ring without symmetry
would compute it twice, and send as many bytes.

Where forces are known before the sums (`Normalization.linear`) one sweep gives both. Otherwise the sums of all anchors
are completed first, those of samples over all ranks and those of proxies at their owner; a second sweep gives forces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pfml.backends.sweep import Counts, sweep_block
from pfml.backends.tile_groups import TileGroup
from pfml.backends.tiled import centered_groups, group_of
from pfml.distributed.communicator import Communicator
from pfml.distributed.schedule import Block, schedule, shard_sizes, shard_slice
from pfml.losses.sample_filter import some_of
from pfml.precision import full_precision
from pfml.superposition import Charges, Field, PairWeights, source_weights

__all__ = ["LocalEnergy", "ShardedEnergy", "ShardedField", "block_counts", "has_effect"]

#: How much a pair of the own class and one of another class count at either end.
BlockCounts = tuple[Counts, Counts]


def block_counts(field: Field, weights: PairWeights) -> tuple[BlockCounts, BlockCounts, BlockCounts]:
    """How much pairs count, by kind: two samples, a sample and a proxy, two proxies."""
    own, other = source_weights(field, weights, sampled=False)

    def counts(at_left: str, at_right: str) -> BlockCounts:
        own_counts, other_counts = (Counts(getattr(of, at_left), getattr(of, at_right)) for of in (own, other))
        return own_counts, other_counts

    return (
        counts("samples_on_samples", "samples_on_samples"),
        counts("proxies_on_samples", "samples_on_proxies"),
        counts("proxies_on_proxies", "proxies_on_proxies"),
    )


def has_effect(counts: BlockCounts) -> bool:
    """Whether a kind of pair has an effect."""
    return any(counts[0] + counts[1])


class ShardedEnergy(NamedTuple):
    """The energy of the whole field, and this rank's shard of its gradient (None unless asked for)."""

    energy: Tensor  # float64, the same on all ranks
    sample_gradient: Tensor | None  # (b, D), of this rank's samples
    proxy_gradient: Tensor | None  # (n, D), of this rank's proxies


@dataclass(eq=False)
class ShardedField:
    """One step's field as this rank sees it.

    Attributes:
        batch_sizes: How many samples of each rank are in the field.
        proxy_sizes: How many proxies each rank holds.
        pairs: How many pairs this rank has computed so far.
        bytes_held: The most that the charges and all that is added up for them have taken so far.
    """

    communicator: Communicator
    field: Field
    weights: PairWeights
    batch_sizes: Sequence[int]
    proxy_sizes: Sequence[int]
    proxies_per_class: int
    pairs: int = 0
    bytes_held: int = 0
    samples: TileGroup = dataclasses.field(init=False)
    proxies: TileGroup = dataclasses.field(init=False)
    of_remote: Tensor = dataclasses.field(init=False)  # sums of remote shards, a term of a linear energy
    on_sphere: bool = dataclasses.field(init=False)  # the proxies

    def trusted_samples(self, samples: Charges, proxies: Charges, keep: Tensor) -> Charges:
        """Those of all ranks' samples that `keep`, (B,), leaves in the field; what it took to choose them is noted."""
        kept = some_of(samples, keep)
        self.batch_sizes = [int(shard.sum()) for shard in keep.cpu().split(list(self.batch_sizes))]
        self.pairs += len(samples.points) * len(proxies.points)
        self.bytes_held = sum(charges.points.nbytes + charges.labels.nbytes for charges in (samples, kept, proxies))
        return kept

    def energy(self, samples: Charges, proxies: Charges, *, with_gradient: bool) -> ShardedEnergy:
        """The energy of all samples and of all ranks' proxies, of which `proxies` are this rank's."""
        with full_precision(samples.points.device):
            self.on_sphere = proxies.on_sphere
            linear = self.field.rule.linear
            self.samples, self.proxies = centered_groups(samples, proxies, gradients=with_gradient and linear)
            self.of_remote = self.samples.sums.new_zeros(())
            self._sweep(return_sums=not linear)
            if linear:
                energy = self.communicator.all_reduce(
                    self.samples.sums.sum() + self.proxies.sums.sum() + self.of_remote
                )
            else:
                energy = self._anchor_energy()
                if with_gradient:
                    self._set_slopes()
                    self._sweep(return_sums=False)
            if not with_gradient:
                return ShardedEnergy(energy, None, None)
            self.proxies.project_gradient()
            return ShardedEnergy(energy, self._sample_gradient(), self.proxies.gradient)

    def _anchor_energy(self) -> Tensor:
        """The energy from the sums of all anchors, which are complete after this."""
        self.samples.sums = self.communicator.all_reduce(self.samples.sums)
        energy = self.field.anchor_energies(*self.samples.sums).sum()
        if self.field.rule.proxies_are_anchors:
            energy = energy + self.communicator.all_reduce(self.field.anchor_energies(*self.proxies.sums).sum())
        return energy

    def _set_slopes(self) -> None:
        """Make both groups ready for a sweep that gives forces."""
        for group, are_anchors in ((self.samples, True), (self.proxies, self.field.rule.proxies_are_anchors)):
            slopes = torch.stack(self.field.anchor_slopes(*group.sums))
            group.slopes = (slopes if are_anchors else torch.zeros_like(slopes)).to(group.points.dtype)
            group.gradient = torch.zeros_like(group.points)

    def _sample_gradient(self) -> Tensor:
        """The gradient of this rank's samples, of which every rank knows a summand."""
        assert self.samples.gradient is not None
        own = self.samples.part(shard_slice(self.batch_sizes, self.communicator.rank))
        self._note_held(own.points.nbytes * self.communicator.world)
        own.gradient = self.communicator.reduce_scatter(self.samples.gradient, self.batch_sizes)
        own.project_gradient()
        return own.gradient

    def _sweep(self, *, return_sums: bool) -> None:
        """Add the pairs of this rank to the groups, and what other ranks computed for its proxies."""
        of_samples, of_mixed, of_proxies = block_counts(self.field, self.weights)
        sizes = shard_sizes(len(self.samples), self.communicator.world)
        band = self.samples.part(shard_slice(sizes, self.communicator.rank))
        self._add_block(band, band, of_samples)
        for block in schedule(sizes, self.communicator.rank):
            remote = self.samples.part(shard_slice(sizes, block.remote)).part(block.remote_rows)
            self._add_block(band.part(block.own_rows), remote, of_samples)
        self._add_block(self.samples, self.proxies, of_mixed)
        self._add_block(self.proxies, self.proxies, of_proxies)
        self._note_held(0)
        if has_effect(of_proxies):
            for shift in range(1, self.communicator.world // 2 + 1):
                self._compute_remote_block(shift, of_proxies, return_sums)

    def _compute_remote_block(self, shift: int, counts: BlockCounts, return_sums: bool) -> None:
        """Compute a block against a remote shard, while another rank computes one against this rank's."""
        away = (self.communicator.rank - shift) % self.communicator.world
        here = schedule(self.proxy_sizes, self.communicator.rank)[shift - 1]
        rows = schedule(self.proxy_sizes, away)[shift - 1].remote_rows  # those of this rank that go away
        remote = self._remote_shard(here, away, rows)
        self._add_block(self.proxies.part(here.own_rows), remote, counts)
        self.of_remote += remote.sums.sum()
        returned: list[tuple[Tensor, Tensor, Tensor]] = []  # where it is added, what is received, what is sent
        if return_sums:
            mine = self.proxies.sums[:, rows]
            returned.append((mine, torch.empty_like(mine, memory_format=torch.contiguous_format), remote.sums))
        if self.proxies.gradient is not None and remote.gradient is not None:
            forces = self.proxies.gradient[rows]
            returned.append((forces, torch.empty_like(forces), remote.gradient))
        self._note_held(_group_bytes(remote) + sum(received.nbytes for _, received, _ in returned))
        self.communicator.exchange(
            [(here.remote, sent) for _, _, sent in returned], [(away, received) for _, received, _ in returned]
        )
        for total, received, _ in returned:
            total += received

    def _remote_shard(self, here: Block, away: int, rows: slice) -> TileGroup:
        """The proxies of another rank, while `rows` of this one are sent to the rank `away`."""
        first = shard_slice(self.proxy_sizes, here.remote).start
        coming = torch.arange(
            first + here.remote_rows.start, first + here.remote_rows.stop, device=self.samples.labels.device
        )
        points = self.proxies.points.new_empty(len(coming), self.proxies.points.shape[1])
        slopes = self.proxies.slopes.new_ones(2, len(coming))
        outgoing, incoming = [(away, self.proxies.points[rows])], [(here.remote, points)]
        if not self.field.rule.linear and self.proxies.gradient is not None:
            outgoing.append((away, self.proxies.slopes[:, rows].contiguous()))
            incoming.append((here.remote, slopes))
        self.communicator.exchange(outgoing, incoming)
        labels = coming // max(self.proxies_per_class, 1)
        remote = group_of(Charges(points, labels, self.on_sphere), gradient=self.proxies.gradient is not None)
        remote.center, remote.slopes = self.proxies.center, slopes
        remote.prepare()
        return remote

    def _add_block(self, left: TileGroup, right: TileGroup, counts: BlockCounts) -> None:
        if not has_effect(counts):
            return
        self.pairs += len(left) * (len(left) - 1) // 2 if left is right else len(left) * len(right)
        sweep_block(left, right, self.field, *counts)

    def _note_held(self, besides: int) -> None:
        held = _group_bytes(self.samples) + _group_bytes(self.proxies) + besides
        self.bytes_held = max(self.bytes_held, held)


def _group_bytes(group: TileGroup) -> int:
    """What a group takes."""
    tensors = (group.points, group.labels, group.inverse_norms, group.squared_norms, group.sums, group.slopes)
    return sum(tensor.nbytes for tensor in (*tensors, group.gradient, group.prepared) if tensor is not None)


class LocalEnergy(torch.autograd.Function):
    """An energy whose gradient is already here when it is asked for.

    Of a function that computes a `ShardedEnergy`, a factor of the samples' gradient, and what the gradients are of.
    """

    @staticmethod
    def forward(ctx: Any, compute: Any, factor: float, embeddings: Tensor, proxies: Tensor) -> Tensor:
        energy, of_samples, of_proxies = compute()
        ctx.factor = factor
        ctx.save_for_backward(of_samples, of_proxies)
        return energy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[None, None, Tensor, Tensor]:
        """The kept gradients, scaled; only once."""
        of_samples, of_proxies = ctx.saved_tensors
        return None, None, (scale * ctx.factor) * of_samples, scale * of_proxies
