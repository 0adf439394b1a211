"""An index brought up to date with a folder or a table: new images embedded, changed ones again, gone ones removed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from pfml.data.decoding import ImageError, Track, in_threads
from pfml.data.image_set import ImageSet
from pfml.data.readers.folder import image_files
from pfml.data.readers.table import listed_images
from pfml.models.embedder import Embedder
from pfml.search.embedding import embed_files
from pfml.search.identity import ModelIdentity
from pfml.search.index import Entry, ImageIndex
from pfml.storage.embeddings import EmbeddedImages
from pfml.storage.file_state import FileState

__all__ = ["Listing", "Update", "list_images", "plain_path", "update_index"]


@dataclass(frozen=True)
class Listing:
    """Images of one source.

    Args:
        source: Absolute path of the folder or table that lists them.
        paths: Absolute, all different.
        class_names: One per path, "" where it is unknown.
        remarks: Sentences about the list that a user should read.
    """

    source: str
    paths: tuple[str, ...]
    class_names: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.class_names):
            raise ValueError(f"class_names must be {len(self.paths)}, one per path, got {len(self.class_names)}")


def list_images(source: str | Path) -> Listing:
    """The images of a folder or of a CSV table.

    In a folder, the class of an image is the folder of `source` that it lies in, at any depth; if `source` has folders
    `train` and `test` with folders in them, these are the classes. An image that lies in `source` itself has no class.
    The classes of a table are its labels, whatever the split of a row.
    """
    path = plain_path(Path(source).expanduser())
    if path.is_dir():
        return _of_folder(path)
    if path.suffix.lower() == ".csv":
        return _of_table(path)
    raise FileNotFoundError(f"images to index must be a folder or a .csv file, got {path}, which is neither")


def plain_path(path: Path) -> Path:
    """The absolute path without "..", so that an image has one name from wherever a folder or table names it."""
    path = path.absolute()
    if ".." not in path.parts:
        return path
    plain = Path(os.path.normpath(path))
    # after a link to a folder, ".." leads elsewhere than the text says
    is_elsewhere = path.exists() and not (plain.exists() and plain.samefile(path))
    return path.resolve() if is_elsewhere else plain


@dataclass
class Update:
    """What an update did, counted in images.

    Args:
        added: New ones.
        replaced: Files that had changed.
        relabeled: Of another class than before; not embedded again.
        unchanged: Left as they were.
        removed: No longer listed, or gone from the disk.
        failures: Files that cannot be read: they are left out.
        taken: Of the added and replaced ones, those whose vectors came from an embedded collection.
        kept_out: Removed by a person before, alone or with their class (`pfml.search.edits`).
    """

    added: int = 0
    replaced: int = 0
    relabeled: int = 0
    unchanged: int = 0
    removed: int = 0
    failures: list[ImageError] = field(default_factory=list)
    taken: int = 0
    kept_out: int = 0

    def __str__(self) -> str:
        names = ("added", "replaced", "relabeled", "unchanged", "removed", "kept_out")
        counts = {name: getattr(self, name) for name in names if getattr(self, name) or name == "added"}
        done = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in counts.items())
        return f"{done}, {len(self.failures):,} unreadable" if self.failures else done


def update_index(
    index: ImageIndex,
    embedder: Embedder,
    listing: Listing,
    *,
    embeddings: EmbeddedImages | None = None,
    shard_images: int = 4096,
    batch_size: int = 64,
    workers: int = 2,
    track: Track | None = None,
) -> Update:
    """Make `index` hold the images of `listing`, as they are now; what was done.

    Entries of other sources stay. Every `shard_images` images are written before the next are read: memory is
    bounded, and after an interruption the same call resumes where it stopped.

    Args:
        index: Of this embedder.
        embedder: On the device where it is to compute.
        listing: See `list_images`.
        embeddings: Vectors of this embedder (`pfml.storage.embeddings.open_embeddings`), taken for images whose files
            have not changed since; others are embedded.
        shard_images: Images that are embedded and written together.
        batch_size: Images that the model embeds at a time.
        workers: Threads that read files.
        track: Shows the progress, as track(iterable, description, total).

    Raises:
        OtherModelError: If the index or the embeddings belong to another model.
        LockedError: If another process is writing the index.
    """
    if shard_images < 1:
        raise ValueError(f"shard_images must be at least 1, got {shard_images}")
    model = ModelIdentity.of(embedder)
    index.model.require(model, f"the index {index.path}")
    if embeddings is not None:
        made_by = ModelIdentity(embeddings.settings.model_digest, embeddings.settings.model)
        made_by.require(model, f"the embeddings {embeddings.folder}")
    update = Update()
    with index.writing():
        index.refresh()
        update.removed = _remove_gone(index, listing)
        listing, update.kept_out = _without_left_out(index, listing)
        pending = _pending(index, listing, model, update, workers, track)
        for first in range(0, len(pending), shard_images):
            some = pending[first : first + shard_images]
            stop = first + len(some)

            def tracked(
                items: Iterable[Any], _: str, total: int, first: int = first, stop: int = stop
            ) -> Iterable[Any]:
                label = f"embedding {first + 1:,} to {stop:,} of {len(pending):,}"
                return items if track is None else track(items, label, total)

            _add(index, embedder, model, listing.source, some, embeddings, update, batch_size, workers, tracked)
    return update


def _remove_gone(index: ImageIndex, listing: Listing) -> int:
    """Remove what the source no longer lists, and what lay in its folder and is gone; how many these were."""
    listed = set(listing.paths)
    around = Path(listing.source)
    gone = []
    for entry in index.entries():
        if entry.path in listed or not entry.source:  # what was added by vectors alone is left alone
            continue
        path = Path(entry.path)
        if entry.source == listing.source or (around in path.parents and not path.exists()):
            gone.append(entry.path)
    return index.remove(paths=gone)


def _without_left_out(index: ImageIndex, listing: Listing) -> tuple[Listing, int]:
    """The listing without what a person has left out of the index, and how many images that were."""
    names = index.edits.names(listing.class_names)
    kept = [
        (path, name)
        for path, name in zip(listing.paths, listing.class_names, strict=True)
        if names[name] is not None and path not in index.edits.left_out
    ]
    paths, class_names = (tuple(one[k] for one in kept) for k in (0, 1))
    return replace(listing, paths=paths, class_names=class_names), len(listing.paths) - len(kept)


def _pending(
    index: ImageIndex,
    listing: Listing,
    model: ModelIdentity,
    update: Update,
    workers: int,
    track: Track | None,
) -> list[tuple[str, str]]:
    """Paths and classes that must be embedded; entries that only have another class are written again here."""

    def unchanged_entry(path: str) -> Entry | None:
        entry = index.find(path)
        return entry if entry is not None and entry.file.is_of(path) else None

    same: Iterable[Entry | None] = in_threads(unchanged_entry, listing.paths, workers)
    if track is not None:
        same = track(same, "comparing files", len(listing.paths))
    pending: list[tuple[str, str]] = []
    other_class: list[tuple[Entry, str]] = []
    for path, name, entry in zip(listing.paths, listing.class_names, same, strict=True):
        if entry is None:
            pending.append((path, name))
        elif entry.given_class != name:
            other_class.append((entry, name))
        else:
            update.unchanged += 1
    if other_class:
        entries = [entry for entry, _ in other_class]
        index.add(
            index.vectors([entry.id for entry in entries]),
            [entry.path for entry in entries],
            [name for _, name in other_class],
            model=model,
            sources=[listing.source] * len(entries),
            files=[entry.file for entry in entries],
        )
        update.relabeled = len(entries)
    return pending


def _add(
    index: ImageIndex,
    embedder: Embedder,
    model: ModelIdentity,
    source: str,
    some: Sequence[tuple[str, str]],
    embeddings: EmbeddedImages | None,
    update: Update,
    batch_size: int,
    workers: int,
    track: Track,
) -> None:
    """Write images as one shard, embedded unless `embeddings` has them; unreadable ones are noted, and leave it."""
    paths = [path for path, _ in some]
    stored = {} if embeddings is None else _stored(embeddings, paths, workers)
    new = [path for path in paths if path not in stored]
    found = embed_files(embedder, new, batch_size=batch_size, workers=workers, track=track)
    update.failures += found.failures
    update.taken += len(stored)
    file_of = {**stored, **dict(zip(found.paths, found.files, strict=True))}
    written = [(path, name) for path, name in some if path in file_of]
    vectors = torch.empty(len(written), index.dimension)
    is_stored = torch.tensor([path in stored for path, _ in written], dtype=torch.bool)
    vectors[~is_stored] = found.vectors
    if embeddings is not None:
        vectors[is_stored] = embeddings.vectors([path for path, _ in written if path in stored]).float()
    before = {path for path in paths if index.find(path) is not None}
    index.add(
        vectors,
        [path for path, _ in written],
        [name for _, name in written],
        model=model,
        sources=[source] * len(written),
        files=[file_of[path] for path, _ in written],
    )
    index.remove(paths=sorted(before - file_of.keys()))
    update.replaced += len(before & file_of.keys())
    update.added += len(file_of.keys() - before)


def _stored(embeddings: EmbeddedImages, paths: Sequence[str], workers: int) -> dict[str, FileState]:
    """Path -> state of its file, of those images that were embedded as they are now."""
    known = [path for path in paths if path in embeddings]
    files = [embeddings.file(path) for path in known]
    same = in_threads(lambda pair: pair[0].is_of(pair[1]), zip(files, known, strict=True), workers)
    return {path: file for path, file, is_same in zip(known, files, same, strict=True) if is_same}


def _of_folder(folder: Path) -> Listing:
    divided = all(_has_folders(folder / split) for split in ("train", "test"))
    files = image_files([folder])
    names = []
    for file in files:
        parts = file.relative_to(folder).parts[:-1]
        if divided and parts and parts[0] in ("train", "test"):
            parts = parts[1:]
        names.append(parts[0] if parts else "")
    loose = names.count("")
    remark = f"{loose:,} of {len(files):,} images in {folder} lie in no class folder: their class is unknown"
    return Listing(str(folder), tuple(map(str, files)), tuple(names), (remark,) if loose else ())


def _has_folders(folder: Path) -> bool:
    return folder.is_dir() and any(path.is_dir() and not path.name.startswith(".") for path in folder.iterdir())


def _of_table(table: Path) -> Listing:
    images, remarks = listed_images(table)
    class_of = _named(images)
    return Listing(str(table), tuple(class_of), tuple(class_of.values()), remarks)


def _named(images: ImageSet) -> dict[str, str]:
    """Path -> class name."""
    assert isinstance(images.images, tuple)
    names = (images.class_names[label] for label in images.labels.tolist())
    return {str(plain_path(path)): name for path, name in zip(images.images, names, strict=True)}
