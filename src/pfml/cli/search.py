"""`pfml search` and `pfml calibrate`: verdicts on images, and the threshold of "unknown"."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfml.cli.console import create_console, preferred_run, print_json
from pfml.cli.input_images import (
    end_with_unreadable,
    print_unreadable,
    refuse_all_unreadable,
    refuse_images_first,
    unreadable_content,
)
from pfml.cli.parser import add_backend_option, add_device_option, add_expand_option, add_json_option, add_quiet_option
from pfml.terminal import print_line, readable, shell_words

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Collection

    from rich.console import Console

    from pfml.data import ImageSet, RetrievalData
    from pfml.data.decoding import Track
    from pfml.search import Edits, Hit, ImageIndex, Threshold, Verdict

#: An index that is so many times larger than the gallery of the calibration has other rates.
LARGER = 2
#: Queries per forward pass.
BATCH = 64
#: The rates of a threshold that were measured.
RATES = ("false_accepts", "false_rejects", "wrong_classes")
#: Share of known images called unknown from which on a threshold is of little use.
MANY_REJECTS = 0.5


def search(
    run: Path,
    images: list[Path],
    k: int = 10,
    class_name: list[str] | None = None,
    index: Path | None = None,
    backend: str = "auto",
    expand: int | None = None,
    rerank: bool = False,
    device: str = "auto",
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Find the nearest images of an index, the most likely class, and whether the image is known."""
    from pfml.data.readers.folder import image_paths
    from pfml.evaluation import Expansion, KReciprocal
    from pfml.search import open_run, verdict_of
    from pfml.search.embedding import embed_files
    from pfml.search.neighborhood import NEIGHBORS
    from pfml.search.reranked import search_reranked

    if expand is not None and rerank:
        raise ValueError("--expand and --rerank must not be given together: each ranks in its own way")
    console = create_console(stderr=as_json, quiet=quiet)
    refuse_images_first("search", run, images)
    files = list(image_paths(images))
    opened = open_run(preferred_run(console, run), index=index, backend=backend, device=device)
    found, threshold = opened.gallery, opened.threshold
    if found.backend_remark:
        print_line(console, found.backend_remark)
    queries = embed_files(opened.embedder, files, batch_size=BATCH, workers=2)
    failures = queries.failures
    refuse_all_unreadable(failures, len(files))
    # a verdict is of all classes, by the distances to the query itself
    near = found.search(queries.vectors, max(k, NEIGHBORS), model=opened.model)
    verdicts = [verdict_of(hits, threshold=threshold, spread_of=found.class_spread) for hits in near]
    if expand is None and not rerank and class_name is None:
        results = [hits[:k] for hits in near]
    elif expand is None and not rerank:
        results = found.search(queries.vectors, k, model=opened.model, class_names=class_name)
    else:
        settings = KReciprocal() if expand is None else Expansion(expand)
        results = search_reranked(
            found, queries.vectors, k, settings=settings, model=opened.model, class_names=class_name
        )
    remark = _about(threshold, found, run, opened.is_measured)
    if as_json:
        print_line(console, remark)
        answers = [_answer(*each) for each in zip(queries.paths, verdicts, results, strict=True)]
        content = None if threshold is None else _threshold_content(threshold)
        left_out = unreadable_content(failures)
        print_json({"index": str(found.path), "threshold": content, "results": answers, "left_out": left_out})
        end_with_unreadable(failures)
        return
    for query, verdict, hits in zip(queries.paths, verdicts, results, strict=True):
        _print_hits(console, query, verdict, hits)
    print_line(console, remark)
    print_unreadable(console, failures)
    if failures:
        print_line(console, f"{len(failures):,} of {len(files):,} images cannot be read")
    end_with_unreadable(failures)


