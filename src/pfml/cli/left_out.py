"""Files that a command leaves out because they cannot be read: named, counted, and said by the exit status."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pfml.cli.console import print_line

if TYPE_CHECKING:
    from rich.console import Console

    from pfml.data.decoding import ImageError

__all__ = ["LEFT_OUT", "end_with_left_out", "print_left_out", "refuse_nothing_readable"]

#: Exit status of a command that has done its work on all files but some.
LEFT_OUT = 3


def print_left_out(console: Console, failures: Sequence[ImageError]) -> None:
    """A line for each file."""
    for failure in failures:
        print_line(console, f"left out: {failure}")


def refuse_nothing_readable(failures: Sequence[ImageError], total: int) -> None:
    """Raise an error that lists the files if these are all there are."""
    from pfml.data.decoding import UnreadableImagesError

    if failures and len(failures) == total:
        raise UnreadableImagesError(list(failures), total)


def end_with_left_out(failures: Sequence[ImageError]) -> None:
    """End the program with `LEFT_OUT` if there are such files; under torchrun, which would end all ranks, do not."""
    from pfml.search import Share

    if failures and Share.of_process().is_whole:
        sys.exit(LEFT_OUT)
