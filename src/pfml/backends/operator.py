"""A way to superpose pairs, made a torch operator: opaque to torch.compile, with its own gradient.

Where a field's forces are known before its sums (`Normalization.linear`), the forward pass computes the gradient along
with the energy and the backward pass only scales it; otherwise, and for gradients too large to keep, the backward pass
superposes again.

While torch traces or transforms the program, the field is an operator of torch.library. Otherwise it is a plain
autograd function: the way through torch.library takes longer than a small field itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pfml.precision import full_precision
from pfml.superposition import Anchors, Charges, Field, PairWeights, anchor_counts, field_of
from pfml.tracing import is_traced

__all__ = ["Compute", "FieldOperator", "Superpose", "refuse_second_order", "with_known_gradients"]

#: Gradients larger than this are not kept between forward and backward; a GPU keeps those of a million proxies.
KEPT_GRADIENT_BYTES = {"cpu": 2**28, "cuda": 2**31}

#: (samples, proxies, field, weights, slopes, with_gradient) -> sums (2, n) in float64, and the gradients of both (empty
#: unless asked for). `slopes` (2, n) are d energy / d sums; None for 1 everywhere, never where proxies have `anchors`.
#: Sums of charges that are no anchors may be anything.
Superpose = Callable[
    [Charges, Charges, Field, PairWeights, Tensor | None, bool],
    tuple[Tensor, Tensor, Tensor],
]


#: A function of charges, field and weights, and of tensors and switches besides, that gives tensors.
Compute = Callable[..., tuple[Tensor, ...]]


class FieldOperator:
    """The operators pfml::NAME_energy and pfml::NAME_gradient around a function that superposes pairs.

    Args:
        name: The backend's name.
        superpose: How pairs are superposed.
        accelerate: Makes a function of charges faster to call, for calls that are not traced; None for none.
    """

    def __init__(self, name: str, superpose: Superpose, accelerate: Callable[[Compute], Compute] | None = None) -> None:
        self.name = name
        self.superpose = superpose
        self.compute_energy: Compute = partial(_energy, superpose)
        self.compute_gradient: Compute = partial(_gradient, superpose)
        if accelerate is not None:
            self.compute_energy, self.compute_gradient = (
                accelerate(self.compute_energy),
                accelerate(self.compute_gradient),
            )
        self._define()

    def energy(self, samples: Charges, proxies: Charges, field: Field, weights: PairWeights) -> Tensor:
        """The total energy of samples and proxies under `field`, a scalar."""
        wants_gradient = torch.is_grad_enabled() and (samples.points.requires_grad or proxies.points.requires_grad)
        size = (samples.points.numel() + proxies.points.numel()) * samples.points.element_size()
        kept = KEPT_GRADIENT_BYTES.get(samples.points.device.type, KEPT_GRADIENT_BYTES["cpu"])
        with_gradient = wants_gradient and field.rule.linear and size <= kept
        problem = samples, proxies, field, weights
        _refuse_forward_mode(samples.points, proxies.points)
        if is_traced():
            return self._energy_op(*_arguments(*problem), with_gradient)[0]
        if with_gradient:
            energy, _, *gradients = self.compute_energy(*_detached(*problem), with_gradient=True)
            return with_known_gradients(energy, (samples.points, proxies.points), gradients, self.refuse_second_order)
        if wants_gradient:
            return _Eager.apply(self, problem, samples.points, proxies.points)
        return self.compute_energy(*_detached(*problem), with_gradient=False)[0]

    def sums(self, samples: Charges, proxies: Charges, field: Field, weights: PairWeights) -> Tensor:
        """What each charge sums over its own class and over the others, (2, n) in float64, samples first."""
        return _energy(self.superpose, *_detached(samples, proxies, field, weights), with_gradient=False)[1]

    def _define(self) -> None:
        superpose = self.superpose

        @torch.library.custom_op(f"pfml::{self.name}_energy", mutates_args=())
        def energy_op(
            samples: Tensor,
            sample_labels: Tensor,
            proxies: Tensor,
            proxy_labels: Tensor,
            anchor_rows: Tensor,
            anchor_weights: Tensor,
            shares: Tensor,
            sampled: bool,
            on_sphere: Sequence[bool],
            field: int,
            weights: Sequence[float],
            with_gradient: bool,
        ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            anchors = Anchors(anchor_rows, anchor_weights) if sampled else None
            charges = (
                Charges(samples, sample_labels, on_sphere[0], shares=shares if shares.dim() == 2 else None),
                Charges(proxies, proxy_labels, on_sphere[1], anchors),
            )
            return _energy(superpose, *_detached(*charges, field_of(field), PairWeights(*weights)), with_gradient)

        @torch.library.custom_op(f"pfml::{self.name}_gradient", mutates_args=())
        def gradient_op(
            samples: Tensor,
            sample_labels: Tensor,
            proxies: Tensor,
            proxy_labels: Tensor,
            anchor_rows: Tensor,
            anchor_weights: Tensor,
            shares: Tensor,
            sums: Tensor,
            scale: Tensor,
            sampled: bool,
            on_sphere: Sequence[bool],
            field: int,
            weights: Sequence[float],
        ) -> tuple[Tensor, Tensor]:
            anchors = Anchors(anchor_rows, anchor_weights) if sampled else None
            charges = (
                Charges(samples, sample_labels, on_sphere[0], shares=shares if shares.dim() == 2 else None),
                Charges(proxies, proxy_labels, on_sphere[1], anchors),
            )
            return _gradient(superpose, *_detached(*charges, field_of(field), PairWeights(*weights)), sums, scale)

        energy_op.register_fake(_fake_energy)
        gradient_op.register_fake(_fake_gradient)
        energy_op.register_autograd(self._backward, setup_context=_keep_for_backward)
        gradient_op.register_autograd(self.refuse_second_order)
        self._energy_op, self._gradient_op = energy_op, gradient_op

    def _backward(self, ctx: Any, scale: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        if any(other is not None for other in others):
            self.refuse_second_order()
        if scale is None:
            return (None,) * 12
        if ctx.with_gradient:
            sample_gradient, proxy_gradient = _scaled(ctx.saved_tensors, scale)
        else:
            sample_gradient, proxy_gradient = self._gradient_op(*ctx.saved_tensors, scale, *ctx.settings)
        return sample_gradient, None, proxy_gradient, *(None,) * 9

    def refuse_second_order(self, *_: Any) -> NoReturn:
        """Say that there is no second derivative."""
        refuse_second_order(self.name)


def refuse_second_order(backend: str) -> NoReturn:
    """Say that this backend has no second derivative."""
    raise RuntimeError(
        f"the {backend} backend can be differentiated once only; for second derivatives use backend='dense'"
    )


def _energy(
    superpose: Superpose, samples: Charges, proxies: Charges, field: Field, weights: PairWeights, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Energy, sums (2, n) in float64, and the gradients of samples and proxies (empty unless asked for)."""
    with full_precision(samples.points.device):
        sampled = proxies.anchors is not None
        slopes = None
        if sampled:
            slopes = anchor_counts(samples, proxies, field).to(samples.points.dtype).repeat(2, 1)
        sums, *gradients = superpose(samples, proxies, field, weights, slopes, with_gradient)
        if field.rule.linear and not sampled:
            energy = sums.sum()
        else:
            energies = field.anchor_energies(sums[0], sums[1])
            energy = _times_counts(energies, anchor_counts(samples, proxies, field)).sum()
        return energy.to(samples.points.dtype), sums, gradients[0], gradients[1]


