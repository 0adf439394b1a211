"""The evaluation of a backbone before any training (zero-shot), stored as a run."""

from __future__ import annotations

from typing import Any

from pfml.data import RetrievalData
from pfml.distributed import World
from pfml.evaluation import evaluate
from pfml.models import Embedder
from pfml.runs.card import write_run_cards
from pfml.runs.config import RunConfig
from pfml.runs.config_files import write_config
from pfml.runs.folder import RunFolder
from pfml.runs.results import summarize
from pfml.training.environment import precision, resolve_device
from pfml.training.progress import Monitor

__all__ = ["evaluate_untrained"]


def evaluate_untrained(
    embedder: Embedder,
    data: RetrievalData,
    config: RunConfig,
    folder: RunFolder,
    monitor: Monitor,
    world: World,
    *,
    resume: bool = False,
) -> dict[str, Any]:
    """Evaluate the embedder as it is; the results, as those of a run, of epoch 0.

    The folder gets config.yaml, log.jsonl, model/ and results.json, so that what reads runs reads it too. With `resume`
    it may hold what an interrupted evaluation has written; it is evaluated again, and everything is written again.
    """
    embedder = embedder.to(world.device or resolve_device(config.device))
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


def _written(
    config: RunConfig, data: RetrievalData, folder: RunFolder, embedder: Embedder, entry: dict[str, Any]
) -> dict[str, Any]:
    write_config(folder.config, config, sealed=True)
    folder.forget_after(0, 0)  # the same lines, if an evaluation was interrupted here
    folder.append("evaluation", 0, **entry)
    embedder.save(folder.model)
    results = summarize([entry], select_by=config.select_by)
    folder.write_results(results)
    write_run_cards(folder, data, config, results)
    folder.close()
    return results
