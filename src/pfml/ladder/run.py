"""A run that works up the ladder: `pfml train --data FOLDER --effort minutes`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pfml.data.decoding import listing_all_unreadable
from pfml.evaluation.metrics import summary
from pfml.ladder.ladder import Climb, climb
from pfml.methods import LossConfig
from pfml.models.embedder import TrainedOn
from pfml.runs.config import RunConfig
from pfml.runs.data import PreparedData, prepare_data
from pfml.runs.folder import RunFolder
from pfml.suggest.comparison import untrained_embedder
from pfml.suggest.preview import distances_of
from pfml.suggest.suggestion import suggest_loss
from pfml.training.environment import precision, resolve_device
from pfml.training.progress import Monitor
from pfml.training.runner import write_untrained

__all__ = ["LadderRun", "refuse_other_options", "run_ladder"]

#: What may be decided beside the effort; the ladder decides the rest.
FREE = ("effort", "data", "storage", "seed", "device", "autocast", "select_by", "model.backbone", "model.weights")


@dataclass(frozen=True, eq=False)
class LadderRun:
    """What `run_ladder` leaves.

    Args:
        results: As those of any run.
        climb: The rungs, and the one that was kept.
    """

    results: dict[str, Any]
    climb: Climb

    @property
    def conclusion(self) -> str:
        """A sentence that says what was kept and what it does on the unseen classes."""
        found = self.climb
        before, after = (summary(scores.as_dict()) for scores in (found.before, found.after))
        if found.chosen is found.rungs[0]:
            return f"kept: the pretrained backbone, since nothing proved to be better; unseen classes: {before}"
        return f"kept: {found.chosen.candidate}; unseen classes: {before} before, {after} after"


def refuse_other_options(given: Collection[str]) -> None:
    """Refuse options that decide what the ladder decides."""
    others = [option for option in given if not option.startswith(FREE)]
    if others:
        shown = ", ".join(f"--{option}" for option in sorted(others))
        raise ValueError(f"--effort works up the ladder by itself: leave out {shown}, or leave out --effort")


def run_ladder(
    config: RunConfig,
    out: str | Path,
    *,
    data: PreparedData | None = None,
    monitor: Monitor | None = None,
) -> LadderRun:
    """Work up the ladder on the data of `config`, and store what is kept as a run in the folder `out`.

    Args:
        config: With an effort, images and a backbone with pretrained weights.
        out: Folder of the run, which must not hold one.
        data: What `prepare_data(config.data)` returns, from a caller that has it already.
        monitor: What to show.
    """
    monitor, config = monitor or Monitor(), config.resolved()
    folder = RunFolder(Path(out))
    folder.refuse_run()
    backbone = untrained_embedder(config)
    if backbone is None or config.effort is None:
        missing = "a backbone with pretrained weights" if backbone is None else "an effort, such as minutes"
        raise ValueError(f"the ladder needs {missing}: set {'model.weights' if backbone is None else 'effort'}")
    images, corruption = data or prepare_data(config.data, monitor.track)
    for remark in images.remarks:
        monitor.remark(remark)
    with listing_all_unreadable(images, track=monitor.track):
        found = climb(
            backbone.to(resolve_device(config.device)),
            images,
            _fitting_field,
            effort=config.effort,
            seed=config.seed,
            autocast=precision(config.autocast),
            monitor=monitor,
        )
    folder.start()
    if corruption is not None:
        corruption.write(folder.noise)
    if found.embedder.trained_on is not None:
        found.embedder.trained_on = TrainedOn(images.name, images.train.class_names)
    stored = replace(config, loss=LossConfig("zero-shot"), model=found.embedder.config)
    results = write_untrained(stored, images, folder, found.embedder, {"epoch": 0, "test": found.after.as_dict()})
    for rung in found.rungs:
        folder.append("rung", 0, **rung.as_dict(), is_kept=rung is found.chosen)
    folder.append("untrained", 0, test=found.before.as_dict(), image_size=found.embedder.preprocessing.crop)
    folder.close()
    return LadderRun(results, found)


def _fitting_field(points: Tensor, labels: Tensor) -> LossConfig:
    """The logarithmic field with radii that fit these embeddings."""
    distances = distances_of(points, labels, images_per_second=1.0, image_size=1)
    return suggest_loss(labels, distances)[0]
