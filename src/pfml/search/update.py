"""An index brought up to date with a folder or a table: new images embedded, changed ones again, gone ones removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pfml.data.decoding import ImageError, Track, in_threads
from pfml.models.embedder import Embedder
from pfml.search.embedding import embed_files
from pfml.search.identity import ModelIdentity
from pfml.search.index import Entry, ImageIndex
from pfml.search.listing import Listing
from pfml.storage.columns import Table
from pfml.storage.embeddings import EmbeddedImages
from pfml.storage.file_state import FileState

__all__ = ["Update", "update_index"]


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
        with_new_metadata: Of those that were in the index, the images of which the source now says something else.
    """

    added: int = 0
    replaced: int = 0
    relabeled: int = 0
    unchanged: int = 0
    removed: int = 0
    failures: list[ImageError] = field(default_factory=list)
    taken: int = 0
    kept_out: int = 0
    with_new_metadata: int = 0

    def __str__(self) -> str:
        names = ("added", "replaced", "relabeled", "unchanged", "removed", "kept_out", "with_new_metadata")
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
        update.with_new_metadata = _describe(index, listing)
        row_of = {path: row for row, path in enumerate(listing.paths)}

        def metadata_of(paths: Sequence[str]) -> Table:
            """What is known of images, by the listing, or else as it was."""
            if listing.metadata is not None:
                return listing.metadata.rows(torch.tensor([row_of[path] for path in paths], dtype=torch.int64))
            return Table.of([{} if (entry := index.find(path)) is None else entry.metadata for path in paths])

        pending = _pending(index, listing, model, update, metadata_of, workers, track)
        for first in range(0, len(pending), shard_images):
            some = pending[first : first + shard_images]
            stop = first + len(some)

            def tracked(
                items: Iterable[Any], _: str, total: int, first: int = first, stop: int = stop
            ) -> Iterable[Any]:
                label = f"embedding {first + 1:,} to {stop:,} of {len(pending):,}"
                return items if track is None else track(items, label, total)

            _add(
                index,
                embedder,
                model,
                listing.source,
                some,
                metadata_of,
                embeddings,
                update,
                batch_size,
                workers,
                tracked,
            )
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
    classes = index.edits.classes_of(listing.paths, listing.class_names)
    kept = [row for row, name in enumerate(classes) if name is not None]
    left_out = len(listing.paths) - len(kept)
    return listing.subset(kept) if left_out else listing, left_out


def _describe(index: ImageIndex, listing: Listing) -> int:
    """Write what the listing says of images of the index that is not what is known of them; how many these are."""
    if listing.metadata is None:
        return 0
    changed = []
    for row, path in enumerate(listing.paths):
        entry = index.find(path)
        if entry is not None and entry.metadata != listing.metadata.row(row):
            changed.append(row)
    some = listing.subset(changed)
    if changed and some.metadata is not None:
        index.set_metadata(some.paths, some.metadata)
    return len(changed)


def _pending(
    index: ImageIndex,
    listing: Listing,
    model: ModelIdentity,
    update: Update,
    metadata_of: Callable[[Sequence[str]], Table],
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
        paths = [entry.path for entry in entries]
        index.add(
            index.vectors([entry.id for entry in entries]),
            paths,
            [name for _, name in other_class],
            model=model,
            sources=[listing.source] * len(entries),
            files=[entry.file for entry in entries],
            metadata=metadata_of(paths),
        )
        update.relabeled = len(entries)
    return pending


def _add(
    index: ImageIndex,
    embedder: Embedder,
    model: ModelIdentity,
    source: str,
    some: Sequence[tuple[str, str]],
    metadata_of: Callable[[Sequence[str]], Table],
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
        metadata=metadata_of([path for path, _ in written]),
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
