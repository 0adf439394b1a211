"""The demo: retrieval of unseen glyphs by raw pixels, an untrained model, Proxy Anchor and PFML."""

from __future__ import annotations

import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from pfml.data import RetrievalData, read_glyphs
from pfml.evaluation import embed, retrieval_metrics
from pfml.methods import LossConfig
from pfml.models import Embedder
from pfml.pages.demo import Contender, Demo, Trained, demo_losses, demo_page, describe, scores_table
from pfml.pages.page import Table, write_page
from pfml.runs.config import RunConfig
from pfml.runs.config_files import shipped_config
from pfml.runs.folder import RunFolder
from pfml.storage.files import write_atomically
from pfml.terminal import print_line
from pfml.training.environment import resolve_device, seeded
from pfml.training.progress import ProgressMonitor
from pfml.training.runner import train

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["run_demo"]

#: Written into each run's folder: only folders with it are replaced by the next demo.
MARK = "made-by-pfml-demo"


def run_demo(
    out: Path,
    *,
    console: Console,
    epochs: int = 6,
    seed: int = 0,
    device: str = "auto",
    data: RetrievalData | None = None,
) -> Path:
    """Train and compare the methods, print a table, write a page of results; the page's path, out/report.html.

    Args:
        out: Folder for the page and the runs; what an earlier demo left there is replaced, and nothing else.
        console: Where progress and table are printed.
        epochs: Passes over the training glyphs, for each method.
        seed: Of everything that is random; the same seed gives the same numbers, but for times, with as many threads.
        device: Where to compute.
        data: Another data set, as pixels; None for the glyphs.
    """
    out = Path(out)
    config = replace(shipped_config("glyphs"), epochs=epochs, seed=seed, device=device, log_every=5)
    losses = demo_losses(config)
    _clear(out, losses)
    data = read_glyphs() if data is None else data
    for line in describe(data):
        print_line(console, line)

    with seeded(seed):
        untrained = Embedder(config.model).to(resolve_device(config.device))
    trained = {}
    length = "1 epoch" if epochs == 1 else f"{epochs} epochs"
    for method, (name, loss) in losses.items():
        print_line(console, f"training {name}: {length}, in {out / 'runs' / method}")
        trained[method] = _trained(name, data, replace(config, loss=loss), out / "runs" / method, console)
    demo = Demo(out, data, config, _pixels(data), _untrained(untrained, data), trained)
    _print_table(console, scores_table(demo))
    print_line(console, "writing the page")
    report = out / "report.html"
    write_page(report, demo_page(demo))
    return report


def _pixels(data: RetrievalData) -> Contender:
    """Gray pixels as they are; the metrics normalize their length."""
    pixels = data.test.images
    if not isinstance(pixels, Tensor):
        raise TypeError("the demo compares raw pixels, so its data must be pixels, got files")
    gray = pixels.float().mean(1).flatten(1)
    metrics = retrieval_metrics(gray, data.test.labels, recall_at=data.recall_at)
    return Contender("raw pixels", gray, metrics.as_dict())


def _untrained(embedder: Embedder, data: RetrievalData) -> Contender:
    points = embed(embedder, data.test).cpu()
    metrics = retrieval_metrics(points, data.test.labels, recall_at=data.recall_at)
    return Contender("untrained model", points, metrics.as_dict())


def _trained(name: str, data: RetrievalData, config: RunConfig, out: Path, console: Console) -> Trained:
    """Train one method in the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / MARK, b"")
    with seeded(config.seed):
        embedder = Embedder(config.model)
    monitor = ProgressMonitor(console, lines=False)
    results = train(data, embedder, config, out=out, storage=config.storage, monitor=monitor)
    folder = RunFolder(out)
    return Trained(
        name,
        embed(embedder, data.test).cpu(),
        results["last"]["test"],
        alignment=results["alignment"]["paper"],
        images_per_second=statistics.median(entry["images_per_second"] for entry in folder.entries("evaluation")),
        folder=folder,
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

    printed = PrintedTable(title="Unseen glyphs, in percent", title_justify="left")
    for number, column in enumerate(table.columns):
        printed.add_column(column, justify="right" if number else "left", no_wrap=True)
    for r, row in enumerate(table.rows):
        printed.add_row(*(Text(cell, style="bold" if (r, c) in table.strong else "") for c, cell in enumerate(row)))
    console.print(printed)
    print_line(console, "W2: between proxies and training images. Time: of a training step, relative to Proxy Anchor.")
