"""Whether the program is being traced, or its autograd graph watched."""

from __future__ import annotations

import torch

__all__ = ["is_traced", "is_watched"]


def is_traced() -> bool:
    """Whether a compiler, a tracing mode or a transform of torch.func traces the program.

    Then our operators must go through torch.library. Otherwise the functions behind them are called directly, which
    costs less.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def is_watched() -> bool:
    """Whether each node of the autograd graph is read as it is made or left.

    Activation checkpointing and `torch.autograd.graph.save_on_cpu` take the tensors that a node saves; anomaly
    detection reads what it computes.
    """
    has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    return has_hooks or torch.is_anomaly_enabled()
