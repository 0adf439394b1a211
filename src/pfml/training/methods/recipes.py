"""How a method is trained: like all others, or as it was published."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from pfml.training.config import BatchConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from pfml.training.methods.choice import LossConfig
from pfml.training.methods.method import Method, Recipe
from pfml.training.methods.table import METHODS

__all__ = ["recipe_config"]

Config = TypeVar("Config", bound=TrainConfig)


def recipe_config(method: str, base: Config, *, published: bool = False) -> Config:
    """`base` for `method`, a key of `METHODS`.

    All methods share trunk, batch, schedule and epochs of `base`; from the table come only the learning rate of what
    the loss learns, where it is no proxy, and mates in the batch for those that need them. The options of `base.loss`
    are kept if it names the same method.

    Args:
        method: Its name.
        base: A `TrainConfig` or `RunConfig`.
        published: Take optimiser, rates, schedule, batch, epochs, and head of a `RunConfig`, as they were published.

    Raises:
        ValueError: The published recipe is unknown.
    """
    row = METHODS[LossConfig(method).name]
    loss = base.loss if base.loss.name == method else LossConfig(method)
    config = replace(base, loss=loss)
    config = _published(method, row.recipe, config) if published else _shared(row, config)
    return replace(config, batch=_with_mates(config.batch)) if row.needs_mates else config


def _shared(row: Method, config: Config) -> Config:
    if row.proxy_lr is None:
        return config
    return replace(config, optimizer=replace(config.optimizer, proxy_lr=row.proxy_lr))


def _published(method: str, recipe: Recipe | None, config: Config) -> Config:
    from pfml.training.run import RunConfig

    if recipe is None:
        raise ValueError(f"the table has no published recipe of {method}: train it with published=False")
    optimizer = OptimizerConfig(
        name=recipe.optimizer,  # type: ignore[arg-type]  # checked by the configuration
        lr=recipe.lr,
        proxy_lr=recipe.proxy_lr,
        weight_decay=recipe.weight_decay,
        proxy_weight_decay=recipe.proxy_weight_decay,
        eps=recipe.eps,
        momentum=recipe.momentum,
        clip_value=recipe.clip_value,
    )
    schedule = ScheduleConfig()
    if recipe.step_every is not None:
        schedule = ScheduleConfig("step", every=recipe.step_every, factor=recipe.step_factor)
    batch = BatchConfig(recipe.batch_size or config.batch.size, recipe.samples_per_class)
    config = replace(
        config,
        optimizer=optimizer,
        schedule=schedule,
        batch=batch,
        epochs=recipe.epochs or config.epochs,
        warm_up_epochs=recipe.warm_up_epochs,
    )
    if isinstance(config, RunConfig):
        model = config.model
        pooling, layer_norm = recipe.pooling or model.pooling, recipe.layer_norm or model.layer_norm
        config = replace(config, model=replace(model, pooling=pooling, layer_norm=layer_norm))
    return config


def _with_mates(batch: BatchConfig) -> BatchConfig:
    """At least two samples of a class: 4, or 2 where the size is no multiple of 4."""
    if batch.samples_per_class >= 2:
        return batch
    return replace(batch, samples_per_class=4 if batch.size % 4 == 0 else 2)
