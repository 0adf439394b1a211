"""`pfml calibrate`: the threshold of "unknown"."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from pfml.cli.console import create_console, preferred_run, print_json
from pfml.cli.parser import add_device_option, add_json_option, add_quiet_option
from pfml.cli.search import threshold_content
from pfml.terminal import print_line, shell_words

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Collection

    from rich.console import Console

    from pfml.data import ImageSet, RetrievalData
    from pfml.data.decoding import Track
    from pfml.search import Edits, Threshold

#: The rates of a threshold that were measured.
RATES = ("false_accepts", "false_rejects", "wrong_classes")
#: Share of known images called unknown from which on a threshold is of little use.
MANY_REJECTS = 0.5


def calibrate(
    run: Path,
    false_accept_rate: float = 0.05,
    score: str = "auto",
    data: str | None = None,
    root: Path | None = None,
    seed: int = 0,
    device: str = "auto",
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Choose the score and the threshold of unknown images, on unseen classes, or by leaving known ones out."""
    from dataclasses import replace

    from pfml.data import RetrievalData
    from pfml.models import load_embedder
    from pfml.search import Edits, calibrate_known
    from pfml.search import calibrate as threshold_of
    from pfml.search.index_folder import read_edits
    from pfml.training.environment import resolve_device
    from pfml.training.progress import ProgressMonitor

    console = create_console(stderr=as_json, quiet=quiet)
    run = preferred_run(console, run)
    embedder = load_embedder(run).to(resolve_device(device))
    seen = () if embedder.trained_on is None else embedder.trained_on.class_names
    images, described = _calibration_images(console, run, data, root, seen)
    edits = read_edits(run / "index")
    images = _following(console, images, edits, seen)
    track = ProgressMonitor(console).track
    rate = false_accept_rate
    if isinstance(images, RetrievalData):
        threshold = calibrate_known(
            embedder, images, false_accept_rate=rate, score=score, seed=seed, source=described, track=track
        )
    else:
        threshold = threshold_of(
            embedder, images, false_accept_rate=rate, score=score, seed=seed, data=described, track=track
        )
    threshold = replace(threshold, edits=Edits(tuple(edit for edit in edits.steps if edit.classes)))
    file = threshold.save(run)
    _print_threshold(console, threshold, is_default=score == "auto")
    if threshold.protocol != "classes" and embedder.trained_on is not None:
        print_line(console, _about_known(threshold, run))
    print_line(console, f"{file}: pfml search {shell_words(str(run))} IMAGE calls images below this threshold unknown")
    if as_json:
        measured = {name: asdict(getattr(threshold, name)) for name in RATES}
        of_what = {"data": threshold.data, "protocol": threshold.protocol, "compared": dict(threshold.compared)}
        print_json({"threshold": str(file), **of_what, **threshold_content(threshold), **measured})


