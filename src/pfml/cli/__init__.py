"""The command line `pfml`: what is typed, as a call of one of `COMMANDS`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from pfml import allocator
from pfml.cli.commands import COMMANDS
from pfml.cli.console import remarks_printed
from pfml.cli.last_words import end
from pfml.cli.parser import create_parser, with_config_first, with_run_config, without_code
from pfml.cli.recipe import with_recipe
from pfml.cli.students import with_teachers
from pfml.cli.suggestions import refuse_nothing, with_long_data, with_suggestions

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line with `arguments`, those of the process if None.

    A mistake of the user ends with a sentence and status 2 if the arguments cannot be read, 1 if what they ask for
    cannot be done.
    """
    from pfml.training.interrupts import Interrupted
    from pfml.training.loop import NonFiniteLossError

    parser = create_parser(COMMANDS)
    arguments = sys.argv[1:] if arguments is None else arguments
    name = arguments[0] if arguments else ""
    remarks_printed.set(())
    try:
        refuse_ranks(name)
        if name in COMMANDS and COMMANDS[name].keeps_memory:
            allocator.keep_freed_memory()
        if name in COMMANDS and COMMANDS[name].run_config:
            refuse_nothing(arguments)
            arguments = with_config_first(with_recipe(without_code(with_teachers(with_long_data(arguments)))))
            arguments = with_suggestions(parser, arguments)
        parsed = parser.parse_args(arguments)
        command = COMMANDS[parsed.command]
        values = vars(parser.instantiate(parsed)[name])
        command.function(**with_run_config(values) if command.run_config else values)
    except (ValueError, OSError, ImportError, NonFiniteLossError) as error:
        end(f"pfml {name}", error)
    except Interrupted as interrupt:
        with suppress(OSError):  # the terminal may be gone, whose end is SIGHUP
            sys.stderr.write(f"pfml {name}: {interrupt}\n")
        sys.exit(128 + interrupt.signal)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # torchrun interrupts all
            sys.stderr.write(f"pfml {name}: interrupted\n")
        sys.exit(130)


def refuse_ranks(name: str) -> None:
    """Raise ValueError if torchrun has started several processes of a command that would all do the same."""
    from pfml.distributed.launch import Launch

    size = Launch.of_process().size
    if size > 1 and name in COMMANDS and not COMMANDS[name].ranks:
        known = ", ".join(each for each, command in COMMANDS.items() if command.ranks)
        raise ValueError(
            f"{size} processes cannot share its work: start it without torchrun (those of {known} share theirs)"
        )
