"""One's own images: a CSV table of paths and labels."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from pfml.data.image_set import ImageSet, Protocol, RetrievalData
from pfml.data.splits import as_divided, class_order, divided

__all__ = ["listed_images", "read_table", "splits_of", "table_lines"]

SPLITS = ("train", "test", "query", "gallery", "validation")


def read_table(root: Path, *, split: Protocol = "classes", seed: int | None = 0) -> RetrievalData:
    """The images of a CSV table with the columns `path` and `label`, and optionally `split`; others are ignored.

    Paths are relative to the folder of the table. The column `split` is train, test, query, gallery or validation,
    where query is another word for test that needs a gallery. Without it the images are divided at random. Classes are
    sorted, by number if all labels are whole numbers.

    Args:
        root: The CSV file, in UTF-8.
        split: What is held out, see `pfml.data.splits.divided`; a column of that name decides by itself what it is.
        seed: Of the division.
    """
    file = _table(root)
    parts: dict[str, list[tuple[Path, str]]] = {}
    for path, label, part in _rows(file):
        parts.setdefault(part, []).append((path, label))
    remarks = _repetitions(parts)
    if set(parts) <= {""}:
        everything = parts.get("", [])
        classes = _classes(everything)
        if len(classes) < 2:
            raise ValueError(f"{file} must list at least 2 classes, got {len(classes)}")
        return divided(_image_set(everything, classes), "csv", split, seed=seed, remarks=remarks)
    return _divided(file, parts, split, seed, remarks)


def listed_images(root: Path) -> tuple[ImageSet, tuple[str, ...]]:
    """All images of such a table, whatever their split and however many classes, and remarks on them.

    The first row on a file counts.

    Args:
        root: The CSV file, in UTF-8.
    """
    rows = [(path, label) for path, label, _ in _rows(_table(root))]
    if not rows:
        raise ValueError(f"{root} must list an image at least, got none below its first line")
    first = list(dict(reversed(rows)).items())[::-1]
    return _image_set(first, _classes(first)), _repetitions({"": rows})


def splits_of(root: Path) -> set[str]:
    """The splits that rows of such a table have; "" if it has no such column."""
    return {split for _, _, split in _rows(_table(root))}


def _table(root: Path) -> Path:
    file = Path(root)
    if not file.is_file():
        raise FileNotFoundError(f"the table of images must be a CSV file, got {file}, which is none")
    return file


def _divided(
    file: Path,
    parts: dict[str, list[tuple[Path, str]]],
    split: Protocol,
    seed: int | None,
    remarks: tuple[str, ...],
) -> RetrievalData:
    train, gallery, validation = (parts.get(part, []) for part in ("train", "gallery", "validation"))
    test = parts.get("test", []) + parts.get("query", [])
    if not test and split != "none":
        raise ValueError(f"{file} must have rows whose split is test (or query, with a gallery), got none")
    if "query" in parts and not gallery:
        raise ValueError(f"{file} must have rows whose split is gallery, in which its queries are searched, got none")
    if not train and split != "none":
        remarks = (*remarks, f"no row of {file} has the split train, so that one can evaluate on it but not train")
    searched = _classes(test + gallery)
    divided_parts = {"train": _image_set(train, _classes(train)), "test": _image_set(test, searched)}
    divided_parts |= {"gallery": _image_set(gallery, searched)} if gallery else {}
    divided_parts |= {"validation": _image_set(validation, _classes(validation))} if validation else {}
    return as_divided("csv", divided_parts, split, where=str(file), seed=seed, remarks=remarks)


def _rows(file: Path) -> Iterator[tuple[Path, str, str]]:
    """Path, label and split ("" if there is no such column) of each row."""
    for line, header, cells in table_lines(file, ("path", "label")):
        yield _row(f"{file}, line {line}", file.parent, header, cells)


def table_lines(file: Path, required: Sequence[str]) -> Iterator[tuple[int, list[str], list[str]]]:
    """The number of each line of a CSV table, the columns by its first line, and the cells, all stripped.

    Empty lines are left out.

    Args:
        file: In UTF-8.
        required: Columns that it must have.
    """
    with file.open(encoding="utf-8-sig", newline="") as text:
        table = csv.reader(text)
        try:
            header = [cell.strip() for cell in next(table, [])]
            for column in ("path", "label", "split"):
                if header.count(column) > 1:
                    raise ValueError(f"{file} must have one column {column}, got {header.count(column)}")
            for column in required:
                if column not in header:
                    found = ", ".join(cell for cell in header if cell) or "none"
                    raise ValueError(f"{file} must have the column {column} in its first line, got {found}")
            for cells in table:
                if any(cell.strip() for cell in cells):
                    if len(cells) != len(header):
                        expected = f"{len(header)} cells like the first line"
                        raise ValueError(f"{file}, line {table.line_num} must have {expected}, got {len(cells)}")
                    yield table.line_num, header, [cell.strip() for cell in cells]
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} must be text in UTF-8, got other bytes ({error.reason})") from None
        except csv.Error as error:
            raise ValueError(f"{file}, line {table.line_num} must be a line of a CSV table: {error}") from None


def _row(where: str, folder: Path, header: list[str], cells: list[str]) -> tuple[Path, str, str]:
    row = dict(zip(header, cells, strict=True))
    for column in ("path", "label", "split"):
        if row.get(column) == "":
            raise ValueError(f"{where} must have a {column}, got an empty cell")
    if "split" in row and row["split"] not in SPLITS:
        raise ValueError(f"{where} must have a split of {', '.join(SPLITS)}, got {row['split']!r}")
    return folder / row["path"], row["label"], row.get("split", "")


def _classes(listed: list[tuple[Path, str]]) -> list[str]:
    return class_order(label for _, label in listed)


def _image_set(listed: list[tuple[Path, str]], classes: list[str]) -> ImageSet:
    position = {label: k for k, label in enumerate(classes)}
    labels = torch.tensor([position[label] for _, label in listed], dtype=torch.int64)
    return ImageSet(tuple(path for path, _ in listed), labels, tuple(classes))


def _repetitions(parts: dict[str, list[tuple[Path, str]]]) -> tuple[str, ...]:
    """A remark on files that are listed more than once: an image finds its copy at distance 0."""
    counts = Counter(path for listed in parts.values() for path, _ in listed)
    twice = [str(path) for path, count in counts.items() if count > 1]
    return (f"{len(twice):,} files are listed more than once, the first is {twice[0]}",) if twice else ()