def _gradient(
    superpose: Superpose,
    samples: Charges,
    proxies: Charges,
    field: Field,
    weights: PairWeights,
    sums: Tensor,
    scale: Tensor,
) -> tuple[Tensor, Tensor]:
    """The gradients of samples and proxies, times `scale`, from the sums of the forward pass."""
    with full_precision(samples.points.device):
        slopes = torch.stack(field.anchor_slopes(sums[0], sums[1])) * scale
        slopes = _times_counts(slopes, anchor_counts(samples, proxies, field)).to(samples.points.dtype)
        _, *gradients = superpose(samples, proxies, field, weights, slopes, True)
        return gradients[0], gradients[1]


class _Eager(torch.autograd.Function):
    """An operator's energy, whose backward pass superposes again."""

    @staticmethod
    def forward(
        ctx: Any,
        operator: FieldOperator,
        problem: tuple[Charges, Charges, Field, PairWeights],
        samples: Tensor,
        proxies: Tensor,
    ) -> Tensor:
        still = _detached(*problem)
        energy, sums, *_ = operator.compute_energy(*still, with_gradient=False)
        ctx.operator, ctx.problem = operator, still
        ctx.save_for_backward(samples, proxies, sums)
        return energy

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Any, ...]:
        *points, sums = ctx.saved_tensors
        gradients = ctx.operator.compute_gradient(*ctx.problem, sums, scale)
        return None, None, *_once(gradients, points, ctx.operator.refuse_second_order)


def with_known_gradients(
    value: Tensor, points: Sequence[Tensor], gradients: Sequence[Tensor], refuse_second_order: Callable[[], Any]
) -> Tensor:
    """`value`, whose gradients at `points` are these; for a second derivative, `refuse_second_order` is called."""
    # in a tuple, so that the result is no view of an input
    return _Known.apply(refuse_second_order, (value,), len(points), *points, *gradients)


