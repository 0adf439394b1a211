"""What a row of the table of methods says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from pfml.methods.recipe import PublishedRecipe, Recipe, chosen_recipe, read_recipes

__all__ = ["Method"]


@dataclass(frozen=True)
class Method:
    """A loss with the values that a name stands for, and how it is trained.

    Args:
        loss: Creates the loss from num_classes, embedding_dim, num_features if it has heads on features, and options;
            None for a method that trains nothing.
        description: What it is.
        source: The paper.
        values: Options that differ from the defaults of `loss`.
        miner: What it chooses from the batch.
        learns: What the loss itself learns.
        needs_positives: Whether a sample without positives in its batch contributes nothing, so that K must be >= 2.
        proxy_lr: Learning rate of what the loss learns where all methods share a recipe; None for the shared one.
        recipe_file: How it was published: a file of `pfml.methods.recipes`; empty if the table has none.
        model: Counts of `EmbedderConfig` above 1 that the loss needs where they are not set: parts, relations, ...
        note: Where the loss departs from its paper.
        from_teachers: Whether the loss compares with embeddings of teachers in place of labels.
    """

    loss: Callable[..., nn.Module] | None
    description: str
    source: str
    values: Mapping[str, Any] = field(default_factory=dict)
    miner: str = ""
    learns: str = ""
    needs_positives: bool = False
    proxy_lr: float | None = None
    recipe_file: str = ""
    model: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
    from_teachers: bool = False

    @property
    def trains(self) -> bool:
        """Whether there is anything to train; `pfml.training.run` only evaluates a method without a loss."""
        return self.loss is not None

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """The published recipes, one for each data set and backbone; see `recipe_for`."""
        return read_recipes(self.recipe_file) if self.recipe_file else ()

    def recipe_for(self, dataset: str | None, backbone: str | None) -> PublishedRecipe | None:
        """The published recipe for a data set and a backbone, or the nearest one; None if there is none at all."""
        return chosen_recipe(self.recipes, dataset, backbone)

    @property
    def has_heads(self) -> bool:
        """Whether the loss has heads of its own on the backbone's features, and so a third size, `num_features`."""
        return self.loss is not None and "num_features" in inspect.signature(self.loss).parameters

    def options(self) -> dict[str, Any]:
        """What may be set, with its default: the keyword-only arguments of the loss."""
        if self.loss is None:
            return {}
        parameters = inspect.signature(self.loss).parameters.values()
        defaults = {one.name: one.default for one in parameters if one.kind is one.KEYWORD_ONLY}
        return {**defaults, **self.values}

    def option_names(self) -> list[str]:
        """The names of `options`."""
        return list(self.options())
