"""The potential field loss over the ranks of a process group: a global batch, a part of the proxies on each rank."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn
from torch.autograd.function import once_differentiable

from pfml.distributed.cost import StepCost
from pfml.distributed.meetings import part_sizes, part_slice
from pfml.distributed.peers import Peers
from pfml.distributed.placement import normal_rows, sample_rows
from pfml.distributed.sharded_field import ShardedEnergy, ShardedField
from pfml.distributed.shards import check_shard, checked_batch, extra_state, require_equal
from pfml.field import DecayLaw
from pfml.losses.potential_field import REDUCTIONS, PotentialFieldLoss
from pfml.sphere import unit
from pfml.superposition import Charges

__all__ = ["ShardedPotentialFieldLoss"]

#: What becomes of the network's gradients -> the factor of the embeddings' gradient, for a world of that size.
NETWORK_GRADIENTS = {"averaged": lambda world: world, "summed": lambda world: 1}
_TYPES = (torch.float32, torch.float64)


class ShardedPotentialFieldLoss(nn.Module):
    """`PotentialFieldLoss` of the global batch: each rank brings its samples and holds a part of the proxies.

    Value and gradients are those of a single process with all samples and all proxies. Every rank gets the same value.
    The parameter of a rank, (n, D), is the rows `rows` of the flattened proxies, (C * M, D); they start where those of
    a `PotentialFieldLoss` start, if all ranks have the same seed. All communication happens in `forward`, which all
    ranks must call together; batches may differ in size, and be empty. The backward pass is local.

    **Gradients under DistributedDataParallel.** The gradient of the network is the sum over ranks of what their
    embeddings contribute. DDP divides that sum by the number of ranks. So with `network_gradients="averaged"`, the
    default, the gradient of the embeddings is d loss / d embeddings times the number of ranks, and what DDP leaves in
    the network is the gradient of a single process. Choose "summed" if you add gradients up yourself: then it is
    d loss / d embeddings. The gradient of the proxies is d loss / d proxies in either case: wrap the network in DDP,
    never this loss, and give its parameters to the optimiser of their own rank. A factor on the loss must be the same
    on all ranks.

    What goes wrong on one rank (a label out of range, NaN, a wrong shape, other hyper-parameters) is raised on all of
    them as the same error. A rank that dies is noticed by the others when the timeout of the process group ends.

    Args:
        num_classes, ..., normalize_embeddings: As in `PotentialFieldLoss`; equal on all ranks. Its `proxy_sample`
            and `trust` are missing: no rank has all proxies, and every pair counts.
        backend: "auto" or "tiled"; the other backends compute no blocks.
        network_gradients: "averaged" or "summed", see above.
        group: The process group; None for the default one.

    Attributes:
        rows: The rows of the flattened proxies that this rank holds.
        last_step: What the last forward pass computed, sent, received and held; None before the first.

    Example:
        >>> loss = ShardedPotentialFieldLoss(num_classes=500_000, embedding_dim=512, proxies_per_class=2)
        >>> network = DistributedDataParallel(network)
        >>> optimizer = torch.optim.AdamW([{"params": network.parameters(), "lr": 1e-4}, *loss.param_groups(lr=1e-2)])
        >>> loss(network(images), labels).backward()
    """

    proxies: nn.Parameter  # (n, D), this rank's
    proxy_labels: Tensor  # (n,)

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        proxies_per_class: int = 15,
        delta: float = 0.2,
        alpha: float = 3.0,
        delta_rep: float | None = None,
        potential: str | DecayLaw = "pfml",
        normalization: str = "none",
        reduction: str = "sum",
        proxy_init: str = "normal",
        proxy_init_norm: float = 3.0,
        proxy_space: str = "normalized",
        proxy_attraction: bool | float = True,
        proxy_repulsion: bool | float = True,
        sample_sample: bool | float = True,
        normalize_embeddings: bool = True,
        backend: str = "auto",
        network_gradients: str = "averaged",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.peers = Peers(group)
        error = None
        try:
            # without proxies it takes no memory: it checks the options, and knows what follows from them
            whole = PotentialFieldLoss(
                num_classes,
                embedding_dim,
                proxies_per_class=0,
                delta=delta,
                alpha=alpha,
                delta_rep=delta_rep,
                potential=potential,
                normalization=normalization,
                reduction=reduction,
                proxy_init=proxy_init,
                proxy_init_norm=proxy_init_norm,
                proxy_space=proxy_space,
                proxy_attraction=proxy_attraction,
                proxy_repulsion=proxy_repulsion,
                sample_sample=sample_sample,
                normalize_embeddings=normalize_embeddings,
                backend=backend,
            )
            _check_options(proxies_per_class, backend, network_gradients)
        except Exception as caught:  # whatever it is, the other ranks must not wait for this one
            error = caught
        self.peers.records([], error)
        self._set_options(whole, proxies_per_class, network_gradients)
        self.digest = require_equal(self.peers, self._settings())
        self.proxies = nn.Parameter(torch.empty(self.proxy_sizes[self.peers.rank], embedding_dim))
        labels = torch.arange(self.rows.start, self.rows.stop) // max(proxies_per_class, 1)
        self.register_buffer("proxy_labels", labels, persistent=False)
        self._set_proxies(unit(normal_rows(sum(self.proxy_sizes), embedding_dim, self.rows)))
        self.register_load_state_dict_pre_hook(check_shard)

    def _set_options(self, whole: PotentialFieldLoss, proxies_per_class: int, network_gradients: str) -> None:
        self.num_classes, self.embedding_dim = whole.num_classes, whole.embedding_dim
        self.proxies_per_class = proxies_per_class
        self.field, self.weights, self.reduction = whole.field, whole.weights, whole.reduction
        self.proxy_init, self.proxy_init_norm, self.proxy_space = (
            whole.proxy_init, whole.proxy_init_norm, whole.proxy_space,
        )  # fmt: skip
        self.normalize_embeddings = whole.normalize_embeddings
        self.network_gradients = network_gradients
        self.proxies_ready = self.proxy_init == "normal" or proxies_per_class == 0
        self.proxy_sizes = part_sizes(self.num_classes * proxies_per_class, self.peers.world)
        self.rows = part_slice(self.proxy_sizes, self.peers.rank)
        self.last_step: StepCost | None = None
        self._hyperparameters = {**whole.hyperparameters(), "proxies_per_class": proxies_per_class}

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The energy of all ranks' samples and proxies, a scalar; all ranks call it together.

        Args:
            embeddings: (b, D), this rank's, any floating-point type; b may be 0.
            labels: (b,), integers in [0, C).
        """
        sent, received = self.peers.bytes_sent, self.peers.bytes_received
        if self.proxy_space == "projected" and self.training and torch.is_grad_enabled():
            self.proxies.data.copy_(unit(self.proxies.data))  # as PotentialFieldLoss does
        labels, wide, batch_sizes, with_gradient = self._agreed_batch(embeddings, labels)
        mine, proxies = embeddings.to(wide), self.proxies.to(wide)
        with torch.autocast(mine.device.type, enabled=False):
            step = ShardedField(
                self.peers, self.field, self.weights, batch_sizes, self.proxy_sizes, self.proxies_per_class
            )
            compute = partial(self._energy, step, labels, with_gradient)
            if torch.is_grad_enabled() and (mine.requires_grad or proxies.requires_grad):
                factor = NETWORK_GRADIENTS[self.network_gradients](self.peers.world)
                energy = _Local.apply(compute, factor, mine, proxies)
            else:
                energy = compute(mine, proxies).energy
        self.last_step = StepCost(
            step.pairs, self.peers.bytes_sent - sent, self.peers.bytes_received - received, step.bytes_held
        )
        return energy.to(wide) / REDUCTIONS[self.reduction](sum(batch_sizes) + sum(self.proxy_sizes))

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """This rank's proxies as an optimiser's parameter group; an empty list if there are none anywhere.

        Its entry "sharded" tells code that looks at gradients that other ranks have the other rows.
        """
        if self.proxies_per_class == 0:
            return []
        return [{"params": [self.proxies], "lr": lr, "weight_decay": weight_decay, "sharded": True}]

    def proxy_points(self) -> Tensor:
        """Where this rank's proxies are, (n, D), detached; on the unit sphere unless proxy_space is "free"."""
        points = self.proxies.detach()
        return points.clone() if self.proxy_space == "free" else unit(points)

    @torch.no_grad()
    def initialize_proxies(self, embeddings: Tensor, labels: Tensor, *, generator: Generator | None = None) -> None:
        """Put this rank's proxies where those of a `PotentialFieldLoss` would be put, given the same arguments.

        All ranks call it together, with the same embeddings and labels of the whole training set and generators in the
        same state.
        """
        error = None
        try:
            labels, _ = checked_batch(self, embeddings, labels)
            sizes = self.num_classes, self.proxies_per_class
            if self.proxy_init == "normal":
                points = unit(normal_rows(sum(self.proxy_sizes), self.embedding_dim, self.rows, generator))
            else:
                points = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
                points = unit(points) if self.normalize_embeddings else points
                points = sample_rows(self.proxy_init, points, labels, sizes, self.rows, generator)
        except Exception as caught:
            error = caught
        self.peers.records([], error)
        self._set_proxies(points)
        self.proxies_ready = True

    def hyperparameters(self) -> dict[str, Any]:
        """Those of the `PotentialFieldLoss` of which this is a part."""
        return dict(self._hyperparameters)

    def get_extra_state(self) -> Tensor:
        """Hyper-parameters and which part of the proxies this is, as JSON in a byte tensor."""
        shard = {"rank": self.peers.rank, "world": self.peers.world}
        return extra_state(hyperparameters=self.hyperparameters(), proxies_ready=self.proxies_ready, shard=shard)

    def set_extra_state(self, state: Tensor) -> None:
        """Take over what `get_extra_state` of an equal part gave (it was compared before)."""
        self.proxies_ready = json.loads(bytes(state.tolist()))["proxies_ready"]

    def extra_repr(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self._settings().items())
        return f"rank {self.peers.rank} of {self.peers.world}, {settings}"

    def _settings(self) -> dict[str, Any]:
        """All that must be equal on all ranks."""
        names = ("proxy_init", "proxy_init_norm", "network_gradients")
        return {**self._hyperparameters, **{name: getattr(self, name) for name in names}}

    def _agreed_batch(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, torch.dtype, list[int], bool]:
        """Labels, the type to compute in, all ranks' batch sizes, and whether any rank wants a gradient."""
        error, record = None, [0, 0, 0, self.digest]
        try:
            if not self.proxies_ready:
                raise RuntimeError(f"proxy_init={self.proxy_init!r} needs loss.initialize_proxies before the first use")
            labels, wide = checked_batch(self, embeddings, labels)
            wants = torch.is_grad_enabled() and (embeddings.requires_grad or self.proxies.requires_grad)
            record[:3] = len(embeddings), _TYPES.index(wide), wants
        except Exception as caught:
            error = caught
        batch_sizes, types, wanted, digests = map(list, zip(*self.peers.records(record, error), strict=True))
        if len(set(digests)) > 1:
            raise RuntimeError(
                "all ranks must call the same loss at the same time, got losses of other hyper-parameters"
            )
        if len(set(types)) > 1:
            names = [str(_TYPES[index]) for index in types]
            raise TypeError(f"embeddings and proxies must give one type on all ranks, got {names} by rank")
        return labels, wide, batch_sizes, any(wanted)

    def _energy(
        self, step: ShardedField, labels: Tensor, with_gradient: bool, embeddings: Tensor, proxies: Tensor
    ) -> ShardedEnergy:
        """The energy of the gathered batch."""
        all_labels = self.peers.gathered(labels, step.batch_sizes)
        points = self.peers.gathered(embeddings.detach(), step.batch_sizes)
        samples = Charges(points, all_labels, on_sphere=self.normalize_embeddings)
        mine = Charges(proxies.detach().contiguous(), self.proxy_labels, on_sphere=self.proxy_space != "free")
        return step.energy(samples, mine, with_gradient=with_gradient)

    @torch.no_grad()
    def _set_proxies(self, points: Tensor) -> None:
        if self.proxy_space != "free":
            points = unit(points)
        self.proxies.copy_(points * (self.proxy_init_norm if self.proxy_space == "normalized" else 1.0))


def _check_options(proxies_per_class: Any, backend: str, network_gradients: str) -> None:
    if not isinstance(proxies_per_class, int) or isinstance(proxies_per_class, bool) or proxies_per_class < 0:
        raise ValueError(f"proxies_per_class must be an integer >= 0, got {proxies_per_class!r}")
    if backend not in ("auto", "tiled"):
        raise ValueError(f"backend of a sharded loss must be 'auto' or 'tiled', got {backend!r}")
    if network_gradients not in NETWORK_GRADIENTS:
        raise ValueError(f"network_gradients must be one of {tuple(NETWORK_GRADIENTS)}, got {network_gradients!r}")


class _Local(torch.autograd.Function):
    """An energy whose gradient is already here when it is asked for."""

    @staticmethod
    def forward(ctx: Any, compute: Any, factor: float, embeddings: Tensor, proxies: Tensor) -> Tensor:
        energy, of_samples, of_proxies = compute(embeddings, proxies)
        ctx.factor = factor
        ctx.save_for_backward(of_samples, of_proxies)
        return energy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[None, None, Tensor, Tensor]:
        of_samples, of_proxies = ctx.saved_tensors
        return None, None, (scale * ctx.factor) * of_samples, scale * of_proxies
