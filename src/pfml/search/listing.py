"""The images of a folder or of a table, with their classes and what else is known of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pfml.data.image_set import ImageSet
from pfml.data.readers.folder import image_files
from pfml.data.readers.metadata import read_metadata
from pfml.data.readers.table import listed_images
from pfml.storage.columns import Table
from pfml.storage.values import Kind

__all__ = ["Listing", "list_images", "plain_path"]


@dataclass(frozen=True)
class Listing:
    """Images of one source.

    Args:
        source: Absolute path of the folder or table that lists them.
        paths: Absolute, all different.
        class_names: One per path, "" where it is unknown.
        remarks: Sentences about the list that a user should read.
        metadata: What else is known of each image, a row per path; None leaves in the index what is known there.
    """

    source: str
    paths: tuple[str, ...]
    class_names: tuple[str, ...]
    remarks: tuple[str, ...] = ()
    metadata: Table | None = None

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.class_names):
            raise ValueError(f"class_names must be {len(self.paths)}, one per path, got {len(self.class_names)}")
        if self.metadata is not None and len(self.metadata) != len(self.paths):
            raise ValueError(f"metadata must be {len(self.paths)}, a row per path, got {len(self.metadata)}")

    def subset(self, chosen: Sequence[int]) -> Listing:
        """The images at these positions."""
        metadata = None if self.metadata is None else self.metadata.rows(torch.tensor(chosen, dtype=torch.int64))
        paths, class_names = (tuple(column[k] for k in chosen) for column in (self.paths, self.class_names))
        return replace(self, paths=paths, class_names=class_names, metadata=metadata)


def list_images(
    source: str | Path,
    *,
    metadata: str | Path | None = None,
    columns: Mapping[str, str] | None = None,
    known: Mapping[str, Kind] | None = None,
) -> Listing:
    """The images of a folder or of a CSV table.

    In a folder, the class of an image is the folder of `source` that it lies in, at any depth; if `source` has folders
    `train` and `test` with folders in them, these are the classes. An image that lies in `source` itself has no class.
    The classes of a table are its labels, whatever the split of a row; its other columns are metadata.

    Args:
        source: The folder or table.
        metadata: A table with the column `path`, relative to the folder or to the table, whose other columns are the
            metadata of a folder's images.
        columns: Column of metadata -> its type, or "ignore"; see `pfml.data.readers.metadata.read_metadata`.
        known: Column -> the type that it has in the index.
    """
    path = plain_path(Path(source).expanduser())
    if path.is_dir():
        listing = _of_folder(path)
        if metadata is None and columns:
            raise ValueError("columns are given types where there are some: give the table of metadata, too")
        if metadata is None:
            return listing
        return _described(listing, plain_path(Path(metadata).expanduser()), columns, known)
    if path.suffix.lower() == ".csv":
        if metadata is not None:
            raise ValueError(f"metadata in a table of their own are those of a folder: put the columns into {path}")
        return _of_table(path, columns, known)
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


def _of_table(table: Path, columns: Mapping[str, str] | None, known: Mapping[str, Kind] | None) -> Listing:
    images, remarks = listed_images(table)
    class_of = _named(images)
    found = read_metadata(table, kinds=columns, known=known)
    row_of: dict[str, int] = {}
    for row, path in enumerate(found.paths):
        row_of.setdefault(str(plain_path(table.parent / path)), row)
    rows = found.table.rows(torch.tensor([row_of[path] for path in class_of], dtype=torch.int64))
    return Listing(str(table), tuple(class_of), tuple(class_of.values()), (*remarks, *found.remarks), rows)


def _described(
    listing: Listing, table: Path, columns: Mapping[str, str] | None, known: Mapping[str, Kind] | None
) -> Listing:
    """The images of a folder with what a table says of them."""
    if not table.is_file():
        raise FileNotFoundError(f"the metadata must be a CSV table with the column path, got {table}, which is no file")
    found = read_metadata(table, kinds=columns, known=known)
    place = {path: k for k, path in enumerate(listing.paths)}
    rows = [len(found.paths)] * len(listing.paths)  # the row after the last one, which says nothing
    strangers, folder = [], Path(listing.source)
    for row, path in enumerate(found.paths):
        around = (str(plain_path(base / path)) for base in (folder, table.parent))
        here = next((place[one] for one in around if one in place), None)
        if here is None:
            strangers.append(path)
        elif rows[here] == len(found.paths):
            rows[here] = row
    matched = sum(row < len(found.paths) for row in rows)
    if not matched:
        raise ValueError(
            f"the paths in {table} must be relative to {folder} or to the table, got {found.paths[0]}, which is no "
            f"image of the folder, like all others"
        )
    remarks = []
    if strangers:
        remarks.append(f"{len(strangers):,} rows of {table} are of no image in {folder}, the first is {strangers[0]}")
    if matched < len(rows):
        remarks.append(f"{len(rows) - matched:,} of {len(rows):,} images in {folder} have no row in {table}")
    metadata = Table.joined([found.table, Table(1, {})]).rows(torch.tensor(rows, dtype=torch.int64))
    return replace(listing, remarks=(*listing.remarks, *found.remarks, *remarks), metadata=metadata)


def _named(images: ImageSet) -> dict[str, str]:
    """Path -> class name."""
    assert isinstance(images.images, tuple)
    names = (images.class_names[label] for label in images.labels.tolist())
    return {str(plain_path(path)): name for path, name in zip(images.images, names, strict=True)}
