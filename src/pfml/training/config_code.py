"""What no configuration may say: the names of code.

jsonargparse imports the module that `class_path` names before it decides whether it wants the class, and so it does
with a text in the place of a group of options (`data: module.Class`, `--model settings.yaml`). A configuration is a
file that anybody may have written, so both are refused before the parser sees them.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any, get_type_hints

__all__ = ["CODE_KEYS", "config_groups", "refuse_code", "refuse_code_in_text"]

#: Keys by which jsonargparse imports a class and calls it.
CODE_KEYS = ("class_path", "init_args", "dict_kwargs")


@cache
def config_groups() -> frozenset[str]:
    """The dotted names of those options of a run that are groups of options, such as "data" and "data.noise"."""
    from pfml.training.run import RunConfig

    return frozenset(_groups(RunConfig, ""))


def refuse_code(content: Any, where: str, at: str = "") -> None:
    """Raise ValueError at a key by which the parser would import code, and at a group that is no mapping.

    Args:
        content: What YAML or JSON says.
        where: The file or option that says it, for messages.
        at: The dotted name of `content` itself; "" for a whole configuration.
    """
    if at in config_groups() and content is not None and not isinstance(content, dict):
        raise ValueError(f"{at!r} of {where} must be names and values, got {content!r}: write its options out")
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        name = f"{at}.{key}" if at else str(key)
        _refuse_key(name, where)
        refuse_code(value, where, name)


def refuse_code_in_text(text: str, where: str, at: str = "") -> None:
    """The same for YAML or JSON that is yet to be read; YAMLError if it cannot be, or is not plain.

    The parser reads YAML with a program of its own, and what two programs make of one text may differ: both are looked
    at.
    """
    from jsonargparse import get_loader

    from pfml.training.config_files import plain_yaml

    for content in (plain_yaml(text), get_loader("yaml")(text)):
        refuse_code(content, where, at)


def refuse_code_option(option: str) -> None:
    """Raise ValueError at an option, such as "data.class_path", by which the parser would import code."""
    _refuse_key(option, "the command line")


def _refuse_key(name: str, where: str) -> None:
    for key in CODE_KEYS:
        if key in name.split("."):
            raise ValueError(f"{name!r} in {where} is refused: a configuration has plain values, and {key} names code")


def _groups(config: type, prefix: str) -> list[str]:
    found: list[str] = []
    hints = get_type_hints(config)
    for one in dataclasses.fields(config):
        if dataclasses.is_dataclass(kind := hints[one.name]):
            name = f"{prefix}{one.name}"
            found += [name, *_groups(kind, f"{name}.")]  # type: ignore[arg-type]
    return found
