"""How the help of a command looks: kinds of values by one word, defaults as they are typed, no names of Python."""

from __future__ import annotations

import json
import re
from argparse import SUPPRESS, Action, _HelpAction
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from jsonargparse import DefaultHelpFormatter

__all__ = ["PlainHelpFormatter"]

#: Kind of a value -> the word for it.
KINDS: dict[Any, str] = {int: "INT", float: "FLOAT", Path: "PATH", bool: "{true,false}"}


class PlainHelpFormatter(DefaultHelpFormatter):
    """jsonargparse's, but types are one word beside the option, and only defaults that say something are shown."""

    def _get_help_string(self, action: Action) -> str:
        if isinstance(action, _HelpAction):
            return "Show this help."
        # YAML and the command line write null where Python has None
        text = re.sub(r"\bNone\b", "null", action.help or "")
        notes = ["required"] if action.required and action.option_strings else []
        if action.option_strings and action.nargs != 0 and (default := _default(action.default)):
            notes.append(f"default: {default}")
        return f"{text} ({', '.join(notes)})" if notes else text

    def _get_default_metavar_for_optional(self, action: Action) -> str:
        kind = getattr(action, "_typehint", None) or action.type
        return _kind(kind) or super()._get_default_metavar_for_optional(action)


def _kind(kind: Any) -> str:
    """The word for a kind of values; "" if there is none, such as for text."""
    kinds = [one for one in get_args(kind) if one is not NoneType] if get_origin(kind) in (Union, UnionType) else [kind]
    if len(kinds) == 1:
        return KINDS.get(kinds[0], "")
    choices = [_choices(one) for one in kinds]
    return "{" + ",".join(one for several in choices for one in several) + "}" if all(choices) else ""


def _choices(kind: Any) -> list[str]:
    if kind is bool:
        return ["true", "false"]
    return [str(one) for one in get_args(kind)] if get_origin(kind) is Literal else []


def _default(value: Any) -> str:
    """A default as it would be typed; "" if there is none, or it is empty."""
    if value is None or value is SUPPRESS or (not isinstance(value, bool | int | float) and not value):
        return ""
    if isinstance(value, bool | tuple | list):
        return json.dumps(value)
    return str(value)
