"""How long a run will take: as long as its like did before, else a rough guess from measured speeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pfml.data.readers.published import PUBLISHED
from pfml.experiments.planned_run import PlannedRun

__all__ = ["Estimate", "Estimator"]

#: Seconds to train on 1,000 images, by kind of device and backbone. On a CPU: measured on 2 busy cores. On a GPU:
#: ResNet-50 measured on an NVIDIA H200 in float32, the others guessed from it.
SECONDS_PER_1000: dict[str, dict[str, float]] = {
    "cpu": {"convnet": 1.0, "resnet50": 1500.0, "bn_inception": 760.0, "vit_small": 750.0},
    "cuda": {"convnet": 0.05, "resnet50": 0.35, "bn_inception": 0.2, "vit_small": 0.2},
}
LIKE = {"dino_small": "vit_small", "resnet50_he": "resnet50"}
#: An image that is only embedded costs this part of one that is trained on.
EMBEDDING = 1 / 3
START = 5.0  # seconds to open the images and build the network
GLYPHS = (6_768, 6_816)


@dataclass(frozen=True)
class Estimate:
    """Seconds, and whether runs of the same kind have told them."""

    seconds: float
    is_rough: bool


class Estimator:
    """Estimates for runs on one kind of device.

    Args:
        records: Of the store; the runs that are done tell how fast this machine is.
        device: "cpu" or "cuda".
    """

    def __init__(self, records: Sequence[Mapping[str, Any]], device: str) -> None:
        self.device = device
        self.speeds: dict[tuple[str, ...], list[float]] = {}
        for record in records:
            if record["status"] != "done" or record["device"].split(":")[0] != device or not record["seconds"] > START:
                continue
            images = record["images"]
            if record["method"] == "zero-shot" or record["settings"].get("fold") == "concatenated":
                continue
            every = record["config"].get("evaluate_every", 1)
            work = _work(images["train"], images["test"], record["epochs"], every)
            kind = (record["backbone"], record["dataset"])
            for key in (kind, (*kind, record["method"])):
                self.speeds.setdefault(key, []).append((record["seconds"] - START) / work)

    def estimate(self, run: PlannedRun) -> Estimate:
        """How long `run` will take if it starts from its beginning."""
        train, test = GLYPHS
        if run.dataset in PUBLISHED:
            train, test = PUBLISHED[run.dataset].train[0], PUBLISHED[run.dataset].test[0]
        if run.task in ("concatenate", "untrained"):
            work = max(len(run.needs), 1) * test * EMBEDDING
        else:
            share = 1.0 if run.config.data.validation == "none" else 0.75
            work = _work(share * train, test + (1 - share) * train, run.epochs, run.config.evaluate_every)
        for key in ((run.backbone, run.dataset, run.method), (run.backbone, run.dataset)):
            if key in self.speeds:
                return Estimate(START + statistics.median(self.speeds[key]) * work, is_rough=False)
        seconds = SECONDS_PER_1000[self.device][LIKE.get(run.backbone, run.backbone)] / 1000
        return Estimate(START + seconds * work, is_rough=True)


def _work(train: float, test: float, epochs: int, evaluate_every: int) -> float:
    """Images that pass through the network, those without a gradient at their lower price."""
    evaluations = math.ceil(epochs / evaluate_every)
    return epochs * train + EMBEDDING * (evaluations * test + train)
