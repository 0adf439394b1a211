"""Published data sets: where their files lie, the lists among them, and a remark where a copy has another size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pfml.data.image_set import ImageSet, RetrievalData
from pfml.storage.files import named_errors

__all__ = ["Benchmark", "locate", "rows", "with_count_remarks"]


@dataclass(frozen=True)
class Benchmark:
    """A published data set: its name, its authors, and the sizes that papers report.

    Args:
        title: As papers call it.
        authors: Who to get it from.
        train, test, gallery: Images and classes of each part.
        recall_at: The K of Recall@K that papers report.
    """

    title: str
    authors: str
    train: tuple[int, int]
    test: tuple[int, int]
    gallery: tuple[int, int] | None = None
    recall_at: tuple[int, ...] = (1, 2, 4, 8)


def with_count_remarks(data: RetrievalData, published: Benchmark) -> RetrievalData:
    """`data`, with a remark for each count that differs from the published one."""
    remarks = list(data.remarks)
    parts: list[tuple[str, ImageSet | None, tuple[int, int] | None]] = [
        ("training", data.train, published.train),
        ("test" if published.gallery is None else "query", data.test, published.test),
        ("gallery", data.gallery, published.gallery),
    ]
    for part, images, counts in parts:
        if images is not None and counts is not None:
            found = (len(images), images.num_classes)
            for kind, expected, number in zip(("images", "classes"), counts, found, strict=True):
                if number != expected:
                    remarks.append(_sentence(published.title, f"{part} {kind}", expected, number))
    return replace(data, remarks=tuple(remarks))


def _sentence(title: str, what: str, expected: int, found: int) -> str:
    difference = abs(expected - found)
    verb = "is" if difference == 1 else "are"
    trouble = "missing" if found < expected else "too many"
    return (
        f"{title} has {expected:,} {what}, found {found:,}: {difference:,} {verb} {trouble}; "
        "numbers will not be comparable"
    )


def locate(published: Benchmark, root: Path, *layouts: Sequence[str], inside: str = "") -> Path:
    """The folder, `root` or `root / inside`, that holds all files of one of `layouts`.

    Args:
        published: The data set.
        root: What the user gave.
        layouts: Each a list of files, relative to the folder; an entry "a|b" is there if either is.
        inside: The folder's name in the published archive, for a user who gives the folder around it.

    Raises:
        FileNotFoundError: Saying which file was expected where, and whose data set it is.
    """
    root = Path(root)
    origin = f"Get {published.title} from its authors ({published.authors}), or give another root."
    if not root.is_dir():
        raise FileNotFoundError(f"the root of {published.title} must be a folder, got {root}, which is none. {origin}")
    folders = [root, root / inside] if inside else [root]
    for folder in folders:
        if any(not _missing(folder, layout) for layout in layouts):
            return folder
    # the layout that comes nearest is the one the user has
    folder, layout = min(
        ((folder, layout) for folder in folders for layout in layouts),
        key=lambda pair: len(_missing(*pair)) / len(pair[1]),
    )
    others = "".join(
        f"; or instead {', '.join(_words(file) for file in other)}" for other in layouts if other != layout
    )
    around = f" or in a folder {inside} in it" if inside else ""
    raise FileNotFoundError(
        f"{published.title} must have {', '.join(_words(file) for file in layout)} in {root}{around}{others}, "
        f"but {_words(_missing(folder, layout)[0])} is not in {folder}. {origin}"
    )


def _missing(folder: Path, layout: Sequence[str]) -> list[str]:
    return [file for file in layout if not any((folder / either).is_file() for either in file.split("|"))]


def _words(file: str) -> str:
    return file.replace("|", " or ")


def rows(file: Path, columns: Sequence[str], *, header_lines: int = 0) -> Iterator[list[str]]:
    """The lines of a list, split at blanks into `columns`; empty lines are skipped.

    The first column, or the last if it is called "path", may hold blanks: file names do.
    """
    blanks_in_last = columns[-1] == "path"
    with named_errors(file, "text in UTF-8"):
        text = file.read_text(encoding="utf-8-sig")
    for number, line in enumerate(text.splitlines(), 1):
        if number <= header_lines or not line.strip():
            continue
        cells = line.split(None, len(columns) - 1) if blanks_in_last else line.rsplit(None, len(columns) - 1)
        if len(cells) != len(columns):
            raise ValueError(
                f"{file}, line {number} must have {len(columns)} columns ({', '.join(columns)}), got {line!r}"
            )
        yield [cell.strip() for cell in cells]
