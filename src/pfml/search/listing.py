"""Which images an index is to hold, and what class each of them shows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from pfml.data.image_set import ImageSet
from pfml.data.readers.folder import image_files
from pfml.data.readers.table import listed_images

__all__ = ["Listing", "list_images", "plain_path"]


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


def list_images(place: str | Path) -> Listing:
    """The images of a folder or of a CSV table.

    In a folder, the class of an image is the folder of `place` that it lies in, at any depth; if `place` has folders
    `train` and `test` with folders in them, these are the classes. An image that lies in `place` itself has no class.
    The classes of a table are its labels, whatever the split of a row.
    """
    place = plain_path(Path(place).expanduser())
    if place.is_dir():
        return _of_folder(place)
    if place.suffix.lower() == ".csv":
        return _of_table(place)
    raise FileNotFoundError(f"images to index must be a folder or a .csv file, got {place}, which is neither")


def plain_path(path: Path) -> Path:
    """The absolute path without "..", so that an image has one name from wherever a folder or table names it."""
    path = path.absolute()
    if ".." not in path.parts:
        return path
    plain = Path(os.path.normpath(path))
    # after a link to a folder, ".." leads elsewhere than the text says
    is_elsewhere = path.exists() and not (plain.exists() and plain.samefile(path))
    return path.resolve() if is_elsewhere else plain


def _of_folder(folder: Path) -> Listing:
    divided = all(_has_folders(folder / part) for part in ("train", "test"))
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
    assert not isinstance(images.images, Tensor)
    names = (images.class_names[label] for label in images.labels.tolist())
    return {str(plain_path(path)): name for path, name in zip(images.images, names, strict=True)}
