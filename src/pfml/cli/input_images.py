"""Images that commands are given: unreadable ones are left out, named and counted; images typed before the run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pfml.terminal import print_line, shell_words

if TYPE_CHECKING:
    from rich.console import Console

    from pfml.data.decoding import ImageError

__all__ = [
    "UNREADABLE_STATUS",
    "end_with_unreadable",
    "print_unreadable",
    "refuse_all_unreadable",
    "refuse_images_first",
    "unreadable_content",
]

#: Exit status of a command that has done its work on all files but unreadable ones.
UNREADABLE_STATUS = 3


def print_unreadable(console: Console, failures: Sequence[ImageError]) -> None:
    """A line for each file that was left out."""
    for failure in failures:
        print_line(console, f"left out: {failure}")


def unreadable_content(failures: Sequence[ImageError]) -> list[dict[str, str]]:
    """The files that were left out, for JSON."""
    return [{"path": str(failure.path), "reason": failure.reason} for failure in failures]


def refuse_all_unreadable(failures: Sequence[ImageError], total: int) -> None:
    """Raise an error that lists the files if none of `total` files can be read."""
    from pfml.data.decoding import UnreadableImagesError

    if failures and len(failures) == total:
        raise UnreadableImagesError(list(failures), total)


def end_with_unreadable(failures: Sequence[ImageError]) -> None:
    """End the program with `UNREADABLE_STATUS` if there are such files.

    Not under torchrun, which would end all ranks.
    """
    from pfml.search import ImageShard

    if failures and ImageShard.of_process().is_all:
        sys.exit(UNREADABLE_STATUS)


def refuse_images_first(command: str, run: Path, images: Sequence[Path]) -> None:
    """Raise ValueError if `run` is no model, but the one path of `images` is: they were typed in the other order."""
    if len(images) == 1 and not _has_model(run) and _has_model(images[0]):
        order = shell_words("pfml", command, str(images[0]), str(run))
        raise ValueError(f"the run comes before the images: {order}")


def _has_model(folder: Path) -> bool:
    return any((path / "model.json").is_file() for path in (folder, folder / "model"))
