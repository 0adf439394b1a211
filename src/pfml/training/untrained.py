"""Zero-shot: what the backbone knows before any training."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pfml.data import RetrievalData
from pfml.distributed import World
from pfml.evaluation import evaluate
from pfml.models import Embedder
from pfml.runs.card import write_run_cards
from pfml.runs.config_files import write_config
from pfml.runs.folder import RunFolder
from pfml.runs.results import summarize
from pfml.training.environment import precision, resolve_device, seeded
from pfml.training.progress import Monitor

if TYPE_CHECKING:
    from pfml.runs.config import RunConfig

__all__ = ["evaluate_untrained", "without_layer"]


def evaluate_untrained(
    config: RunConfig,
    data: RetrievalData,
    folder: RunFolder,
    monitor: Monitor,
    world: World | None = None,
    *,
    resume: bool = False,
) -> dict[str, Any]:
    """Evaluate the backbone as it comes, without an embedding layer; the results, as those of a run, of epoch 0.

    The folder gets config.yaml, log.jsonl, model/ and results.json, so that what reads runs reads it too. With `resume`
    it may hold what an evaluation that was cut short has written; it is evaluated again, and all is written again.
    """
    world = world or World()
    config = without_layer(config)
    with seeded(config.seed):
        embedder = Embedder(config.model).to(world.device or resolve_device(config.device))
    if not resume:
        world.by_first(folder.start)
    for remark in data.remarks:
        monitor.remark(remark)
    entry: dict[str, Any] = {"epoch": 0}
    for role, images in (("test", data), ("validation", data.validation)):
        if images is not None:
            autocast = precision(config.autocast)
            metrics = evaluate(
                embedder, images, recall_at=data.recall_at, autocast=autocast, track=monitor.track, world=world
            )
            entry[role] = metrics.as_dict()
    results: dict[str, Any] = world.by_first(lambda: _written(config, data, folder, embedder, entry))
    return results


def without_layer(config: RunConfig) -> RunConfig:
    """`config` as a run that trains nothing stores it: the backbone's features are the embedding."""
    return replace(config, model=replace(config.model, embedding_dim=None))


def _written(
    config: RunConfig, data: RetrievalData, folder: RunFolder, embedder: Embedder, entry: dict[str, Any]
) -> dict[str, Any]:
    write_config(folder.config, config, sealed=True)
    folder.forget_after(0, 0)  # the same lines, if a run was cut short here
    folder.append("evaluation", 0, **entry)
    embedder.save(folder.model)
    results = summarize([entry], select_by=config.select_by)
    folder.write_results(results)
    write_run_cards(folder, data, config, results)
    folder.close()
    return results
