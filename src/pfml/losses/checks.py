"""Checks of a batch, as one operator: errors name the value and where it is, and torch.compile keeps one graph."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from pfml.tracing import is_traced

__all__ = ["CollapseWarning", "DeferredCheck", "check_batch", "checked_sum", "conclude", "deferred_checks"]


INSTALLED = find_spec("triton") is not None
#: Values that one program of a kernel looks at.
LOOKED_AT_ONCE = 4096


class CollapseWarning(UserWarning):
    """All embeddings of a batch coincide: the model has collapsed, or its input is constant."""


@dataclass(frozen=True, eq=False)
class DeferredCheck:
    """A check whose result nobody has waited for yet.

    Attributes:
        is_bad: Scalar bool on the device: whether `explain` would raise.
        is_worth_a_look: Scalar bool on the device: whether `explain` would raise or warn.
    """

    is_bad: Tensor
    is_worth_a_look: Tensor
    embeddings: Tensor
    labels: Tensor
    proxies: Tensor
    num_classes: int

    def explain(self) -> None:
        """Raise, or warn, as `check_batch` would have done; the proxies must be those of that time."""
        _explain(self.embeddings, self.labels.long(), self.proxies, self.num_classes)


_deferred: ContextVar[list[DeferredCheck] | None] = ContextVar("deferred checks", default=None)


@contextmanager
def deferred_checks() -> Iterator[list[DeferredCheck]]:
    """Within the block, losses do not wait for the device to check values: what they would look at is in the list.

    For loops that read it before they use what was computed. Types and shapes are checked at once, as ever.
    """
    checks: list[DeferredCheck] = []
    token = _deferred.set(checks)
    try:
        yield checks
    finally:
        _deferred.reset(token)


def check_batch(embeddings: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
    """`labels` as int64 on the embeddings' device, after checking them, the embeddings and the proxies (C, M, D).

    Raises:
        TypeError: Embeddings or labels of the wrong type.
        ValueError: Wrong shapes, labels outside [0, C), or NaN or Inf anywhere.
    """
    num_classes, _, embedding_dim = proxies.shape
    for name, value, hint in (
        ("embeddings", embeddings, ""),
        ("labels", labels, "; torch.as_tensor makes one of integers, pfml.LabelMap of any values"),
    ):
        if not isinstance(value, Tensor):
            error = ValueError if value is None else TypeError
            raise error(f"{name} must be a tensor, got {type(value).__name__}{hint}")
    if embeddings.dim() != 2 or embeddings.shape[1] != embedding_dim:
        raise ValueError(f"embeddings must be (batch, {embedding_dim}), got shape {tuple(embeddings.shape)}")
    if not embeddings.is_floating_point():
        raise ValueError(f"embeddings must be floating-point of width {embedding_dim}, got {embeddings.dtype}")
    if embeddings.element_size() < 2:
        raise TypeError(f"embeddings must be of 16 bits or more, got {embeddings.dtype}")
    if labels.dim() != 1 or labels.shape[0] != embeddings.shape[0]:
        raise ValueError(
            f"labels must be ({embeddings.shape[0]},), one for each embedding, got shape {tuple(labels.shape)}"
        )
    if labels.dtype.is_floating_point or labels.dtype in (torch.bool, torch.complex64, torch.complex128):
        raise TypeError(f"labels must be integers, got {labels.dtype}; pfml.LabelMap turns any values into integers")
    if proxies.device != embeddings.device:
        raise ValueError(
            f"embeddings are on {embeddings.device} but the proxies on {proxies.device}: "
            f"move the loss with loss.to({str(embeddings.device)!r})"
        )
    check = _checked_labels_op if is_traced() else _checked_labels
    return check(embeddings.detach(), labels.to(embeddings.device), proxies.detach(), num_classes)


def _checked_labels(embeddings: Tensor, labels: Tensor, proxies: Tensor, num_classes: int) -> Tensor:
    labels = labels.to(torch.int64, copy=True)
    by_kernels = embeddings.is_cuda and _has_kernels(embeddings, proxies)
    verdicts = _verdicts_of_kernels if by_kernels else _verdicts
    is_bad, is_worth_a_look = verdicts(embeddings, labels, proxies, num_classes)
    if _deferred.get() is None and embeddings.is_cuda and torch.cuda.is_current_stream_capturing():
        torch._assert_async(~is_bad)
    else:
        conclude(DeferredCheck(is_bad, is_worth_a_look, embeddings, labels, proxies, num_classes))
    return labels


def _verdicts(embeddings: Tensor, labels: Tensor, proxies: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Whether anything is wrong, and whether something is or the embeddings have collapsed."""
    # One number says whether anything is wrong, so that a GPU is waited for once. An overflow of float32 is looked
    # into below; nobody does so in time where the look is deferred.
    wide = (torch.float32, proxies.dtype) if _deferred.get() is None else (torch.float64, torch.float64)
    total = proxies.sum(dtype=wide[1])  # without a copy of the proxies
    if not labels.numel():
        is_bad = total * 0 != 0
        return is_bad, is_bad
    low, high = torch.aminmax(labels)
    lowest, highest = torch.aminmax(embeddings, dim=0)
    spread = (highest.to(wide[0]) - lowest.to(wide[0])).amax()  # NaN or Inf if any value is
    is_bad = (low < 0) | (high >= num_classes) | ((total + spread) * 0 != 0)
    return is_bad, is_bad | (spread == 0)


