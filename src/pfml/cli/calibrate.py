"""`pfml calibrate`: from which distance on an image is unknown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pfml.cli.console import create_console, print_line
from pfml.terminal import shell_words

if TYPE_CHECKING:
    from rich.console import Console

    from pfml.cli.parser import Parser
    from pfml.data import ImageSet
    from pfml.data.decoding import Track
    from pfml.search import Threshold

__all__ = ["add_calibrate_arguments", "calibrate"]

#: Share of known images called unknown from which on a threshold is of little use.
MANY_REJECTS = 0.5


def calibrate(
    run: Path,
    false_accept_rate: float = 0.01,
    data: str | None = None,
    root: Path | None = None,
    seed: int = 0,
) -> None:
    """Choose the distance beyond which an image is unknown, on classes that were not trained on: threshold.json."""
    from pfml.models import load_embedder
    from pfml.search import calibrate as threshold_of
    from pfml.training.environment import resolve_device
    from pfml.training.progress import ProgressMonitor

    console = create_console()
    embedder = load_embedder(run).to(resolve_device("auto"))
    images, described = _calibration_images(console, run, data, root)
    track = ProgressMonitor(console).track
    threshold = threshold_of(
        embedder, images, false_accept_rate=false_accept_rate, seed=seed, data=described, track=track
    )
    file = threshold.save(run)
    _print_threshold(console, threshold)
    print_line(console, f"{file}: pfml search {shell_words(str(run))} IMAGE calls images beyond this distance unknown")


def add_calibrate_arguments(parser: Parser) -> None:
    """Add the arguments of `calibrate`."""
    add = parser.add_argument
    add("run", type=Path, help="Folder of a run, or of a saved embedder.")
    add(
        "--false-accept-rate",
        type=float,
        default=0.01,
        help="Of images whose class is not in the index, the share that may be accepted.",
    )
    add("--data", help="A data set by name, or the path of a folder or CSV; by default that of the run.")
    add("--root", type=Path, help="Folder of a data set given by name.")
    add("--seed", type=int, default=0, help="Of the division of the classes.")


def _calibration_images(console: Console, run: Path, data: str | None, root: Path | None) -> tuple[ImageSet, str]:
    """The validation images, or the test images if there are none, and what they are."""
    from pfml.data import load_data, with_validation
    from pfml.data.own_images import own_images
    from pfml.data.readers.table import splits_of
    from pfml.runs.config_files import read_config
    from pfml.search.threshold import FEWEST_CLASSES
    from pfml.training.progress import ProgressMonitor

    validation, unreadable, track = "none", "auto", ProgressMonitor(console).track
    if data is not None and (table := _table_of(data, root)) is not None and splits_of(table) == {"train"}:
        return _all_classes(console, table, track)
    if data is None:
        # a model inside of a run's folder belongs to that run
        files = [folder / "config.yaml" for folder in (run, run.parent) if (folder / "config.yaml").is_file()]
        if not files:
            raise ValueError(f"{run} does not say its data: name it with --data, and --root if it is not a path")
        config = read_config(files[0]).data
        data, root, validation = config.name, root or config.root, config.validation
        unreadable = config.unreadable
    images = with_validation(own_images(data, load_data(data, root), unreadable, track), validation)
    for remark in images.remarks:
        print_line(console, remark)
    if images.validation is not None and images.validation.num_classes >= FEWEST_CLASSES:
        return images.validation, f"validation classes of {data}"
    if images.validation is not None:
        few = images.validation.num_classes
        print_line(console, f"{few} validation classes are too few to choose and to measure on: test classes instead")
    return images.test, f"test classes of {data}"


def _table_of(data: str, root: Path | None) -> Path | None:
    """The table that the data are, or None."""
    if data == "csv" and root is not None:
        return root
    path = Path(data).expanduser()
    return path if path.suffix.lower() == ".csv" and path.is_file() else None


def _all_classes(console: Console, table: Path, track: Track) -> tuple[ImageSet, str]:
    """All images of a table that sets none apart: of what a run is to be trained on, none of which this model knows."""
    from pfml.data import RetrievalData, without_unreadable
    from pfml.data.readers.table import listed_images

    images, remarks = listed_images(table)
    nothing = images.of_classes([])
    data = without_unreadable(RetrievalData("csv", nothing, images, remarks=remarks), track=track)
    for remark in data.remarks:
        print_line(console, remark)
    print_line(console, f"no row of {table} is for testing: all of its {data.test.num_classes:,} classes are taken")
    return data.test, f"all classes of {table}"


def _print_threshold(console: Console, threshold: Threshold) -> None:
    (images, classes), (others, other_classes) = threshold.chosen_on, threshold.measured_on
    print_line(console, f"threshold {threshold.distance:.4f}, chosen on {images:,} images of {classes:,} classes")
    print_line(console, f"measured on {others:,} images of {other_classes:,} other classes ({threshold.data}):")
    rates = {
        "false accepts, class not in the index": threshold.false_accepts,
        "false rejects, class in the index": threshold.false_rejects,
        "accepted with a wrong class": threshold.wrong_classes,
    }
    for name, rate in rates.items():
        print_line(console, f"  {name + ':':<40}{rate}")
    if threshold.false_rejects.value > MANY_REJECTS:
        print_line(console, _warning(threshold))


def _warning(threshold: Threshold) -> str:
    """What it means that most known images are called unknown, and what to do about it."""
    return (
        f"warning: {threshold.false_rejects.value:.0%} of known images would be called unknown: the nearest strangers "
        f"are closer than most images are to their own class; give more images per class, allow a higher "
        f"--false-accept-rate than {threshold.false_accept_rate:g}, or train a better embedder"
    )
