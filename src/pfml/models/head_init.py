"""Where a head starts: a linear layer that keeps what a pretrained backbone knows.

A random layer from F features to D dimensions throws away what the other F - D dimensions know before the first step.
The layers here are computed instead, in closed form from the features of the training images (`ClosedFormHeads`):

- "principal": the D directions in which the features differ most.
- "whitened": the same after the directions in which images of one class differ were weakened. With S the covariance
  within classes and s its mean variance, features are first multiplied by (S + s I)^(-1/4), half of a whitening.

Both are centered, and scaled to the size that a random layer has, so that learning rates mean the same.

Three starts are random: "random", He's normal distribution with fan-out and no bias, as Proxy Anchor's, HIST's and
Multi-Similarity's code has it; "uniform", torch's own of a linear layer, as SoftTriple's, ProxyGML's and ProxyNCA++'s
has it; and "orthogonal", rows of length 1 at right angles and no bias, as Hyp's and HIER's has it. The last two are
shorter, so that a step turns them further.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from pfml.models.head import Head

__all__ = ["FEATURE_STARTS", "HEAD_STARTS", "ClosedFormHeads", "draw_head", "initialize_head", "set_linear"]

HEAD_STARTS = ("random", "uniform", "orthogonal", "principal", "whitened")
#: Start that looks at the features of the training images -> strength of its whitening.
FEATURE_STARTS = {"principal": 0.0, "whitened": 0.5}


class ClosedFormHeads:
    """Linear heads computed from the features of labeled images, for any strength of whitening and any dimension.

    Centered features are multiplied by (S + s I)^(-strength / 2), with S their covariance within classes and s the mean
    of its variances, then projected on the directions in which they differ most. Strength 0 leaves distances as they
    are, 1 whitens fully: a direction in which images of one class differ much then counts as much as any other.

    One decomposition serves all strengths and dimensions.

    Args:
        features: (N, F) of the training images.
        labels: (N,) int64, their classes.
    """

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.center = features.double().mean(0)
        self._centered = features.double() - self.center
        counts = torch.bincount(labels).clamp_min(1).to(self._centered)
        sums = torch.zeros(len(counts), features.shape[1]).to(self._centered).index_add_(0, labels, self._centered)
        within = self._centered - (sums / counts[:, None])[labels]
        self._axes, variances = _principal_axes(within)
        self._variances = variances / len(within)
        self._mean_variance = float(self._variances.sum()) / features.shape[1]
        self._whitenings: dict[float, Tensor] = {}
        self._directions: dict[float, Tensor] = {}

    def weight_and_bias(self, strength: float, dimension: int | None = None) -> tuple[Tensor, Tensor]:
        """(D, F) and (D,) in float64; without a dimension, D is F, and no direction is left out."""
        size = self._centered.shape[1]
        weight = self._whitening(strength)
        if dimension is not None and dimension < size:
            directions = self._directions_of(strength)
            if directions.shape[1] < dimension:
                directions = _completed(directions, dimension)
            weight = directions[:, :dimension].T @ weight
        weight = weight * (math.sqrt(2 * size) / weight.norm())  # as He's initialization has it on average
        return weight, -weight @ self.center

    def _whitening(self, strength: float) -> Tensor:
        """(S + s I)^(-strength / 2), (F, F), in units of what happens to a direction without variance."""
        if strength not in self._whitenings:
            matrix = torch.eye(self._centered.shape[1]).to(self._centered)
            if strength and self._mean_variance:
                factors = (self._variances / self._mean_variance + 1) ** (-strength / 2)
                matrix += (self._axes * (factors - 1)) @ self._axes.T
            self._whitenings[strength] = matrix
        return self._whitenings[strength]

    def _directions_of(self, strength: float) -> Tensor:
        """The directions in which whitened features differ, most first, (F, r)."""
        if strength not in self._directions:
            matrix = self._whitening(strength)
            if len(self._centered) < len(matrix):
                self._directions[strength] = _principal_axes(self._centered @ matrix)[0]
            else:  # their products follow from those of the features, however many images there are
                self._directions[strength] = _axes_of_products(matrix @ self._products @ matrix)[0]
        return self._directions[strength]

    @cached_property
    def _products(self) -> Tensor:
        return self._centered.T @ self._centered


@torch.no_grad()
def initialize_head(head: Head, start: str, features: Tensor, labels: Tensor) -> None:
    """Put the linear layer of `head` where `start` says.

    Args:
        head: Changed in place.
        start: One of `FEATURE_STARTS`; those that are drawn leave the layer as it is.
        features: What the layer gets for the training images, (N, F).
        labels: Their classes, (N,); "principal" does not look at them.
    """
    if start not in HEAD_STARTS:
        raise ValueError(f"head_start must be one of {', '.join(HEAD_STARTS)}, got {start!r}")
    if start not in FEATURE_STARTS:
        return
    layer = require_layer(head, start)
    set_linear(layer, *ClosedFormHeads(features, labels).weight_and_bias(FEATURE_STARTS[start], layer.out_features))


@torch.no_grad()
def set_linear(layer: torch.nn.Linear, weight: Tensor, bias: Tensor) -> None:
    """Give `layer` this weight, and this bias if it has one."""
    layer.weight.copy_(weight)
    if layer.bias is not None:
        layer.bias.copy_(bias)


@torch.no_grad()
def draw_head(head: Head, start: str, *, generator: torch.Generator) -> None:
    """Draw the linear layer of `head`.

    Args:
        head: Changed in place.
        start: "uniform": weight and bias between -1 / sqrt(F) and 1 / sqrt(F), as torch does; "orthogonal": rows of
            length 1 at right angles, or columns if there are fewer of them, and no bias.
        generator: Of the random numbers, on the CPU.
    """
    layer = head.linear
    if layer is None:
        raise ValueError(f"head_start={start!r} needs a head with a linear layer: set model.embedding_dim")
    if start == "orthogonal":
        weight = torch.nn.init.orthogonal_(torch.empty(layer.weight.shape), generator=generator)
        set_linear(layer, weight, torch.zeros(layer.out_features))
        return
    bound = 1 / math.sqrt(head.num_features)
    for parameter in layer.parameters():
        parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator))


def require_layer(head: Head, start: str) -> torch.nn.Linear:
    """The head's linear layer, which must have one to start, with no more dimensions than there are features."""
    if head.linear is None:
        raise ValueError(f"head_start={start!r} needs a head with a linear layer: set model.embedding_dim")
    if head.linear.out_features > head.num_features:
        raise ValueError(
            f"head_start={start!r} needs at most as many dimensions as features: model.embedding_dim must be "
            f"<= {head.num_features}, got {head.linear.out_features}"
        )
    return head.linear


