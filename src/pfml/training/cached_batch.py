"""A batch that is larger than memory: gradient caching (Gao et al., RepL4NLP 2021).

The network embeds the batch in mini-batches without a graph. The loss sees all embeddings at once, and its gradient for
each of them is kept. Then each mini-batch passes through the network again, with a graph, and takes its part of that
gradient back. The result is the step of the whole batch, for one more pass forward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["CachedBatch"]


class CachedBatch:
    """What the network returns for a batch, `outputs`, and the way back through the network.

    Args:
        network: Images (B, ...) to embeddings or features (B, ...).
        images: The batch.
        size: Of a mini-batch; None, or that of the batch or more, for one ordinary pass.
    """

    def __init__(self, network: Callable[[Tensor], Tensor], images: Tensor, size: int | None) -> None:
        self.network = network
        self.pieces = images.split(size) if size is not None and size < len(images) else ()
        self.states: list[tuple[Tensor, Tensor | None]] = []
        if not self.pieces:
            self.outputs = network(images)
            return
        parts = []
        with torch.no_grad():
            for piece in self.pieces:
                self.states.append(_random_state(piece.device))
                parts.append(network(piece))
        self.outputs = torch.cat(parts).requires_grad_()

    def backward(self) -> None:
        """Hand the gradient of the outputs, which a loss has left there, on to the parameters of the network."""
        if not self.pieces:
            return  # autograd has done so
        gradient = self.outputs.grad
        if gradient is None:  # of a loss that looked at none of them
            return
        after = _random_state(self.outputs.device)
        for piece, part, state in zip(self.pieces, gradient.split(len(self.pieces[0])), self.states, strict=True):
            _set_random_state(state, piece.device)  # so that dropout is the same
            outputs = self.network(piece)
            if outputs.requires_grad:  # in a warm-up without a head nothing of the network trains
                outputs.backward(part)
        _set_random_state(after, self.outputs.device)


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_random_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
