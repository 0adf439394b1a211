"""`pfml index`: an index of images, brought up to date with folders and tables, and edited."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from pfml.cli.console import create_console, preferred_run, print_json, print_model
from pfml.cli.input_images import end_with_unreadable, print_unreadable, refuse_images_first, unreadable_content
from pfml.cli.parser import add_device_option, add_json_option, add_quiet_option
from pfml.packages import pip_install
from pfml.terminal import print_line, readable, shell_words

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from rich.console import Console

    from pfml.search import Edit, ImageIndex, Update

__all__ = ["add_index_arguments", "index"]


def index(
    run: Path,
    images: Path | None = None,
    out: Path | None = None,
    metadata: Path | None = None,
    columns: list[str] | None = None,
    embeddings: Path | None = None,
    remove: list[Path] | None = None,
    remove_class: list[str] | None = None,
    rename_class: list[list[str]] | None = None,
    merge_class: list[list[str]] | None = None,
    undo: bool = False,
    compact: bool = False,
    approximate: str = "auto",
    shard_images: int = 4096,
    batch_size: int = 64,
    workers: int = 2,
    device: str = "auto",
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Embed the images of a folder or CSV into an index that pfml search searches; again to bring it up to date."""
    from pfml.data.readers.metadata import parse_columns
    from pfml.models import load_embedder
    from pfml.search import ImageIndex, ModelIdentity, list_images, update_index
    from pfml.search.backends import require_backend
    from pfml.search.update import Update
    from pfml.storage.embeddings import open_embeddings
    from pfml.training.environment import resolve_device
    from pfml.training.progress import ProgressMonitor

    console = create_console(stderr=as_json, quiet=quiet)
    if images is not None:
        refuse_images_first("index", run, [images])
    run = preferred_run(console, run)
    folder = out or run / "index"
    update = Update()
    edits = _edits(rename_class or [], merge_class or [], remove_class or [])
    is_asked = approximate not in ("auto", "no")
    if images is None and not (edits or remove or undo or compact or is_asked):
        raise ValueError(
            "pfml index needs images to add, or --remove, --remove-class, --rename-class, --merge-class, --undo, "
            "--compact or --approximate"
        )
    if is_asked:
        require_backend("ivf")  # before images are embedded
    if undo and (edits or remove):
        raise ValueError("--undo takes back the last change: make no other one with it")
    if images is None and embeddings is not None:
        raise ValueError("--embeddings needs the images too: the folder or CSV that tells their classes")
    if images is None and (metadata is not None or columns):
        raise ValueError("--metadata and --columns need the images too: the folder or CSV that they are about")
    kinds = parse_columns(",".join(columns)) if columns else None
    if undo:
        print_line(console, f"undone: {readable(str(ImageIndex.open(folder).undo()))}")
    if images is not None:
        there = ImageIndex.open(folder) if (folder / "index.json").is_file() else None
        known = None if there is None else there.columns
        listing = list_images(images, metadata=metadata, columns=kinds, known=known)
        for remark in listing.remarks:
            print_line(console, remark)
        stored = None if embeddings is None else open_embeddings(embeddings)
        embedder = load_embedder(run).to(resolve_device(device))
        print_model(console, run)
        if there is None:
            ImageIndex.create(folder, ModelIdentity.of(embedder), embedder.embedding_dim)
        found = there or ImageIndex.open(folder)
        update = update_index(
            found,
            embedder,
            listing,
            embeddings=stored,
            shard_images=shard_images,
            batch_size=batch_size,
            workers=workers,
            track=ProgressMonitor(console).track,
        )
        print_unreadable(console, update.failures)
        print_line(console, f"{listing.source}: {update}{_about_kept_out(update)}")
        if stored is not None:
            embedded = update.added + update.replaced - update.taken
            print_line(console, f"{update.taken:,} vectors taken from {embeddings}, {embedded:,} images embedded")
    else:
        found = ImageIndex.open(folder)
    removed = _edit(console, found, remove or [], edits)
    for line in _about_gone(found, run, out):
        print_line(console, line)
    if compact:
        found.compact()
    _print_index(console, found)
    if approximate != "no":
        _approximate(console, found, approximate)
    if as_json:
        names = ("added", "replaced", "relabeled", "unchanged", "kept_out", "with_new_metadata")
        done = {name: getattr(update, name) for name in names}
        counts = {"images": len(found), "classes": _named_classes(found), "removed": update.removed + removed}
        left_out = unreadable_content(update.failures)
        print_json({"index": str(found.path), **counts, **done, "columns": found.columns, "left_out": left_out})
    end_with_unreadable(update.failures)


