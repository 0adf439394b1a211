"""The parser of `pfml`: options and configuration files, as the arguments of a command's function."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jsonargparse import ArgumentParser

from pfml.cli.error_reporting import end
from pfml.cli.help_format import PlainHelpFormatter
from pfml.cli.mistaken import about_stray_argument
from pfml.typos import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pfml.cli.commands import Command

__all__ = ["Parser", "create_parser", "options_of", "with_config_first", "with_run_config", "without_code"]

#: What may follow --data.
DATA_TAKES = "a folder with a folder per class in it, a CSV with the columns path and label, or the name of a data set"


class Parser(ArgumentParser):
    """A parser whose errors are one sentence, and suggest the option that was meant."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=PlainHelpFormatter, **options)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: --([\w.-]+)|does not accept option '([\w.-]+)'", message)
        if unknown:
            known = {action.dest for parser in self._with_subparsers() for action in parser._actions}
            message += did_you_mean((unknown[1] or unknown[2]).replace("-", "_"), known)
        message += about_stray_argument(self.prog.removeprefix("pfml "), message)
        end(self.prog, message, status=2, hint=f"For all options: {self.prog} --help")

    def _with_subparsers(self) -> list[ArgumentParser]:
        action = self._subcommands_action
        return [self, *(action.choices.values() if action is not None else [])]


def create_parser(commands: Mapping[str, Command]) -> Parser:
    """The parser of `pfml`, one subcommand for each of `commands`: that of one command alone is made at once."""
    _take_any_text()
    parser = Parser(prog="pfml")
    subcommands = parser.add_subcommands(dest="command")
    for name, command in commands.items():
        # of some sixty options, a usage with all of them would hide what is needed
        usage = f"pfml {name} (--data DATA | --config CONFIG) [options]" if command.run_config else None
        subparser = Parser(description=command.summary, usage=usage)
        if command.run_config:
            _add_run_config(subparser)
        command.add_arguments(subparser)
        subcommands.add_subcommand(name, subparser, help=command.summary)
        subparser.prog = f"pfml {name}"
    return parser


def options_of(parser: Parser, name: str) -> list[str]:
    """The options of the command `name`, as they are declared."""
    action = parser._subcommands_action
    assert action is not None
    return list(action.choices[name]._option_string_actions)


def _take_any_text() -> None:
    """Let a path that is not UTF-8 be an argument: jsonargparse asks YAML for its value first, which fails on it."""
    import yaml
    from jsonargparse import get_loader, set_loader

    set_loader("yaml", get_loader("yaml"), exceptions=(yaml.YAMLError, UnicodeEncodeError))


def _add_run_config(parser: Parser) -> None:
    from pfml.runs.config import RunConfig
    from pfml.runs.config_files import shipped_configs

    shipped = ", ".join(shipped_configs())
    parser.add_argument("--config", action="config", help=f"A YAML file, or a configuration of the package: {shipped}.")
    parser.add_class_arguments(RunConfig)
    for action in parser._actions:
        if "--data" in action.option_strings:  # which `with_long_data` makes --data.name of
            action.metavar = "DATA"
            action.help = f"The images: {DATA_TAKES} (see --data.name); or a YAML or JSON file of all options of data."


def without_code(arguments: list[str]) -> list[str]:
    """`arguments` after refusing what would make the parser import code; files of groups of options are read here.

    The program ends at an option that names code (`--data.class_path`), at a value that does (`--data '{"class_path":
    ...}'`), and at a text in the place of a group, which the parser would take for the name of a class.
    """
    from pfml.runs.config_files import config_groups, refuse_code_option

    found: list[str] = []
    rest = iter(arguments)
    try:
        for argument in rest:
            option, separator, value = argument.partition("=")
            name = option.removeprefix("--")
            if not option.startswith("--") or name == "config":
                found.append(argument)
                continue
            refuse_code_option(name)
            is_group = name in config_groups()
            if not is_group and not name.startswith("loss.options"):
                found.append(argument)
                continue
            value = value if separator else next(rest, "")
            found.append(f"{option}={_plain_value(name, value, is_group=is_group)}")
    except ValueError as error:
        end(f"pfml {arguments[0]}", error, status=2)
    return found


def _plain_value(name: str, value: str, *, is_group: bool) -> str:
    """The value of an option that may have options in it; of a file, its content; ValueError if it names code."""
    import yaml

    from pfml.runs.config_files import refuse_code_in_text

    where = f"--{name}"
    try:
        if is_group and Path(value).suffix in (".yaml", ".yml", ".json"):
            where = value
            value = Path(value).read_text(encoding="utf-8")
        refuse_code_in_text(value, where, name)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{name!r} must be plain YAML or JSON, got {where}, which is not: {error}") from None
    except OSError as error:
        raise ValueError(f"{name!r} must be a file that can be read, got {where}: {error.strerror}") from None
    return value


def with_config_first(arguments: list[str]) -> list[str]:
    """--config moved before the other options, so that these override it wherever it stands; names made files.

    Options of a loss make no sense for another one: those of the configuration are dropped if --loss.name names one.
    """
    configs, others, loss = [], [], None
    rest = iter(arguments)
    for argument in rest:
        option, separator, value = argument.partition("=")
        if option in ("--config", "--loss.name"):
            value = value if separator else next(rest, "")
        if option == "--config":
            configs.append(_config_file(value))
            continue
        others += [f"{option}={value}"] if option == "--loss.name" else [argument]
        loss = value if option == "--loss.name" else loss
    fresh = ["--loss.options={}"] if loss is not None and any(_loss_name(file) != loss for file in configs) else []
    return [*others[:1], *(f"--config={file}" for file in configs), *fresh, *others[1:]]


def with_run_config(values: dict[str, Any]) -> dict[str, Any]:
    """The parsed fields of `RunConfig` put together, and the other options."""
    from pfml.runs.config import RunConfig

    names = {one.name for one in fields(RunConfig)}
    config = RunConfig(**{name: value for name, value in values.items() if name in names})
    others = {name: value for name, value in values.items() if name not in names and name != "config"}
    return {"config": config, **others}


def _loss_name(config_file: str) -> str | None:
    """The loss that a configuration names; None if it cannot be read, which the parser will say."""
    import yaml

    from pfml.runs.config_files import plain_yaml

    try:
        return plain_yaml(Path(config_file).read_text(encoding="utf-8"))["loss"]["name"]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return None


def _config_file(name: str) -> str:
    from pfml.runs.config_files import shipped_configs

    shipped = shipped_configs()
    file = name if Path(name).exists() else str(shipped.get(name, ""))
    if not file:
        hint = did_you_mean(name, shipped) or f"; the package has {', '.join(shipped)}"
        end("pfml", f"{name!r} is neither a file nor a configuration of the package{hint}", status=2)
    _refuse_hostile_yaml(file)
    return file


def _refuse_hostile_yaml(config_file: str) -> None:
    """End the program at a file that would take all memory or import code, or was damaged since a run wrote it.

    What else is wrong with it, the parser says.
    """
    import yaml

    from pfml.runs.config_files import read_sealed_text, refuse_code_in_text

    try:
        refuse_code_in_text(read_sealed_text(Path(config_file)), config_file)
    except (OSError, UnicodeDecodeError):
        return
    except yaml.YAMLError as error:
        end("pfml", f"{config_file} must be a configuration: {error}", status=2)
    except ValueError as error:
        end("pfml", error, status=2)
