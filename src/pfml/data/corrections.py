"""Labels put right: which training images get another class, and which are left out.

The list is a CSV table of image, given class and corrected class; an empty corrected class drops the image. Images are
named as in RUN/noise.csv, so that a list works for data that has no files, too.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path

import torch

from pfml.data.image_set import ImageSet
from pfml.storage.files import named_errors, write_atomically

__all__ = ["Corrections"]

COLUMNS = ("image", "given class", "corrected class")


@dataclass(frozen=True)
class Corrections:
    """What is to change, by position in an image set.

    Args:
        labels: Position -> label to give; None to leave the image out.
    """

    labels: dict[int, int | None]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def dropped(self) -> int:
        """How many images are left out."""
        return sum(label is None for label in self.labels.values())

    def apply(self, images: ImageSet) -> ImageSet:
        """`images` with these labels, without those that are dropped; every class must keep an image."""
        labels = images.labels.clone()
        for index, label in self.labels.items():
            if label is not None:
                labels[index] = label
        kept = [k for k in range(len(images)) if self.labels.get(k, 0) is not None]
        before = torch.bincount(images.labels, minlength=images.num_classes)
        after = torch.bincount(labels[kept], minlength=images.num_classes)
        emptied = ((before > 0) & (after == 0)).nonzero()[:, 0].tolist()
        if emptied:
            raise ValueError(
                f"corrections must leave every class an image, got none left of {images.class_names[emptied[0]]!r}: "
                f"take a line of it out of the list, or correct fewer with a higher threshold"
            )
        return images.with_labels(labels).subset(kept)

    def then(self, later: Corrections, images: ImageSet) -> Corrections:
        """These corrections of `images` and then `later`, whose positions count what these leave, as one list."""
        kept = [k for k in range(len(images)) if self.labels.get(k, 0) is not None]
        both = {**self.labels, **{kept[index]: label for index, label in later.labels.items()}}
        given = images.labels.tolist()
        return Corrections({index: label for index, label in both.items() if label != given[index]})

    def moved(self, images: ImageSet, more: ImageSet) -> Corrections:
        """These corrections of `images` as those of the same images among `more`, whose labels are by the same names.

        A list names an image without the folders that all images share, and more images may share fewer folders.
        """
        position = {more.name_of(k): k for k in range(len(more))}
        label_of = {name: k for k, name in enumerate(more.class_names)}
        found: dict[int, int | None] = {}
        for index, label in self.labels.items():
            name = images.name_of(index)
            if name not in position:
                raise ValueError(f"{name} has a corrected label and must be among the images, but is not: restore it")
            found[position[name]] = None if label is None else label_of[images.class_names[label]]
        return Corrections(found)

    def write(self, path: Path, images: ImageSet) -> None:
        """Write the list; `path` is either complete or as it was. `images` have the given labels."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(COLUMNS)
        names = images.short_names()
        for index, label in sorted(self.labels.items()):
            given = images.class_names[int(images.labels[index])]
            table.writerow((names[index], given, "" if label is None else images.class_names[label]))
        write_atomically(Path(path), text.getvalue().encode(errors="surrogateescape"))

    @classmethod
    def read(cls, path: Path, images: ImageSet) -> Corrections:
        """The list that `write` wrote for `images`; one that was made for other labels is refused."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"the list of corrections must be a CSV file, got {path}, which is none")
        index_of = {name: k for k, name in enumerate(images.short_names())}
        class_of = {name: k for k, name in enumerate(images.class_names)}
        labels: dict[int, int | None] = {}
        with (
            named_errors(path, "a CSV table in UTF-8"),
            path.open(encoding="utf-8", errors="surrogateescape", newline="") as text,
        ):
            table = csv.reader(text)
            header = tuple(next(table, ()))
            if header != COLUMNS:
                raise ValueError(
                    f"{path} must have the columns {', '.join(COLUMNS)}, got {', '.join(header) or 'none'}; "
                    f"a table of path and label is a data set of its own: give it as data.name"
                )
            for cells in table:
                where = f"{path}, line {table.line_num}"
                index, label = _corrected(where, cells, images, index_of, class_of)
                if index in labels:
                    raise ValueError(f"{where} must name a new image, got {cells[0]} again")
                labels[index] = label
        return cls(labels)


def _corrected(
    where: str, cells: list[str], images: ImageSet, index_of: dict[str, int], class_of: dict[str, int]
) -> tuple[int, int | None]:
    """Position and corrected label of one line."""
    if len(cells) != len(COLUMNS):
        raise ValueError(f"{where} must have {len(COLUMNS)} cells ({', '.join(COLUMNS)}), got {len(cells)}")
    name, given, corrected = cells
    if name not in index_of:
        raise ValueError(f"{where} must name a training image, got {name!r}")
    has = images.class_names[int(images.labels[index_of[name]])]
    if given != has:
        raise ValueError(
            f"{where} must have the given class of {name}, which is {has}, got {given}: "
            f"the list was made for other labels; keep data.noise and data.validation of the run that was audited"
        )
    if corrected and corrected not in class_of:
        raise ValueError(f"{where} must correct to a training class or to nothing, got {corrected!r}")
    return index_of[name], class_of[corrected] if corrected else None
