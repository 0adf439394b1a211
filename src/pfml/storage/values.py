"""A value that is known of an image: a text, a number, a date or a list of texts."""

from __future__ import annotations

import math
import re
from datetime import UTC, date, datetime, timedelta
from typing import Any, Literal, TypeAlias, get_args

__all__ = [
    "KINDS",
    "Kind",
    "Value",
    "json_value",
    "kind_of",
    "microseconds",
    "moment",
    "parse_date",
    "parse_number",
    "plain_value",
    "shown_value",
]

Kind = Literal["text", "number", "date", "list"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Value: TypeAlias = str | float | datetime | tuple[str, ...]

EPOCH = datetime(1970, 1, 1)  # dates have no zone: they are as they are written
DATE = re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d:\d\d)?)?")
NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")


def parse_number(text: str) -> float | None:
    """The number of a text, such as 20, -3.5 or 1e6; None if it is none, or larger than float64 can hold."""
    found = float(text) if NUMBER.fullmatch(text) else math.inf
    return found if math.isfinite(found) else None


def parse_date(text: str) -> datetime | None:
    """The date of an ISO text, such as 2024-05-01 or 2024-05-01 12:30, in UTC if it has a zone; None if it is none."""
    if DATE.fullmatch(text) is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is None else found.astimezone(UTC).replace(tzinfo=None)


def microseconds(moment: datetime) -> int:
    """Microseconds since 1970."""
    return (moment - EPOCH) // timedelta(microseconds=1)


def moment(count: int) -> datetime:
    """The date that is `count` microseconds after 1970."""
    return EPOCH + timedelta(microseconds=count)


def json_value(value: Value) -> str | float | list[str]:
    """A value as JSON has it; dates are ISO texts, without a time at midnight."""
    if isinstance(value, datetime):
        is_day = (value.hour, value.minute, value.second, value.microsecond) == (0, 0, 0, 0)
        return value.date().isoformat() if is_day else value.isoformat()
    return list(value) if isinstance(value, tuple) else value


def shown_value(value: Value) -> str:
    """A value for people.

    Example:
        >>> shown_value(12.0), shown_value(("red", "blue")), shown_value(datetime(2024, 5, 1))
        ('12', 'red, blue', '2024-05-01')
    """
    if isinstance(value, float):
        return f"{value:.15g}"
    return ", ".join(value) if isinstance(value, tuple) else str(json_value(value))


def plain_value(value: Any, where: str) -> Value | None:
    """A value as columns hold it, None if it is missing; `where` names it in errors."""
    if value is None or value == "" or isinstance(value, str | datetime):
        if isinstance(value, datetime) and value.tzinfo is not None:
            return value.astimezone(UTC).replace(tzinfo=None)
        return value or None
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(float(value)) < float("inf"):
            raise ValueError(f"{where} must be finite, or None if it is missing, got {value}")
        return float(value)
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value) or None
    raise TypeError(f"{where} must be a text, a number, a date or a list of texts, got {value!r}")


def kind_of(value: Value) -> Kind:
    """What a value is."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, datetime):
        return "date"
    return "list" if isinstance(value, tuple) else "number"