def add_calibrate_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `calibrate`."""
    add = parser.add_argument
    add("run", type=Path, help="Folder of a run, or of a saved embedder.")
    add(
        "--false-accept-rate",
        type=float,
        default=0.05,
        help="Of images whose class is not in the index, the share that may be accepted.",
    )
    add(
        "--score",
        default="auto",
        help="distance, potential, margin, agreement, relative, combination, or auto: combination, unless another one "
        "accepts clearly more.",
    )
    add("--data", help="A data set by name, or the path of a folder or CSV; by default that of the run.")
    add("--root", type=Path, help="Folder of a data set given by name.")
    add("--seed", type=int, default=0, help="Of the folds of classes.")
    add_device_option(parser)
    add_json_option(parser)
    add_quiet_option(parser)


def _calibration_images(
    console: Console, run: Path, data: str | None, root: Path | None, seen: Collection[str]
) -> tuple[ImageSet | RetrievalData, str]:
    """Images of all classes that the model has not seen; all data if there is no such class; and what they are."""
    from dataclasses import replace
    from functools import reduce

    from pfml.data import ImageSet, load_data
    from pfml.data.own_images import own_images
    from pfml.data.readers.table import splits_of
    from pfml.runs.data import data_of_run, names_data, prepare_data
    from pfml.training.progress import ProgressMonitor

    track = ProgressMonitor(console).track
    if data is not None and (table := _table_of(data, root)) is not None and splits_of(table) == {"train"}:
        return _all_classes(console, table, track)
    config = data_of_run(run)
    if data is not None and (config is None or not names_data(config, data, root)):
        images = own_images(data, load_data(data, root), "auto", track)
    else:
        if config is None:
            raise ValueError(f"{run} does not say its data: name it with --data, and --root if it is not a path")
        config = replace(config, root=root or config.root)
        if config.split != "classes":
            known = prepare_data(config, track).data  # with the labels that the run was trained on
            for remark in known.remarks:
                print_line(console, remark)
            return known, f"{'held-out' if known.protocol == 'images' else 'training'} images of {config.name}"
        data, images = config.name, prepare_data(config, track).data
    for remark in images.remarks:
        print_line(console, remark)
    parts = {name: images.parts[name] for name in ("train", "validation") if len(images.parts.get(name, ()))}
    unseen = {name: part for name, part in parts.items() if not set(part.class_names) & set(seen)}
    described = f"{' and '.join([', '.join(unseen), 'test'] if unseen else ['test'])} classes of {data}"
    return reduce(ImageSet.joined, [*unseen.values(), images.test]), described


def _following(
    console: Console, images: ImageSet | RetrievalData, edits: Edits, seen: Collection[str]
) -> ImageSet | RetrievalData:
    """The images by the names of the index: merged classes are one, those of deleted ones are left out.

    So are unseen classes that were merged into one that the model was trained on.
    """
    from pfml.data import ImageSet

    parts = {"": images} if isinstance(images, ImageSet) else images.parts
    changed = edits.changed(name for part in parts.values() for name in part.class_names)
    if not changed:
        return images
    print_line(console, f"{len(changed):,} classes are renamed, merged or left out as in the index")
    if isinstance(images, ImageSet):
        trained = {*seen, *edits.names(seen).values()}
        return images.renamed({name: None if now in trained else now for name, now in changed.items()})
    return images.with_parts({role: part.renamed(changed) for role, part in parts.items()})


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


def _print_threshold(console: Console, threshold: Threshold, *, is_default: bool) -> None:
    from pfml.search.calibration import CLEARLY_MORE, PREFERRED

    images, classes = threshold.measured_on
    if threshold.protocol != "classes":
        about = f"no class is unseen: each is left out in turn of a gallery of {threshold.searched_in:,} images"
        print_line(console, about)
    for name, share in threshold.compared.items():
        chosen = ", chosen" if name == threshold.scoring.name else ""
        print_line(console, f"  {name + ':':<14}accepts {share:.1%} of known images{chosen}")
    if is_default:
        rule = f"unless another score accepts more than {CLEARLY_MORE:g} times as many"
        print_line(console, f"  {PREFERRED} is chosen {rule}")
    own = f", {len(threshold.class_values):,} classes have their own" if threshold.class_values else ""
    print_line(console, f"threshold {threshold.scoring.name} {threshold.value:.4g}{own}")
    print_line(console, f"measured on {images:,} images of {classes:,} classes, cross-fitted ({threshold.data}):")
    rates = {
        "false accepts, class not in the index": threshold.false_accepts,
        "false rejects, class in the index": threshold.false_rejects,
        "accepted with a wrong class": threshold.wrong_classes,
    }
    for name, rate in rates.items():
        print_line(console, f"  {name + ':':<40}{rate}")
    if threshold.misses_rate:
        print_line(console, _missed(threshold))
    if threshold.false_rejects.value > MANY_REJECTS:
        print_line(console, _warning(threshold))


def _missed(threshold: Threshold) -> str:
    """What it means that the measured rate is not the asked one."""
    rate, asked = threshold.false_accepts, threshold.false_accept_rate
    more = "more" if rate.value > asked else "fewer"
    return (
        f"warning: {rate.value:.2%} of images of other classes were accepted, {more} than the asked {asked:g}: classes "
        f"differ too much for the number that there is; calibrate on more classes with --data"
    )


def _about_known(threshold: Threshold, run: Path) -> str:
    """What it means that the model was trained on the classes that were left out."""
    own = "" if threshold.protocol == "images" else " and on these images, which makes known ones look too near"
    return (
        f"the model was trained on the classes left out{own}: strangers may look more alike to it than measured; "
        f"pfml calibrate {shell_words(str(run))} --data FOLDER measures classes that it has not seen"
    )


def _warning(threshold: Threshold) -> str:
    """What it means that most known images are called unknown, and what to do about it."""
    return (
        f"warning: {threshold.false_rejects.value:.0%} of known images would be called unknown: images of other "
        f"classes look as much alike; give more images per class, correct their labels with pfml audit, allow a higher "
        f"--false-accept-rate than {threshold.false_accept_rate:g}, or train a better embedder"
    )
