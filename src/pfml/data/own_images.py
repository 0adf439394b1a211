"""Images of one's own, a folder or a table: what is left out of them, and what their owner should know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from pfml.data.copies import about_copies
from pfml.data.datasets import DATASETS
from pfml.data.decoding import KEPT_BYTES, LISTED, ImageError, Track, UnreadableImagesError, decode_files
from pfml.data.image_set import ImageSet, RetrievalData
from pfml.terminal import readable

__all__ = ["UNREADABLE", "about_lone_images", "about_single_class", "is_own", "own_images", "without_unreadable"]

#: What happens to files that cannot be read: "auto" skips those of one's own, and refuses those of published sets.
UNREADABLE = ("auto", "skip", "refuse")
#: With a larger share of such files, the folder or the table is the mistake.
MOST_UNREADABLE = 0.5


def is_own(name: str) -> bool:
    """Whether data of this name (see `load_data`) are images of one's own: a folder or a table."""
    return name not in DATASETS or name in ("folder", "csv")


def own_images(
    name: str,
    data: RetrievalData,
    unreadable: str = "auto",
    track: Track | None = None,
    *,
    keep_bytes: int = KEPT_BYTES,
) -> RetrievalData:
    """`data` of this name without files that cannot be read, if these are to be skipped, and with remarks on the rest.

    Args:
        name: As given to `load_data`.
        data: What that returned.
        unreadable: One of `UNREADABLE`.
        track: Shows the progress, as track(iterable, description, total).
        keep_bytes: See `without_unreadable`.
    """
    if unreadable == "skip" or (unreadable == "auto" and is_own(name)):
        data = without_unreadable(data, track=track, keep_bytes=keep_bytes)
    if not is_own(name):
        return data
    return replace(
        data, remarks=(*data.remarks, *about_lone_images(data), *about_single_class(data), *about_copies(data))
    )


def without_unreadable(
    data: RetrievalData, workers: int = 2, track: Track | None = None, *, keep_bytes: int = KEPT_BYTES
) -> RetrievalData:
    """`data` without the files that cannot be read, nor classes that have no others; remarks count and name them.

    Every file is decoded once. The division into trained and unseen classes stays what it was.

    Args:
        data: Of files.
        workers: Threads that decode.
        track: Shows the progress, as track(iterable, description, total).
        keep_bytes: Decoded images up to this size in all are kept, so that no file is opened again.

    Raises:
        UnreadableImagesError: If most files cannot be read: then the folder or the table is the mistake.
    """
    files = list(dict.fromkeys(path for part in data.parts.values() for path in _files(part)))
    pixels, failures = decode_files(files, workers, track, keep_bytes)
    if pixels:
        data = data.with_parts({role: replace(part, pixels=pixels) for role, part in data.parts.items()})
    if not failures:
        return data
    if len(failures) > MOST_UNREADABLE * len(files):
        raise UnreadableImagesError(failures, len(files))
    bad = {str(failure.path) for failure in failures}
    kept = {role: _without(part, bad) for role, part in data.parts.items()}
    classes = {role: _classes_of(part) for role, part in kept.items()}
    searched = [role for role in ("test", "gallery") if role in classes]  # share their labels
    together = sorted({label for role in searched for label in classes[role]})
    if data.protocol == "images":  # which known classes share with both, and what nothing trains on is not known
        together = classes["train"]
    classes |= dict.fromkeys(searched, together)
    left = data.with_parts({role: part.of_classes(classes[role]) for role, part in kept.items()})
    remarks = (*_about_left_out(failures, len(files)), *_about_lost_classes(data, left))
    return replace(left, remarks=(*data.remarks, *remarks))


def about_lone_images(data: RetrievalData) -> tuple[str, ...]:
    """Remarks on classes with a single image, which can neither be found nor judged."""
    meaning = {
        "training": "no other image says what the class looks like, and pfml audit cannot judge its label",
        "validation": "there is no other to find, so that it is not counted",
        "unseen": "there is no other to find, so that it is not counted",
    }
    searched = data.test if data.gallery is None else None  # else there may be others in the gallery
    trained = None if data.protocol == "images" else data.train  # else the division has said so
    remarks = []
    for role, images in {"training": trained, "validation": data.validation, "unseen": searched}.items():
        if images is None:
            continue
        counts = torch.bincount(images.labels, minlength=images.num_classes)
        lone = [images.class_names[label] for label in (counts == 1).nonzero()[:, 0].tolist()]
        if lone:
            classes = f"{len(lone):,} of {images.num_classes:,} {role} classes {'has' if len(lone) == 1 else 'have'}"
            remarks.append(f"{classes} a single image ({_listed(lone)}): {meaning[role]}")
    return tuple(remarks)


def about_single_class(data: RetrievalData) -> tuple[str, ...]:
    """A remark on unseen images that are all of one class, among which every neighbor is right."""
    found = data.test.labels.unique().tolist() if data.protocol == "classes" and data.gallery is None else []
    if len(found) != 1:
        return ()
    name = readable(data.test.class_names[found[0]])
    return (f"a single class is unseen ({name}), so that R@1 is 100 % for any model: give more classes to measure one",)


def _files(images: ImageSet) -> tuple[Path, ...]:
    return images.images if isinstance(images.images, tuple) else ()


def _without(images: ImageSet, bad: set[str]) -> ImageSet:
    return images.subset([k for k, path in enumerate(_files(images)) if str(path) not in bad])


def _classes_of(images: ImageSet) -> list[int]:
    """The labels that occur, in order."""
    labels: list[int] = images.labels.unique().tolist()
    return labels


def _about_left_out(failures: Sequence[ImageError], total: int) -> tuple[str, ...]:
    named = "; ".join(map(str, failures[:LISTED]))
    more = f"; and {len(failures) - LISTED:,} more" if len(failures) > LISTED else ""
    are = "is" if len(failures) == 1 else "are"
    return (f"{len(failures):,} of {total:,} images cannot be read and {are} left out: {named}{more}",)


def _about_lost_classes(before: RetrievalData, after: RetrievalData) -> tuple[str, ...]:
    kept, every = (
        dict.fromkeys(name for part in data.parts.values() for name in part.class_names) for data in (after, before)
    )
    lost = [name for name in every if name not in kept]
    if not lost:
        return ()
    image = "training image" if before.protocol == "images" else "image"
    return (f"no {image} of the {'class' if len(lost) == 1 else 'classes'} {_listed(lost)} can be read",)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED:,} more" if len(names) > LISTED else "")
