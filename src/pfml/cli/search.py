"""`pfml search`: the nearest images of an index, and verdicts."""

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

    from rich.console import Console

    from pfml.data.decoding import ImageError
    from pfml.search import Entry, Hit, ImageIndex, OpenedRun, Query, Threshold, Verdict
    from pfml.search.queries import Combination

#: An index that is so many times larger than the gallery of the calibration has other rates.
LARGER = 2
#: Queries per forward pass.
BATCH = 64


def search(
    run: Path,
    images: list[Path] | None = None,
    id: list[int] | None = None,  # noqa: A002 - what it is called everywhere
    unlike: list[Path] | None = None,
    unlike_id: list[int] | None = None,
    combine: Combination | None = None,
    k: int = 10,
    class_name: list[str] | None = None,
    where: str | None = None,
    index: Path | None = None,
    backend: str = "auto",
    expand: int | None = None,
    rerank: bool = False,
    device: str = "auto",
    as_json: bool = False,
    as_csv: bool = False,
    quiet: bool = False,
) -> None:
    """Find the nearest images of an index, the most likely class, and whether the image is known."""
    import torch

    from pfml.data.readers.folder import image_paths
    from pfml.evaluation import Expansion, KReciprocal
    from pfml.search import open_run, search_queries, verdict_of
    from pfml.search.neighborhood import NEIGHBORS
    from pfml.search.reranked import search_reranked

    if expand is not None and rerank:
        raise ValueError("--expand and --rerank must not be given together: each ranks in its own way")
    if combine == "any" and (expand is not None or rerank):
        raise ValueError("--combine any orders by the nearest image: give it without --expand and --rerank")
    if not images and not id:
        raise ValueError("pfml search needs an image to search by: a file, a folder, or --id of the index")
    if k < 1:
        raise ValueError(f"--k must be at least 1, got {k}")
    if as_json and as_csv:
        raise ValueError("--json and --csv must not be given together: one of them is printed")
    console = create_console(stderr=as_json or as_csv, quiet=quiet)
    refuse_images_first("search", run, images or [])
    files, negatives = (list(image_paths(some)) if some else [] for some in (images, unlike))
    opened = open_run(preferred_run(console, run), index=index, backend=backend, device=device)
    found, threshold = opened.gallery, opened.threshold
    if found.backend_remark:
        print_line(console, found.backend_remark)
    asked, failures = _asked(opened, files, id or [], negatives, unlike_id or [], combine)
    names, queries = [name for name, _ in asked], [query for _, query in asked]
    # a verdict is of all classes, by the distances to the query itself
    near = search_queries(found, queries, max(k, NEIGHBORS), model=opened.model)
    verdicts = [
        verdict_of(hits, threshold=threshold if query.is_plain else None, spread_of=found.class_spread)
        for hits, query in zip(near, queries, strict=True)
    ]
    results = [hits[:k] for hits in near]
    if expand is not None or rerank:
        settings = KReciprocal() if expand is None else Expansion(expand)
        depth, points = k + max(len(query.without) for query in queries), torch.cat([one.points() for one in queries])
        ranked = search_reranked(
            found, points, depth, settings=settings, model=opened.model, class_names=class_name, where=where
        )
        results = [
            [hit for hit in hits if hit.id not in query.without][:k]
            for hits, query in zip(ranked, queries, strict=True)
        ]
    elif class_name is not None or where:
        results = search_queries(found, queries, k, model=opened.model, class_names=class_name, where=where)
    remark = "a query of several images is neither known nor unknown: the threshold is one of single images"
    if any(query.is_plain for query in queries):
        remark = _about(threshold, found, run, opened.is_measured)
    if as_json:
        print_line(console, remark)
        answers = [_answer(*each) for each in zip(names, verdicts, results, strict=True)]
        content = None if threshold is None else threshold_content(threshold)
        left_out = unreadable_content(failures)
        print_json({"index": str(found.path), "threshold": content, "results": answers, "left_out": left_out})
        end_with_unreadable(failures)
        return
    if as_csv:
        _print_csv(names, verdicts, results)
    else:
        for name, verdict, hits in zip(names, verdicts, results, strict=True):
            _print_hits(console, name, verdict, hits)
    print_line(console, remark)
    print_unreadable(console, failures)
    if failures:
        print_line(console, f"{len(failures):,} of {len(files) + len(negatives):,} images cannot be read")
    end_with_unreadable(failures)


