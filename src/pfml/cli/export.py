"""`pfml export`: a run handed on."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pfml.cli.console import create_console, print_line, print_model
from pfml.terminal import shell_words

if TYPE_CHECKING:
    from rich.console import Console

    from pfml.cli.parser import Parser

#: where to -> the options that make sense there, beside the run
TARGETS = {
    "onnx": ("out", "images"),
    "bundle": ("out", "images", "with_onnx"),
    "qdrant": ("url", "path", "collection", "index"),
}


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
) -> None:
    """Hand a run on: as an ONNX file, as a bundle that one call loads, or to a Qdrant collection."""
    given: dict[str, object] = {"out": out, "images": images, "with_onnx": with_onnx or None}
    given |= {"url": url, "path": path, "collection": collection, "index": index}
    for name, value in given.items():
        if value is not None and name not in TARGETS[to]:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be left out with --to {to}, which has no use for it, got {value}")
    console = create_console()
    if to != "qdrant":
        print_model(console, run)
    if to == "onnx":
        _onnx(console, run, out or run / "onnx" / "model.onnx", images)
    elif to == "bundle":
        if images and not with_onnx:
            raise ValueError("--images must go with --with-onnx, which they check; got --images alone")
        _bundle(console, run, out or run / "bundle", images, with_onnx)
    else:
        place = path or (run / "qdrant" if url is None else None)
        _qdrant(console, index or run / "index", collection or _collection_name(run), url, place)


def add_export_arguments(parser: Parser) -> None:
    """Add the arguments of `export`."""
    add = parser.add_argument
    add("run", type=Path, help="Folder of a run, or of a saved embedder.")
    add("--to", choices=tuple(TARGETS), required=True, help="What to make of it.")
    add("--out", type=Path, help="File (.onnx, or .zip for a bundle) or folder; by default in the run.")
    add("--images", type=Path, nargs="+", help="Images to check an ONNX file on; by default a few of the run's data.")
    add("--with-onnx", action="store_true", help="Put an ONNX file into the bundle, too.")
    add("--url", help="Address of a Qdrant server; its key, if any, is the environment variable QDRANT_API_KEY.")
    add("--path", type=Path, help="Folder for Qdrant's local mode; by default `qdrant` in the run.")
    add("--collection", help="Name of the Qdrant collection; by default that of the run.")
    add("--index", type=Path, help="Folder of the index that goes to Qdrant; by default `index` in the run.")


def _onnx(console: Console, run: Path, out: Path, images: list[Path] | None) -> None:
    from pfml.export import export_onnx
    from pfml.export.runs import few_images
    from pfml.models import load_embedder

    embedder = load_embedder(run)
    result = export_onnx(embedder, out, few_images(run, images))
    difference = f"{result.largest_difference:.2g}, on {result.images} images"
    print_line(console, f"{result.path}: the largest difference between onnxruntime and torch is {difference}")
    print_line(console, f"{result.preprocessing}: what to do to an image before it")


def _bundle(console: Console, run: Path, out: Path, images: list[Path] | None, with_onnx: bool) -> None:
    from pfml.export import export_bundle
    from pfml.export.runs import few_images

    parts = export_bundle(run, out, onnx_images=few_images(run, images) if with_onnx else None)
    print_line(console, f"{out}: {', '.join(parts)}; pfml.load_bundle({str(out)!r})")
    place = shell_words(str(run))
    for part, command in (("index", f"pfml index {place} FOLDER"), ("threshold", f"pfml calibrate {place}")):
        if part not in parts:
            print_line(console, f"it has no {part}, since {run} has none: {command} makes it")


def _qdrant(console: Console, index: Path, collection: str, url: str | None, path: Path | None) -> None:
    from pfml.export import export_qdrant
    from pfml.search import ImageIndex

    key = os.environ.get("QDRANT_API_KEY") if url is not None else None
    result = export_qdrant(ImageIndex.open(index), collection, url=url, path=path, api_key=key)
    print_line(console, f"{url or path}: {result.points:,} points in the collection {collection!r}")
    if result.others:
        print_line(
            console, f"{result.others:,} points there are of images that the index no longer has; they were left"
        )


def _collection_name(run: Path) -> str:
    """The name of the run's folder, in characters that every server takes."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", run.resolve().name).strip("-") or "pfml"
