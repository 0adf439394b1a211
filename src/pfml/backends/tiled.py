"""The tiled backend as a torch operator: opaque to torch.compile, with its own gradient.

The work is done in `sweep`. Where a field's forces are known before its sums (`Normalization.linear`), the forward
pass computes the gradient along with the energy and the backward pass only scales it; otherwise, and for gradients too
large to keep, the backward pass sweeps again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pfml.backends.sweep import Group, chunks, sweep
from pfml.sphere import inverse_norms
from pfml.superposition import Charges, Field, PairWeights, field_of

__all__ = ["pair_sums", "tiled_energy"]

#: Gradients larger than this are not kept between forward and backward.
KEPT_GRADIENT_BYTES = 2**28


def tiled_energy(samples: Charges, proxies: Charges, field: Field, weights: PairWeights) -> Tensor:
    """The total energy of samples and proxies under `field`, a scalar."""
    wants_gradient = torch.is_grad_enabled() and (samples.points.requires_grad or proxies.points.requires_grad)
    size = (samples.points.numel() + proxies.points.numel()) * samples.points.element_size()
    with_gradient = wants_gradient and field.rule.linear and size <= KEPT_GRADIENT_BYTES
    energy, *_ = _call(samples, proxies, field, weights, with_gradient)
    return energy.to(samples.points.dtype)


def pair_sums(samples: Charges, proxies: Charges, field: Field, weights: PairWeights) -> Tensor:
    """What each charge sums over its own class and over the others, (2, n) in float64, samples first."""
    return _call(samples, proxies, field, weights, with_gradient=False)[1]


def _call(
    samples: Charges, proxies: Charges, field: Field, weights: PairWeights, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.ops.pfml.tiled_energy(
        samples.points,
        samples.labels,
        proxies.points,
        proxies.labels,
        [samples.on_sphere, proxies.on_sphere],
        field.handle,
        [weights.sample_sample, weights.sample_proxy, weights.proxy_attraction, weights.proxy_repulsion],
        with_gradient,
    )


@torch.library.custom_op("pfml::tiled_energy", mutates_args=())
def _tiled_energy(
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
    with full_precision(samples.device):
        rule = field_of(field)
        groups = _groups((samples, proxies), (sample_labels, proxy_labels), on_sphere, gradients=with_gradient)
        sweep(*groups, rule, PairWeights(*weights))
        for group in groups:
            group.project_gradient()
        sums = torch.cat([group.sums for group in groups], dim=1)
        energies = rule.anchor_energies(*sums)
        if not rule.rule.proxies_are_anchors:
            energies = energies[: len(samples)]
        return energies.sum(), sums, _gradient_or_nothing(groups[0]), _gradient_or_nothing(groups[1])


@torch.library.custom_op("pfml::tiled_gradient", mutates_args=())
def _tiled_gradient(
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
    """The gradients of samples and proxies, times `scale`, from the sums of an earlier sweep."""
    with full_precision(samples.device):
        rule = field_of(field)
        groups = _groups((samples, proxies), (sample_labels, proxy_labels), on_sphere, gradients=True)
        slopes = torch.stack(rule.anchor_slopes(*sums)) * scale
        if not rule.rule.proxies_are_anchors:
            slopes[:, len(samples) :] = 0
        for group, part in zip(groups, slopes.split([len(samples), len(proxies)], dim=1), strict=True):
            group.slopes = part.to(samples.dtype)
        sweep(*groups, rule, PairWeights(*weights))
        for group in groups:
            group.project_gradient()
        return _gradient_or_nothing(groups[0]), _gradient_or_nothing(groups[1])


def _groups(
    points: tuple[Tensor, Tensor], labels: tuple[Tensor, Tensor], on_sphere: Sequence[bool], *, gradients: bool
) -> tuple[Group, Group]:
    """Samples and proxies, ready for a sweep; both centred at the mean of a few of them."""
    made = []
    for group_points, group_labels, sphere in zip(points, labels, on_sphere, strict=True):
        group_points = group_points.detach().contiguous()
        group = Group(
            points=group_points,
            labels=group_labels,
            inverse_norms=_inverse_norms(group_points) if sphere else None,
            centre=group_points.new_zeros(group_points.shape[1], dtype=torch.float64),
            squared_norms=group_points.new_zeros(len(group_points), dtype=torch.float64),
            sums=group_points.new_zeros(2, len(group_points), dtype=torch.float64),
            slopes=group_points.new_ones(2, len(group_points)),
            gradient=torch.zeros_like(group_points) if gradients else None,
        )
        made.append(group)
    few = torch.cat([group.exact(slice(0, 512)) for group in made])
    for group in made:
        if len(few):
            group.centre = few.mean(dim=0)
        group.prepare()
    return made[0], made[1]


def _inverse_norms(points: Tensor) -> Tensor:
    """1 / |points|, (n, 1) in float64, without a float64 copy of all points."""
    inverse = points.new_empty(len(points), 1, dtype=torch.float64)
    for rows in chunks(points):
        inverse[rows] = inverse_norms(points[rows])
    return inverse


def _gradient_or_nothing(group: Group) -> Tensor:
    return group.points.new_empty(0) if group.gradient is None else group.gradient


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products in true float32, whatever autocast and the precision switches for products say outside."""
    # The switches of each backend: torch's older, common one refuses to be read once allow_tf32 has been set.
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    outside = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False), torch.no_grad():
            yield
    finally:
        for switch, precision in zip(switches, outside, strict=True):
            switch.fp32_precision = precision


@_tiled_energy.register_fake
def _(samples, sample_labels, proxies, proxy_labels, on_sphere, field, weights, with_gradient):  # type: ignore[no-untyped-def]
    sums = samples.new_empty(2, samples.shape[0] + proxies.shape[0], dtype=torch.float64)
    if with_gradient:
        gradients = (torch.empty_like(samples), torch.empty_like(proxies))
    else:
        gradients = (samples.new_empty(0), samples.new_empty(0))
    return samples.new_empty((), dtype=torch.float64), sums, *gradients


@_tiled_gradient.register_fake
def _(samples, sample_labels, proxies, proxy_labels, on_sphere, field, weights, sums, scale):  # type: ignore[no-untyped-def]
    return torch.empty_like(samples), torch.empty_like(proxies)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    samples, sample_labels, proxies, proxy_labels, ctx.on_sphere, ctx.field, ctx.weights, ctx.with_gradient = inputs
    _, sums, sample_gradient, proxy_gradient = output
    if ctx.with_gradient:
        ctx.save_for_backward(sample_gradient, proxy_gradient)
    else:
        ctx.save_for_backward(samples, sample_labels, proxies, proxy_labels, sums)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, scale: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(other is not None for other in others):
        _refuse_second_order()
    if scale is None:
        return (None,) * 8
    if ctx.with_gradient:
        sample_gradient, proxy_gradient = (gradient * scale for gradient in ctx.saved_tensors)
    else:
        *charges, sums = ctx.saved_tensors
        sample_gradient, proxy_gradient = torch.ops.pfml.tiled_gradient(
            *charges, ctx.on_sphere, ctx.field, ctx.weights, sums, scale
        )
    return sample_gradient, None, proxy_gradient, None, None, None, None, None


def _refuse_second_order(*_: Any) -> tuple[Tensor | None, ...]:
    raise RuntimeError("the tiled backend can be differentiated once only; for second derivatives use backend='dense'")


torch.library.register_autograd("pfml::tiled_energy", _backward, setup_context=_keep_for_backward)
torch.library.register_autograd("pfml::tiled_gradient", _refuse_second_order)
