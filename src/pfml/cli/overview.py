"""What `pfml` says without a command: its help, its version, or that there is no such command."""

from __future__ import annotations

import shutil
import sys
import textwrap

from pfml.cli.commands import COMMANDS, GROUPS
from pfml.cli.error_reporting import end
from pfml.typos import did_you_mean
from pfml.version import __version__

__all__ = ["answer_without_command", "overview"]

DESCRIPTION = "Potential field based deep metric learning (CVPR 2025)."
OPTIONS = {"-h, --help": "Show this help, or that of a COMMAND.", "--version": "Print the version."}
HINT = "In the names of options - and _ are the same. Completion for a shell: pfml completion --help"
#: Columns of the names.
NAMES = 14
#: Columns of all, in a file and on a wide terminal.
WIDEST = 80


def answer_without_command(arguments: list[str]) -> None:
    """End the program unless the first of `arguments` is a command; without any, as with --help, after the help."""
    first = arguments[0] if arguments else "--help"
    if first in COMMANDS:
        return
    if first not in ("-h", "--help", "--version"):
        what = f"there is no command {first!r}{did_you_mean(first, COMMANDS)}"
        if first.startswith("-"):
            what = f"a command must come first, got the option {first}"
        end("pfml", what, status=2, hint="For all commands: pfml --help")
    print(f"pfml {__version__}" if first == "--version" else overview())
    sys.exit(0)


def overview() -> str:
    """The help: all commands in their groups, a sentence each."""
    lines = ["usage: pfml COMMAND [options]", "", DESCRIPTION]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:"]
        for name, command in commands.items():
            lines += _entry(name, command.summary)
    lines += ["", "options:"]
    for name, text in OPTIONS.items():
        lines += _entry(name, text)
    return "\n".join([*lines, "", *textwrap.wrap(HINT, _width())])


def _entry(name: str, text: str) -> list[str]:
    indent = " " * NAMES
    return textwrap.wrap(text, _width(), initial_indent=f"  {name}".ljust(NAMES), subsequent_indent=indent)


def _width() -> int:
    return min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)
