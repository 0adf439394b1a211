"""The parser of one command: argparse, with errors of one sentence and help in plain words."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pfml.cli.error_reporting import exit_with_error
from pfml.terminal import shell_words
from pfml.typos import did_you_mean

__all__ = [
    "Command",
    "Parser",
    "add_backend_option",
    "add_device_option",
    "add_expand_option",
    "add_json_option",
    "add_quiet_option",
    "create_parser",
    "with_declared_spelling",
]

#: Type of a value -> its name in help.
METAVARS: dict[Any, str] = {int: "INT", float: "FLOAT", Path: "PATH"}
#: Command -> what a positional argument too many is probably meant as, and the option that takes it.
MEANT = {
    **dict.fromkeys(("train", "tune", "evaluate", "calibrate"), ("images are", "data")),
    "serve": ("an index elsewhere is", "index"),
    "audit": ("another embedder is", "model"),
    "export": ("the destination is", "out"),
}


@dataclass(frozen=True)
class Command:
    """A command of `pfml`.

    Args:
        function: What it does; the first line of its docstring is its help.
        add_arguments: Adds its arguments to a parser.
        run_config: Whether the fields of `RunConfig` are options too, and --config reads them from a file; `function`
            gets them as `config`, and as `given` the names of those that were typed, None if a file or a recipe
            decides the others.
        ranks: Whether several processes that torchrun starts share its work.
        keeps_memory: Whether it keeps the memory that it frees until it ends, which is faster on a CPU.
    """

    function: Callable[..., None]
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run_config: bool = False
    ranks: bool = False
    keeps_memory: bool = True

    @property
    def summary(self) -> str:
        """One line that says what the command does."""
        return (self.function.__doc__ or "").split("\n")[0]


class HelpFormatter(argparse.HelpFormatter):
    """argparse's, with one word for the type of a value, and defaults only where they say something."""

    def _get_help_string(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._HelpAction):
            return "Show this help."
        notes = ["required"] if action.required and action.option_strings else []
        if action.option_strings and action.nargs != 0 and (default := shown_default(action.default)):
            notes.append(f"default: {default}")
        text = f"{action.help} ({', '.join(notes)})" if notes else action.help or ""
        return text.replace("%", "%%")  # which argparse fills in otherwise

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return METAVARS.get(action.type) or super()._get_default_metavar_for_optional(action)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, and suggest the option that was meant."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=HelpFormatter, **options)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        """The values; - and _ are the same in the names of options."""
        return super().parse_args(with_declared_spelling(list(args or ()), self._option_string_actions), namespace)

    def error(self, message: str) -> NoReturn:
        """End the program with status 2."""
        unknown = re.search(r"unrecognized arguments: --([\w.-]+)", message)
        if unknown:
            known = {option.removeprefix("--") for option in self._option_string_actions}
            spelled = {option.replace("-", "_"): option for option in known}
            message += did_you_mean(unknown[1].replace("-", "_"), spelled)
        needed = re.fullmatch(r"argument (--[\w.-]+): expected (?:one|at least one) argument", message)
        if needed and (what := getattr(self._option_string_actions[needed[1]], "takes", "")):
            message = f"{needed[1]} must be followed by {what}"
        message = re.sub(r"^argument (--[\w.-]+): must ", r"\1 must ", message)
        message += _about_stray_argument(self.prog.removeprefix("pfml "), message)
        exit_with_error(self.prog, message, status=2, hint=f"For all options: {self.prog} --help")


def create_parser(name: str, command: Command, **options: Any) -> Parser:
    """The parser of the command `name`."""
    parser = Parser(prog=f"pfml {name}", description=command.summary, **options)
    command.add_arguments(parser)
    return parser


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Add --device."""
    parser.add_argument("--device", default="auto", help="auto (a GPU if there is one), cpu, cuda or cuda:N.")


def add_backend_option(parser: argparse.ArgumentParser) -> None:
    """Add --backend: how an index is searched."""
    parser.add_argument(
        "--backend",
        default="auto",
        help="exact, faiss (exact too), ivf (approximate), or auto: ivf from 100,000 images on, if pfml index has "
        "built its file, else exact.",
    )


def add_expand_option(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add --expand; `verb` says what the command then does."""
    parser.add_argument(
        "--expand",
        type=int,
        nargs="?",
        const=5,
        metavar="K",
        help=f"Query expansion: {verb} with the mean of each query and its K nearest (5), weighted by similarity.",
    )


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="Print the result as JSON; everything else goes to stderr."
    )


def add_quiet_option(parser: argparse.ArgumentParser) -> None:
    """Add --quiet; after --json, where a command has both."""
    rest = ", and what --json asks for" if "--json" in parser._option_string_actions else ""
    parser.add_argument("--quiet", action="store_true", help=f"Print errors only{rest}.")


def with_declared_spelling(arguments: list[str], options: Iterable[str]) -> list[str]:
    """`arguments` with the names of options as `options` has them; values, and what is no option, stay as they are.

    What follows the name of an option after a dot is the name of a parameter, which has no dashes:
    --loss.options.proxies-per-class is --loss.options.proxies_per_class.

    Example:
        >>> with_declared_spelling(["run-1", "--dry_run", "--k=3"], ["--dry-run", "--k"])
        ['run-1', '--dry-run', '--k=3']
    """
    declared = {_plain(option): option for option in options if option.startswith("--")}
    end = arguments.index("--") if "--" in arguments else len(arguments)  # what follows is no option
    return [_declared(one, declared) if one.startswith("--") else one for one in arguments[:end]] + arguments[end:]


def shown_default(value: Any) -> str:
    """A default as it would be typed; "" if there is none, or it is empty."""
    if value is None or value is argparse.SUPPRESS or (not isinstance(value, bool | int | float) and not value):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _declared(argument: str, declared: dict[str, str]) -> str:
    option, equals, value = argument.partition("=")
    group, dot, inner = _plain(option), "", ""
    while group and group not in declared:
        group, _, last = group.rpartition(".")
        dot, inner = ".", f"{last}.{inner}" if inner else last
    return f"{declared[group]}{dot}{inner}{equals}{value}" if group else argument


def _plain(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _about_stray_argument(command: str, message: str) -> str:
    """The option that was meant, to end a message on an argument too many with; empty if there is none."""
    found = re.fullmatch(r"unrecognized arguments: ([^-].*)", message)
    if found is None or command not in MEANT:
        return ""
    what, option = MEANT[command]
    # several arguments come as one text; a name with blanks is one only if it is there
    is_one = " " not in found[1] or Path(found[1]).exists()
    return f"; {what} given as --{option} {shell_words(found[1])}" if is_one else ""
