"""Images that come later: they join the classes that are there, and bring new ones, without changing the division."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from pfml.data.image_set import ImageSet, RetrievalData
from pfml.data.readers.folder import listed_folder
from pfml.data.readers.table import listed_images, splits_of
from pfml.data.splits import divided, held_out_images

__all__ = ["with_added"]


def with_added(data: RetrievalData, path: str | Path, *, seed: int | None = 0) -> RetrievalData:
    """`data` and the images of a further folder or table; what `data` trains and tests on stays as it is.

    An image of a class that `data` has, by its name, joins that class: it trains if the class trains, and is searched
    if it is held out. New classes are divided among themselves as `data` was ("classes": half of them train; a single
    one does). With the protocol "images" a fifth of the added images of every class is held out, with "none" nothing.

    Args:
        data: Images of one's own, before validation classes are set apart.
        path: A folder of class folders, or a CSV of path and label.
        seed: Of the division.
    """
    images, remarks = _listed(Path(path))
    _refuse_repeated(data, images, path)
    if data.gallery is not None and data.gallery is not data.train:
        raise ValueError(
            f"the images of {path} cannot be added to data with a gallery of its own: add them to its table"
        )
    known = {name for part in data.parts.values() for name in part.class_names}
    new = [c for c, name in enumerate(images.class_names) if name not in known]
    fresh = images.of_classes(new)
    count = f"{len(fresh):,} images of {len(new):,} new classes, {len(images) - len(fresh):,} of known ones"
    about = replace(data, remarks=(*data.remarks, *remarks, f"{path} adds {count}"))
    if data.protocol == "none":
        return replace(about, train=data.train.joined(images))
    if data.protocol == "images":
        is_held = torch.zeros(len(images), dtype=torch.bool)
        is_held[held_out_images(images, seed or 0)] = True
        rest, held = (images.subset(some.nonzero()[:, 0]) for some in (~is_held, is_held))
        train = data.train.joined(rest)
        return replace(about, train=train, test=data.test.joined(held), gallery=train)
    parts = {role: part.joined(images.of_classes(_shared(images, part))) for role, part in data.parts.items()}
    if len(new) == 1:
        parts["train"] = parts["train"].joined(fresh)
    elif new:
        halves = divided(fresh, data.name, "classes", seed=seed)
        parts = {**parts, "train": parts["train"].joined(halves.train), "test": parts["test"].joined(halves.test)}
    return replace(about.with_parts(parts), added_classes=(*data.added_classes, fresh.class_names))


def _listed(path: Path) -> tuple[ImageSet, tuple[str, ...]]:
    """All images of a folder or table that is to be added, and remarks on them."""
    path = path.expanduser()
    if path.is_dir():
        return listed_folder(path)
    if path.suffix.lower() == ".csv" and path.is_file():
        if splits_of(path) - {""}:
            raise ValueError(
                f"images that are added are divided like those before: leave the column split out of {path}"
            )
        return listed_images(path)
    raise ValueError(f"images to add must be a folder of class folders or a .csv file, got {path}, which is neither")


def _refuse_repeated(data: RetrievalData, images: ImageSet, path: str | Path) -> None:
    """Refuse files that `data` has already: an image would find its copy."""
    there = {str(file.resolve()) for part in data.parts.values() for file in _files(part)}
    repeated = [file for file in _files(images) if str(file.resolve()) in there]
    if repeated:
        every = "all" if len(repeated) == len(images) else f"{len(repeated):,} of {len(images):,}"
        raise ValueError(
            f"the images to add must be new ones, but {every} images of {path} are there already, the first is "
            f"{repeated[0]}: put new images into a folder of their own"
        )


def _files(images: ImageSet) -> tuple[Path, ...]:
    return images.images if isinstance(images.images, tuple) else ()


def _shared(images: ImageSet, part: ImageSet) -> list[int]:
    """The labels in `images` of classes that `part` has."""
    there = set(part.class_names)
    return [c for c, name in enumerate(images.class_names) if name in there]
