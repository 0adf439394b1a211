"""The potential field loss: Eq. 6 over a batch of embeddings and learned proxies, as an nn.Module."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from pfml.backends import BACKENDS, resolve_backend
from pfml.backends.cuda_graph import GraphCache, is_small
from pfml.backends.operator import refuse_second_order, with_known_gradients
from pfml.energy import class_potentials, potential_energy
from pfml.field import ContrastiveLaw, DecayLaw, power_law
from pfml.half_precision import watched, widened
from pfml.losses.checks import DeferredCheck, check_batch, conclude, deferred_checks
from pfml.losses.diagnostics import FieldDiagnostics, diagnose
from pfml.losses.proxy_init import PROXY_INITS, class_proxies, normal_proxies, warn_of_classes_without_samples
from pfml.losses.sample_filter import check_trust, fit, some_of, trusted
from pfml.losses.subsampling import subsample_anchors
from pfml.sphere import unit
from pfml.superposition import Charges, Field, PairWeights
from pfml.tracing import is_traced, is_watched

__all__ = ["PotentialFieldLoss", "require_same"]

#: reduction -> what the sum over anchors is divided by, for n points
REDUCTIONS: dict[str, Callable[[int], int]] = {
    "sum": lambda n: 1,
    "pairs": lambda n: max(n * (n - 1), 1),
    "points": lambda n: max(n, 1),
}
PROXY_SPACES = ("normalized", "projected", "free")
#: Hyper-parameters that say how the energy is computed, not what it is: a stored loss may have others.
MAY_DIFFER = frozenset({"proxy_sample"})
#: The CUDA graphs of each loss. They are no part of it, so that it can be copied and stored.
_GRAPHS: WeakKeyDictionary[nn.Module, GraphCache] = WeakKeyDictionary()


def _of_law(name: str) -> Any:
    """An option that is part of the decay law: set it, and the next step has another law."""

    def get(loss: PotentialFieldLoss) -> Any:
        return getattr(loss.field.law, name)

    def put(loss: PotentialFieldLoss, value: Any) -> None:
        law = loss.field.law
        if not hasattr(law, name):
            raise AttributeError(f"{name} must be an option of the decay law, and {type(law).__name__} has none")
        loss.field = replace(loss.field, law=replace(law, **{name: value}))  # type: ignore[type-var]

    return property(get, put)


def _normalization() -> Any:
    """That of the field: set it, and the next step has another."""

    def get(loss: PotentialFieldLoss) -> str:
        return loss.field.normalization

    def put(loss: PotentialFieldLoss, value: str) -> None:
        interact = bool(loss.proxy_attraction or loss.proxy_repulsion)
        _check_proxy_sample(loss.proxy_sample, loss.proxies_per_class, interact, value)
        loss.field = replace(loss.field, normalization=value)

    return property(get, put)


def _of_weights(name: str) -> Any:
    """The weight of a kind of pair: set it, and the next step has another."""

    def get(loss: PotentialFieldLoss) -> float:
        weight: float = getattr(loss.weights, name)
        return weight

    def put(loss: PotentialFieldLoss, value: Any) -> None:
        _check_weight(name, value)
        loss.weights = replace(loss.weights, **{name: float(value)})

    return property(get, put)


class PotentialFieldLoss(nn.Module):
    """Total potential energy (Eq. 6) of a batch and of `proxies_per_class` learned proxies per class.

    Every embedding and every proxy attracts its own class and repels the others, with a force that decays with
    distance. The defaults are the paper's. For delta and alpha its text gives ranges; 0.2 and 3 are those of its
    figures. The value leaves out constants that exert no force (they are in `literal_energy`). The loss computes in
    float32 (float64 if given float64), also under autocast. A `GradientOverflowWarning` says what to do where forces
    of close pairs overflow float16.

    `delta`, `alpha`, `delta_rep`, `normalization` and the weights of pairs are also attributes. Set one during
    training, and it acts from the next step on.

    Example:
        >>> loss = PotentialFieldLoss(num_classes=100, embedding_dim=64)
        >>> value = loss(torch.randn(8, 64, requires_grad=True), torch.arange(8))
        >>> value.backward()
        >>> optimizer = torch.optim.AdamW(loss.param_groups(lr=1e-2))

    Args:
        num_classes: C; labels are 0 to C - 1 (`pfml.LabelMap` makes such labels of any values).
        embedding_dim: D.
        proxies_per_class: M; 0 for a field of samples alone.
        delta: Radius inside which attraction stops, and outside which repulsion stops.
        alpha: Rate of decay of the field; 0 selects its logarithmic limit.
        normalization: "none" (Eq. 6), or forces relative to the field at each anchor: "log", "anchor"
            (see `pfml.superposition`).
        trust: Sample filtering for noisy labels; 0 uses every sample (Eq. 6). In training mode a sample takes no part
            in the field if its own class is less than `trust` times as strong there as another class
            (see `pfml.losses.sample_filter`). `trusted` returns which samples stay.

    More of the field:
        delta_rep: Another radius for repulsion.
        potential: "pfml" (Eqs. 1, 2), "cpml" (the paper's contrast, whose force grows with distance), or a `DecayLaw`
            of your own, which has its own parameters in place of delta, alpha and delta_rep.
        reduction: "sum" (Eq. 6), "pairs" (mean over ordered pairs) or "points" (mean over points).
        normalize_embeddings: Whether to project embeddings onto the unit sphere first (harmless if they are on it).

    Proxies:
        proxy_init: "normal", or "samples" / "kmeans", which need `initialize_proxies` before the first batch.
        proxy_init_norm: Length of a new proxy parameter in the space "normalized". With Adam, lr / length is the
            angle that a step turns a proxy by, so it should not depend on the number of proxies.
        proxy_space: "normalized" (free parameters, normalized in forward), "projected" (normalized in forward; each
            training forward also projects the parameters back onto the sphere) or "free" (used as they are).

    Weights of pairs (True and False are 1 and 0):
        sample_sample: Of two samples.
        proxy_attraction: Of two proxies of one class; 1 in Eq. 6.
        proxy_repulsion: Of two proxies of different classes.

    Computation:
        backend: "auto" or a key of `pfml.backends.BACKENDS`; `backend_for` returns the choice of "auto".
        proxy_sample: None, or for very many proxies the size of a random subsample of them, drawn in each training
            forward with torch's generator of their device. It estimates the pairs of proxies without bias, in value
            and gradients. All proxies of the batch's classes are always there; in Eq. 6 every pair with a sample is
            exact, in "log" the energies of samples are. Evaluation mode is exact.
    """

    proxies: nn.Parameter  # (C, M, D)
    proxy_labels: Tensor  # (C * M,)

    # As plain attributes these would be ignored where a schedule sets them.
    delta, alpha, delta_rep = _of_law("delta"), _of_law("alpha"), _of_law("delta_rep")
    normalization = _normalization()
    sample_sample = _of_weights("sample_sample")
    proxy_attraction, proxy_repulsion = _of_weights("proxy_attraction"), _of_weights("proxy_repulsion")

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        *,
        proxies_per_class: int = 15,
        delta: float = 0.2,
        alpha: float = 3.0,
        normalization: str = "none",
        trust: float = 0.0,
        delta_rep: float | None = None,
        potential: str | DecayLaw = "pfml",
        reduction: str = "sum",
        normalize_embeddings: bool = True,
        proxy_init: str = "normal",
        proxy_init_norm: float = 3.0,
        proxy_space: str = "normalized",
        sample_sample: bool | float = True,
        proxy_attraction: bool | float = True,
        proxy_repulsion: bool | float = True,
        backend: str = "auto",
        proxy_sample: int | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("num_classes", num_classes, 1),
            ("embedding_dim", embedding_dim, 1),
            ("proxies_per_class", proxies_per_class, 0),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
        if not isinstance(proxy_init_norm, int | float) or isinstance(proxy_init_norm, bool):
            raise TypeError(f"proxy_init_norm must be an int or a float, got {proxy_init_norm!r}")
        if not 0 < proxy_init_norm < math.inf:
            raise ValueError(f"proxy_init_norm must be positive and finite, got {proxy_init_norm}")
        for name, choice, choices in (
            ("reduction", reduction, tuple(REDUCTIONS)),
            ("proxy_space", proxy_space, PROXY_SPACES),
            ("proxy_init", proxy_init, ("normal", *PROXY_INITS)),
        ):
            if choice not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {choice!r}")
        weights = {
            "sample_sample": sample_sample,
            "proxy_attraction": proxy_attraction,
            "proxy_repulsion": proxy_repulsion,
        }
        for name, weight in weights.items():
            _check_weight(name, weight)
        if not isinstance(normalize_embeddings, bool):
            raise TypeError(f"normalize_embeddings must be True or False, got {normalize_embeddings!r}")
        resolve_backend(backend, 0)
        _check_proxy_sample(proxy_sample, proxies_per_class, bool(proxy_attraction or proxy_repulsion), normalization)

        self.num_classes = num_classes
        self.embedding_dim = embedding_dim
        self.proxies_per_class = proxies_per_class
        self.field = Field(_law(potential, delta, alpha, delta_rep), normalization)
        self.reduction = reduction
        self.proxy_init = proxy_init
        self.proxy_init_norm = proxy_init_norm
        self.proxy_space = proxy_space
        self.weights = PairWeights(**{name: float(weight) for name, weight in weights.items()})
        self.normalize_embeddings = normalize_embeddings
        self.backend = backend
        self.proxy_sample = proxy_sample
        check_trust(trust, proxies_per_class, self.field.law)
        self.trust = float(trust)

        self.proxies = nn.Parameter(torch.empty(num_classes, proxies_per_class, embedding_dim))
        self.register_buffer("proxy_labels", self._classes_of_proxies(), persistent=False)
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(_check_hyperparameters)

    def reset_parameters(self) -> None:
        """Draw the proxies anew, as when the loss was made; for one of the device "meta", after `to_empty`."""
        self.proxy_labels.copy_(self._classes_of_proxies())
        self.proxies_ready = self.proxy_init == "normal" or self.proxies_per_class == 0
        self._set_proxies(normal_proxies(self.num_classes, self.proxies_per_class, self.embedding_dim))

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: None = None,
        ref_emb: None = None,
        ref_labels: None = None,
    ) -> Tensor:
        """The energy of the batch and the proxies, a scalar; in training mode an unbiased estimate with `proxy_sample`.

        Args:
            embeddings: (batch, D), any floating-point type.
            labels: (batch,), integers in [0, C).
            indices_tuple, ref_emb, ref_labels: Must be None: a field takes all pairs. They are here so that the loss
                can replace one of pytorch-metric-learning.
        """
        if indices_tuple is not None or ref_emb is not None or ref_labels is not None:
            raise ValueError("indices_tuple, ref_emb and ref_labels must be None: the field is made of all pairs")
        replayed = self._replayed(embeddings, labels) if self._is_recordable(embeddings, labels) else None
        return self._energy(embeddings, labels, self.proxies) if replayed is None else replayed

    def _energy(self, embeddings: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
        """`forward`, given where the proxies' parameters are."""
        if self.proxy_space == "projected" and self.training and torch.is_grad_enabled():
            self._project_proxies()
        samples, sources = self._charges(embeddings, labels, proxies)
        if self.training and self.trust:
            keep = trusted(fit(samples, sources, self.num_classes, self.field.law), self.trust)
            samples = some_of(samples, keep)
        if self.training and self.proxy_sample is not None and self.proxy_sample < len(sources.points):
            subsample = subsample_anchors(samples.labels, self.num_classes, self.proxies_per_class, self.proxy_sample)
            sources = sources._replace(anchors=subsample)
        with torch.autocast(samples.points.device.type, enabled=False):
            num_points = len(samples.points) + len(sources.points)
            backend = resolve_backend(self.backend, num_points, samples.points, self.field)
            energy = BACKENDS[backend](samples, sources, self.field, self.weights)
            return watched(energy / REDUCTIONS[self.reduction](num_points), embeddings, proxies)

    def _is_recordable(self, embeddings: Tensor, labels: Tensor) -> bool:
        """Whether a GPU may compute this step, checks and gradients included, as one CUDA graph.

        Python needs several times as long as a GPU for the launches of a small step. What waits for it (`trust`),
        draws (`proxy_sample`) or changes the proxies (`proxy_space` "projected") is left out, and so are steps whose
        autograd graph is observed: activation checkpointing, saved tensors on the CPU, anomaly detection.
        """
        return (
            type(embeddings) is Tensor
            and type(labels) is Tensor
            and type(self.proxies) is nn.Parameter
            and embeddings.dim() == 2
            and embeddings.is_cuda
            and embeddings.device == labels.device == self.proxies.device
            and embeddings.device.index == torch.cuda.current_device()
            and embeddings.requires_grad
            and self.proxies.requires_grad
            and torch.is_grad_enabled()
            and embeddings.dtype in (torch.float32, torch.bfloat16)
            and self.proxies.dtype == torch.float32
            and is_small(embeddings, self.proxies)
            and not (self.training and (self.trust or self.proxy_sample or self.proxy_space == "projected"))
            and self.proxies_ready
            and forward_ad._current_level < 0
            and not is_traced()
            and not is_watched()
            and not torch.cuda.is_current_stream_capturing()
            and self.backend_for(len(embeddings)) == "triton"
        )

    def _replayed(self, embeddings: Tensor, labels: Tensor) -> Tensor | None:
        """The value and its gradients by a CUDA graph; None while this kind of step is not recorded."""
        key = (
            embeddings.shape,
            embeddings.dtype,
            labels.shape,
            labels.dtype,
            self.proxies.shape,
            self.proxies.data_ptr(),
            self.proxy_labels.data_ptr(),
            self.field.handle,
            self.weights,
            self.reduction,
            self.proxy_space,
            self.normalize_embeddings,
            torch.cuda.current_stream().cuda_stream,
        )
        if self not in _GRAPHS:
            _GRAPHS[self] = GraphCache()
        step = _GRAPHS[self].replay(key, self._checked_step, embeddings, labels)
        if step is None:
            return None
        value, verdicts, *gradients = step
        refuse = partial(refuse_second_order, "triton")
        energy = with_known_gradients(value, (embeddings, self.proxies), gradients, refuse)
        is_bad, is_worth_a_look = verdicts.unbind()
        points = embeddings.detach(), labels, self.proxies.detach()
        conclude(DeferredCheck(is_bad, is_worth_a_look, *points, self.num_classes))  # last: it may wait for the GPU
        return energy

    def _checked_step(self, embeddings: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """The value, both verdicts of the check, and the gradients in float32: what is recorded."""
        # other leaves than the user's, whose nodes of the autograd graph belong to the stream of earlier steps
        points, proxies = (each.detach().float().requires_grad_() for each in (embeddings, self.proxies))
        with torch.enable_grad(), deferred_checks() as checks:
            value = self._energy(points, labels, proxies)
        gradients = torch.autograd.grad(value, (points, proxies), materialize_grads=True)
        (check,) = checks
        return value.detach(), torch.stack((check.is_bad, check.is_worth_a_look)), *gradients

    @torch.no_grad()
    def trusted(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Which samples of a batch the filter of `trust` keeps, (batch,) of bool."""
        if not self.trust:
            return torch.ones(len(embeddings), dtype=torch.bool, device=embeddings.device)
        samples, proxies = self._charges(embeddings, labels, self.proxies)
        return trusted(fit(samples, proxies, self.num_classes, self.field.law), self.trust)

    def backend_for(self, batch_size: int) -> str:
        """The backend that computes a batch of this size: what "auto" chooses, or the one asked for."""
        num_points = batch_size + self.num_classes * self.proxies_per_class
        return resolve_backend(self.backend, num_points, self.proxies, self.field)

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """The proxies as an optimizer's parameter group; an empty list if there are none.

        The paper trains proxies 100 times faster than the backbone. Weight decay is off for them by default: at rest
        the field exerts no force at all, and an adaptive optimizer would let the decay alone move the proxies.
        """
        if self.proxies_per_class == 0:
            return []
        return [{"params": [self.proxies], "lr": lr, "weight_decay": weight_decay}]

    def proxy_points(self) -> Tensor:
        """Where the proxies are, (C, M, D), detached; on the unit sphere unless proxy_space is "free"."""
        points = self.proxies.detach()
        return points.clone() if self.proxy_space == "free" else unit(points)

    @torch.no_grad()
    def initialize_proxies(
        self, embeddings: Tensor, labels: Tensor, *, generator: torch.Generator | None = None
    ) -> None:
        """Place the proxies as `proxy_init` says, given embeddings of the training set.

        Proxies of a class without embeddings start at random, with a warning.
        """
        labels = check_batch(embeddings, labels, self.proxies)
        if self.proxy_init == "normal":
            shape = (self.num_classes, self.proxies_per_class, self.embedding_dim)
            self._set_proxies(normal_proxies(*shape, generator=generator))
            return
        if self.proxies_per_class == 0:
            return
        warn_of_classes_without_samples(labels, self.num_classes)
        points = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        if self.normalize_embeddings:
            points = unit(points)
        proxies_of = partial(class_proxies, self.proxy_init, per_class=self.proxies_per_class, generator=generator)
        self._set_proxies(torch.stack([proxies_of(points[labels == c]) for c in range(self.num_classes)]))
        self.proxies_ready = True

    def class_potentials(self, points: Tensor) -> Tensor:
        """Psi_j of the proxies at each point for each class j (Eqs. 3 to 5), (n, C) in float64: low is a good fit."""
        if self.proxies_per_class == 0:
            raise ValueError("class_potentials needs proxies, and this loss has proxies_per_class=0")
        self._require_proxies()
        points = unit(points.detach()) if self.normalize_embeddings else points.detach()
        sources = self.proxy_points().flatten(0, 1)
        return class_potentials(points, sources, self.proxy_labels, self.num_classes, law=self.field.law)

    @torch.no_grad()
    def literal_energy(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Eq. 6 exactly, in float64: every constant and self term included, whatever the loss's options.

        Follows Eq. 2 down to r = 0, where the loss itself stops at the law's core: infinite if points of two classes
        coincide.

        Takes all pairs, those of proxies included: O((B + C * M)^2), whatever `proxy_sample` is.
        """
        samples, _ = self._charges(embeddings, labels, self.proxies)
        points = torch.cat([samples.positions(), self.proxy_points().flatten(0, 1).to(samples.points.dtype)])
        labels = torch.cat([samples.labels, self.proxy_labels])
        return potential_energy(points, labels, law=self.field.law, form="literal", backend=self.backend)

    @torch.no_grad()
    def diagnostics(self, embeddings: Tensor | None = None, labels: Tensor | None = None) -> FieldDiagnostics:
        """What the field does to a batch and the proxies, or to the proxies alone; warns of a collapse.

        Takes all pairs, those of proxies included: O((B + C * M)^2), whatever `proxy_sample` is.
        """
        if (embeddings is None) != (labels is None):
            raise ValueError("diagnostics needs embeddings and labels, or neither of them")
        if embeddings is None or labels is None:
            embeddings, labels = self.proxies.new_empty(0, self.embedding_dim), self.proxy_labels[:0]
        samples, _ = self._charges(embeddings, labels, self.proxies)
        return diagnose(samples, self.proxy_points().to(samples.points.dtype), self.field, self.weights)

    def get_extra_state(self) -> Tensor:
        """The hyper-parameters as JSON in a byte tensor, so that a state_dict holds tensors only."""
        state = {"hyperparameters": self.hyperparameters(), "proxies_ready": self.proxies_ready}
        return torch.frombuffer(bytearray(json.dumps(state, sort_keys=True).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the state that `get_extra_state` of an equal loss returned (hyper-parameters are compared before)."""
        self.proxies_ready = _extra_state(state)["proxies_ready"]
        # no state_dict holds them, and on the device "meta" they had no values that `to_empty` could keep
        self.proxy_labels = self._classes_of_proxies()

    def hyperparameters(self) -> dict[str, Any]:
        """Everything that a stored loss must share with the one that loads it, and `MAY_DIFFER`."""
        law = self.field.law
        return {
            "num_classes": self.num_classes,
            "embedding_dim": self.embedding_dim,
            "proxies_per_class": self.proxies_per_class,
            "law": type(law).__name__,
            **{f"law.{name}": value for name, value in asdict(law).items()},  # type: ignore[call-overload]
            "normalization": self.field.normalization,
            "reduction": self.reduction,
            "proxy_space": self.proxy_space,
            **asdict(self.weights),
            "normalize_embeddings": self.normalize_embeddings,
            "proxy_sample": self.proxy_sample,
            **({"trust": self.trust} if self.trust else {}),
        }

    def extra_repr(self) -> str:
        """The hyper-parameters, for `repr`."""
        return ", ".join(f"{name}={value}" for name, value in self.hyperparameters().items())

    def _charges(self, embeddings: Tensor, labels: Tensor, proxies: Tensor) -> tuple[Charges, Charges]:
        """The batch and the proxies as charges of one floating-point type, after all checks."""
        labels = check_batch(embeddings, labels, proxies)
        self._require_proxies()
        wide = torch.promote_types(torch.promote_types(embeddings.dtype, proxies.dtype), torch.float32)
        samples = Charges(widened(embeddings, wide), labels, on_sphere=self.normalize_embeddings)
        points = widened(proxies, wide).flatten(0, 1)
        return samples, Charges(points, self.proxy_labels, on_sphere=self.proxy_space != "free")

    def _classes_of_proxies(self) -> Tensor:
        return torch.arange(self.num_classes, device=self.proxies.device).repeat_interleave(self.proxies_per_class)

    def _require_proxies(self) -> None:
        if not self.proxies_ready:
            raise RuntimeError(
                f"proxy_init={self.proxy_init!r} needs loss.initialize_proxies(embeddings, labels) before the first use"
            )

    @torch.no_grad()
    def _set_proxies(self, points: Tensor) -> None:
        if self.proxy_space != "free":
            points = unit(points)
        self.proxies.copy_(points * (self.proxy_init_norm if self.proxy_space == "normalized" else 1.0))

    @torch.no_grad()
    def _project_proxies(self) -> None:
        # .data: a point that lies on the sphere stays there, so a graph that saved it may go on using it
        self.proxies.data.copy_(unit(self.proxies.data))


def _law(potential: str | DecayLaw, delta: float, alpha: float, delta_rep: float | None) -> DecayLaw:
    if isinstance(potential, str):
        if potential == "pfml":
            return power_law(delta=delta, alpha=alpha, delta_rep=delta_rep)
        if potential == "cpml":
            return ContrastiveLaw(delta=delta, delta_rep=delta_rep)
        raise ValueError(f"potential must be 'pfml', 'cpml' or a DecayLaw, got {potential!r}")
    if (delta, alpha, delta_rep) != (0.2, 3.0, None):
        raise ValueError("delta, alpha and delta_rep belong to 'pfml' and 'cpml'; set them in your own law instead")
    return potential


def _check_weight(name: str, weight: Any) -> None:
    if not isinstance(weight, int | float):
        raise TypeError(f"{name} must be True, False or a number, got {weight!r}")
    if not 0 <= weight < math.inf:
        raise ValueError(f"{name} must not be negative or infinite, got {weight}")


def _check_proxy_sample(
    proxy_sample: int | None, proxies_per_class: int, proxies_interact: bool, normalization: str
) -> None:
    if proxy_sample is None:
        return
    if not isinstance(proxy_sample, int) or isinstance(proxy_sample, bool) or proxy_sample < 1:
        raise ValueError(f"proxy_sample must be None or an integer >= 1, got {proxy_sample!r}")
    for fails, reason in (
        (proxies_per_class == 0, "proxies, and this loss has proxies_per_class=0"),
        (not proxies_interact, "proxies that act on each other: switch proxy_attraction or proxy_repulsion on"),
        (normalization == "anchor", "proxies that are anchors, and in normalization='anchor' only samples are"),
    ):
        if fails:
            raise ValueError(f"proxy_sample needs {reason}")


def _extra_state(state: Any) -> dict[str, Any]:
    try:
        return json.loads(bytes(state.cpu().numpy().tobytes()))
    except (AttributeError, ValueError):
        raise ValueError("the stored hyper-parameters of the potential field loss cannot be read") from None


def _check_hyperparameters(loss: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Refuse a state_dict of a different loss before anything of it is loaded."""
    assert isinstance(loss, PotentialFieldLoss)
    state = state_dict.get(prefix + "_extra_state")
    if state is None:
        return  # torch reports the missing key itself
    require_same(_extra_state(state)["hyperparameters"], loss.hyperparameters())


def require_same(stored: dict[str, Any], mine: dict[str, Any]) -> None:
    """Raise unless the hyper-parameters of a stored loss are those of this one, apart from such as may differ."""

    def told(values: dict[str, Any], name: str) -> str:
        return repr(values[name]) if name in values else "none"  # options that are off are not stored

    differing = [
        f"{name}: stored {told(stored, name)}, here {told(mine, name)}"
        for name in sorted((stored.keys() | mine.keys()) - MAY_DIFFER)
        if stored.get(name) != mine.get(name)
    ]
    if differing:
        raise ValueError("the stored loss has other hyper-parameters: " + "; ".join(differing))
