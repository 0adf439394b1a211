"""Names of options in either spelling: - and _ are the same, as --evaluate-every and --evaluate_every."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["with_declared_spelling"]


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


def _declared(argument: str, declared: dict[str, str]) -> str:
    option, equals, value = argument.partition("=")
    group, dot, inner = _plain(option), "", ""
    while group and group not in declared:
        group, _, last = group.rpartition(".")
        dot, inner = ".", f"{last}.{inner}" if inner else last
    return f"{declared[group]}{dot}{inner}{equals}{value}" if group else argument


def _plain(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")
