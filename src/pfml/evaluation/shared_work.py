"""Evaluation by several ranks: each embeds some batches, the first one computes the metrics, all get both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import Tensor

from pfml.distributed.meetings import part_sizes, part_slice
from pfml.distributed.world import World
from pfml.evaluation.retrieval import RetrievalMetrics

__all__ = ["gathered_batches", "metrics_by_first"]


def gathered_batches(mine: Tensor, batches: Sequence[Tensor], world: World) -> Tensor:
    """The rows of all batches in their order; those of this rank are of the batches `world.part(len(batches))`."""
    counts = part_sizes(len(batches), world.size)
    sizes = [sum(map(len, batches[part_slice(counts, rank)])) for rank in range(world.size)]
    return world.gathered(mine, sizes)


def metrics_by_first(metrics: Callable[[], RetrievalMetrics], world: World) -> RetrievalMetrics:
    """What `metrics` gives on the first rank, the only one to compute it."""
    values = world.by_first(lambda: dataclasses.asdict(metrics()))
    recall = {int(k): share for k, share in values["recall"].items()}  # JSON has texts for keys
    return RetrievalMetrics(**{**values, "recall": recall})
