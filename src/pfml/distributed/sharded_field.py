"""The field of a global batch and of proxies that are spread over ranks: each rank's share of the work.

A rank has all samples, and its own part of the proxies. It computes

    its part of the samples against itself and other parts   (`meetings`; all samples are here, nothing is sent)
    all samples against its own proxies
    its own proxies against themselves, and against the parts that are its guests

A guest is sent its energies and forces home: each pair is computed once, where a ring without symmetry would compute it
twice, and what comes back is no more than what such a ring would have to send on.

Where forces are known before the sums (`Normalization.linear`) one sweep gives both. Otherwise the sums of all anchors
are completed first: those of samples are added over ranks, those of proxies come home; a second sweep gives the forces.
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
from pfml.distributed.peers import Peers
from pfml.distributed.schedule import Meeting, meetings, part_sizes, part_slice
from pfml.losses.sample_filter import some_of
from pfml.precision import full_precision
from pfml.superposition import Charges, Field, PairWeights, source_weights

__all__ = ["LocalEnergy", "ShardedEnergy", "ShardedField", "block_counts", "counts_at_all"]

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


def counts_at_all(counts: BlockCounts) -> bool:
    """Whether a kind of pair has an effect."""
    return any(counts[0] + counts[1])


class ShardedEnergy(NamedTuple):
    """The energy of the whole field, and this rank's part of its gradient (None unless asked for)."""

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

    peers: Peers
    field: Field
    weights: PairWeights
    batch_sizes: Sequence[int]
    proxy_sizes: Sequence[int]
    proxies_per_class: int
    pairs: int = 0
    bytes_held: int = 0
    samples: TileGroup = dataclasses.field(init=False)
    proxies: TileGroup = dataclasses.field(init=False)
    of_guests: Tensor = dataclasses.field(init=False)  # what guests have summed here: their part of a linear energy
    on_sphere: bool = dataclasses.field(init=False)  # the proxies

    def trusted_samples(self, samples: Charges, proxies: Charges, keep: Tensor) -> Charges:
        """Those of all ranks' samples that `keep`, (B,), leaves in the field; what it took to choose them is noted."""
        kept = some_of(samples, keep)
        self.batch_sizes = [int(part.sum()) for part in keep.cpu().split(list(self.batch_sizes))]
        self.pairs += len(samples.points) * len(proxies.points)
        self.bytes_held = sum(charges.points.nbytes + charges.labels.nbytes for charges in (samples, kept, proxies))
        return kept

    def energy(self, samples: Charges, proxies: Charges, *, with_gradient: bool) -> ShardedEnergy:
        """The energy of all samples and of all ranks' proxies, of which `proxies` are this rank's."""
        with full_precision(samples.points.device):
            self.on_sphere = proxies.on_sphere
            linear = self.field.rule.linear
            self.samples, self.proxies = centered_groups(samples, proxies, gradients=with_gradient and linear)
            self.of_guests = self.samples.sums.new_zeros(())
            self._sweep(sums_come_home=not linear)
            if linear:
                energy = self.peers.summed(self.samples.sums.sum() + self.proxies.sums.sum() + self.of_guests)
            else:
                energy = self._anchor_energy()
                if with_gradient:
                    self._set_slopes()
                    self._sweep(sums_come_home=False)
            if not with_gradient:
                return ShardedEnergy(energy, None, None)
            self.proxies.project_gradient()
            return ShardedEnergy(energy, self._sample_gradient(), self.proxies.gradient)

    def _anchor_energy(self) -> Tensor:
        """The energy from the sums of all anchors, which are complete after this."""
        self.samples.sums = self.peers.summed(self.samples.sums)
        energy = self.field.anchor_energies(*self.samples.sums).sum()
        if self.field.rule.proxies_are_anchors:
            energy = energy + self.peers.summed(self.field.anchor_energies(*self.proxies.sums).sum())
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
        home = self.samples.part(part_slice(self.batch_sizes, self.peers.rank))
        self._note_held(home.points.nbytes * self.peers.world)
        home.gradient = self.peers.scattered_sum(self.samples.gradient, self.batch_sizes)
        home.project_gradient()
        return home.gradient

    def _sweep(self, *, sums_come_home: bool) -> None:
        """Add this rank's share of all pairs to the groups, and what other ranks computed for its proxies."""
        of_samples, of_mixed, of_proxies = block_counts(self.field, self.weights)
        sizes = part_sizes(len(self.samples), self.peers.world)
        band = self.samples.part(part_slice(sizes, self.peers.rank))
        self._add_block(band, band, of_samples)
        for meeting in meetings(sizes, self.peers.rank):
            guests = self.samples.part(part_slice(sizes, meeting.guest)).part(meeting.guest_rows)
            self._add_block(band.part(meeting.host_rows), guests, of_samples)
        self._add_block(self.samples, self.proxies, of_mixed)
        self._add_block(self.proxies, self.proxies, of_proxies)
        self._note_held(0)
        if counts_at_all(of_proxies):
            for shift in range(1, self.peers.world // 2 + 1):
                self._hold_meeting(shift, of_proxies, sums_come_home)

    def _hold_meeting(self, shift: int, counts: BlockCounts, sums_come_home: bool) -> None:
        """Be the host of another rank's proxies and, on the other side, a guest."""
        away = (self.peers.rank - shift) % self.peers.world
        here = meetings(self.proxy_sizes, self.peers.rank)[shift - 1]
        rows = meetings(self.proxy_sizes, away)[shift - 1].guest_rows  # those of this rank that go away
        guest = self._received_guest(here, away, rows)
        self._add_block(self.proxies.part(here.host_rows), guest, counts)
        self.of_guests += guest.sums.sum()
        arriving: list[tuple[Tensor, Tensor, Tensor]] = []  # where it is added, what has come, what is sent
        if sums_come_home:
            mine = self.proxies.sums[:, rows]
            arriving.append((mine, torch.empty_like(mine, memory_format=torch.contiguous_format), guest.sums))
        if self.proxies.gradient is not None and guest.gradient is not None:
            forces = self.proxies.gradient[rows]
            arriving.append((forces, torch.empty_like(forces), guest.gradient))
        self._note_held(_group_bytes(guest) + sum(come.nbytes for _, come, _ in arriving))
        self.peers.exchange([(here.guest, sent) for _, _, sent in arriving], [(away, come) for _, come, _ in arriving])
        for total, come, _ in arriving:
            total += come

    def _received_guest(self, here: Meeting, away: int, rows: slice) -> TileGroup:
        """The proxies of another rank, while `rows` of this one go to the rank `away`."""
        first = part_slice(self.proxy_sizes, here.guest).start
        coming = torch.arange(
            first + here.guest_rows.start, first + here.guest_rows.stop, device=self.samples.labels.device
        )
        points = self.proxies.points.new_empty(len(coming), self.proxies.points.shape[1])
        slopes = self.proxies.slopes.new_ones(2, len(coming))
        outgoing, incoming = [(away, self.proxies.points[rows])], [(here.guest, points)]
        if not self.field.rule.linear and self.proxies.gradient is not None:
            outgoing.append((away, self.proxies.slopes[:, rows].contiguous()))
            incoming.append((here.guest, slopes))
        self.peers.exchange(outgoing, incoming)
        labels = coming // max(self.proxies_per_class, 1)
        guest = group_of(Charges(points, labels, self.on_sphere), gradient=self.proxies.gradient is not None)
        guest.center, guest.slopes = self.proxies.center, slopes
        guest.prepare()
        return guest

    def _add_block(self, left: TileGroup, right: TileGroup, counts: BlockCounts) -> None:
        if not counts_at_all(counts):
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
        of_samples, of_proxies = ctx.saved_tensors
        return None, None, (scale * ctx.factor) * of_samples, scale * of_proxies