def add_search_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `search`."""
    add = parser.add_argument
    add("run", type=Path, help="Folder of a run, or of a saved embedder, with an index in it.")
    add("images", type=Path, nargs="+", help="Image files, or folders with images in them.")
    add("--k", type=int, default=10, help="How many images to find.")
    add("--class", dest="class_name", metavar="CLASS", nargs="+", action="extend", help="Search these classes only.")
    add("--index", type=Path, help="Folder of the index; by default `index` in the run.")
    add_backend_option(parser)
    add_expand_option(parser, "search")
    add("--rerank", action="store_true", help="Rank the first 100 by k-reciprocal neighbors (Zhong et al., 2017).")
    add_device_option(parser)
    add_json_option(parser)
    add_quiet_option(parser)


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
    _print_threshold(console, threshold)
    if threshold.protocol != "classes" and embedder.trained_on is not None:
        print_line(console, _about_known(threshold, run))
    print_line(console, f"{file}: pfml search {shell_words(str(run))} IMAGE calls images below this threshold unknown")
    if as_json:
        measured = {name: asdict(getattr(threshold, name)) for name in RATES}
        of_what = {"data": threshold.data, "protocol": threshold.protocol, "compared": dict(threshold.compared)}
        print_json({"threshold": str(file), **of_what, **_threshold_content(threshold), **measured})


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


def _about(threshold: Threshold | None, index: ImageIndex, run: Path, is_measured: bool) -> str:
    """What "unknown" rests on."""
    if threshold is None:
        return f"no threshold: nothing is called unknown; pfml calibrate {shell_words(str(run))} finds one"
    images, asked = threshold.searched_in, threshold.false_accept_rate
    own = f"; {len(threshold.class_values):,} classes have their own threshold" if threshold.class_values else ""
    text = (
        f"unknown: {threshold.scoring.name} below {threshold.value:.4g}{own}; "
        f"measured false accept rate {threshold.false_accepts}, asked {asked:g}"
    )
    if len(index) > LARGER * images:
        text += f"; measured among {images:,} images: with {len(index):,} more is accepted falsely"
    if not is_measured:
        text += f"; measured before classes were merged: pfml calibrate {shell_words(str(run))} measures again"
    return text


def _threshold_content(threshold: Threshold) -> dict[str, Any]:
    """The threshold for JSON: how it scores, what it accepts, the asked and the measured rate."""
    return {
        "score": threshold.scoring.name,
        "value": threshold.value,
        "class_values": dict(threshold.class_values),
        "false_accept_rate": threshold.false_accept_rate,
        "false_accepts": asdict(threshold.false_accepts),
    }


def _answer(query: str, verdict: Verdict, hits: list[Hit]) -> dict[str, Any]:
    found = [
        {"rank": rank, "id": hit.id, "distance": hit.distance, "class_name": hit.class_name, "path": hit.path}
        for rank, hit in enumerate(hits, 1)
    ]
    unknown = None if verdict.is_known is None else not verdict.is_known
    return {"query": query, "verdict": asdict(verdict), "unknown": unknown, "hits": found}


def _print_hits(console: Console, query: str, verdict: Verdict, hits: list[Hit]) -> None:
    from rich.table import Table
    from rich.text import Text

    print_line(console, f"{query}: {_said(verdict)}")
    table = Table("rank", "distance", "class", "path")
    table.columns[3].overflow = "fold"
    for rank, hit in enumerate(hits, 1):
        # names may hold brackets, which rich would read as markup
        table.add_row(
            str(rank), f"{hit.distance:.4f}", Text(readable(hit.class_name)), Text(readable(_short(hit.path)))
        )
    console.print(table)


def _said(verdict: Verdict) -> str:
    """The verdict in words, such as "known, Bengal, 18 of 24, potential 0.83"."""
    words = {True: ["known"], False: ["unknown"], None: []}[verdict.is_known]
    if verdict.class_name is None:
        return ", ".join([*words, "no class among the nearest"])
    likely = verdict.class_name if verdict.is_known is not False else f"most like {verdict.class_name}"
    return ", ".join([*words, likely, f"{verdict.votes} of {verdict.of}", f"potential {verdict.potential:.2f}"])


def _short(path: str) -> str:
    """A path as seen from here, if it lies below."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


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


def _print_threshold(console: Console, threshold: Threshold) -> None:
    images, classes = threshold.measured_on
    if threshold.protocol != "classes":
        about = f"no class is unseen: each is left out in turn of a gallery of {threshold.searched_in:,} images"
        print_line(console, about)
    for name, share in threshold.compared.items():
        chosen = ", chosen" if name == threshold.scoring.name else ""
        print_line(console, f"  {name + ':':<14}accepts {share:.1%} of known images{chosen}")
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
