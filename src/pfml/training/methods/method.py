"""What a row of the table of methods says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

__all__ = ["Method", "Recipe"]


@dataclass(frozen=True)
class Recipe:
    """How a method was trained where it was published, on CUB if it differs; None where the source is silent.

    Args:
        optimizer: A key of `pfml.training.optimisation.OPTIMIZERS`.
        lr: Of the trunk.
        proxy_lr: Of what the loss learns.
        weight_decay: Of trunk and head.
        proxy_weight_decay: Of what the loss learns.
        eps: Added to the root of Adam's second moment.
        momentum: Of SGD and RMSprop.
        clip_value: Largest gradient component.
        step_every, step_factor: The learning rates times `step_factor` every `step_every` epochs.
        batch_size: Images per batch.
        samples_per_class: K of P x K sampling; 0 for random batches.
        epochs, warm_up_epochs: As in `TrainConfig`.
        pooling, layer_norm: Of the head, as in `EmbedderConfig`.
        source: Where these values stand.
        departs: What of it a configuration of ours cannot say.
    """

    optimizer: str
    lr: float
    source: str
    proxy_lr: float | None = None
    weight_decay: float = 0.0
    proxy_weight_decay: float = 0.0
    eps: float = 1e-8
    momentum: float = 0.0
    clip_value: float | None = None
    step_every: int | None = None
    step_factor: float = 1.0
    batch_size: int | None = None
    samples_per_class: int = 0
    epochs: int | None = None
    warm_up_epochs: int = 0
    pooling: str | None = None
    layer_norm: str | None = None
    departs: str = ""

    def describe(self) -> str:
        """In a line."""
        rates = f"{self.lr:g}" + (f", loss {self.proxy_lr:g}" if self.proxy_lr is not None else "")
        eps = f" eps {self.eps:g}" if self.eps != 1e-8 else ""
        momentum = f" momentum {self.momentum:g}" if self.momentum else ""
        step = f"x{self.step_factor:g} per {self.step_every}" if self.step_every else ""
        per_class = f" ({self.samples_per_class} per class)" if self.samples_per_class else ""
        parts = [
            f"{self.optimizer}{eps}{momentum} {rates}, decay {self.weight_decay:g}",
            step,
            f"batch {self.batch_size}{per_class}" if self.batch_size else "",
            f"{self.epochs} epochs" if self.epochs else "",
            f"warm-up {self.warm_up_epochs}" if self.warm_up_epochs else "",
            f"clip {self.clip_value:g}" if self.clip_value else "",
            " ".join(filter(None, [self.pooling, f"LayerNorm {self.layer_norm}" if self.layer_norm else ""])),
        ]
        return "; ".join(filter(None, parts)) + f" [{self.source}]"


@dataclass(frozen=True)
class Method:
    """A loss with the values that a name stands for, and how it is trained.

    Args:
        loss: Creates the loss from num_classes, embedding_dim and options.
        description: What it is.
        source: The paper.
        values: Options that differ from the defaults of `loss`.
        miner: What it chooses from the batch.
        learns: What the loss itself learns.
        needs_mates: Whether a sample without a mate in its batch teaches nothing, so that K must be 2 or more.
        proxy_lr: Learning rate of what the loss learns where all methods share a recipe; None for the shared one.
        recipe: How it was published.
        note: Where the loss departs from its paper.
        from_teachers: Whether the loss compares with embeddings of teachers in place of labels.
        trains: Whether there is anything to train; `pfml.training.methods.untrained` evaluates those without.
    """

    loss: Callable[..., nn.Module]
    description: str
    source: str
    values: Mapping[str, Any] = field(default_factory=dict)
    miner: str = ""
    learns: str = ""
    needs_mates: bool = False
    proxy_lr: float | None = None
    recipe: Recipe | None = None
    note: str = ""
    from_teachers: bool = False
    trains: bool = True

    def options(self) -> dict[str, Any]:
        """What may be set, with its default: the keyword-only arguments of the loss."""
        parameters = inspect.signature(self.loss).parameters.values()
        defaults = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
        return {**defaults, **self.values}

    def option_names(self) -> list[str]:
        """The names of `options`."""
        return list(self.options())
