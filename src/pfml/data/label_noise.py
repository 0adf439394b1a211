"""Label noise for experiments: which images get which false class, and a record of it."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import torch
from torch import Tensor

from pfml.data.image_set import ImageSet
from pfml.data.seeding import generator_for
from pfml.storage.files import named_errors, write_csv
from pfml.typos import did_you_mean

__all__ = ["VARIANTS", "Corruption", "LabelNoise", "corrupt"]

VARIANTS = ("exact", "with-own", "bernoulli", "list")
COLUMNS = ("image", "true class", "given class")
TABLE = "a CSV table in UTF-8"


@dataclass(frozen=True)
class LabelNoise:
    """How many labels are wrong, and how they are drawn.

    Args:
        rate: Fraction of the images in [0, 1].
        variant: "exact": round(rate n) images get a class that is uniform over the others. "with-own": round(rate n)
            images get a class that is uniform over all, their own included, so that a few stay right. "bernoulli":
            each image with probability `rate` gets one of the other classes. "list": the labels of `file`.
        seed: Of the draw, apart from the seed of the training.
        file: For "list": a CSV table of path and label without header (or with the header path,label), such as the
            lists that PRISM's authors published. Images are found by their file name and folder, whatever the rest
            of the path and the suffix. A label is a class name or a number that counts the classes from 0 or from 1:
            whichever gives more images their true class, since most labels in such a list are true. A number that is
            no class, of which the published CUB list has some, leaves the image its true label, as does an image
            that is not listed; a remark says how many.
    """

    rate: float = 0.0
    variant: str = "exact"
    seed: int = 0
    file: Path | None = None

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(
                f"the variant of label noise must be one of {', '.join(VARIANTS)}, got {self.variant!r}"
                + did_you_mean(self.variant, VARIANTS)
            )
        if not 0 <= self.rate <= 1:
            raise ValueError(f"the rate of label noise must lie in [0, 1], got {self.rate}")
        if (self.variant == "list") != (self.file is not None):
            raise ValueError(
                f"label noise must have a file if and only if it is a list, got {self.variant}, {self.file}"
            )
        if self.variant == "list" and self.rate:
            raise ValueError(f"the rate of label noise must stay 0 for a list, which has its own, got {self.rate}")


@dataclass(frozen=True, eq=False)
class Corruption:
    """The images whose labels were replaced, by a random draw or by a list.

    Args:
        indices: (K,) int64, positions in the image set, ascending.
        true_labels: (K,) what they show.
        given_labels: (K,) what they are called; equal to the true ones only in the variant "with-own".
        image_names: What the K images are called, without the folders that all images of the set share.
        class_names: Of the image set.
        remarks: Sentences that a user should read.
    """

    indices: Tensor
    true_labels: Tensor
    given_labels: Tensor
    image_names: tuple[str, ...]
    class_names: tuple[str, ...]
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def wrong(self) -> int:
        """The number of labels that are wrong."""
        return int((self.true_labels != self.given_labels).sum())

    def apply(self, images: ImageSet) -> ImageSet:
        """`images`, which must be those that were corrupted, with the given labels."""
        labels = images.labels.clone()
        labels[self.indices] = self.given_labels
        return images.with_labels(labels)

    def write(self, path: Path) -> None:
        """Write a CSV table of image, true class and given class; `path` is either complete or as it was."""
        labels = zip(self.image_names, self.true_labels, self.given_labels, strict=True)
        rows = ((name, self.class_names[true], self.class_names[given]) for name, true, given in labels)
        write_csv(path, [COLUMNS, *rows])

    @classmethod
    def read(cls, path: Path, images: ImageSet) -> Corruption:
        """The corruption of `images`, with their true labels, that `write` wrote to `path`."""
        index_of = {name: k for k, name in enumerate(images.short_names())}
        class_of = {name: k for k, name in enumerate(images.class_names)}
        given_labels: dict[int, int] = {}
        with named_errors(path, TABLE), Path(path).open(encoding="utf-8", newline="") as text:
            table = csv.reader(text)
            header = tuple(next(table, ()))
            if header != COLUMNS:
                raise ValueError(
                    f"{path} must have the columns {', '.join(COLUMNS)}, got {', '.join(header) or 'none'}"
                )
            for cells in table:
                index, given = _recorded(f"{path}, line {table.line_num}", cells, images, index_of, class_of)
                if index in given_labels:
                    raise ValueError(f"{path}, line {table.line_num} must name a new image, got {cells[0]} again")
                given_labels[index] = given
        return _corruption(images, given_labels)


def corrupt(images: ImageSet, noise: LabelNoise) -> tuple[ImageSet, Corruption]:
    """`images` with label noise as `noise` says, and the record of them.

    Give it the images that train, after validation classes were set apart, so that these stay clean. A published list
    counts all training classes, and needs data without validation classes.
    """
    if noise.variant == "list":
        assert noise.file is not None
        corruption = _listed(images, noise.file)
    else:
        corruption = _corruption(images, _drawn(images, noise))
    return corruption.apply(images), corruption


def _drawn(images: ImageSet, noise: LabelNoise) -> dict[int, int]:
    """The new label of each image that is chosen."""
    count, classes = len(images), images.num_classes
    if noise.rate > 0 and classes < 2:
        raise ValueError(f"label noise must have at least 2 classes to choose from, got {classes}")
    if not noise.rate:
        return {}
    random = generator_for(noise.seed, "label noise", 0)
    if noise.variant == "bernoulli":
        chosen = (torch.rand(count, generator=random, dtype=torch.float64) < noise.rate).nonzero()[:, 0]
    else:
        chosen = torch.randperm(count, generator=random)[: round(noise.rate * count)].sort().values
    # a step of 1 to C - 1 classes, around the circle of C, reaches each other class equally often
    smallest = 0 if noise.variant == "with-own" else 1
    steps = torch.randint(smallest, classes, (len(chosen),), generator=random)
    given = (images.labels[chosen] + steps) % classes
    return dict(zip(chosen.tolist(), given.tolist(), strict=True))


def _corruption(images: ImageSet, given_labels: dict[int, int], remarks: Sequence[str] = ()) -> Corruption:
    indices = torch.tensor(sorted(given_labels), dtype=torch.int64)
    names = images.short_names()
    return Corruption(
        indices,
        images.labels[indices],
        torch.tensor([given_labels[k] for k in indices.tolist()], dtype=torch.int64),
        tuple(names[k] for k in indices.tolist()),
        images.class_names,
        tuple(remarks),
    )


def _recorded(
    where: str, cells: list[str], images: ImageSet, index_of: dict[str, int], class_of: dict[str, int]
) -> tuple[int, int]:
    """Index and given label of one line of a record."""
    if len(cells) != len(COLUMNS):
        raise ValueError(f"{where} must have {len(COLUMNS)} cells ({', '.join(COLUMNS)}), got {len(cells)}")
    name, true, given = cells
    if name not in index_of:
        raise ValueError(f"{where} must name an image of the set, got {name!r}")
    for kind, label in (("true", true), ("given", given)):
        if label not in class_of:
            raise ValueError(f"{where} must have a {kind} class of the set, got {label!r}")
    if class_of[true] != images.labels[index_of[name]]:
        shown = images.class_names[int(images.labels[index_of[name]])]
        raise ValueError(f"{where} must have the true class of {name}, which is {shown}, got {true}")
    return index_of[name], class_of[given]


def _listed(images: ImageSet, file: Path) -> Corruption:
    """The labels of a published list that differ from the true ones."""
    index_of = {_folder_and_stem(name): k for k, name in enumerate(map(images.name_of, range(len(images))))}
    if len(index_of) != len(images):
        raise ValueError(
            f"a noise list needs images that differ in folder and file name, got {len(index_of)} of {len(images)}"
        )
    rows = _list_rows(file)
    found = {
        index_of[key]: label
        for key, label in ((_folder_and_stem(path), label) for path, label in rows)
        if key in index_of
    }
    if not found:
        raise ValueError(
            f"{file} must list images of the set by folder and file name, got none of {len(rows)}; "
            f"its first is {rows[0][0] if rows else 'missing'}, the first of the set {images.name_of(0)}"
        )
    labels = _as_classes(found, images)
    given = {k: label for k, label in labels.items() if label is not None and label != images.labels[k]}
    strays = sorted({found[k] for k, label in labels.items() if label is None})
    remarks = []
    if strays:
        number = sum(label is None for label in labels.values())
        example = ", ".join(strays[:3])
        remarks.append(f"{file} gives {number:,} images a label that is no class ({example}): they keep their true one")
    if len(found) < len(images):
        unlisted = f"{len(images) - len(found):,} of the {len(images):,} images"
        remarks.append(f"{file} does not list {unlisted}: they keep their true label")
    if len(rows) > len(found):
        remarks.append(f"{len(rows) - len(found):,} of the {len(rows):,} lines of {file} are about other images")
    return _corruption(images, given, remarks)


def _list_rows(file: Path) -> list[tuple[str, str]]:
    with named_errors(file, TABLE), Path(file).open(encoding="utf-8-sig", newline="") as text:
        table = csv.reader(text)
        rows = []
        for cells in table:
            if len(cells) != 2:
                raise ValueError(f"{file}, line {table.line_num} must have a path and a label, got {len(cells)} cells")
            rows.append((cells[0].strip(), cells[1].strip()))
    return rows[1:] if rows and rows[0] == ("path", "label") else rows


def _folder_and_stem(name: str) -> tuple[str, str]:
    path = PurePath(name)
    return path.parent.name, path.stem


def _as_classes(found: dict[int, str], images: ImageSet) -> dict[int, int | None]:
    """The class of each listed label, None if it is none."""
    by_name = {name: k for k, name in enumerate(images.class_names)}
    by_number = [{str(k + first): k for k in range(images.num_classes)} for first in (0, 1)]
    readings = [{k: by.get(label) for k, label in found.items()} for by in (by_name, *by_number)]
    true = images.labels.tolist()
    return max(readings, key=lambda reading: sum(label == true[k] for k, label in reading.items()))
