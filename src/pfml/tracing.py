"""Whether the program is being traced."""

from __future__ import annotations

import torch

__all__ = ["is_traced"]


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
