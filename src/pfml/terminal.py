"""Text for a terminal, which obeys what it is sent: names of files and classes may hold commands to it."""

from __future__ import annotations

import os
import re
import shlex
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["plain_console", "print_line", "readable", "shell_words", "visible"]

#: Characters that move the cursor, color, rename or turn what follows, and bytes of a name that are no UTF-8; a line
#: break and a tab do no harm.
COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""The text with every character that a terminal would obey written out.

    Example:
        >>> visible("finch\x1b[2J")
        'finch\\x1b[2J'
    """
    return COMMANDS.sub(lambda found: _written_out(found[0]), text)


def shell_words(*words: str) -> str:
    r"""Words as a person types them into a shell, also those that hold what a terminal would obey.

    Example:
        >>> print(shell_words("pfml", "train", "--data", "my photos", "caf\udce9"))
        pfml train --data 'my photos' $'caf\xe9'
    """
    return " ".join(map(_shell_word, words))


def _shell_word(word: str) -> str:
    if not COMMANDS.search(word):
        return shlex.quote(word)

    def byte_by_byte(found: re.Match[str]) -> str:
        return "".join(f"\\x{byte:02x}" for byte in found[0].encode("utf-8", "surrogateescape"))

    plain = word.replace("\\", r"\\").replace("'", r"\'")
    return f"$'{COMMANDS.sub(byte_by_byte, plain)}'"


def _written_out(character: str) -> str:
    """A byte that is no UTF-8 as that byte, which is how file names are shown everywhere."""
    is_byte = "\udc80" <= character <= "\udcff"
    return f"\\x{ord(character) - 0xDC00:02x}" if is_byte else character.encode("unicode_escape").decode("ascii")


def readable(text: str) -> str:
    """Text with names of files in it as every page and terminal can show it: bytes that are no UTF-8 are escaped."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def plain_console(width: int | None = None, *, stderr: bool = False) -> Console:
    """A console that shows all text as `visible` has it, and commands of its own only."""
    from collections.abc import Iterable

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class PlainConsole(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                # what has `control` is rich's own, such as the movements of a progress bar
                yield segment if segment.control else segment._replace(text=visible(segment.text))

    # Jupyter asks the commands of a cell for colors, which rich takes for a terminal: bars would fill the notebook
    in_notebook = "JPY_PARENT_PID" in os.environ and not (sys.stderr if stderr else sys.stdout).isatty()
    return PlainConsole(width=width, stderr=stderr, force_terminal=False if in_notebook else None)


def print_line(console: Console, line: str) -> None:
    """Print `line` as it is, on one line."""
    # A path may hold brackets, which rich would read as markup, and may not be broken.
    console.print(readable(line), markup=False, highlight=False, soft_wrap=True)
