"""The demo: letters that were never trained on are found by raw pixels, an untrained net, Proxy Anchor and PFML."""

from __future__ import annotations

import shutil
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from pfml.data import RetrievalData, read_glyphs
from pfml.evaluation import RetrievalMetrics, embed, retrieval_metrics
from pfml.files import write_atomically
from pfml.models import Embedder
from pfml.report.page import Table, write_page
from pfml.training.config_files import shipped_config
from pfml.training.loop import resolve_device
from pfml.training.methods import LossConfig
from pfml.training.monitor import ProgressMonitor
from pfml.training.run import RunConfig, seeded, train
from pfml.training.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Contender", "Demo", "run_demo", "scores_table"]

#: Written into each run's folder: only folders with it are replaced by the next demo.
MARK = "made-by-pfml-demo"


@dataclass(frozen=True, eq=False)
class Contender:
    """A way to compare images, and how well it finds unseen letters.

    Args:
        name: For tables and pictures.
        embeddings: (N, D) of the test images, on the CPU.
        metrics: Of searching them among each other.
        alignment: The paper's W2 between proxies and training data; None without proxies.
        images_per_second: While training, median over epochs; None without training.
        folder: Of the run; None without training.
        train_embeddings: (N, D) of the training images, on the CPU; None without training.
    """

    name: str
    embeddings: Tensor
    metrics: RetrievalMetrics
    alignment: float | None = None
    images_per_second: float | None = None
    folder: RunFolder | None = None
    train_embeddings: Tensor | None = None


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
    trained: dict[str, Contender]

    @property
    def contenders(self) -> tuple[Contender, ...]:
        return (self.pixels, self.untrained, *self.trained.values())


def run_demo(out: Path, *, console: Console, epochs: int = 8, seed: int = 0, data: RetrievalData | None = None) -> Path:
    """Train and compare the methods, print a table, write a page of results; the page's path, out/report.html.

    Args:
        out: Folder for the page and the runs; what an earlier demo left there is replaced, and nothing else.
        console: Where progress and table are printed.
        epochs: Passes over the training letters, for each method.
        seed: Of everything that is random; the same seed gives the same numbers, but for times.
        data: Other letters, as pixels; None for the glyphs.
    """
    from pfml.experiments.demo_page import demo_page

    out = Path(out)
    config = replace(shipped_config("glyphs"), epochs=epochs, seed=seed, log_every=1)
    losses = demo_losses(config)
    _clear(out, losses)
    data = read_glyphs() if data is None else data
    for line in describe(data):
        _say(console, line)

    with seeded(seed):
        untrained = Embedder(config.model).to(resolve_device(config.device))
    trained = {}
    for method, (name, loss) in losses.items():
        _say(console, f"training {name}: {epochs} epochs, in {out / 'runs' / method}")
        trained[method] = _trained(name, data, replace(config, loss=loss), out / "runs" / method, console)
    demo = Demo(out, data, config, _pixels(data), _untrained(untrained, data), trained)
    _print_table(console, scores_table(demo))
    _say(console, "drawing the report")
    report = out / "report.html"
    write_page(report, demo_page(demo))
    return report


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
    numbers = [
        [*(c.metrics.recall[k] for k in recall_at), c.metrics.map_at_r, c.alignment, _relative_time(c, demo)]
        for c in demo.contenders
    ]
    shares = len(recall_at) + 1
    rows = []
    for contender, values in zip(demo.contenders, numbers, strict=True):
        texts = [f"{100 * value:.1f}" for value in values[:shares] if value is not None]
        texts += ["–" if value is None else f"{value:.2f}" for value in values[shares:]]  # noqa: RUF001
        rows.append((contender.name, *texts))
    best = [max(column) for column in zip(*(values[:shares] for values in numbers), strict=True)]
    strong = {(r, c + 1) for r, values in enumerate(numbers) for c in range(shares) if values[c] == best[c]}
    return Table(columns, tuple(rows), _table_caption(demo), frozenset(strong))


def _table_caption(demo: Demo) -> str:
    return (
        f"Unseen letters, in percent: R@K is the share of images with an image of the same letter among the K nearest; "
        f"MAP@R also asks for the order of all of them. W2: distance between proxies and training images as the paper "
        f"defines it (0 to 2, small is close; with Proxy Anchor's single proxy, the distance to the nearest image). "
        f"Time: of a training step, Proxy Anchor's being 1, measured in this run. Measured after the last epoch, "
        f"one run each with seed {demo.config.seed}; all methods share network, start, batches and learning rates."
    )


def _relative_time(contender: Contender, demo: Demo) -> float | None:
    baseline = demo.trained["proxy-anchor"].images_per_second
    if contender.images_per_second is None or baseline is None:
        return None
    return baseline / contender.images_per_second


def _pixels(data: RetrievalData) -> Contender:
    """Grey pixels as they are; the metrics normalise their length."""
    pixels = data.test.images
    if not isinstance(pixels, Tensor):
        raise TypeError("the demo compares raw pixels, so its data must be pixels, got files")
    grey = pixels.float().mean(1).flatten(1)
    return Contender("raw pixels", grey, retrieval_metrics(grey, data.test.labels, recall_at=data.recall_at))


def _untrained(embedder: Embedder, data: RetrievalData) -> Contender:
    points = embed(embedder, data.test).cpu()
    return Contender("untrained net", points, retrieval_metrics(points, data.test.labels, recall_at=data.recall_at))


def _trained(name: str, data: RetrievalData, config: RunConfig, out: Path, console: Console) -> Contender:
    """Train one method in the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / MARK, b"")
    with seeded(config.seed):
        embedder = Embedder(config.model)
    monitor = ProgressMonitor(console, lines=False)
    results = train(embedder, data, config, out=out, storage=config.storage, monitor=monitor)
    folder = RunFolder(out)
    points = embed(embedder, data.test).cpu()
    return Contender(
        name,
        points,
        retrieval_metrics(points, data.test.labels, recall_at=data.recall_at),
        alignment=results["alignment"]["paper"],
        images_per_second=statistics.median(entry["images_per_second"] for entry in folder.entries("evaluation")),
        folder=folder,
        train_embeddings=embed(embedder, data.train).cpu(),
    )


def _clear(out: Path, methods: dict[str, tuple[str, LossConfig]]) -> None:
    """Remove the runs of an earlier demo; a run that no demo made is left alone, and refused."""
    runs = [out / "runs" / method for method in methods]
    for run in runs:
        if run.exists() and not (run / MARK).exists() and any(run.iterdir()):
            raise FileExistsError(f"{run} must be empty or of an earlier demo, got other files: choose another folder")
    for run in runs:
        if run.exists():
            shutil.rmtree(run)
    out.mkdir(parents=True, exist_ok=True)


def _print_table(console: Console, table: Table) -> None:
    from rich.table import Table as PrintedTable
    from rich.text import Text

    printed = PrintedTable(title="Unseen letters: R@K and MAP@R in percent", title_justify="left")
    for number, column in enumerate(table.columns):
        printed.add_column(column, justify="right" if number else "left", no_wrap=True)
    for r, row in enumerate(table.rows):
        printed.add_row(*(Text(cell, style="bold" if (r, c) in table.strong else "") for c, cell in enumerate(row)))
    console.print(printed)
    _say(console, "W2: between proxies and training images. Time: of a training step, relative to Proxy Anchor.")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
