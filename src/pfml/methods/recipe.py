"""The published recipes: data, read from the authors' public code and papers, a file of `recipes/` for each method.

Keys at the top of a file hold for all of its recipes, each `[[recipe]]` overrides them. The recipe for CUB with
ResNet-50 stands first where there is one. Epochs count from the start of the run: where the authors count those of a
warm-up apart, they are added.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

__all__ = ["PublishedRecipe", "Recipe", "chosen_recipe", "read_recipes"]

#: Backbone of ours -> the published one of the same architecture, with other weights.
SAME_ARCHITECTURE = {"resnet50_he": "resnet50"}


@dataclass(frozen=True)
class Recipe:
    """How a method was trained, in the words of `RunConfig`; None where the source is silent.

    Args:
        optimizer: A key of `pfml.training.optimizer.OPTIMIZERS`.
        lr: Of the backbone.
        source: Where these values stand.
        head_lr: Of the embedding layer; None for `lr`.
        proxy_lr: Of what the loss learns; rates of its other groups are options of the loss.
        weight_decay: Of backbone and head.
        proxy_weight_decay: Of what the loss learns.
        dataset, backbone: What it is for; None if the source makes no difference.
        options: Of the loss, where they differ from what the method's name stands for.
        eps: Added to the root of Adam's second moment.
        momentum: Of SGD and RMSprop.
        clip_value, clip_norm: Largest gradient component; largest norm of all of them.
        schedule: As in `ScheduleConfig`; None for what `step_every` or `milestones` say, else constant rates.
        step_every, step_factor: The learning rates times `step_factor` every `step_every` epochs.
        milestones: The learning rates times `step_factor` after each of these epochs instead.
        batch_size: Images per batch.
        samples_per_class: K of P x K sampling; 0 for random batches.
        neighbors: Classes that come with each anchor class of a batch; see `BatchConfig`.
        steps_per_epoch: Batches of an epoch, where the source counts steps.
        epochs, warm_up_epochs, warm_up_after: As in `TrainConfig`; all epochs, those of the warm-up among them.
        batch_norm, head_start: As in `TrainConfig`.
        crop_area: Least and largest area of a random crop.
        pooling, layer_norm, parts, freeze_patch_embedding, image_size, resize: As in `EmbedderConfig`.
        embedding_dim: D, or "features" for those of the backbone without a layer.
        departs: What of it a configuration of ours cannot say.
    """

    optimizer: str
    lr: float
    source: str
    head_lr: float | None = None
    proxy_lr: float | None = None
    weight_decay: float = 0.0
    proxy_weight_decay: float = 0.0
    dataset: str | None = None
    backbone: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    eps: float = 1e-8
    momentum: float = 0.0
    clip_value: float | None = None
    clip_norm: float | None = None
    schedule: Literal["constant", "step", "milestones", "cosine", "one-cycle"] | None = None
    step_every: int | None = None
    step_factor: float = 1.0
    milestones: tuple[int, ...] = ()
    batch_size: int | None = None
    samples_per_class: int = 0
    neighbors: int = 0
    steps_per_epoch: int | None = None
    epochs: int | None = None
    warm_up_epochs: int = 0
    warm_up_after: int = 0
    batch_norm: Literal["train", "freeze-statistics", "freeze", "freeze-all"] | None = None
    head_start: Literal["random", "uniform", "orthogonal"] = "random"
    crop_area: tuple[float, float] | None = None
    pooling: str | None = None
    layer_norm: str | None = None
    parts: int = 1
    freeze_patch_embedding: bool = False
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
        rates = f"{self.lr:g}" + (f", head {self.head_lr:g}" if self.head_lr is not None else "")
        rates += f", loss {self.proxy_lr:g}" if self.proxy_lr is not None else ""
        eps = f" eps {self.eps:g}" if self.eps != 1e-8 else ""
        momentum = f" momentum {self.momentum:g}" if self.momentum else ""
        other = self.proxy_lr is not None and self.proxy_weight_decay != self.weight_decay
        decay = f"decay {self.weight_decay:g}" + (f", loss {self.proxy_weight_decay:g}" if other else "")
        step = f"x{self.step_factor:g} per {self.step_every}" if self.step_every else self.schedule or ""
        if self.milestones:
            step = f"x{self.step_factor:g} after {', '.join(map(str, self.milestones))}"
        near = f", {self.neighbors} neighbors" if self.neighbors else ""
        per_class = f" ({self.samples_per_class} per class{near})" if self.samples_per_class else ""
        of_steps = f" of {self.steps_per_epoch} steps" if self.steps_per_epoch else ""
        after = f" after {self.warm_up_after}" if self.warm_up_after else ""
        resize = f" of {self.resize}" if self.resize else ""
        width = "without a layer" if self.embedding_dim == "features" else f"{self.embedding_dim} dimensions"
        head = [self.pooling, f"LayerNorm {self.layer_norm}" if self.layer_norm else ""]
        head += [width if self.embedding_dim else "", f"{self.head_start} start" if self.head_start != "random" else ""]
        head += [f"in {self.parts} parts" if self.parts > 1 else ""]
        parts = [
            f"{self.optimizer}{eps}{momentum} {rates}, {decay}",
            step,
            f"batch {self.batch_size}{per_class}" if self.batch_size else "",
            f"{self.epochs} epochs{of_steps}" if self.epochs else f"epochs{of_steps}" if of_steps else "",
            f"warm-up {self.warm_up_epochs}{after}" if self.warm_up_epochs else "",
            f"clip {self.clip_value:g}" if self.clip_value else "",
            f"clip norm {self.clip_norm:g}" if self.clip_norm else "",
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


@cache
def read_recipes(name: str) -> tuple[Recipe, ...]:
    """The recipes of `recipes/NAME.toml`, in their order."""
    content = tomllib.loads((files("pfml.methods") / "recipes" / f"{name}.toml").read_text(encoding="utf-8"))
    own, recipes = content.pop("recipe"), []
    for row in own:
        values: dict[str, Any] = {**content, **row}
        values["options"] = {**content.get("options", {}), **row.get("options", {})}
        for key in {"milestones", "crop_area"} & values.keys():
            values[key] = tuple(values[key])
        recipes.append(Recipe(**values))
    return tuple(recipes)
