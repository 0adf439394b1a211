"""Whether training has helped: the network as it comes, on the same unseen classes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from pfml.distributed import World
from pfml.evaluation import evaluate
from pfml.evaluation.metrics import HEADLINE, metric_label
from pfml.models import Embedder
from pfml.runs.config import RunConfig
from pfml.runs.data import prepare_data
from pfml.runs.results import of_model
from pfml.suggest.suggest import BACKBONE
from pfml.terminal import shell_words
from pfml.training.environment import precision, resolve_device, seeded
from pfml.training.progress import Monitor

__all__ = ["Untrained", "comparison", "untrained_command", "untrained_scores"]


@dataclass(frozen=True)
class Untrained:
    """What the backbone finds as it comes, without an embedding layer.

    Args:
        scores: Metrics on the test classes.
        image_size: Side of the crops that it saw; None if that is not known.
    """

    scores: dict[str, float]
    image_size: int | None = None


def untrained_scores(config: RunConfig, monitor: Monitor | None = None, world: World | None = None) -> Untrained:
    """What the backbone of the run finds among its test classes as it comes, at the resolution that it comes with.

    A run may train on smaller crops to save time; one who does not train need not.
    """
    monitor, world = monitor or Monitor(), world or World()
    data, _ = prepare_data(config.data, monitor.track)
    model = replace(config.model, embedding_dim=None, image_size=None, resize=None)
    with seeded(config.seed):
        embedder = Embedder(model).to(world.device or resolve_device(config.device))
    autocast = precision(config.autocast)
    scores = evaluate(embedder, data, autocast=autocast, track=monitor.track, world=world).as_dict()
    return Untrained(scores, embedder.preprocessing.crop)


def untrained_command(config: RunConfig) -> str:
    """The command that evaluates the backbone of a run as it comes, on the run's data."""
    data, model = config.data, config.model
    parts = ["pfml", "train", "--data", data.name, *(() if data.root is None else ("--data.root", str(data.root)))]
    if (model.backbone, model.weights) != (BACKBONE, "default"):
        parts += ["--model.backbone", model.backbone, "--model.weights", model.weights]
    return shell_words(*parts, "--loss.name", "zero-shot")


def comparison(untrained: Untrained, results: dict[str, Any], config: RunConfig) -> str:
    """A sentence that says whether the run is better than the network as it came, by both R@1 and MAP@R.

    Scores that are shown alike count as alike.
    """
    entry = of_model(results)
    scores = untrained.scores, entry["test"]
    before, after = ([round(each[key], 3) for key in HEADLINE] for each in scores)
    size, own = config.model.image_size, untrained.image_size
    apart = size is not None and own is not None and size != own
    at, at_trained = (f" (at {own} pixels)", f", at {size} pixels") if apart else ("", "")
    labels = [metric_label(key) for key in HEADLINE]
    numbers = (
        f"unseen classes, {labels[0]} {before[0]:.1%} before training{at} and {after[0]:.1%} after "
        f"(epoch {entry['epoch']}{at_trained}), {labels[1]} {before[1]:.1%} and {after[1]:.1%}"
    )
    queries = entry["test"]["num_queries"]
    chance = ""
    if before[0] != after[0] and _may_be_chance(before[0], after[0], queries):
        chance = f", though with {queries:,} images the difference of {labels[0]} may be chance"
    recall, precision_ = (new - old for old, new in zip(before, after, strict=True))
    if recall > 0 and precision_ > 0:
        return f"{numbers}: training has helped{chance}"
    if recall > 0 or precision_ > 0:
        if recall < 0 or precision_ < 0:
            return f"{numbers}: training has helped one and not the other{chance}"
        better, same = labels if recall > 0 else reversed(labels)
        return f"{numbers}: training has improved {better} and left {same} as it was{chance}"
    return (
        f"{numbers}: training has not helped; use the network as it comes ({untrained_command(config)}), "
        f"or give more classes, more images or more epochs"
    )


def _may_be_chance(before: float, after: float, queries: float) -> bool:
    """Whether two shares of so many images differ by too little to tell.

    That is one standard error as if each were of images of its own; the same images are asked twice, so about two.
    """
    share = (before + after) / 2
    return abs(after - before) < math.sqrt(2 * share * (1 - share) / max(queries, 1))
