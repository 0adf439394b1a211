"""`pfml completion`: what a shell needs to complete commands, options and their values."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pfml.cli.parser import Parser

__all__ = ["add_completion_arguments", "completion"]


def completion(shell: str) -> None:
    """Print a script by which bash or zsh completes commands and options; docs/COMMANDS.md says where to put it."""
    from pfml.cli.commands import COMMANDS
    from pfml.cli.parser import create_parser

    if find_spec("shtab") is None:
        raise ImportError("pfml completion needs the package shtab: pip install shtab")
    print(create_parser(COMMANDS).get_completion_script(f"shtab-{shell}"))


def add_completion_arguments(parser: Parser) -> None:
    """Add the arguments of `completion`."""
    parser.add_argument("shell", choices=("bash", "zsh"), help="Which shell.")
