"""Whether training has helped: the network as it comes, on the same unseen classes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from pfml.distributed import World
from pfml.evaluation import evaluate
from pfml.models import Embedder
from pfml.training.environment import precision, resolve_device, seeded
from pfml.training.monitor import Monitor
from pfml.training.results import of_model
from pfml.training.run import RunConfig, prepare_data

__all__ = ["comparison", "untrained_scores"]


def untrained_scores(config: RunConfig, monitor: Monitor | None = None, world: World | None = None) -> dict[str, float]:
    """The metrics of the backbone as it comes, without an embedding layer, on the test classes of the run."""
    monitor, world = monitor or Monitor(), world or World()
    data, _ = prepare_data(config.data, monitor.track)
    with seeded(config.seed):
        embedder = Embedder(replace(config.model, embedding_dim=None)).to(world.device or resolve_device(config.device))
    autocast = precision(config.autocast)
    return evaluate(embedder, data, autocast=autocast, track=monitor.track, world=world).as_dict()


def comparison(untrained: dict[str, float], results: dict[str, Any]) -> str:
    """A sentence that says whether the run is better than the network as it came, by both R@1 and MAP@R."""
    entry = of_model(results)
    before, after = ([scores[key] for key in ("recall_at_1", "map_at_r")] for scores in (untrained, entry["test"]))
    numbers = (
        f"unseen classes, R@1 {before[0]:.1%} before training and {after[0]:.1%} after (epoch {entry['epoch']}), "
        f"MAP@R {before[1]:.1%} and {after[1]:.1%}"
    )
    queries = entry["test"]["num_queries"]
    chance = ""
    if _may_be_chance(before[0], after[0], queries):
        chance = f", though with {queries:,} images the difference of R@1 may be chance"
    wins = [new > old for old, new in zip(before, after, strict=True)]
    losses = [new < old for old, new in zip(before, after, strict=True)]
    if any(wins) and not any(losses):
        return f"{numbers}: training has helped{chance}"
    if any(wins):
        return f"{numbers}: training has helped one and not the other{chance}"
    return (
        f"{numbers}: training has not helped; use the network as it comes (--loss.name zero-shot), "
        f"or give more classes, more images or more epochs"
    )


def _may_be_chance(before: float, after: float, queries: float) -> bool:
    """Whether two shares of so many images differ by too little to tell.

    That is one standard error as if each were of images of its own; the same images are asked twice, so about two.
    """
    share = (before + after) / 2
    return abs(after - before) < math.sqrt(2 * share * (1 - share) / max(queries, 1))
