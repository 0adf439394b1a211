"""The command line `pfml`: what is typed, as a call of one of `COMMANDS`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pfml import memory
from pfml.cli.commands import COMMANDS, overview
from pfml.cli.error_reporting import current_launch, exit_with_error
from pfml.cli.parser import create_parser
from pfml.cli.run_options import parsed_run_values
from pfml.distributed.torchrun import Launch
from pfml.training.shutdown import Interrupted
from pfml.typos import did_you_mean
from pfml.version import __version__

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line with `arguments`, those of the process if None.

    A mistake of the user ends with a sentence and status 2 if the arguments cannot be read, 1 if what they ask for
    cannot be done.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    answer_without_command(arguments)
    name, *rest = arguments
    command = COMMANDS[name]
    try:
        refuse_ranks(name)
        if command.keeps_memory:
            memory.keep_freed_memory()
        with said_to_load(name, rest):
            values = parsed_values(name, rest)
        refuse_missing_folders(values)
        run(name, values)
    except (ValueError, OSError, ImportError) as error:
        exit_with_error(f"pfml {name}", error)
    except KeyboardInterrupt:
        if current_launch().rank == 0:  # torchrun interrupts all
            sys.stderr.write(f"pfml {name}: interrupted\n")
        sys.exit(130)


@contextmanager
def said_to_load(name: str, arguments: list[str]) -> Iterator[None]:
    """A line on the terminal within the block, which loads torch where options are those of a run: two seconds."""
    is_shown = COMMANDS[name].run_config and sys.stderr.isatty() and not {"-h", "--help", "--quiet"} & {*arguments}
    if not is_shown:
        yield
        return
    sys.stderr.write(f"pfml {name}: loading ...\r")
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def answer_without_command(arguments: list[str]) -> None:
    """End the program unless the first of `arguments` is a command; without any, as with --help, after the help."""
    first = arguments[0] if arguments else "--help"
    if first in COMMANDS:
        return
    if first not in ("-h", "--help", "--version"):
        what = f"there is no command {first!r}{did_you_mean(first, COMMANDS)}"
        if first.startswith("-"):
            what = f"a command must come first, got the option {first}"
        exit_with_error("pfml", what, status=2, hint="For all commands: pfml --help")
    print(f"pfml {__version__}" if first == "--version" else overview())
    sys.exit(0)


def parsed_values(name: str, arguments: list[str]) -> dict[str, Any]:
    """The arguments of the function of the command `name`, by what was typed; the program ends here with --help."""
    parser = create_parser(name, COMMANDS[name])
    if COMMANDS[name].run_config:
        return parsed_run_values(parser, arguments)
    return vars(parser.parse_args(arguments))


def refuse_missing_folders(values: dict[str, Any]) -> None:
    """Raise FileNotFoundError if a run that was typed is not there, with the name beside it that was meant."""
    for name in ("run", "resume", "final", "from_run"):
        path = values.get(name)
        if path is not None and not path.exists():
            beside = [each.name for each in path.absolute().parent.iterdir()] if path.absolute().parent.is_dir() else []
            raise FileNotFoundError(f"no such folder: {path}{did_you_mean(path.name, beside)}")


def run(name: str, values: dict[str, Any]) -> None:
    """Call the function of the command `name`; an error that training alone raises is known once that is loaded."""
    try:
        COMMANDS[name].function(**values)
    except RuntimeError as error:
        loop = sys.modules.get("pfml.training.loop")
        if loop is None or not isinstance(error, loop.NonFiniteLossError):
            raise
        exit_with_error(f"pfml {name}", error)
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
