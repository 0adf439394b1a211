"""Float16 tensors, computed on in float32, and a warning where their gradients do not fit back into float16.

The force of Eq. 2 on two classes that are 0.05 apart is 1e6, and float16 ends at 65504: the gradient of such an
embedding is infinite, though it was finite when it was computed. That is only seen in the backward pass. There a GPU is
not waited for: the flag is copied to memory behind the work, and read by a later step that finds it there.

A loss that is scaled up (torch.amp.GradScaler) overflows now and then on purpose. So there is a warning only if the
gradient of the loss itself, without the scale, is too large.
"""

from __future__ import annotations

import warnings
from collections import deque

import torch
from torch import Tensor

from pfml.tracing import is_traced

__all__ = ["GradientOverflowWarning", "watched", "widened"]

#: From here on float16 rounds to infinity.
OVERFLOW = 65520.0


class GradientOverflowWarning(UserWarning):
    """The gradient of a float16 tensor is finite in float32 and infinite in float16."""


#: Flags that are on their way from a GPU, each with the event after which it can be read.
_under_way: deque[tuple[torch.cuda.Event, Tensor]] = deque(maxlen=8)
#: What the loss whose backward pass is under way was multiplied by: it comes before the gradients of its points.
_scale: deque[Tensor] = deque(maxlen=1)


def widened(points: Tensor, dtype: torch.dtype) -> Tensor:
    """`points` in a wider type, differentiable; warns once if float16 cannot hold their gradient."""
    if points.dtype != torch.float16 or not (points.requires_grad and torch.is_grad_enabled()):
        return points.to(dtype)
    if is_traced():
        return _widened_op(points, dtype)
    _report_arrived()
    wide = points.to(dtype)
    wide.register_hook(_check_overflow)
    return wide


def watched(value: Tensor, *points: Tensor) -> Tensor:
    """`value`, an energy of points that were widened: its own gradient is the scale that theirs are judged by."""
    if not value.requires_grad or all(each.dtype != torch.float16 for each in points):
        return value
    if is_traced():
        return _watched_op(value)
    value.register_hook(_note_scale)
    return value


def _note_scale(gradient: Tensor) -> None:
    if not _is_batched(gradient):
        _scale.append(gradient.detach())


def _is_batched(gradient: Tensor) -> bool:
    """Whether it is many gradients at once (is_grads_batched), which have no one value."""
    return torch._C._functorch.is_legacy_batchedtensor(gradient)


def _check_overflow(gradient: Tensor) -> None:
    _report_arrived()
    if gradient.numel() == 0 or _is_batched(gradient):
        return
    largest = gradient.detach().abs().amax()
    overflows = largest >= OVERFLOW
    if _scale and _scale[0].device == gradient.device:
        overflows &= largest >= OVERFLOW * _scale[0].abs()
    if not gradient.is_cuda:
        _warn_if(bool(overflows))
    elif not torch.cuda.is_current_stream_capturing():
        flag = torch.empty((), dtype=torch.bool, pin_memory=True)
        flag.copy_(overflows, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(gradient.device))
        _under_way.append((copied, flag))


def _report_arrived() -> None:
    while _under_way and _under_way[0][0].query():
        _warn_if(bool(_under_way.popleft()[1]))


def _warn_if(overflows: bool) -> None:
    if overflows:
        # from one place and with one text, so that Python shows it once
        warnings.warn(
            "gradients of float16 embeddings or proxies are infinite: points of different classes are so close that "
            "float16, which ends at 65504, cannot hold their force; use bfloat16, or make the loss smaller with "
            "reduction='points' or 'pairs', or with torch.amp.GradScaler, which skips such steps and lowers its scale",
            GradientOverflowWarning,
            stacklevel=1,
        )


# The same for programs that are traced: opaque operators, so that they stay one graph.


@torch.library.custom_op("pfml::widened", mutates_args=())
def _widened_op(points: Tensor, dtype: torch.dtype) -> Tensor:
    return points.to(dtype, copy=True)


@_widened_op.register_fake
def _(points: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(points, dtype=dtype)


@torch.library.custom_op("pfml::narrowed_gradient", mutates_args=())
def _narrowed_gradient_op(gradient: Tensor) -> Tensor:
    _check_overflow(gradient)
    return gradient.to(torch.float16, copy=True)


@_narrowed_gradient_op.register_fake
def _(gradient: Tensor) -> Tensor:
    return torch.empty_like(gradient, dtype=torch.float16)


@torch.library.custom_op("pfml::watched", mutates_args=())
def _watched_op(value: Tensor) -> Tensor:
    return value.clone()


@_watched_op.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


@torch.library.custom_op("pfml::watched_gradient", mutates_args=())
def _watched_gradient_op(gradient: Tensor) -> Tensor:
    _note_scale(gradient.clone())
    return gradient.clone()


@_watched_gradient_op.register_fake
def _(gradient: Tensor) -> Tensor:
    return torch.empty_like(gradient)


_widened_op.register_autograd(lambda ctx, gradient: (_narrowed_gradient_op(gradient), None))
_watched_op.register_autograd(lambda ctx, gradient: _watched_gradient_op(gradient))