def add_search_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `search`."""
    add = parser.add_argument
    add("run", type=Path, help="Folder of a run, or of a saved embedder, with an index in it.")
    given = add(
        "images",
        type=Path,
        nargs="+",
        help="Image files, or folders with images in them; with --id they may be left out.",
    )
    given.required = False  # an id will do; nargs="*" would take nothing where an option comes before the images
    add(
        "--id", type=int, nargs="+", action="extend", help="Search by images of the index; they do not find themselves."
    )
    add("--unlike", type=Path, nargs="+", action="extend", metavar="IMAGE", help="Images that hits are not to be like.")
    add("--unlike-id", type=int, nargs="+", action="extend", help="The same, of the index.")
    add(
        "--combine",
        choices=("mean", "any"),
        help="Search by all images together: by their mean, or by the distance to the nearest; else by each.",
    )
    add("--k", type=int, default=10, help="How many images to find.")
    add("--class", dest="class_name", metavar="CLASS", nargs="+", action="extend", help="Search these classes only.")
    add("--where", metavar="FILTER", help="Search these images only, such as 'price < 20 and brand in (a, b)'.")
    add("--index", type=Path, help="Folder of the index; by default `index` in the run.")
    add_backend_option(parser)
    add_expand_option(parser, "search")
    add("--rerank", action="store_true", help="Rank the first 100 by k-reciprocal neighbors (Zhong et al., 2017).")
    add_device_option(parser)
    add_json_option(parser)
    add(
        "--csv",
        dest="as_csv",
        action="store_true",
        help="Print a line of CSV for each image found; everything else goes to stderr.",
    )
    add_quiet_option(parser)


def _about(threshold: Threshold | None, index: ImageIndex, run: Path, is_measured: bool) -> str:
    """What "unknown" rests on."""
    if threshold is None:
        return f"no threshold: nothing is called unknown; pfml calibrate {shell_words(str(run))} finds one"
    images, asked = threshold.searched_in, threshold.false_accept_rate
    own = f"; {len(threshold.class_values):,} classes have their own threshold" if threshold.class_values else ""
    text = (
        f"an image is unknown if its score ({threshold.scoring.name}) is below {threshold.value:.4g}{own}; "
        f"measured false accept rate {threshold.false_accepts}, asked {asked:g}"
    )
    if len(index) > LARGER * images:
        text += f"; measured among {images:,} images: with {len(index):,} more is accepted falsely"
    if not is_measured:
        text += f"; measured before classes were merged: pfml calibrate {shell_words(str(run))} measures again"
    return text


def threshold_content(threshold: Threshold) -> dict[str, Any]:
    """The threshold for JSON: how it scores, what it accepts, the asked and the measured rate."""
    return {
        "score": threshold.scoring.name,
        "value": threshold.value,
        "class_values": dict(threshold.class_values),
        "false_accept_rate": threshold.false_accept_rate,
        "false_accepts": asdict(threshold.false_accepts),
    }


def _asked(
    opened: OpenedRun,
    files: list[str],
    ids: list[int],
    negatives: list[str],
    negative_ids: list[int],
    combine: Combination | None,
) -> tuple[list[tuple[str, Query]], list[ImageError]]:
    """The queries, and what to call them, one per image or one of all, and the files that cannot be read."""
    import torch

    from pfml.search import Query
    from pfml.search.embedding import embed_files

    index = opened.gallery
    places = {one: _short(str(_entry(index, one).path)) for one in (*ids, *negative_ids)}
    positive, negative = (
        embed_files(opened.embedder, some, batch_size=BATCH, workers=2) for some in (files, negatives)
    )
    failures = [*positive.failures, *negative.failures]
    refuse_all_unreadable(failures, len(files) + len(negatives) + len(places))
    refuse_all_unreadable(positive.failures, len(files) + len(ids))
    names = [*positive.paths, *(places[one] for one in ids)]
    like = torch.cat([positive.vectors, index.vectors(ids)])
    unlike = torch.cat([negative.vectors, index.vectors(negative_ids)])
    if combine is not None:
        name = " + ".join(names) + "".join(f" - {one}" for one in (*negative.paths, *map(places.get, negative_ids)))
        return [(name, Query(like, unlike, combine, (*ids, *negative_ids)))], failures
    itself = [*([()] * len(positive.paths)), *((one,) for one in ids)]
    queries = [
        Query(vector[None], unlike, without=(*own, *negative_ids)) for vector, own in zip(like, itself, strict=True)
    ]
    return list(zip(names, queries, strict=True)), failures


def _entry(index: ImageIndex, id: int) -> Entry:  # noqa: A002
    try:
        return index.entry(id)
    except (KeyError, RuntimeError, OverflowError):
        raise ValueError(
            f"an id must be one of the index {index.path}, as pfml search --json has them, got {id}"
        ) from None


def _answer(query: str, verdict: Verdict, hits: list[Hit]) -> dict[str, Any]:
    from pfml.search.metadata import json_metadata

    found = [
        {
            "rank": rank,
            "id": hit.id,
            "distance": hit.distance,
            "class_name": hit.class_name,
            "path": hit.path,
            "metadata": json_metadata(hit.metadata),
        }
        for rank, hit in enumerate(hits, 1)
    ]
    unknown = None if verdict.is_known is None else not verdict.is_known
    return {"query": query, "verdict": asdict(verdict), "unknown": unknown, "hits": found}


def _print_csv(names: list[str], verdicts: list[Verdict], results: list[list[Hit]]) -> None:
    """A line for each image found: the query and its verdict, then the image with its metadata."""
    import csv
    import sys

    from pfml.storage.values import shown_value

    fixed = ("query", "known", "likely_class", "potential", "rank", "id", "distance", "class", "path")
    columns = list(dict.fromkeys(name for hits in results for hit in hits for name in hit.metadata))
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow([*fixed, *(readable(f"metadata {name}" if name in fixed else name) for name in columns)])
    for query, verdict, hits in zip(names, verdicts, results, strict=True):
        known = {True: "yes", False: "no", None: ""}[verdict.is_known]
        potential = "" if verdict.class_name is None else f"{verdict.potential:.4f}"
        for rank, hit in enumerate(hits, 1):
            values = [shown_value(hit.metadata[name]) if name in hit.metadata else "" for name in columns]
            about = (query, known, verdict.class_name or "", potential)
            found = (str(rank), str(hit.id), f"{hit.distance:.6f}", hit.class_name, hit.path, *values)
            table.writerow([readable(cell) for cell in (*about, *found)])


def _print_hits(console: Console, query: str, verdict: Verdict, hits: list[Hit]) -> None:
    from rich.table import Table
    from rich.text import Text

    from pfml.storage.values import shown_value

    print_line(console, f"{query}: {_said(verdict)}")
    columns = list(dict.fromkeys(name for hit in hits for name in hit.metadata))
    # names may hold brackets, which rich would read as markup
    table = Table("rank", "id", "distance", "class", "path")
    table.columns[4].overflow = "fold"
    for name in columns:
        table.add_column(Text(readable(name)))
    for rank, hit in enumerate(hits, 1):
        values = [shown_value(hit.metadata[name]) if name in hit.metadata else "" for name in columns]
        texts = [hit.class_name, _short(hit.path), *values]
        table.add_row(str(rank), str(hit.id), f"{hit.distance:.4f}", *(Text(readable(text)) for text in texts))
    console.print(table)


def _said(verdict: Verdict) -> str:
    """The verdict in words, such as "known, Bengal, 18 of 24, potential 0.83, score 2.1"."""
    words = {True: ["known"], False: ["unknown"], None: []}[verdict.is_known]
    if verdict.class_name is None:
        return ", ".join([*words, "no class among the nearest"])
    likely = verdict.class_name if verdict.is_known is not False else f"most like {verdict.class_name}"
    score = [] if verdict.score is None else [f"score {verdict.score + 0.0:.4g}"]  # -0.0 has a sign
    return ", ".join([*words, likely, f"{verdict.votes} of {verdict.of}", f"potential {verdict.potential:.2f}", *score])


def _short(path: str) -> str:
    """A path as seen from here, if it lies below."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path
