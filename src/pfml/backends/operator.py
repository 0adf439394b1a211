"""A way to superpose pairs, made a torch operator: opaque to torch.compile, with its own gradient.

Where a field's forces are known before its sums (`Normalization.linear`), the forward pass computes the gradient along
with the energy and the backward pass only scales it; otherwise, and for gradients too large to keep, the backward pass
superposes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pfml.precision import full_precision
from pfml.superposition import Charges, Field, PairWeights, field_of

__all__ = ["FieldOperator"]

#: Gradients larger than this are not kept between forward and backward.
KEPT_GRADIENT_BYTES = 2**28

#: (samples, proxies, field, weights, slopes, with_gradient) -> sums (2, n) in float64, and the gradients of both (empty
#: unless asked for). `slopes` (2, n) are d energy / d sums, 1 if None.
Superpose = Callable[
    [Charges, Charges, Field, PairWeights, Tensor | None, bool],
    tuple[Tensor, Tensor, Tensor],
]


class FieldOperator:
    """The operators pfml::NAME_energy and pfml::NAME_gradient around a function that superposes pairs."""

    def __init__(self, name: str, superpose: Superpose) -> None:
        self.name = name
        self.superpose = superpose
        self._define()

    def energy(self, samples: Charges, proxies: Charges, field: Field, weights: PairWeights) -> Tensor:
        """The total energy of samples and proxies under `field`, a scalar."""
        wants_gradient = torch.is_grad_enabled() and (samples.points.requires_grad or proxies.points.requires_grad)
        size = (samples.points.numel() + proxies.points.numel()) * samples.points.element_size()
        with_gradient = wants_gradient and field.rule.linear and size <= KEPT_GRADIENT_BYTES
        energy, *_ = self._call(samples, proxies, field, weights, with_gradient)
        return energy.to(samples.points.dtype)

    def sums(self, samples: Charges, proxies: Charges, field: Field, weights: PairWeights) -> Tensor:
        """What each charge sums over its own class and over the others, (2, n) in float64, samples first."""
        return self._call(samples, proxies, field, weights, with_gradient=False)[1]

    def _call(
        self, samples: Charges, proxies: Charges, field: Field, weights: PairWeights, with_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._energy_op(
            samples.points,
            samples.labels,
            proxies.points,
            proxies.labels,
            [samples.on_sphere, proxies.on_sphere],
            field.handle,
            [weights.sample_sample, weights.sample_proxy, weights.proxy_attraction, weights.proxy_repulsion],
            with_gradient,
        )

    def _define(self) -> None:
        superpose = self.superpose

        @torch.library.custom_op(f"pfml::{self.name}_energy", mutates_args=())
        def energy_op(
            samples: Tensor,
            sample_labels: Tensor,
            proxies: Tensor,
            proxy_labels: Tensor,
            on_sphere: Sequence[bool],
            field: int,
            weights: Sequence[float],
            with_gradient: bool,
        ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            """Energy (float64), sums (2, n), and the gradients of samples and proxies (empty unless asked for)."""
            rule = field_of(field)
            charges = _charges(samples, sample_labels, proxies, proxy_labels, on_sphere)
            with full_precision(samples.device):
                sums, *gradients = superpose(*charges, rule, PairWeights(*weights), None, with_gradient)
                energies = rule.anchor_energies(sums[0], sums[1])
                if not rule.rule.proxies_are_anchors:
                    energies = energies[: len(samples)]
                return energies.sum(), sums, gradients[0], gradients[1]

        @torch.library.custom_op(f"pfml::{self.name}_gradient", mutates_args=())
        def gradient_op(
            samples: Tensor,
            sample_labels: Tensor,
            proxies: Tensor,
            proxy_labels: Tensor,
            on_sphere: Sequence[bool],
            field: int,
            weights: Sequence[float],
            sums: Tensor,
            scale: Tensor,
        ) -> tuple[Tensor, Tensor]:
            """The gradients of samples and proxies, times `scale`, from the sums of the forward pass."""
            rule = field_of(field)
            charges = _charges(samples, sample_labels, proxies, proxy_labels, on_sphere)
            with full_precision(samples.device):
                slopes = torch.stack(rule.anchor_slopes(sums[0], sums[1])) * scale
                if not rule.rule.proxies_are_anchors:
                    slopes[:, len(samples) :] = 0
                _, *gradients = superpose(*charges, rule, PairWeights(*weights), slopes.to(samples.dtype), True)
                return gradients[0], gradients[1]

        energy_op.register_fake(_fake_energy)
        gradient_op.register_fake(_fake_gradient)
        energy_op.register_autograd(self._backward, setup_context=_keep_for_backward)
        gradient_op.register_autograd(self._refuse_second_order)
        self._energy_op, self._gradient_op = energy_op, gradient_op

    def _backward(self, ctx: Any, scale: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
        if any(other is not None for other in others):
            self._refuse_second_order()
        if scale is None:
            return (None,) * 8
        if ctx.with_gradient:
            sample_gradient, proxy_gradient = (gradient * scale for gradient in ctx.saved_tensors)
        else:
            *charges, sums = ctx.saved_tensors
            sample_gradient, proxy_gradient = self._gradient_op(
                *charges, ctx.on_sphere, ctx.field, ctx.weights, sums, scale
            )
        return sample_gradient, None, proxy_gradient, None, None, None, None, None

    def _refuse_second_order(self, *_: Any) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            f"the {self.name} backend can be differentiated once only; for second derivatives use backend='dense'"
        )


def _charges(
    samples: Tensor, sample_labels: Tensor, proxies: Tensor, proxy_labels: Tensor, on_sphere: Sequence[bool]
) -> tuple[Charges, Charges]:
    return (
        Charges(samples.detach().contiguous(), sample_labels, on_sphere[0]),
        Charges(proxies.detach().contiguous(), proxy_labels, on_sphere[1]),
    )


def _fake_energy(
    samples: Tensor, sample_labels: Tensor, proxies: Tensor, proxy_labels: Tensor, on_sphere: Any, field: Any,
    weights: Any, with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sums = samples.new_empty(2, samples.shape[0] + proxies.shape[0], dtype=torch.float64)
    if with_gradient:
        gradients = (torch.empty_like(samples), torch.empty_like(proxies))
    else:
        gradients = (samples.new_empty(0), samples.new_empty(0))
    return samples.new_empty((), dtype=torch.float64), sums, *gradients


def _fake_gradient(
    samples: Tensor, sample_labels: Tensor, proxies: Tensor, proxy_labels: Tensor, on_sphere: Any, field: Any,
    weights: Any, sums: Tensor, scale: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(samples), torch.empty_like(proxies)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    samples, sample_labels, proxies, proxy_labels, ctx.on_sphere, ctx.field, ctx.weights, ctx.with_gradient = inputs
    _, sums, sample_gradient, proxy_gradient = output
    if ctx.with_gradient:
        ctx.save_for_backward(sample_gradient, proxy_gradient)
    else:
        ctx.save_for_backward(samples, sample_labels, proxies, proxy_labels, sums)
    ctx.set_materialize_grads(False)