def add_index_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `index`."""
    add = parser.add_argument
    add("run", type=Path, help="Folder of a run, or of a saved embedder.")
    add(
        "images",
        type=Path,
        nargs="?",
        help="A folder, best with a folder per class in it, or a CSV: path, label, and other columns as metadata.",
    )
    add("--out", type=Path, help="Folder of the index; by default `index` in the run.")
    add(
        "--metadata",
        type=Path,
        metavar="FILE.csv",
        help="What else is known of the images of a folder: a CSV with the column path, relative to the folder or to "
        "the CSV; its other columns can be searched with --where. A CSV of images has these columns itself.",
    )
    add(
        "--columns",
        action="append",
        metavar="NAME:TYPE,...",
        help="Types of columns, in place of what their cells look like: text, number, date, list, or ignore.",
    )
    add(
        "--embeddings",
        type=Path,
        help="Folder that pfml embed wrote: images that are in it, and have not changed since, are not embedded again.",
    )
    add(
        "--remove",
        type=Path,
        nargs="+",
        action="extend",
        help="Images to remove, or folders whose images are all removed; they stay out when they are indexed again.",
    )
    add("--remove-class", nargs="+", action="extend", metavar="CLASS", help="Classes to remove, likewise.")
    add("--rename-class", nargs=2, action="append", metavar=("CLASS", "NAME"), help="Give a class a new name.")
    add("--merge-class", nargs=2, action="append", metavar=("CLASS", "INTO"), help="Make a class part of another one.")
    add("--undo", action="store_true", help="Take back the last change of these four, or of the page of pfml serve.")
    add("--compact", action="store_true", help="Rewrite the index without what was removed, in few files.")
    add(
        "--approximate",
        choices=("auto", "no", "pq4", "int8", "float16", "float32"),
        default="auto",
        help="The file of approximate search, built with vectors of this precision. auto: pq4 (two bits for a number) "
        "from 100,000 images on, if faiss is installed, and again when many images are new; no: leave it as it is.",
    )
    add("--shard-images", type=int, default=4096, help="Images that are written together.")
    add("--batch-size", type=int, default=64, help="Images per forward pass.")
    add("--workers", type=int, default=2, help="Threads that read files.")
    add_device_option(parser)
    add_json_option(parser)
    add_quiet_option(parser)


def _edits(rename: list[list[str]], merge: list[list[str]], remove: list[str]) -> list[Edit]:
    """The edits of classes that were asked for, in this order."""
    from pfml.search import Edit

    renamed = [Edit("rename", name, into) for name, into in rename]
    merged = [Edit("merge", name, into) for name, into in merge]
    return [*renamed, *merged, *(Edit("delete", name) for name in remove)]


def _edit(console: Console, index: ImageIndex, paths: list[Path], edits: list[Edit]) -> int:
    """Leave out images and folders of images, and edit classes; how many images were left out."""
    from pfml.search import Edit
    from pfml.search.listing import plain_path

    known = [entry.path for entry in index.entries()] if paths else []
    chosen: dict[str, None] = {}
    for given in map(plain_path, paths):
        below = [path for path in known if given in Path(path).parents]
        chosen |= dict.fromkeys(below or [str(given)])  # the index refuses what it does not have
    leave_out = [Edit("leave_out", paths=tuple(chosen))] if chosen else []
    count = 0
    for edit in map(index.edit, [*leave_out, *edits]):
        if edit.kind in ("leave_out", "delete"):
            count += edit.images
        else:
            print_line(console, readable(str(edit)))
    if leave_out or any(edit.kind == "delete" for edit in edits):
        print_line(console, f"{count:,} removed")
    return count


def _about_gone(index: ImageIndex, run: Path, out: Path | None) -> list[str]:
    """A line on each indexed folder that is gone: if it was moved, its images are in the index twice from now on."""
    counts = Counter(entry.source for entry in index.entries() if Path(entry.source) in Path(entry.path).parents)
    where = () if out is None else ("--out", str(out))
    return [
        f"warning: {readable(source)} is gone, and its {count:,} images are still found: "
        f"{shell_words('pfml', 'index', str(run), *where, '--remove', source)} takes them out"
        for source, count in counts.items()
        if source and not Path(source).exists()
    ]


def _about_kept_out(update: Update) -> str:
    return ", since they were removed before (--undo takes back the last change)" if update.kept_out else ""


def _named_classes(index: ImageIndex) -> int:
    return sum(1 for name in index.class_counts() if name)


def _print_index(console: Console, index: ImageIndex) -> None:
    from pfml.search.metadata import OWN_COLUMNS
    from pfml.search.where import about_columns

    waste = f", {index.num_removed:,} removed that --compact would clear away" if index.num_removed else ""
    size = f"{len(index):,} images of {_named_classes(index):,} classes in {_shards(index.num_shards)}{waste}"
    print_line(console, f"{index.path}: {size}")
    known = {name: kind for name, kind in index.columns.items() if name not in OWN_COLUMNS}
    if known:
        print_line(console, readable(f"metadata: {about_columns(known)}"))


def _shards(count: int) -> str:
    return "1 shard" if count == 1 else f"{count:,} shards"


def _approximate(console: Console, index: ImageIndex, asked: str) -> None:
    """Build the file of approximate search if it is asked for, or due."""
    from importlib.util import find_spec

    from pfml.search.ivf import IVF_FROM
    from pfml.training.progress import ProgressMonitor

    track = ProgressMonitor(console).track
    if asked != "auto":
        built = index.build_ivf(precision=asked, track=track)
    elif find_spec("faiss") is not None:
        built = index.build_ivf(if_due=True, track=track)
    else:
        built = None
        if len(index) >= IVF_FROM:
            print_line(console, f"approximate search of so many images needs faiss: {pip_install('faiss')}")
    if built is not None:
        how = f"{built.probes:,} of {built.lists:,} lists in {built.precision}, recall@10 {built.recall:.3f}"
        print_line(console, f"approximate search: {how}, {built.bytes / 2**20:,.0f} MiB")
