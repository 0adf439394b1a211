"""The command line `pfml`: what is typed, as a call of one of `COMMANDS`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from pfml import memory
from pfml.cli.commands import COMMANDS
from pfml.cli.console import remarks_printed
from pfml.cli.error_reporting import end
from pfml.cli.overview import answer_without_command
from pfml.cli.parser import create_parser, options_of, with_config_first, with_run_config, without_code
from pfml.cli.recipe import with_recipe
from pfml.cli.spelling import with_declared_spelling
from pfml.cli.students import with_teachers
from pfml.cli.suggestions import refuse_nothing, with_long_data, with_suggestions
from pfml.distributed.torchrun import Launch

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line with `arguments`, those of the process if None.

    A mistake of the user ends with a sentence and status 2 if the arguments cannot be read, 1 if what they ask for
    cannot be done.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    answer_without_command(arguments)
    name = arguments[0]
    command = COMMANDS[name]
    remarks_printed.set(())
    try:
        refuse_ranks(name)
        if command.keeps_memory:
            memory.keep_freed_memory()
        run(name, parsed_values(name, arguments))
    except (ValueError, OSError, ImportError) as error:
        end(f"pfml {name}", error)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # torchrun interrupts all
            sys.stderr.write(f"pfml {name}: interrupted\n")
        sys.exit(130)


def parsed_values(name: str, arguments: list[str]) -> dict[str, Any]:
    """The arguments of the function of the command `name`, by what was typed; the program ends here with --help."""
    command = COMMANDS[name]
    parser = create_parser({name: command})
    arguments = with_declared_spelling(arguments, options_of(parser, name))
    if command.run_config:
        refuse_nothing(arguments)
        arguments = with_config_first(with_recipe(without_code(with_teachers(with_long_data(arguments)))))
        arguments = with_suggestions(parser, arguments)
    values = vars(parser.instantiate(parser.parse_args(arguments))[name])
    return with_run_config(values) if command.run_config else values


def run(name: str, values: dict[str, Any]) -> None:
    """Call the function of the command `name`; errors that only training raises are known once it is loaded."""
    from pfml.training.loop import NonFiniteLossError
    from pfml.training.shutdown import Interrupted

    try:
        COMMANDS[name].function(**values)
    except NonFiniteLossError as error:
        end(f"pfml {name}", error)
    except Interrupted as interrupt:
        with suppress(OSError):  # the terminal may be gone, whose end is SIGHUP
            sys.stderr.write(f"pfml {name}: {interrupt}\n")
        sys.exit(128 + interrupt.signal)


def refuse_ranks(name: str) -> None:
    """Raise ValueError if torchrun has started several processes of a command that would all do the same."""
    size = Launch.of_process().size
    if size > 1 and not COMMANDS[name].ranks:
        known = ", ".join(each for each, command in COMMANDS.items() if command.ranks)
        raise ValueError(
            f"{size} processes cannot share its work: start it without torchrun (those of {known} share theirs)"
        )
