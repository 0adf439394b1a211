"""Labels put right: which training images get another class, which are left out, and which classes get another name.

The list is a CSV table of image, given class and corrected class; an empty corrected class drops the image. Images are
named as in RUN/noise.csv, so that a list works for data that has no files, too. A line without an image is about all
images of the given class: it is renamed, merged if there is a class of the new name, or dropped.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pfml.data.image_set import ImageSet
from pfml.storage.files import named_errors, write_csv

__all__ = ["Corrections"]

COLUMNS = ("image", "given class", "corrected class")


@dataclass(frozen=True)
class Corrections:
    """What is to change, by position in an image set.

    Args:
        labels: Position -> label to give; None to leave the image out.
        classes: Class -> its new name, None to leave out all of its images; after the labels are given.
    """

    labels: dict[int, int | None]
    classes: Mapping[str, str | None] = field(default_factory=dict)

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
        renamed, corrected = (some.renamed(self.classes) for some in (images, images.with_labels(labels).subset(kept)))
        before, after = (torch.bincount(some.labels, minlength=some.num_classes) for some in (renamed, corrected))
        emptied = ((before > 0) & (after == 0)).nonzero()[:, 0].tolist()
        if emptied:
            raise ValueError(
                f"corrections must leave every class an image, got none left of {renamed.class_names[emptied[0]]!r}: "
                f"take a line of it out of the list, or correct fewer with a higher threshold"
            )
        return corrected

    def kept(self, images: ImageSet) -> list[int]:
        """Positions of the images that `apply` leaves, in order."""
        labels = [self.labels.get(k, label) for k, label in enumerate(images.labels.tolist())]
        is_kept = [self.classes.get(name, name) is not None for name in images.class_names]
        return [k for k, label in enumerate(labels) if label is not None and is_kept[label]]

    def then(self, later: Corrections, images: ImageSet) -> Corrections:
        """These corrections of `images` and then `later`, made for what these leave, as one list."""
        kept, between = self.kept(images), images.subset(()).renamed(self.classes).class_names
        now = {name: self.classes.get(name, name) for name in images.class_names}
        # any class that is called so then; the one that always was, if there is one
        label_of = {now[name]: k for k, name in enumerate(images.class_names)}
        label_of |= {name: k for k, name in enumerate(images.class_names) if now[name] == name}
        relabeled = {
            kept[index]: None if label is None else label_of[between[label]] for index, label in later.labels.items()
        }
        both, given = {**self.labels, **relabeled}, images.labels.tolist()
        last = {name: None if then is None else later.classes.get(then, then) for name, then in now.items()}
        return Corrections(
            {index: label for index, label in both.items() if label != given[index]},
            {name: then for name, then in last.items() if then != name},
        )

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
        return Corrections(found, self.classes)

    def write(self, path: Path, images: ImageSet) -> None:
        """Write the list; `path` is either complete or as it was. `images` have the given labels."""
        rows: list[tuple[str, ...]] = [COLUMNS]
        names = images.short_names()
        for index, label in sorted(self.labels.items()):
            given = images.class_names[int(images.labels[index])]
            rows.append((names[index], given, "" if label is None else images.class_names[label]))
        write_csv(path, [*rows, *(("", given, now or "") for given, now in self.classes.items())])

    @classmethod
    def read(cls, path: Path, images: ImageSet) -> Corrections:
        """The list that `write` wrote for `images`; one that was made for other labels is refused."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"the list of corrections must be a CSV file, got {path}, which is none")
        index_of = {name: k for k, name in enumerate(images.short_names())}
        class_of = {name: k for k, name in enumerate(images.class_names)}
        labels: dict[int, int | None] = {}
        classes: dict[str, str | None] = {}
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
                if len(cells) != len(COLUMNS):
                    raise ValueError(f"{where} must have {len(COLUMNS)} cells ({', '.join(COLUMNS)}), got {len(cells)}")
                if not cells[0]:
                    _, given, now = cells
                    if given not in class_of or given in classes:
                        raise ValueError(f"{where} must name another training class, got {given!r}")
                    classes[given] = now or None
                    continue
                index, label = _corrected(where, cells, images, index_of, class_of)
                if index in labels:
                    raise ValueError(f"{where} must name a new image, got {cells[0]} again")
                labels[index] = label
        return cls(labels, classes)


def _corrected(
    where: str, cells: list[str], images: ImageSet, index_of: dict[str, int], class_of: dict[str, int]
) -> tuple[int, int | None]:
    """Position and corrected label of one line about an image."""
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