class _Known(torch.autograd.Function):
    """A value with its gradients."""

    @staticmethod
    def forward(ctx: Any, refuse: Callable[[], Any], value: tuple[Tensor], count: int, *tensors: Tensor) -> Tensor:
        ctx.refuse, ctx.count = refuse, count
        ctx.save_for_backward(*tensors)
        return value[0]

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: activation checkpointing allows no more
        points, kept = saved[: ctx.count], saved[ctx.count :]
        gradients = _once(_scaled(kept, scale), points, ctx.refuse)
        return None, None, None, *gradients, *(None for _ in kept)


def _once(gradients: Sequence[Tensor], points: Sequence[Tensor], refuse: Callable[[], Any]) -> Sequence[Tensor]:
    """`gradients`, as something that depends on the points but cannot be differentiated."""
    return _Once.apply(refuse, len(gradients), *gradients, *points) if torch.is_grad_enabled() else gradients


class _Once(torch.autograd.Function):
    """Gradients that depend on the points in a way that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, refuse: Callable[[], Any], count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.refuse = refuse
        return tuple(gradient.view_as(gradient) for gradient in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.refuse()


def _refuse_forward_mode(*points: Tensor) -> None:
    """A tangent would be lost without a word."""
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(each).tangent is not None for each in points):
        raise RuntimeError("the field has no forward-mode derivative: use reverse mode (backward, torch.func.grad)")


def _arguments(samples: Charges, proxies: Charges, field: Field, weights: PairWeights) -> tuple[Any, ...]:
    """What an operator of torch.library may be given: tensors, numbers and lists of them."""
    nothing = proxies.labels.new_empty(0), proxies.points.new_empty(0, dtype=torch.float64)
    return (
        samples.points,
        samples.labels,
        proxies.points,
        proxies.labels,
        *(proxies.anchors or nothing),
        nothing[1] if samples.shares is None else samples.shares,
        proxies.anchors is not None,
        [samples.on_sphere, proxies.on_sphere],
        field.handle,
        [weights.sample_sample, weights.sample_proxy, weights.proxy_attraction, weights.proxy_repulsion],
    )


def _detached(
    samples: Charges, proxies: Charges, field: Field, weights: PairWeights
) -> tuple[Charges, Charges, Field, PairWeights]:
    """The problem without gradients, in contiguous memory."""
    samples, proxies = (
        group._replace(
            points=group.points.detach().contiguous(),
            labels=group.labels.long().contiguous(),
            shares=None if group.shares is None else group.shares.detach(),
        )
        for group in (samples, proxies)
    )
    return samples, proxies, field, weights


def _times_counts(values: Tensor, counts: Tensor) -> Tensor:
    """values * counts, (..., n); 0 where the count is 0, whatever the value."""
    return torch.where(counts > 0, values * counts, 0.0)


def _scaled(gradients: Sequence[Tensor], scale: Tensor) -> list[Tensor]:
    """gradients * scale; in place if this is the last time that the graph is used."""
    used_again = torch.is_grad_enabled() or torch._C._autograd._get_current_graph_task_keep_graph()
    many_at_once = torch._C._functorch.is_legacy_batchedtensor(scale)  # is_grads_batched
    if used_again or many_at_once or is_traced():
        return [gradient * scale for gradient in gradients]
    return [gradient.mul_(scale) for gradient in gradients]


def _fake_energy(
    samples: Tensor, sample_labels: Tensor, proxies: Tensor, proxy_labels: Tensor, anchor_rows: Tensor,
    anchor_weights: Tensor, shares: Tensor, sampled: bool, on_sphere: Any, field: Any, weights: Any,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sums = samples.new_empty(2, samples.shape[0] + proxies.shape[0], dtype=torch.float64)
    if with_gradient:
        gradients = (torch.empty_like(samples), torch.empty_like(proxies))
    else:
        gradients = (samples.new_empty(0), samples.new_empty(0))
    return samples.new_empty(()), sums, *gradients


def _fake_gradient(
    samples: Tensor, sample_labels: Tensor, proxies: Tensor, proxy_labels: Tensor, anchor_rows: Tensor,
    anchor_weights: Tensor, shares: Tensor, sums: Tensor, scale: Tensor, sampled: bool, on_sphere: Any, field: Any,
    weights: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(samples), torch.empty_like(proxies)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    charges, settings, ctx.with_gradient = inputs[:7], inputs[7:11], inputs[11]
    _, sums, sample_gradient, proxy_gradient = output
    if ctx.with_gradient:
        ctx.save_for_backward(sample_gradient, proxy_gradient)
    else:
        ctx.settings = settings
        ctx.save_for_backward(*charges, sums)
    ctx.set_materialize_grads(False)
