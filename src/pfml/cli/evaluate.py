"""`pfml evaluate`: what a trained embedder is good for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pfml.cli.console import create_console, print_json, print_model, print_scores
from pfml.cli.parser import add_device_option, add_json_option, add_quiet_option
from pfml.terminal import print_line

if TYPE_CHECKING:
    from argparse import ArgumentParser


def evaluate(
    run: Path,
    data: str | None = None,
    root: Path | None = None,
    nmi: bool = False,
    device: str = "auto",
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Evaluate a trained embedder on classes that it has not seen: print the metrics."""
    from pfml.data import load_data
    from pfml.data.own_images import own_images
    from pfml.data.splits import wholly_unseen
    from pfml.distributed import open_world
    from pfml.evaluation import evaluate as metrics_of
    from pfml.models import load_embedder
    from pfml.runs.config_files import read_config
    from pfml.training.environment import resolve_device
    from pfml.training.progress import ProgressMonitor

    console = create_console(stderr=as_json, quiet=quiet)
    is_given, unreadable = data is not None, "auto"
    if not run.is_dir():
        raise FileNotFoundError(
            f"{run} must be the folder of a run or of a saved embedder, but there is no such folder"
        )
    if data is None:
        # a model inside of a run's folder belongs to that run
        files = [folder / "config.yaml" for folder in (run, run.parent) if (folder / "config.yaml").is_file()]
        if not files:
            raise ValueError(f"{run} does not say its data: name it with --data, and --root if it is not a path")
        config = read_config(files[0]).data
        data, root, unreadable = config.name, root or config.root, config.unreadable
    with open_world(resolve_device(device)) as world:
        console.quiet = quiet or not world.is_first
        track = ProgressMonitor(console).track
        images = own_images(data, load_data(data, root), unreadable, track)
        for remark in images.remarks:
            print_line(console, remark)
        embedder = load_embedder(run).to(world.device or resolve_device(device))
        if is_given and images.name in ("folder", "csv"):  # published data sets keep their published split
            images = wholly_unseen(images, () if embedder.trained_on is None else embedder.trained_on.class_names)
        metrics = metrics_of(embedder, images, nmi=nmi, track=track, world=world)
    print_model(console, run)
    title = f"{images.name}: {len(images.test):,} images of {images.test.num_classes:,} unseen classes"
    print_scores(console, title, {str(run): metrics.as_dict()})
    if as_json and world.is_first:
        size = {"images": len(images.test), "classes": images.test.num_classes}
        print_json({"run": str(run), "data": images.name, **size, "metrics": metrics.as_dict()})


def add_evaluate_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `evaluate`."""
    add = parser.add_argument
    add("run", type=Path, help="Folder of a run, or of a saved embedder.")
    add(
        "--data",
        help="A data set by name, or the path of a folder of class folders or of a CSV; by default that of the run. "
        "All classes of a folder or CSV are searched if the model knows none of them.",
    )
    add("--root", type=Path, help="Folder of a data set given by name.")
    add("--nmi", action="store_true", help="Cluster the embeddings, too.")
    add_device_option(parser)
    add_json_option(parser)
    add_quiet_option(parser)
