"""`--teachers RUN RUN ...` and `--ensemble N`: students, as options of `pfml train`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pfml.cli.error_reporting import end
from pfml.cli.recipe import config_content, given_value

if TYPE_CHECKING:
    from pfml.cli.parser import Parser

__all__ = ["add_student_arguments", "with_teachers"]

#: What a student follows its teachers by if nobody says otherwise: what validation classes of CUB chose.
DEFAULT_LOSS = "relaxed-contrastive"


def with_teachers(arguments: list[str]) -> list[str]:
    """--teachers A B C as one list, and the loss of a student if none is named.

    Without a value the program ends.
    """
    found: list[str] = []
    teachers: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        option, separator, value = argument.partition("=")
        if option != "--teachers" or value.startswith("["):
            found.append(argument)
            continue
        given = [value] if separator else []
        while not separator and rest and not rest[0].startswith("--"):
            given.append(rest.pop(0))
        if not all(given) or not given:
            end(f"pfml {arguments[0]}", "--teachers must be followed by the folders of runs, got nothing", status=2)
        teachers += given
    if not teachers:
        return found
    loss = [] if _is_named(found) else [f"--loss.name={DEFAULT_LOSS}", "--loss.options={}"]
    return [found[0], *loss, *found[1:], f"--teachers={json.dumps(teachers)}"]


def _is_named(arguments: list[str]) -> bool:
    """Whether a loss is given, or that of the configuration file is a student's."""
    if any(each.partition("=")[0] in ("--loss", "--loss.name") for each in arguments):
        return True
    file = given_value(arguments, "--config")
    if file is None:
        return False
    from pfml.methods import METHODS

    name = config_content(file).get("loss", {}).get("name")
    return name in METHODS and METHODS[name].from_teachers


def add_student_arguments(parser: Parser) -> None:
    """Add what makes an ensemble of a run."""
    parser.add_argument(
        "--ensemble",
        type=int,
        help="N: train N teachers with seeds of their own, then one student that follows them in place of labels; "
        "the folder's model is the student, its teachers are in teachers/.",
    )
    parser.add_argument(
        "--student_epochs", type=int, help="How long the student of --ensemble trains; four times a teacher by default."
    )
