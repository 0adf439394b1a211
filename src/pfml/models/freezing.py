"""Which parameters train when: warm-up of the head, and frozen BatchNorm.

What the public Proxy-Anchor and HIST code does is `batch_norm="freeze"`: the running statistics never
change, and neither do weight and bias of BatchNorm until a warm-up ends, because its end lets every parameter of the
backbone train, these among them. Without a warm-up they stay frozen. Code that only puts BatchNorm in evaluation mode
has `batch_norm="freeze-statistics"`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pfml.models.embedder import Embedder

__all__ = ["BATCH_NORM_POLICIES", "freeze_statistics", "set_trainable", "start_training_mode"]

#: policy -> what happens to BatchNorm in the backbone
BATCH_NORM_POLICIES = {
    "train": "statistics, weight and bias train",
    "freeze-statistics": "statistics are frozen; weight and bias train (SoftTriple, ProxyGML, Multi-Similarity)",
    "freeze": "statistics are frozen; weight and bias are frozen too, unless a warm-up has ended (Proxy-Anchor)",
    "freeze-all": "statistics, weight and bias are always frozen",
}


def start_training_mode(embedder: Embedder, *, batch_norm: str = "train") -> None:
    """`embedder.train()`, with the statistics of BatchNorm frozen if the policy says so; for the start of an epoch."""
    _check_policy(batch_norm)
    embedder.train()
    if batch_norm != "train":
        freeze_statistics(embedder)


def freeze_statistics(model: nn.Module) -> None:
    """Put every BatchNorm in evaluation mode: it uses its running statistics and leaves them as they are.

    `model.train()` undoes this.
    """
    for layer in batch_norms(model):
        layer.eval()


def set_trainable(
    embedder: Embedder, *, warming_up: bool = False, batch_norm: str = "train", warm_up_epochs: int = 0
) -> None:
    """Set requires_grad of every parameter as this moment of a training run has it.

    Args:
        embedder: Its frozen patch embedding stays frozen.
        warming_up: Whether this is one of the first epochs, in which only the head trains.
        batch_norm: A key of `BATCH_NORM_POLICIES`.
        warm_up_epochs: How many warm-up epochs the run has: "freeze" depends on whether there was one.
    """
    _check_policy(batch_norm)
    if warming_up and warm_up_epochs < 1:
        raise ValueError(f"warming_up needs warm_up_epochs of at least 1, got {warm_up_epochs}")
    for parameter in embedder.head_parameters():
        parameter.requires_grad_(True)
    for parameter in embedder.backbone_parameters():
        parameter.requires_grad_(not warming_up)
    affine_frozen = batch_norm == "freeze-all" or (batch_norm == "freeze" and warm_up_epochs == 0)
    if affine_frozen:
        for layer in batch_norms(embedder):
            layer.requires_grad_(False)
    for parameter in embedder.frozen_parameters():
        parameter.requires_grad_(False)


def batch_norms(model: nn.Module) -> Iterator[_BatchNorm]:
    """Every BatchNorm of a model, of any dimension, also synchronized ones."""
    return (layer for layer in model.modules() if isinstance(layer, _BatchNorm))


def _check_policy(batch_norm: str) -> None:
    if batch_norm not in BATCH_NORM_POLICIES:
        raise ValueError(f"batch_norm must be one of {tuple(BATCH_NORM_POLICIES)}, got {batch_norm!r}")
