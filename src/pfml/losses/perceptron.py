"""Small networks of losses, computed in the dtype of their input, whatever that of their parameters is."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Perceptron", "linear"]


class Perceptron(nn.Module):
    """linear2(relu(linear1(points))).

    Args:
        in_dim: Width of the input.
        hidden_dim: Width of the layer between.
        out_dim: Width of the output.
    """

    def __init__(self, in_dim: int, hidden_dim: int, out_dim: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(in_dim, hidden_dim)
        self.linear2 = nn.Linear(hidden_dim, out_dim)

    def forward(self, points: Tensor) -> Tensor:
        """(batch, out_dim) of points (batch, in_dim), in their dtype."""
        return linear(self.linear2, F.relu(linear(self.linear1, points)))


def linear(layer: nn.Linear, points: Tensor) -> Tensor:
    """The layer in the dtype of `points`."""
    return F.linear(points, layer.weight.to(points.dtype), layer.bias.to(points.dtype))
