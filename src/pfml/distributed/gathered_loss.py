"""Any loss over the ranks of a process group: each brings its samples, and each computes the loss of all of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pfml.distributed.schedule import shard_slice
from pfml.distributed.world import Ranks

__all__ = ["GatheredLoss"]


class GatheredLoss(nn.Module):
    """The loss `whole` of the global batch, computed on every rank alike.

    The gradient of a rank's embeddings is d loss / d embeddings: the gradient of the model is the **sum** over ranks.
    That of the loss's own parameters is complete on every rank. All ranks call `forward` together, with torch's random
    numbers in the same state if the loss draws any.

    Args:
        whole: The loss of one process, the same on all ranks.
        ranks: Who this process is.
    """

    def __init__(self, whole: nn.Module, ranks: Ranks) -> None:
        super().__init__()
        self.whole = whole
        self.ranks = ranks

    def forward(self, embeddings: Tensor, labels: Tensor, **inputs: Tensor) -> Tensor:
        """The loss of all ranks' samples: embeddings (b, D), labels (b,) and other `inputs` (b, ...) of this rank."""
        sizes = [numbers[0] for numbers in self.ranks.control.all_gather_numbers([len(embeddings)])]
        everyone = _Gathered.apply(self.ranks, sizes, embeddings)
        others = {name: _Gathered.apply(self.ranks, sizes, rows) for name, rows in inputs.items()}
        return self.whole(everyone, self.ranks.all_gather(labels, sizes), **others)

    @property
    def terms(self) -> dict[str, Tensor]:
        """The terms of the loss of the global batch; empty if it has none."""
        return getattr(self.whole, "terms", {})

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """The parameter groups of the whole loss."""
        groups = getattr(self.whole, "param_groups", None)
        if groups is not None:
            return groups(lr=lr, weight_decay=weight_decay)
        return [{"params": list(self.whole.parameters()), "lr": lr, "weight_decay": weight_decay}]


class _Gathered(Function):
    """All ranks' rows; the gradient of this rank's own ones goes back."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, sizes: list[int], mine: Tensor) -> Tensor:
        ctx.rows = shard_slice(sizes, ranks.rank)
        return ranks.all_gather(mine.detach(), sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        return None, None, gradient[ctx.rows]
