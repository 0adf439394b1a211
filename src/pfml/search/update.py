"""An index brought up to date with a folder or a table: new images embedded, changed ones again, gone ones removed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfml.data.decoding import ImageError, Track, in_threads, read_size
from pfml.evaluation.evaluate import embed
from pfml.models.embedder import Embedder
from pfml.search.identity import ModelIdentity
from pfml.search.index import ImageIndex
from pfml.search.listing import Listing
from pfml.search.one_pass import OnePass
from pfml.search.segments import FileState
from pfml.search.state import Entry

__all__ = ["Update", "update_index"]


@dataclass
class Update:
    """What an update did, counted in images.

    Args:
        added: New ones.
        replaced: Files that had changed.
        relabelled: Of another class than before; not embedded again.
        unchanged: Left as they were.
        removed: No longer listed, or gone from the disk.
        failures: Files that cannot be read: they are not in the index.
    """

    added: int = 0
    replaced: int = 0
    relabelled: int = 0
    unchanged: int = 0
    removed: int = 0
    failures: list[ImageError] = field(default_factory=list)

    def __str__(self) -> str:
        counts = {
            name: value for name, value in vars(self).items() if name != "failures" and (value or name == "added")
        }
        done = ", ".join(f"{value:,} {name}" for name, value in counts.items())
        return f"{done}, {len(self.failures):,} unreadable" if self.failures else done


def update_index(
    index: ImageIndex,
    embedder: Embedder,
    listing: Listing,
    *,
    segment_images: int = 4096,
    batch_size: int = 64,
    workers: int = 2,
    track: Track | None = None,
) -> Update:
    """Make `index` hold the images of `listing`, as they are now; what was done.

    Entries of other sources stay. Every `segment_images` images are written before the next are read: memory is
    bounded, and after an interruption the same call goes on where it stopped.

    Args:
        index: Of this embedder.
        embedder: On the device where it is to compute.
        listing: See `list_images`.
        segment_images: Images that are embedded and written together.
        batch_size: Images that pass through the network at a time.
        workers: Threads that read files.
        track: Shows the progress, as track(iterable, description, total).

    Raises:
        OtherModelError: If the index belongs to another model.
        IndexLockedError: If another process is writing the index.
    """
    if segment_images < 1:
        raise ValueError(f"segment_images must be at least 1, got {segment_images}")
    model = ModelIdentity.of(embedder)
    index.model.require(model, f"the index {index.path}")
    update = Update()
    with index.writing():
        index.refresh()
        update.removed = _remove_gone(index, listing)
        pending = _pending(index, listing, model, update, workers, track)
        for first in range(0, len(pending), segment_images):
            some = pending[first : first + segment_images]
            stop = first + len(some)

            def tracked(
                items: Iterable[Any], _: str, total: int, first: int = first, stop: int = stop
            ) -> Iterable[Any]:
                label = f"embedding {first + 1:,} to {stop:,} of {len(pending):,}"
                return items if track is None else track(items, label, total)

            _add(index, embedder, model, listing.source, some, update, batch_size, workers, tracked)
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


def _pending(
    index: ImageIndex,
    listing: Listing,
    model: ModelIdentity,
    update: Update,
    workers: int,
    track: Track | None,
) -> list[tuple[str, str]]:
    """Paths and classes that must be embedded; entries that only have another class are written anew here."""

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
        elif entry.class_name != name:
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
        update.relabelled = len(entries)
    return pending


def _add(
    index: ImageIndex,
    embedder: Embedder,
    model: ModelIdentity,
    source: str,
    some: Sequence[tuple[str, str]],
    update: Update,
    batch_size: int,
    workers: int,
    track: Track,
) -> None:
    """Embed images and write them as one segment; those that cannot be read are noted, and leave the index."""
    opened: list[tuple[str, str, FileState, tuple[int, int]]] = []
    for (path, name), looked in zip(some, in_threads(_look, [path for path, _ in some], workers), strict=True):
        if isinstance(looked, ImageError):
            update.failures.append(looked)
        else:
            opened.append((path, name, *looked))
    sizes = torch.tensor([size for *_, size in opened], dtype=torch.int64).reshape(-1, 2)
    place = next(embedder.parameters()).device
    images = OnePass([path for path, *_ in opened], sizes, device=place, workers=workers)
    points: Tensor = embed(embedder, images, batch_size=batch_size, track=track).cpu()
    update.failures += [images.failures[k] for k in sorted(images.failures)]
    good = [k for k in range(len(opened)) if k not in images.failures]
    before = {path for path, _ in some if index.find(path) is not None}
    index.add(
        points[good],
        [opened[k][0] for k in good],
        [opened[k][1] for k in good],
        model=model,
        sources=[source] * len(good),
        files=[opened[k][2] for k in good],
    )
    written = {opened[k][0] for k in good}
    index.remove(paths=sorted(before - written))
    update.replaced += len(before & written)
    update.added += len(written - before)


def _look(path: str) -> tuple[FileState, tuple[int, int]] | ImageError:
    """The state of a file and the size of its image, by its header."""
    try:
        return FileState.of(path), read_size(path)
    except ImageError as error:
        return error
    except OSError as error:
        return ImageError(path, "does not exist" if isinstance(error, FileNotFoundError) else str(error))
