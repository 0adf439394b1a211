"""How a method is trained: like all others, or as it was published."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from pfml.methods import LossConfig, Method, Recipe, method_of
from pfml.methods.recipe import PublishedRecipe
from pfml.runs.config import BatchConfig, OptimizerConfig, ScheduleConfig, TrainConfig

__all__ = ["published_recipe", "recipe_config"]

Config = TypeVar("Config", bound=TrainConfig)


def recipe_config(method: str, base: Config, *, published: bool = False) -> Config:
    """`base` for `method`, a key of `METHODS`.

    All methods share backbone, batch, schedule and epochs of `base`. From the table come the learning rate of what the
    loss learns, where it is no proxy, positives in the batch for methods that need them, and what the loss
    needs of the model. The options of `base.loss` are kept if it names the same method.

    Args:
        method: Its name.
        base: A `TrainConfig` or `RunConfig`.
        published: Take everything as it was published for the data set and the backbone of a `RunConfig` (see
            `published_recipe`): optimizer, rates, schedule, batch, epochs, crops, BatchNorm, the options of the loss,
            and the head. Where the source is silent, `base` decides; options of `base.loss` override the recipe's.

    Raises:
        ValueError: The published recipe is unknown.
    """
    from pfml.runs.config import RunConfig

    row = method_of(LossConfig(method).name)
    loss = base.loss if base.loss.name == method else LossConfig(method)
    config = replace(base, loss=loss)
    if isinstance(config, RunConfig):
        unset: dict[str, Any] = {name: count for name, count in row.model.items() if getattr(config.model, name) == 1}
        config = replace(config, model=replace(config.model, **unset))
    if published:
        target = (base.data.name, base.model.backbone) if isinstance(base, RunConfig) else (None, None)
        config = _published(published_recipe(method, *target).recipe, config)
    else:
        config = _shared(row, config)
    return replace(config, batch=_with_positives(config.batch)) if row.needs_positives else config


def published_recipe(method: str, dataset: str | None = None, backbone: str | None = None) -> PublishedRecipe:
    """The recipe of `method` for a data set and a backbone, or the nearest one and a remark that says so.

    Raises:
        ValueError: There is none.
    """
    found = method_of(LossConfig(method).name).recipe_for(dataset, backbone)
    if found is None:
        raise ValueError(f"the table has no published recipe of {method}: train it with published=False")
    return found


def _shared(row: Method, config: Config) -> Config:
    if row.proxy_lr is None:
        return config
    return replace(config, optimizer=replace(config.optimizer, proxy_lr=row.proxy_lr))


def _published(recipe: Recipe, config: Config) -> Config:
    from pfml.runs.config import RunConfig

    optimizer = OptimizerConfig(
        name=recipe.optimizer,  # type: ignore[arg-type]  # checked by the configuration
        lr=recipe.lr,
        head_lr=recipe.head_lr,
        proxy_lr=recipe.proxy_lr,
        weight_decay=recipe.weight_decay,
        proxy_weight_decay=recipe.proxy_weight_decay,
        eps=recipe.eps,
        momentum=recipe.momentum,
        clip_value=recipe.clip_value,
        clip_norm=recipe.clip_norm,
    )
    augmentation = config.augmentation
    if recipe.crop_area is not None:
        augmentation = replace(augmentation, scale=recipe.crop_area)
    config = replace(
        config,
        loss=replace(config.loss, options={**recipe.options, **config.loss.options}),
        optimizer=optimizer,
        schedule=_schedule(recipe),
        batch=BatchConfig(
            recipe.batch_size or config.batch.size,
            recipe.samples_per_class,
            recipe.steps_per_epoch,
            neighbors=recipe.neighbors,
        ),
        augmentation=augmentation,
        average=0.0,
        epochs=recipe.epochs or config.epochs,
        warm_up_epochs=recipe.warm_up_epochs,
        warm_up_after=recipe.warm_up_after,
        batch_norm=recipe.batch_norm or config.batch_norm,
        head_start=recipe.head_start,
    )
    if isinstance(config, RunConfig):
        model, dim = config.model, recipe.embedding_dim
        model = replace(
            model,
            pooling=recipe.pooling or model.pooling,
            layer_norm=recipe.layer_norm or "none",
            parts=max(recipe.parts, model.parts),
            freeze_patch_embedding=recipe.freeze_patch_embedding,
            embedding_dim=None if dim == "features" else dim or model.embedding_dim,
            image_size=recipe.image_size or model.image_size,
            resize=recipe.resize or model.resize,
        )
        config = replace(config, model=model)
    return config


def _schedule(recipe: Recipe) -> ScheduleConfig:
    if recipe.milestones:
        return ScheduleConfig("milestones", factor=recipe.step_factor, milestones=recipe.milestones)
    if recipe.step_every is not None:
        return ScheduleConfig("step", every=recipe.step_every, factor=recipe.step_factor)
    return ScheduleConfig(recipe.schedule or "constant")


def _with_positives(batch: BatchConfig) -> BatchConfig:
    """At least two samples of a class: 4, or 2 where the size is no multiple of 4."""
    if batch.samples_per_class >= 2:
        return batch
    return replace(batch, samples_per_class=4 if batch.size % 4 == 0 else 2)
