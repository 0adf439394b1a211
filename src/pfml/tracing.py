"""Whether a program runs, or is looked at."""

from __future__ import annotations

import torch

__all__ = ["is_traced"]


def is_traced() -> bool:
    """Whether something must see our operators as such: a compiler, a tracing mode, a transform of torch.func.

    Otherwise the functions behind them are called directly: the way through torch.library costs more than they do.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )
