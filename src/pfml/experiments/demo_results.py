"""What the demo compares, and the table of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from pfml.data import RetrievalData
from pfml.report.page import Table
from pfml.training.methods import LossConfig
from pfml.training.run import RunConfig
from pfml.training.run_folder import RunFolder

__all__ = ["Contender", "Demo", "Trained", "demo_losses", "describe", "scores_table"]


@dataclass(frozen=True, eq=False)
class Contender:
    """A way to compare images, and how well it finds unseen letters.

    Args:
        name: For tables and pictures.
        embeddings: (N, D) of the test images, on the CPU.
        scores: Names and numbers, as `RetrievalMetrics.as_dict` gives them.
    """

    name: str
    embeddings: Tensor
    scores: dict[str, float]


@dataclass(frozen=True, eq=False)
class Trained(Contender):
    """A contender that was trained.

    Args:
        alignment: The paper's W2 between proxies and training data.
        images_per_second: While training, median over the evaluated epochs.
        folder: Of the run.
    """

    alignment: float
    images_per_second: float
    folder: RunFolder


@dataclass(frozen=True, eq=False)
class Demo:
    """What a demo did.

    Args:
        out: Its folder.
        data: The letters.
        config: How all methods were trained, but for the loss.
        pixels, untrained: What needs no training.
        trained: By method, a key of `pfml.training.METHODS`.
    """

    out: Path
    data: RetrievalData
    config: RunConfig
    pixels: Contender
    untrained: Contender
    trained: dict[str, Trained]

    @property
    def contenders(self) -> tuple[Contender, ...]:
        return (self.pixels, self.untrained, *self.trained.values())


def demo_losses(config: RunConfig) -> dict[str, tuple[str, LossConfig]]:
    """Method -> its name for people and its loss; both fields have as many proxies as the configuration says."""
    proxies = {"proxies_per_class": config.loss.options["proxies_per_class"]}
    return {
        "proxy-anchor": ("Proxy Anchor", LossConfig("proxy-anchor")),
        "pfml": ("PFML (paper's text)", LossConfig("pfml", proxies)),
        "pfml-log": ("PFML (our preset)", LossConfig("pfml-log", proxies)),
    }


def describe(data: RetrievalData) -> tuple[str, str]:
    """What the data is, in two sentences."""
    train, test = data.train, data.test
    return (
        f"{data.name}: {len(train):,} images of {train.num_classes} letters to train on, "
        f"{len(test):,} images of {test.num_classes} other letters to search among.",
        "Each image is a letter in one of several typefaces, turned, slanted, scaled, shifted and noisy; "
        "nothing is downloaded.",
    )


def scores_table(demo: Demo) -> Table:
    """Method, recalls, MAP@R, proxy alignment and training time of every contender after the last epoch."""
    recall_at = demo.data.recall_at
    columns = ("method", *(f"R@{k}" for k in recall_at), "MAP@R", "W2", "time")
    keys = (*(f"recall_at_{k}" for k in recall_at), "map_at_r")
    shares = [[contender.scores[key] for key in keys] for contender in demo.contenders]
    baseline = demo.trained["proxy-anchor"].images_per_second
    rows = []
    for contender, values in zip(demo.contenders, shares, strict=True):
        extra = ("-", "-")
        if isinstance(contender, Trained):
            extra = (f"{contender.alignment:.2f}", f"{baseline / contender.images_per_second:.2f}")
        rows.append((contender.name, *(f"{100 * value:.1f}" for value in values), *extra))
    best = [max(column) for column in zip(*shares, strict=True)]
    strong = {(r, c) for r, row in enumerate(shares) for c, value in enumerate(row, start=1) if value == best[c - 1]}
    return Table(columns, tuple(rows), _table_caption(demo), frozenset(strong))


def _table_caption(demo: Demo) -> str:
    return (
        f"Unseen letters, in percent: R@K is the share of images with an image of the same letter among the K nearest; "
        f"MAP@R also asks for the order of all of them. W2: distance between proxies and training images as the paper "
        f"defines it (0 to 2, small is close; with Proxy Anchor's single proxy, the distance to the nearest image). "
        f"Time: of a training step, Proxy Anchor's being 1, measured in this run. Measured after the last epoch, one "
        f"run each with seed {demo.config.seed}, so that differences of about a point may be chance; all methods share "
        f"network, start, batches and learning rates."
    )