def _has_kernels(embeddings: Tensor, proxies: Tensor) -> bool:
    """Whether the kernels of `check_kernels` can look at these values."""
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    fits = max(embeddings.numel(), proxies.numel()) < 2**31 - LOOKED_AT_ONCE  # positions are of 32 bits
    return INSTALLED and fits and embeddings.dtype in narrow and proxies.dtype in narrow and proxies.is_contiguous()


def _verdicts_of_kernels(
    embeddings: Tensor, labels: Tensor, proxies: Tensor, num_classes: int
) -> tuple[Tensor, Tensor]:
    """The same, in few launches."""
    from pfml.losses.check_kernels import conclude, look

    sizes = embeddings.numel(), labels.numel(), proxies.numel()
    found = torch.zeros(1, dtype=torch.int32, device=embeddings.device)
    verdicts = torch.empty(2, dtype=torch.bool, device=embeddings.device)
    with torch.cuda.device_of(embeddings):  # Triton launches on the current device
        programs = (max(-(-max(sizes) // LOOKED_AT_ONCE), 1),)
        look[programs](
            embeddings.contiguous(), labels, proxies, found, *sizes, num_classes, max(embeddings.shape[1], 1),
            BLOCK=LOOKED_AT_ONCE,
        )  # fmt: skip
        conclude[(1,)](found, verdicts.view(torch.int8), labels.numel())
    return verdicts[0], verdicts[1]


def conclude(check: DeferredCheck) -> None:
    """Do about a finished check what `check_batch` does: defer it, or raise or warn if it tells so."""
    deferred = _deferred.get()
    if deferred is not None:
        deferred.append(check)
    elif check.is_worth_a_look.item():
        check.explain()


_checked_labels_op = torch.library.custom_op("pfml::checked_labels", _checked_labels, mutates_args=())


@_checked_labels_op.register_fake
def _(embeddings: Tensor, labels: Tensor, proxies: Tensor, num_classes: int) -> Tensor:
    return torch.empty_like(labels, dtype=torch.int64)


def _explain(embeddings: Tensor, labels: Tensor, proxies: Tensor, num_classes: int) -> None:
    outside = ((labels < 0) | (labels >= num_classes)).nonzero().flatten()
    if len(outside):
        first = int(outside[0])
        raise ValueError(f"labels must lie in [0, {num_classes}), got {int(labels[first])} at index {first}")
    for name, values in (("embeddings", embeddings), ("proxies", proxies.flatten(1))):
        bad_rows = (~torch.isfinite(values)).any(dim=1).nonzero().flatten().tolist()
        if bad_rows:
            rows = "rows" if name == "embeddings" else "classes"
            shown = ", ".join(map(str, bad_rows[:10])) + (", ..." if len(bad_rows) > 10 else "")
            raise ValueError(f"{name} must be finite, got NaN or Inf in {len(bad_rows)} {rows}: {shown}")
    if len(embeddings) > 1 and bool((embeddings == embeddings[:1]).all()):
        warnings.warn(
            f"all {len(embeddings)} embeddings of the batch coincide: the model has collapsed and no force can "
            "separate them; lower the learning rate, or look at loss.diagnostics()",
            CollapseWarning,
            stacklevel=2,
        )


def checked_sum(loss: nn.Module, embeddings: Tensor, *, differentiable: bool = False) -> Tensor:
    """The sum of all that a loss learns, repeated to (C, 1, D): what `check_batch` takes of a loss without proxies.

    Args:
        loss: Has `num_classes` and `embedding_dim`.
        embeddings: Whose device counts if the loss learns nothing.
        differentiable: Whether the loss's parameters get gradients of it.
    """
    sums = [one.sum() if differentiable else one.detach().sum() for one in loss.parameters()]
    device = embeddings.device if isinstance(embeddings, Tensor) else None
    total = torch.stack(sums).sum() if sums else torch.zeros((), device=device)
    sizes: Any = loss.num_classes, 1, loss.embedding_dim
    return total.expand(sizes)
