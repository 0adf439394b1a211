"""What a row of the table of methods says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pfml.training.methods.recipe import PublishedRecipe, Recipe, chosen_recipe

__all__ = ["Method", "Recipe"]


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
        recipes: How it was published, by data set and backbone; see `recipe_for`.
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
    recipes: tuple[Recipe, ...] = ()
    note: str = ""
    from_teachers: bool = False
    trains: bool = True

    def recipe_for(self, dataset: str | None, backbone: str | None) -> PublishedRecipe | None:
        """The published recipe for a data set and a backbone, or the nearest one; None if there is none at all."""
        return chosen_recipe(self.recipes, dataset, backbone)

    def options(self) -> dict[str, Any]:
        """What may be set, with its default: the keyword-only arguments of the loss."""
        parameters = inspect.signature(self.loss).parameters.values()
        defaults = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
        return {**defaults, **self.values}

    def option_names(self) -> list[str]:
        """The names of `options`."""
        return list(self.options())