def _principal_axes(points: Tensor) -> tuple[Tensor, Tensor]:
    """Directions (F, r) in which centered points (N, F) differ, most first, and the sums of squares along them (r,)."""
    count, size = points.shape
    if count >= size:
        return _axes_of_products(points.T @ points)
    squares, combinations = _descending(points @ points.T)  # the smaller matrix has the same values
    return _without_none(points.T @ combinations / squares.sqrt().clamp_min(1e-300), squares)


def _axes_of_products(products: Tensor) -> tuple[Tensor, Tensor]:
    """Principal axes, from the products of the points (F, F)."""
    squares, axes = _descending(products)
    return _without_none(axes, squares)


def _descending(products: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, largest first, none below 0, and their vectors as columns."""
    values, vectors = torch.linalg.eigh(products)
    return values.flip(0).clamp_min(0), vectors.flip(1)


def _without_none(axes: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """The axes along which points differ at all."""
    kept = squares > 1e-12 * squares[:1].clamp_min(1e-300)
    return axes[:, kept], squares[kept]


def _completed(axes: Tensor, count: int) -> Tensor:
    """`axes` and further directions at right angles to them, `count` in all."""
    return torch.linalg.qr(torch.cat([axes, torch.eye(len(axes)).to(axes)], dim=1)).Q[:, :count]
