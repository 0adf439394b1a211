"""What a row of the table of methods says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

__all__ = ["Method", "PublishedRecipe", "Recipe", "chosen_recipe"]

#: Backbone of ours -> the published one of the same architecture, with other weights.
SAME_ARCHITECTURE = {"resnet50_he": "resnet50"}


@dataclass(frozen=True)
class Recipe:
    """How a method was trained, in the words of `RunConfig`; None where the source is silent.

    Args:
        optimizer: A key of `pfml.training.optimizer.OPTIMIZERS`.
        lr: Of the backbone and of the embedding layer.
        source: Where these values stand.
        proxy_lr: Of what the loss learns.
        weight_decay: Of backbone and head.
        proxy_weight_decay: Of what the loss learns.
        dataset, backbone: What it is for; None if the source makes no difference.
        options: Of the loss, where they differ from what the method's name stands for.
        eps: Added to the root of Adam's second moment.
        momentum: Of SGD and RMSprop.
        clip_value: Largest gradient component.
        step_every, step_factor: The learning rates times `step_factor` every `step_every` epochs.
        milestones: The learning rates times `step_factor` after each of these epochs instead.
        batch_size: Images per batch.
        samples_per_class: K of P x K sampling; 0 for random batches.
        steps_per_epoch: Batches of an epoch, where the source counts steps.
        epochs, warm_up_epochs, warm_up_after: As in `TrainConfig`; all epochs, those of the warm-up among them.
        batch_norm, head_start: As in `TrainConfig`.
        crop_area: Least and largest area of a random crop.
        pooling, layer_norm, image_size, resize: As in `EmbedderConfig`.
        embedding_dim: D, or "features" for those of the backbone without a layer.
        departs: What of it a configuration of ours cannot say.
    """

    optimizer: str
    lr: float
    source: str
    proxy_lr: float | None = None
    weight_decay: float = 0.0
    proxy_weight_decay: float = 0.0
    dataset: str | None = None
    backbone: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    eps: float = 1e-8
    momentum: float = 0.0
    clip_value: float | None = None
    step_every: int | None = None
    step_factor: float = 1.0
    milestones: tuple[int, ...] = ()
    batch_size: int | None = None
    samples_per_class: int = 0
    steps_per_epoch: int | None = None
    epochs: int | None = None
    warm_up_epochs: int = 0
    warm_up_after: int = 0
    batch_norm: Literal["train", "freeze-statistics", "freeze", "freeze-all"] | None = None
    head_start: Literal["random", "uniform"] = "random"
    crop_area: tuple[float, float] | None = None
    pooling: str | None = None
    layer_norm: str | None = None
    embedding_dim: int | Literal["features"] | None = None
    image_size: int | None = None
    resize: int | None = None
    departs: str = ""

    @property
    def setting(self) -> str:
        """Data set and backbone that it is for, in words."""
        return " with ".join(filter(None, [self.dataset, self.backbone])) or "any data set"

    def describe(self) -> str:
        """In a line."""
        rates = f"{self.lr:g}" + (f", loss {self.proxy_lr:g}" if self.proxy_lr is not None else "")
        eps = f" eps {self.eps:g}" if self.eps != 1e-8 else ""
        momentum = f" momentum {self.momentum:g}" if self.momentum else ""
        other = self.proxy_lr is not None and self.proxy_weight_decay != self.weight_decay
        decay = f"decay {self.weight_decay:g}" + (f", loss {self.proxy_weight_decay:g}" if other else "")
        step = f"x{self.step_factor:g} per {self.step_every}" if self.step_every else ""
        if self.milestones:
            step = f"x{self.step_factor:g} after {', '.join(map(str, self.milestones))}"
        per_class = f" ({self.samples_per_class} per class)" if self.samples_per_class else ""
        of_steps = f" of {self.steps_per_epoch} steps" if self.steps_per_epoch else ""
        after = f" after {self.warm_up_after}" if self.warm_up_after else ""
        resize = f" of {self.resize}" if self.resize else ""
        width = "without a layer" if self.embedding_dim == "features" else f"{self.embedding_dim} dimensions"
        head = [self.pooling, f"LayerNorm {self.layer_norm}" if self.layer_norm else ""]
        head += [width if self.embedding_dim else "", "uniform start" if self.head_start == "uniform" else ""]
        parts = [
            f"{self.optimizer}{eps}{momentum} {rates}, {decay}",
            step,
            f"batch {self.batch_size}{per_class}" if self.batch_size else "",
            f"{self.epochs} epochs{of_steps}" if self.epochs else f"epochs{of_steps}" if of_steps else "",
            f"warm-up {self.warm_up_epochs}{after}" if self.warm_up_epochs else "",
            f"clip {self.clip_value:g}" if self.clip_value else "",
            f"BatchNorm {self.batch_norm}" if self.batch_norm else "",
            " ".join(filter(None, head)),
            f"crops {self.image_size}{resize}" if self.image_size else "",
            f"of {self.crop_area[0]:.0%} area at least" if self.crop_area else "",
            ", ".join(f"{name} {value}" for name, value in self.options.items()),
        ]
        return "; ".join(filter(None, parts)) + f" [{self.source}]"


@dataclass(frozen=True)
class PublishedRecipe:
    """A recipe, and what was asked for if its authors give none for that.

    Args:
        recipe: The nearest one.
        remark: Whose values they are; empty if they are for what was asked.
    """

    recipe: Recipe
    remark: str = ""


def chosen_recipe(recipes: tuple[Recipe, ...], dataset: str | None, backbone: str | None) -> PublishedRecipe | None:
    """The recipe for a data set and a backbone; None if there is none at all.

    If there is none for both, it is the first of: one for the data set, one for the backbone, any; and the remark says
    so. A recipe that names no data set or no backbone fits all of them. The data set counts first since rates, epochs
    and options follow it.

    Args:
        recipes: All of a method, in the order of preference.
        dataset: A name of `pfml.data.DATASETS`, or anything else; None if it is not known.
        backbone: As in `EmbedderConfig`; None if it is not known.
    """
    if not recipes:
        return None
    architecture = SAME_ARCHITECTURE.get(backbone or "", backbone)

    def fit(recipe: Recipe) -> tuple[bool, bool]:
        return recipe.dataset in (None, dataset), recipe.backbone in (None, architecture)

    best = max(recipes, key=fit)  # of equals the first
    if all(fit(best)) or (dataset is None and backbone is None):
        return PublishedRecipe(best)
    asked = " with ".join(filter(None, [dataset, backbone]))
    return PublishedRecipe(best, f"the source gives no values for {asked}; these are those for {best.setting}")


@dataclass(frozen=True)
class Method:
    """A loss with the values that a name stands for, and how it is trained.

    Args:
        loss: Creates the loss from num_classes, embedding_dim and options; None for a method that trains nothing.
        description: What it is.
        source: The paper.
        values: Options that differ from the defaults of `loss`.
        miner: What it chooses from the batch.
        learns: What the loss itself learns.
        needs_positives: Whether a sample without positives in its batch contributes nothing, so that K must be >= 2.
        proxy_lr: Learning rate of what the loss learns where all methods share a recipe; None for the shared one.
        recipes: How it was published, by data set and backbone; see `recipe_for`.
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
    recipes: tuple[Recipe, ...] = ()
    note: str = ""
    from_teachers: bool = False

    @property
    def trains(self) -> bool:
        """Whether there is anything to train; `pfml.training.run` only evaluates a method without a loss."""
        return self.loss is not None

    def recipe_for(self, dataset: str | None, backbone: str | None) -> PublishedRecipe | None:
        """The published recipe for a data set and a backbone, or the nearest one; None if there is none at all."""
        return chosen_recipe(self.recipes, dataset, backbone)

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
