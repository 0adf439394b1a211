"""Heads on cached features: in closed form, in a second, or trained by the field, in a few."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pfml.data.sampling import BalancedBatches
from pfml.methods import LossConfig, create_loss
from pfml.models.head_init import ClosedFormHeads, set_linear
from pfml.sphere import unit
from pfml.training.environment import seeded

__all__ = ["ClosedForm", "LinearHead", "closed_form_grid", "closed_form_heads", "train_head"]

#: Strengths of whitening that are tried.
STRENGTHS = (0.25, 0.5, 0.75, 1.0)
#: Dimensions that are tried beside that of the features.
DIMENSIONS = (64, 128, 256)
#: Steps of a head that is trained, and images of each class in a batch.
STEPS, PER_CLASS = 300, 4
#: Classes in a batch at most.
MOST_CLASSES = 25
#: Learning rates of the head, relative to the size of its weights, and of the proxies.
HEAD_LR, PROXY_LR = 0.002, 0.02


@dataclass(frozen=True)
class ClosedForm:
    """A head in closed form (see `ClosedFormHeads`).

    Args:
        strength: Of the whitening.
        dimension: D; None for as many as there are features.
    """

    strength: float
    dimension: int | None

    def __str__(self) -> str:
        size = "all dimensions" if self.dimension is None else f"{self.dimension} dimensions"
        return f"whitened by {self.strength:g}, {size}"


@dataclass(frozen=True, eq=False)
class LinearHead:
    """A linear layer: weight (D, F) and bias (D,), in float64."""

    weight: Tensor
    bias: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Embeddings of features (N, F), not yet of unit length, in float32."""
        return (features.to(self.weight) @ self.weight.T + self.bias).to(torch.float32)


def closed_form_grid(num_features: int, num_images: int) -> list[ClosedForm]:
    """The heads worth trying for so many features and training images."""
    sizes = [None, *(size for size in DIMENSIONS if size < min(num_features, num_images))]
    return [ClosedForm(strength, size) for size in sizes for strength in STRENGTHS]


def closed_form_heads(features: Tensor, labels: Tensor, grid: Sequence[ClosedForm]) -> dict[ClosedForm, LinearHead]:
    """Each head of the grid fitted to the same images, from one decomposition."""
    heads = ClosedFormHeads(features, labels)
    return {each: LinearHead(*heads.weight_and_bias(each.strength, each.dimension)) for each in grid}


def train_head(
    features: Tensor,
    labels: Tensor,
    start: LinearHead,
    loss_for: Callable[[Tensor, Tensor], LossConfig],
    *,
    seed: int = 0,
    steps: int = STEPS,
) -> LinearHead:
    """`start` after some steps of gradient descent on cached features.

    Args:
        features: (N, F) of the training images.
        labels: (N,) int64.
        start: Where the head starts.
        loss_for: The loss for embeddings (N, D) with labels (N,) as they are at the start.
        seed: Of proxies and batches.
        steps: Of the optimizer.
    """
    classes, renamed = labels.unique(return_inverse=True)
    size_out, size_in = start.weight.shape
    layer = nn.Linear(size_in, size_out)
    set_linear(layer, start.weight, start.bias)
    size = float(layer.weight.detach().square().mean().sqrt())
    with seeded(seed):
        initial = unit(layer(features)).detach()
        loss = create_loss(loss_for(initial, renamed), len(classes), layer.out_features)
        initialize = getattr(loss, "initialize_proxies", None)
        if initialize is not None:
            initialize(initial, renamed)
        groups = [{"params": list(layer.parameters()), "lr": HEAD_LR * size}]
        proxies = list(loss.parameters())
        groups += [{"params": proxies, "lr": PROXY_LR}] if proxies else []
        optimizer = torch.optim.Adam(groups)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        batches = BalancedBatches(renamed, min(len(classes), MOST_CLASSES), PER_CLASS, seed, per_epoch=steps)
        for indices in batches.batches(0):
            optimizer.zero_grad()
            loss(unit(layer(features[indices])), renamed[indices]).backward()
            optimizer.step()
            schedule.step()
    return LinearHead(layer.weight.detach().double(), layer.bias.detach().double())
