"""Checks of a batch, as one operator: errors name the value and where it is, and torch.compile keeps one graph."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

__all__ = ["CollapseWarning", "check_batch"]


class CollapseWarning(UserWarning):
    """All embeddings of a batch coincide: the network has collapsed, or its input is constant."""


def check_batch(embeddings: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
    """`labels` as int64 on the embeddings' device, after checking them, the embeddings and the proxies (C, M, D).

    Raises:
        TypeError: Embeddings or labels of the wrong type.
        ValueError: Wrong shapes, labels outside [0, C), or NaN or Inf anywhere.
    """
    num_classes, _, embedding_dim = proxies.shape
    for name, value in (("embeddings", embeddings), ("labels", labels)):
        if not isinstance(value, Tensor):
            error = ValueError if value is None else TypeError
            raise error(f"{name} must be a tensor, got {type(value).__name__}")
    if embeddings.dim() != 2 or embeddings.shape[1] != embedding_dim:
        raise ValueError(f"embeddings must be (batch, {embedding_dim}), got shape {tuple(embeddings.shape)}")
    if not embeddings.is_floating_point():
        raise ValueError(f"embeddings must be floating-point of width {embedding_dim}, got {embeddings.dtype}")
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
    return torch.ops.pfml.checked_labels(
        embeddings.detach(), labels.to(embeddings.device), proxies.detach(), num_classes
    )


@torch.library.custom_op("pfml::checked_labels", mutates_args=())
def _checked_labels(embeddings: Tensor, labels: Tensor, proxies: Tensor, num_classes: int) -> Tensor:
    labels = labels.to(torch.int64, copy=True)
    # One number says whether anything is wrong, so that a GPU is waited for once.
    is_bad = ~torch.isfinite(proxies.sum())  # without a copy of the proxies; an overflow is looked into below
    collapsed = torch.zeros_like(is_bad)
    if labels.numel():
        low, high = torch.aminmax(labels)
        spread = (embeddings.float() - embeddings[:1].float()).abs().amax()  # NaN or Inf if any value is
        is_bad = is_bad | (low < 0) | (high >= num_classes) | ~torch.isfinite(spread)
        collapsed = spread == 0
    if embeddings.is_cuda and torch.cuda.is_current_stream_capturing():
        torch._assert_async(~is_bad)
    elif (is_bad | collapsed).item():
        _explain(embeddings, labels, proxies, num_classes)
    return labels


@_checked_labels.register_fake
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
            f"all {len(embeddings)} embeddings of the batch coincide: the network has collapsed and no force can "
            "separate them; lower the learning rate, or look at loss.diagnostics()",
            CollapseWarning,
            stacklevel=2,
        )
