"""Whether training has helped: the pretrained model before training, on the same test images."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from pfml.data import RetrievalData
from pfml.data.image_set import PROTOCOLS
from pfml.data.own_images import is_own
from pfml.distributed import World
from pfml.evaluation import evaluate
from pfml.evaluation.metrics import HEADLINE, metric_label
from pfml.models import Embedder
from pfml.models.backbone_table import default_weights
from pfml.runs.config import DataConfig, RunConfig
from pfml.runs.folder import of_model
from pfml.suggest.suggestion import BACKBONE
from pfml.terminal import shell_words
from pfml.training.environment import precision, resolve_device, seeded
from pfml.training.progress import Monitor

__all__ = ["Untrained", "about_chance", "comparison", "untrained_command", "untrained_embedder", "untrained_scores"]


@dataclass(frozen=True)
class Untrained:
    """Retrieval by the pretrained backbone before training, without an embedding layer.

    Args:
        scores: Metrics on the test images.
        image_size: Side of the crops that it saw; None if that is not known.
    """

    scores: dict[str, float]
    image_size: int | None = None


def untrained_embedder(config: RunConfig) -> Embedder | None:
    """The backbone of a run before training, without an embedding layer; None if it has no pretrained weights.

    It sees images at the resolution of its pretraining: a run may train on smaller crops to save time.
    """
    model = config.model
    weights = default_weights(model.backbone) if model.weights == "default" else model.weights
    if weights == "none":
        return None
    with seeded(config.seed):
        return Embedder(
            replace(model, embedding_dim=None, parts=1, relations=1, sub_blocks=1, image_size=None, resize=None)
        )


def untrained_scores(
    embedder: Embedder,
    data: RetrievalData,
    config: RunConfig,
    monitor: Monitor | None = None,
    world: World | None = None,
) -> Untrained:
    """The metrics of `untrained_embedder` on the test images of a run."""
    monitor, world = monitor or Monitor(), world or World()
    embedder.to(world.device or resolve_device(config.device))
    autocast = precision(config.autocast)
    scores = evaluate(embedder, data, autocast=autocast, track=monitor.track, world=world).as_dict()
    return Untrained(scores, embedder.preprocessing.crop)


def untrained_command(config: RunConfig) -> str:
    """The command that evaluates the backbone of a run before training (zero-shot), on the run's data."""
    data, model = config.data, config.model
    parts = ["pfml", "train", "--data", data.name, *(() if data.root is None else ("--data.root", str(data.root)))]
    if data.split != "classes":
        parts += ["--data.split", data.split]
    if data.split_seed != DataConfig.split_seed and is_own(data.name):
        parts += ["--data.split_seed", "null" if data.split_seed is None else str(data.split_seed)]
    if (model.backbone, model.weights) != (BACKBONE, "default"):
        parts += ["--model.backbone", model.backbone, "--model.weights", model.weights]
    return shell_words(*parts, "--loss.name", "zero-shot")


def comparison(untrained: Untrained, results: dict[str, Any], config: RunConfig) -> str:
    """A sentence that says whether training, or the ladder, has helped, by both R@1 and MAP@R.

    Scores that round to the same shown value count as equal.
    """
    entry = of_model(results)
    scores = untrained.scores, entry["test"]
    before, after = ([round(each[key], 3) for key in HEADLINE] for each in scores)
    size, own = config.test_image_size or config.model.image_size, untrained.image_size
    apart = size is not None and own is not None and size != own
    at, at_trained = (f" (at {own} pixels)", f", at {size} pixels") if apart else ("", "")
    labels = [metric_label(key) for key in HEADLINE]
    protocol = PROTOCOLS[results.get("protocol", "classes")]
    is_ladder = "ladder" in results
    what = "the ladder" if is_ladder else "training"
    when = "" if is_ladder else f" (epoch {entry['epoch']}{at_trained})"
    numbers = (
        f"{protocol}, {labels[0]} {before[0]:.1%} before {what}{at} and {after[0]:.1%} after{when}, "
        f"{labels[1]} {before[1]:.1%} and {after[1]:.1%}"
    )
    chance = about_chance(before[0], after[0], entry["test"]["num_queries"])
    recall, precision_ = (new - old for old, new in zip(before, after, strict=True))
    if recall > 0 and precision_ > 0:
        return f"{numbers}: {what} has helped{chance}"
    if recall > 0 or precision_ > 0:
        if recall < 0 or precision_ < 0:
            return f"{numbers}: {what} has helped one and not the other{chance}"
        better, same = labels if recall > 0 else reversed(labels)
        return f"{numbers}: {what} has improved {better} and left {same} as it was{chance}"
    if is_ladder:
        return f"{numbers}: the ladder has not helped here, though it did on the images that validated it{chance}"
    return (
        f"{numbers}: training has not helped; use the pretrained model without training ({untrained_command(config)}), "
        f"or give more classes, more images or more epochs"
    )


def about_chance(before: float, after: float, queries: float) -> str:
    """The end of a sentence on R@1 of so many images before and after, where the difference may be chance; else "".

    It is within one standard error of independent samples. The same images are queried twice, which makes it about two
    standard errors of the difference.
    """
    share = (before + after) / 2
    if before == after or abs(after - before) >= math.sqrt(2 * share * (1 - share) / max(queries, 1)):
        return ""
    return f", though with {queries:,.0f} images the difference of {metric_label(HEADLINE[0])} may be chance"
