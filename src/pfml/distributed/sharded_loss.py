"""The potential field loss over the ranks of a process group: a global batch, a shard of the proxies on each rank."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn

from pfml.distributed.communicator import Communicator
from pfml.distributed.cost import StepCost
from pfml.distributed.schedule import shard_sizes, shard_slice
from pfml.distributed.sharded_field import LocalEnergy, ShardedField
from pfml.distributed.sharded_filter import sharded_fit
from pfml.half_precision import watched, widened
from pfml.losses.checks import check_batch, deferred_checks
from pfml.losses.potential_field import REDUCTIONS, PotentialFieldLoss, require_same
from pfml.losses.proxy_init import class_proxies, warn_of_classes_without_samples
from pfml.losses.sample_filter import check_trust, trusted
from pfml.sphere import unit
from pfml.superposition import Charges
from pfml.typos import did_you_mean

__all__ = ["ShardedPotentialFieldLoss", "extra_state", "extra_state_of"]

#: The types that a field is computed in; ranks exchange the index in this list.
_TYPES = (torch.float32, torch.float64)

#: The options of a `PotentialFieldLoss` that a sharded one has too, with their defaults.
OPTIONS = {
    name: parameter
    for name, parameter in inspect.signature(PotentialFieldLoss).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name != "proxy_sample"
}
#: What becomes of the model's gradients -> the factor of the embeddings' gradient, for a world of that size.
MODEL_GRADIENTS = {"averaged": lambda world: world, "summed": lambda world: 1}
#: Numbers that are drawn at once.
CHUNK_NUMBERS = 2**22
#: torch draws normal numbers in blocks of this size: chunks of whole blocks give the numbers of one large draw.
BLOCK = 16


def _all_options(given: dict[str, Any]) -> dict[str, Any]:
    """The options of a loss, those that are not given with their defaults."""
    for name in given:
        if name not in OPTIONS:
            known = did_you_mean(name, OPTIONS)
            raise TypeError(f"options of a sharded loss must be among {', '.join(OPTIONS)}, got {name!r}{known}")
    return {name: given.get(name, parameter.default) for name, parameter in OPTIONS.items()}


class ShardedPotentialFieldLoss(nn.Module):
    """`PotentialFieldLoss` of the global batch: each rank brings its samples and holds a shard of the proxies.

    Value and gradients are those of a single process with all samples and all proxies. Every rank gets the same value.
    The parameter of a rank, (n, D), is the rows `rows` of the flattened proxies, (C * M, D); they start where those of
    a `PotentialFieldLoss` start, if all ranks have the same seed. All communication happens in `forward`, which all
    ranks must call together; batches may differ in size, and be empty. The backward pass is local.

    **Gradients under DistributedDataParallel.** The gradient of the model is the sum over ranks of what their
    embeddings contribute. DDP divides that sum by the number of ranks. So with `model_gradients="averaged"`, the
    default, the gradient of the embeddings is d loss / d embeddings times the number of ranks, and what DDP leaves in
    the model is the gradient of a single process. Choose "summed" if you add gradients up yourself: then it is
    d loss / d embeddings. The gradient of the proxies is d loss / d proxies in either case: wrap the model in DDP,
    never this loss, and give its parameters to the optimizer of their own rank. A factor on the loss must be the same
    on all ranks.

    What goes wrong on one rank (a label out of range, NaN, a wrong shape, other hyper-parameters) is raised on all of
    them as the same error. A rank that dies is noticed by the others when the timeout of the process group ends.

    Args:
        num_classes: C.
        embedding_dim: D.
        model_gradients: "averaged" or "summed", see above.
        group: The process group; None for the default one.
        options: Those of `PotentialFieldLoss`, equal on all ranks, but for `proxy_sample`: every pair counts. `backend`
            is "auto" or "tiled". `trust` filters by all ranks' proxies and by the median of the global batch.

    Attributes:
        rows: The rows of the flattened proxies that this rank holds.
        last_step: What the last forward pass computed, sent, received and held; None before the first.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun's part
        >>> loss = ShardedPotentialFieldLoss(num_classes=500, embedding_dim=16, proxies_per_class=2)
        >>> optimizer = torch.optim.AdamW(loss.param_groups(lr=1e-2))
        >>> loss(torch.randn(8, 16, requires_grad=True), torch.arange(8)).backward()
        >>> dist.destroy_process_group()
    """

    proxies: nn.Parameter  # (n, D), this rank's
    proxy_labels: Tensor  # (n,)

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        model_gradients: str = "averaged",
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.communicator = Communicator(group)
        error = None
        try:
            options = _all_options(options)
            proxies_per_class, trust = options["proxies_per_class"], options["trust"]
            # without proxies it takes no memory: it checks the options, and derives what follows from them
            whole = PotentialFieldLoss(num_classes, embedding_dim, **{**options, "proxies_per_class": 0, "trust": 0.0})
            _check_options(proxies_per_class, options["backend"], model_gradients, MODEL_GRADIENTS)
            check_trust(trust, proxies_per_class, whole.field.law)
        except Exception as caught:  # whatever it is, the other ranks must not wait for this one
            error = caught
        self.communicator.all_gather_numbers([], error)
        self._set_options(whole, proxies_per_class, float(trust), model_gradients)
        self.digest = _require_equal(self.communicator, self._settings())
        self.proxies = nn.Parameter(torch.empty(self.proxy_sizes[self.communicator.rank], embedding_dim))
        self.register_buffer("proxy_labels", self._classes_of_proxies(), persistent=False)
        self._set_proxies(unit(normal_rows(sum(self.proxy_sizes), embedding_dim, self.rows)))
        self.register_load_state_dict_pre_hook(_check_shard)

    def _set_options(
        self, whole: PotentialFieldLoss, proxies_per_class: int, trust: float, model_gradients: str
    ) -> None:
        self.num_classes, self.embedding_dim = whole.num_classes, whole.embedding_dim
        self.proxies_per_class = proxies_per_class
        self.field, self.weights, self.reduction = whole.field, whole.weights, whole.reduction
        self.proxy_init, self.proxy_init_norm, self.proxy_space = (
            whole.proxy_init, whole.proxy_init_norm, whole.proxy_space,
        )  # fmt: skip
        self.normalize_embeddings = whole.normalize_embeddings
        self.trust, self.model_gradients = trust, model_gradients
        self.proxies_ready = self.proxy_init == "normal" or proxies_per_class == 0
        self.proxy_sizes = shard_sizes(self.num_classes * proxies_per_class, self.communicator.world)
        self.rows = shard_slice(self.proxy_sizes, self.communicator.rank)
        self.last_step: StepCost | None = None
        of_proxies = {"proxies_per_class": proxies_per_class, **({"trust": trust} if trust else {})}
        self._hyperparameters = {**whole.hyperparameters(), **of_proxies}

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The energy of all ranks' samples and proxies, a scalar; all ranks call it together.

        Args:
            embeddings: (b, D), this rank's, any floating-point type; b may be 0.
            labels: (b,), integers in [0, C).
        """
        sent, received = self.communicator.bytes_sent, self.communicator.bytes_received
        if self.proxy_space == "projected" and self.training and torch.is_grad_enabled():
            self.proxies.data.copy_(unit(self.proxies.data))  # as PotentialFieldLoss does
        labels, wide, batch_sizes, with_gradient = self._agreed_batch(embeddings, labels)
        mine, proxies = widened(embeddings, wide), widened(self.proxies, wide)
        with torch.autocast(mine.device.type, enabled=False):
            samples, charges = self._charges(mine, labels, batch_sizes, proxies)
            step = ShardedField(
                self.communicator, self.field, self.weights, batch_sizes, self.proxy_sizes, self.proxies_per_class
            )
            if self.training and self.trust:
                keep = self._trusted(samples, charges)
                samples = step.trusted_samples(samples, charges, keep)
                mine = mine[keep[shard_slice(batch_sizes, self.communicator.rank)]]
            compute = partial(step.energy, samples, charges, with_gradient=with_gradient)
            if torch.is_grad_enabled() and (mine.requires_grad or proxies.requires_grad):
                factor = MODEL_GRADIENTS[self.model_gradients](self.communicator.world)
                energy = LocalEnergy.apply(compute, factor, mine, proxies)
            else:
                energy = compute().energy
        self.last_step = StepCost(
            step.pairs,
            self.communicator.bytes_sent - sent,
            self.communicator.bytes_received - received,
            step.bytes_held,
        )
        value = energy.to(wide) / REDUCTIONS[self.reduction](sum(step.batch_sizes) + sum(self.proxy_sizes))
        return watched(value, embeddings, self.proxies)

    @torch.no_grad()
    def trusted(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Which of this rank's samples fit their labels well enough to be trained with, (b,) of bool.

        All ranks call it together: the others' samples are what a sample is measured by.
        """
        if not self.trust:
            return torch.ones(len(embeddings), dtype=torch.bool, device=embeddings.device)
        labels, wide, batch_sizes, _ = self._agreed_batch(embeddings, labels)
        charges = self._charges(embeddings.to(wide), labels, batch_sizes, self.proxies.to(wide))
        return self._trusted(*charges)[shard_slice(batch_sizes, self.communicator.rank)]

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """This rank's proxies as an optimizer's parameter group; an empty list if there are none anywhere.

        Its entry "sharded" tells code that reads gradients that other ranks have the other rows.
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
            labels, _ = self._checked_batch(embeddings, labels)
            sizes = self.num_classes, self.proxies_per_class
            if self.proxy_init == "normal":
                points = unit(normal_rows(sum(self.proxy_sizes), self.embedding_dim, self.rows, generator))
            else:
                if self.communicator.rank == 0:
                    warn_of_classes_without_samples(labels, self.num_classes)
                points = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
                points = unit(points) if self.normalize_embeddings else points
                points = sample_rows(self.proxy_init, points, labels, sizes, self.rows, generator)
        except Exception as caught:
            error = caught
        self.communicator.all_gather_numbers([], error)
        self._set_proxies(points)
        self.proxies_ready = True

    def hyperparameters(self) -> dict[str, Any]:
        """The hyper-parameters of the `PotentialFieldLoss` of which this is a shard."""
        return dict(self._hyperparameters)

    def get_extra_state(self) -> Tensor:
        """Hyper-parameters and which shard of the proxies this is, as JSON in a byte tensor."""
        shard = {"rank": self.communicator.rank, "world": self.communicator.world}
        return extra_state(hyperparameters=self.hyperparameters(), proxies_ready=self.proxies_ready, shard=shard)

    def set_extra_state(self, state: Tensor) -> None:
        """Take over what `get_extra_state` of an equal shard gave (it was compared before)."""
        self.proxies_ready = json.loads(bytes(state.tolist()))["proxies_ready"]
        self.proxy_labels = self._classes_of_proxies()  # as PotentialFieldLoss does

    def extra_repr(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self._settings().items())
        return f"rank {self.communicator.rank} of {self.communicator.world}, {settings}"

    def _classes_of_proxies(self) -> Tensor:
        rows = torch.arange(self.rows.start, self.rows.stop, device=self.proxies.device)
        return rows // max(self.proxies_per_class, 1)

    def _settings(self) -> dict[str, Any]:
        """All that must be equal on all ranks."""
        names = ("proxy_init", "proxy_init_norm", "model_gradients")
        return {**self._hyperparameters, **{name: getattr(self, name) for name in names}}

    def _checked_batch(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, torch.dtype]:
        """`labels` as int64 on the proxies' device, and the type to compute in, after all checks."""
        no_proxies = self.proxies.new_empty(self.num_classes, 0, self.embedding_dim)
        # A deferred check would let this rank proceed where others stop: it is evaluated here.
        with deferred_checks() as checks:
            labels = check_batch(embeddings, labels, no_proxies)
        for check in checks:
            if check.is_worth_a_look.item():
                check.explain()
        if not torch.isfinite(self.proxies.detach().sum(dtype=torch.float64)):
            bad = ~torch.isfinite(self.proxies.detach()).all(dim=1)
            classes = self.proxy_labels[bad].unique().tolist()
            shown = ", ".join(map(str, classes[:10])) + (", ..." if len(classes) > 10 else "")
            raise ValueError(f"proxies must be finite, got NaN or Inf in {len(classes)} classes: {shown}")
        return labels, torch.promote_types(torch.promote_types(embeddings.dtype, self.proxies.dtype), torch.float32)

    def _agreed_batch(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, torch.dtype, list[int], bool]:
        """Labels, the type to compute in, all ranks' batch sizes, and whether any rank wants a gradient."""
        # filtering sends messages that a rank in evaluation mode would not send
        filters_samples = bool(self.training and self.trust)
        error, record = None, [0, 0, 0, 2 * self.digest + filters_samples]
        try:
            if not self.proxies_ready:
                raise RuntimeError(f"proxy_init={self.proxy_init!r} needs loss.initialize_proxies before the first use")
            labels, wide = self._checked_batch(embeddings, labels)
            wants = torch.is_grad_enabled() and (embeddings.requires_grad or self.proxies.requires_grad)
            record[:3] = len(embeddings), _TYPES.index(wide), wants
        except Exception as caught:
            error = caught
        batch_sizes, types, wanted, digests = map(
            list, zip(*self.communicator.all_gather_numbers(record, error), strict=True)
        )
        if len(set(digests)) > 1:
            raise RuntimeError(
                "all ranks must call the same loss at the same time, "
                "got losses of other hyper-parameters, or some in training mode and others not"
            )
        if len(set(types)) > 1:
            names = [str(_TYPES[index]) for index in types]
            raise TypeError(f"embeddings and proxies must give one type on all ranks, got {names} by rank")
        return labels, wide, batch_sizes, any(wanted)

    def _charges(
        self, mine: Tensor, labels: Tensor, batch_sizes: list[int], proxies: Tensor
    ) -> tuple[Charges, Charges]:
        """All ranks' samples, and this rank's proxies."""
        all_labels = self.communicator.all_gather(labels, batch_sizes)
        points = self.communicator.all_gather(mine.detach(), batch_sizes)
        return (
            Charges(points, all_labels, on_sphere=self.normalize_embeddings),
            Charges(proxies.detach().contiguous(), self.proxy_labels, on_sphere=self.proxy_space != "free"),
        )

    def _trusted(self, samples: Charges, proxies: Charges) -> Tensor:
        """Which of all ranks' samples are trusted, (B,), the same on every rank."""
        fits = sharded_fit(
            self.communicator, samples, proxies, self.proxy_sizes, self.proxies_per_class, self.field.law
        )
        return trusted(fits, self.trust)

    @torch.no_grad()
    def _set_proxies(self, points: Tensor) -> None:
        if self.proxy_space != "free":
            points = unit(points)
        self.proxies.copy_(points * (self.proxy_init_norm if self.proxy_space == "normalized" else 1.0))


def _check_options(proxies_per_class: Any, backend: str, model_gradients: str, choices: Iterable[str]) -> None:
    """Raise unless these options of a sharded loss, which a whole one lacks or has others of, can be."""
    if not isinstance(proxies_per_class, int) or isinstance(proxies_per_class, bool) or proxies_per_class < 0:
        raise ValueError(f"proxies_per_class must be an integer >= 0, got {proxies_per_class!r}")
    if backend not in ("auto", "tiled"):
        raise ValueError(f"backend of a sharded loss must be 'auto' or 'tiled', got {backend!r}")
    if model_gradients not in choices:
        raise ValueError(f"model_gradients must be one of {tuple(choices)}, got {model_gradients!r}")


def _require_equal(communicator: Communicator, settings: dict[str, Any]) -> int:
    """A digest of the settings; all ranks raise the same error unless it is the same everywhere."""
    text = json.dumps(settings, sort_keys=True)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
    if len({number for (number,) in communicator.all_gather_numbers([digest])}) > 1:
        by_rank = [json.loads(text) for text in communicator.all_gather_texts(text)]
        all_names = dict.fromkeys(name for settings in by_rank for name in settings)  # some are there only if set
        names = [name for name in all_names if any(other.get(name) != by_rank[0].get(name) for other in by_rank)]
        differing = "; ".join(f"{name}: {[other.get(name) for other in by_rank]} by rank" for name in names)
        raise ValueError(f"a sharded loss must have the same hyper-parameters on all ranks, got {differing}")
    return digest


def extra_state(**state: Any) -> Tensor:
    """JSON in a byte tensor, so that a state_dict holds tensors only."""
    return torch.frombuffer(bytearray(json.dumps(state, sort_keys=True).encode()), dtype=torch.uint8)


def extra_state_of(state_dict: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """What `extra_state` stored, or an error that says that it is missing or broken."""
    try:
        stored = json.loads(bytes(state_dict[prefix + "_extra_state"].cpu().numpy().tobytes()))
        return {"hyperparameters": stored["hyperparameters"], "proxies_ready": stored["proxies_ready"], **stored}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError("the stored hyper-parameters of the potential field loss are missing or broken") from None


def _check_shard(loss: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Refuse a state_dict of a different loss, or of another shard, before anything of it is loaded."""
    stored = extra_state_of(state_dict, prefix)
    require_same(stored["hyperparameters"], loss.hyperparameters())
    here = {"rank": loss.communicator.rank, "world": loss.communicator.world}
    if stored.get("shard") != here:
        raise ValueError(
            f"the stored shard of the loss must be of rank {here['rank']} of {here['world']}, "
            f"got {stored.get('shard')}: cut it from a whole state with pfml.distributed.shard_state"
        )


def _signature() -> inspect.Signature:
    """Sizes, the options of a whole loss, and the sharded loss's own: what `help` and `inspect` show."""
    own = inspect.signature(ShardedPotentialFieldLoss.__init__).parameters
    sizes, sharded = (
        [own[n] for n in ("num_classes", "embedding_dim")],
        [own[n] for n in ("model_gradients", "group")],
    )
    return inspect.Signature([*sizes, *OPTIONS.values(), *sharded])


ShardedPotentialFieldLoss.__signature__ = _signature()  # type: ignore[attr-defined]


# Every rank generates all proxies, chunk by chunk or class by class, and keeps its own: initialization is independent
# of the world size, and no rank ever holds all proxies.


def normal_rows(total: int, dim: int, rows: slice, generator: Generator | None = None) -> Tensor:
    """Rows `rows` of torch.randn(total, dim), without the others in memory; the generator moves on as if with them."""
    kept = torch.empty(rows.stop - rows.start, dim)
    for start, stop in _chunks(total, dim):
        drawn = torch.randn(stop - start, dim, generator=generator)
        _keep(kept, rows, start, drawn)
    return kept


def _chunks(total: int, dim: int) -> Iterator[tuple[int, int]]:
    size = BLOCK * max(CHUNK_NUMBERS // (BLOCK * dim), 1)
    starts = list(range(0, max(total, 1), size))
    if len(starts) > 1 and (total - starts[-1]) * dim < BLOCK:
        starts.pop()  # torch draws fewer numbers than a block in another way
    return zip(starts, [*starts[1:], total], strict=True)


def sample_rows(
    init: str, points: Tensor, labels: Tensor, sizes: tuple[int, int], rows: slice, generator: Generator | None
) -> Tensor:
    """Rows `rows` of the (C * M, D) proxies that `PROXY_INITS[init]` places among the samples of each class.

    Args:
        init: A key of `PROXY_INITS`.
        points: (n, D), samples; proxies of a class without any start anywhere.
        labels: (n,), int64.
        sizes: C and M.
        rows: Which proxies to keep.
        generator: One in the same state on every rank.
    """
    num_classes, per_class = sizes
    order = torch.argsort(labels, stable=True)
    by_class = order.split(torch.bincount(labels, minlength=num_classes).tolist())
    kept = points.new_empty(rows.stop - rows.start, points.shape[1])
    for c, members in enumerate(by_class):
        _keep(kept, rows, c * per_class, class_proxies(init, points[members], per_class, generator=generator))
    return kept


def _keep(kept: Tensor, rows: slice, start: int, drawn: Tensor) -> None:
    """Copy into `kept`, the rows `rows` of a whole, what `drawn`, its rows from `start` on, has of them."""
    first, last = max(start, rows.start), min(start + len(drawn), rows.stop)
    if first < last:
        kept[first - rows.start : last - rows.start] = drawn[first - start : last - start]
