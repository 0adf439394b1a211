"""Where the files of a data set lie, and the lists among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pfml.data.readers.published import PUBLISHED
from pfml.storage.files import named_errors

__all__ = ["locate", "rows"]


def locate(name: str, root: Path, *layouts: Sequence[str], inside: str = "") -> Path:
    """The folder, `root` or `root / inside`, that holds all files of one of `layouts`.

    Args:
        name: As in `PUBLISHED`.
        root: What the user gave.
        layouts: Each a list of files, relative to the folder; an entry "a|b" is there if either is.
        inside: The folder's name in the published archive, for a user who gives the folder around it.

    Raises:
        FileNotFoundError: Saying which file was expected where, and whose data set it is.
    """
    root = Path(root)
    published = PUBLISHED[name]
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
