"""An index brought up to date with a folder or a table: new images embedded, changed ones again, gone ones removed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from pfml.data.decoding import ImageError, Track, in_threads
from pfml.models.embedder import Embedder
from pfml.search.embedding import described, embed_files
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
    done = Update()
    with index.writing():
        index.refresh()
        done.removed = _remove_gone(index, listing)
        listing, done.kept_out = _without_left_out(index, listing)
        done.with_new_metadata = _describe(index, listing)
        updater = _Updater(index, embedder, model, listing, embeddings, batch_size, workers, track, done)
        pending = updater.pending()
        for first in range(0, len(pending), shard_images):
            some = pending[first : first + shard_images]
            updater.add(some, f"embedding {first + 1:,} to {first + len(some):,} of {len(pending):,}")
    return done


def _remove_gone(index: ImageIndex, listing: Listing) -> int:
    """Remove what the source no longer lists, and files of its folder that are gone; the number of images."""
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
    """The listing without what a person has left out of the index, and the number of these images."""
    classes = index.edits.classes_of(listing.paths, listing.class_names)
    kept = [row for row, name in enumerate(classes) if name is not None]
    left_out = len(listing.paths) - len(kept)
    return listing.subset(kept) if left_out else listing, left_out


def _describe(index: ImageIndex, listing: Listing) -> int:
    """Write the metadata of the listing where the index has other values; the number of images."""
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


@dataclass(frozen=True, eq=False)
class _Updater:
    """The images of a listing that an index lacks, written to it; `done` counts them. See `update_index`."""

    index: ImageIndex
    embedder: Embedder
    model: ModelIdentity
    listing: Listing
    embeddings: EmbeddedImages | None
    batch_size: int
    workers: int
    track: Track | None
    done: Update

    def pending(self) -> list[tuple[str, str]]:
        """Paths and classes that must be embedded; entries that only have another class are written again here."""
        index, listing = self.index, self.listing

        def unchanged_entry(path: str) -> Entry | None:
            entry = index.find(path)
            return entry if entry is not None and entry.file.is_of(path) else None

        same: Iterable[Entry | None] = in_threads(unchanged_entry, listing.paths, self.workers)
        if self.track is not None:
            same = self.track(same, "comparing files", len(listing.paths))
        pending: list[tuple[str, str]] = []
        other_class: list[tuple[Entry, str]] = []
        for path, name, entry in zip(listing.paths, listing.class_names, same, strict=True):
            if entry is None:
                pending.append((path, name))
            elif entry.given_class != name:
                other_class.append((entry, name))
            else:
                self.done.unchanged += 1
        if other_class:
            entries = [entry for entry, _ in other_class]
            vectors = index.vectors([entry.id for entry in entries])
            named = [(entry.path, name) for entry, name in other_class]
            self._write(vectors, named, [entry.file for entry in entries])
            self.done.relabeled = len(entries)
        return pending

    def add(self, some: Sequence[tuple[str, str]], description: str) -> None:
        """Write images as one shard, embedded unless `embeddings` has them; unreadable ones are noted, and leave it."""
        paths = [path for path, _ in some]
        stored = self._stored(paths)
        new = [path for path in paths if path not in stored]
        track = None if self.track is None else described(self.track, description)
        found = embed_files(self.embedder, new, batch_size=self.batch_size, workers=self.workers, track=track)
        self.done.failures += found.failures
        self.done.taken += len(stored)
        file_of = {**stored, **dict(zip(found.paths, found.files, strict=True))}
        written = [(path, name) for path, name in some if path in file_of]
        vectors = torch.empty(len(written), self.index.dimension)
        is_stored = torch.tensor([path in stored for path, _ in written], dtype=torch.bool)
        vectors[~is_stored] = found.vectors
        if self.embeddings is not None:
            vectors[is_stored] = self.embeddings.vectors([path for path, _ in written if path in stored]).float()
        before = {path for path in paths if self.index.find(path) is not None}
        self._write(vectors, written, [file_of[path] for path, _ in written])
        self.index.remove(paths=sorted(before - file_of.keys()))
        self.done.replaced += len(before & file_of.keys())
        self.done.added += len(file_of.keys() - before)

    def _write(self, vectors: Tensor, named: Sequence[tuple[str, str]], files: Sequence[FileState]) -> None:
        """Add images by path and class to the index, with their metadata."""
        paths = [path for path, _ in named]
        self.index.add(
            vectors,
            paths,
            [name for _, name in named],
            model=self.model,
            sources=[self.listing.source] * len(paths),
            files=files,
            metadata=self._metadata(paths),
        )

    @cached_property
    def _row_of(self) -> dict[str, int]:
        """Path -> its row in the listing."""
        return {path: row for row, path in enumerate(self.listing.paths)}

    def _metadata(self, paths: Sequence[str]) -> Table:
        """The metadata of images in the listing, or what the index has if the listing has none."""
        if self.listing.metadata is not None:
            return self.listing.metadata.rows(torch.tensor([self._row_of[path] for path in paths], dtype=torch.int64))
        return Table.of([{} if (entry := self.index.find(path)) is None else entry.metadata for path in paths])

    def _stored(self, paths: Sequence[str]) -> dict[str, FileState]:
        """Path -> state of its file, of those images that `embeddings` has as they are now."""
        embeddings = self.embeddings
        if embeddings is None:
            return {}
        known = [path for path in paths if path in embeddings]
        files = [embeddings.file(path) for path in known]
        same = in_threads(lambda pair: pair[0].is_of(pair[1]), zip(files, known, strict=True), self.workers)
        return {path: file for path, file, is_same in zip(known, files, same, strict=True) if is_same}
