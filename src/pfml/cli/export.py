"""`pfml export`: an ONNX file, a bundle, or a collection of a vector database."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfml.cli.console import create_console, preferred_run, print_json, print_model
from pfml.cli.parser import add_json_option, add_quiet_option
from pfml.export.vector_databases import VECTOR_DATABASES, shown_address
from pfml.terminal import print_line, shell_words

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from rich.console import Console

#: Target -> the options that belong to it, beside the run.
TARGETS = {"onnx": ("out", "images"), "bundle": ("out", "images", "with_onnx")}
DATABASE_OPTIONS = ("url", "path", "collection", "index", "keep", "hnsw")


def export(
    run: Path,
    to: str,
    out: Path | None = None,
    images: list[Path] | None = None,
    with_onnx: bool = False,
    url: str | None = None,
    path: Path | None = None,
    collection: str | None = None,
    index: Path | None = None,
    keep: bool = False,
    hnsw: bool = False,
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Export a run: to an ONNX file, to a bundle that one call loads, or to a vector database."""
    given: dict[str, object] = {"out": out, "images": images, "with_onnx": with_onnx or None}
    given |= {"url": url, "path": path, "collection": collection, "index": index}
    given |= {"keep": keep or None, "hnsw": hnsw or None}
    for key, value in given.items():
        if value is not None and key not in TARGETS.get(to, DATABASE_OPTIONS):
            option = key.replace("_", "-")
            raise ValueError(f"--{option} must be left out with --to {to}, which has no use for it, got {value}")
    console = create_console(stderr=as_json, quiet=quiet)
    name = _collection_name(run)
    run = preferred_run(console, run)
    if to in TARGETS:
        print_model(console, run)
    if to == "onnx":
        written = _onnx(console, run, out or run / "onnx" / "model.onnx", images)
    elif to == "bundle":
        if images and not with_onnx:
            raise ValueError("--images must go with --with-onnx, which they check; got --images alone")
        written = _bundle(console, run, out or run / "bundle", images, with_onnx)
    else:
        folder = path or (run / to if url is None and VECTOR_DATABASES[to].is_local else None)
        written = _database(console, to, index or run / "index", collection or name, url, folder, keep, hnsw)
    if as_json:
        print_json({"to": to, **written})


def add_export_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `export`."""
    add = parser.add_argument
    add("run", type=Path, help="Folder of a run, or of a saved embedder.")
    titles = ", ".join(database.title for database in VECTOR_DATABASES.values() if database.url)
    add("--to", choices=(*TARGETS, *VECTOR_DATABASES), required=True, help="What to export to.")
    add("--out", type=Path, help="File (.onnx, or .zip for a bundle) or folder; by default in the run.")
    add(
        "--images",
        type=Path,
        nargs="+",
        action="extend",
        help="Images to check an ONNX file on; by default a few of the run's data.",
    )
    add("--with-onnx", action="store_true", help="Put an ONNX file into the bundle, too.")
    add("--url", help=f"Address of a server ({titles}); its key is read from NAME_API_KEY, such as QDRANT_API_KEY.")
    add(
        "--path",
        type=Path,
        help="Folder of a local vector database, or a file (.parquet); by default in the run, by its name.",
    )
    add("--collection", help="Name of the collection or table; by default that of the run.")
    add("--index", type=Path, help="Folder of the index to export; by default `index` in the run.")
    add(
        "--keep",
        action="store_true",
        help="Keep points whose images the index does not have, such as those of another index, instead of deleting "
        "them.",
    )
    add(
        "--hnsw",
        action="store_true",
        help="PostgreSQL: build an HNSW index at the end; searching is faster and may miss neighbors.",
    )
    add_json_option(parser)
    add_quiet_option(parser)


def _onnx(console: Console, run: Path, out: Path, images: list[Path] | None) -> dict[str, Any]:
    from pfml.export import export_onnx
    from pfml.export.onnx import check_images
    from pfml.models import load_embedder

    embedder = load_embedder(run)
    result = export_onnx(embedder, out, check_images(run, images))
    difference = f"{result.largest_difference:.2g}, on {result.images} images"
    print_line(console, f"{result.path}: the largest difference between onnxruntime and torch is {difference}")
    print_line(console, f"{result.preprocessing}: the preprocessing of an image")
    checked = {"images": result.images, "largest_difference": result.largest_difference}
    return {"path": result.path, "preprocessing": result.preprocessing, **checked}


def _bundle(console: Console, run: Path, out: Path, images: list[Path] | None, with_onnx: bool) -> dict[str, Any]:
    from pfml.export import export_bundle
    from pfml.export.onnx import check_images

    parts = export_bundle(run, out, onnx_images=check_images(run, images) if with_onnx else None)
    print_line(console, f"{out}: {', '.join(parts)}; pfml.load_bundle({str(out)!r})")
    typed = shell_words(str(run))
    for part, command in (("index", f"pfml index {typed} FOLDER"), ("threshold", f"pfml calibrate {typed}")):
        if part not in parts:
            print_line(console, f"it has no {part}, since {run} has none: {command} makes it")
    return {"path": out, "parts": parts}


def _database(
    console: Console,
    name: str,
    index: Path,
    collection: str,
    url: str | None,
    folder: Path | None,
    keep: bool,
    hnsw: bool,
) -> dict[str, Any]:
    from pfml.export import export_index
    from pfml.search import ImageIndex
    from pfml.training.progress import ProgressMonitor

    where = folder if url is None else shown_address(url)
    result = export_index(
        ImageIndex.open(index),
        name,
        collection,
        url=url,
        path=folder,
        api_key=os.environ.get(f"{name.upper()}_API_KEY") if url is not None else None,
        keep=keep,
        hnsw=hnsw,
        track=ProgressMonitor(console).track,
    )
    written = f"{result.written:,} written, {result.deleted:,} deleted"
    print_line(console, f"{where}: {result.points:,} points in the collection {collection!r}, {written}")
    if result.kept:
        print_line(console, f"{result.kept:,} points there belong to images that the index does not have; they stay")
    return {"path": where, **asdict(result)}


def _collection_name(run: Path) -> str:
    """The name of the run's folder, in characters that every server accepts."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", run.resolve().name).strip("-") or "pfml"
