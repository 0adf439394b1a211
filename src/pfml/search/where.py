"""The filter of a search: a small language of comparisons of columns, parsed here and evaluated column by column.

    price < 20 and brand in (Acme, 'Blue Note')
    taken >= 2024-05-01 and not (tags contains draft or path contains '2019/')

    filter      = all ("or" all)*
    all         = term ("and" term)*
    term        = "not" term | "(" filter ")" | column comparison
    comparison  = ("=" | "!=" | "<" | "<=" | ">" | ">=") value | ["not"] "in" "(" value ("," value)* ")"
                | ["not"] "contains" value | "is" ["not"] "missing"

Columns and values are bare words or quoted texts, in which a doubled quote stands for itself. A filter is true or false
of every image. A missing value satisfies no comparison; !=, not in and not contains are the opposites of =, in and
contains, and so hold for it. A date without a time is the whole day: `taken <= 2024-05-01` includes its evening.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, Protocol, TypeAlias

import torch
from torch import Tensor

from pfml.storage.columns import Column, DateColumn, ListColumn, NumberColumn, TextColumn
from pfml.storage.values import Kind, microseconds, parse_date, parse_number
from pfml.typos import did_you_mean

__all__ = ["Columns", "Term", "WhereError", "about_columns", "parse_where"]

#: Characters of a filter.
LONGEST = 10_000
#: Parentheses and "not" within each other.
DEEPEST = 50
#: Columns that a message lists.
LISTED = 12

TOKEN = re.compile(
    r"(?P<space>\s+)|(?P<quoted>'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\")|(?P<sign><=|>=|!=|==|<>|[=<>(),])"
    r"|(?P<word>[^\s'\"=<>!(),]+)"
)
ORDERS: dict[str, Callable[..., Tensor]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
SAME = {"==": "=", "<>": "!="}
#: What each kind of column can be asked.
COMPARISONS: dict[Kind, tuple[str, ...]] = {
    "text": ("=", *ORDERS, "in", "contains"),
    "number": ("=", *ORDERS, "in"),
    "date": ("=", *ORDERS, "in"),
    "list": ("contains",),
}


class WhereError(ValueError):
    """A filter that cannot be applied; the message says where, and names the column.

    Args:
        reason: What must hold, and what was got.
        text: The filter.
        position: Of the first character that is wrong, from 0.
    """

    def __init__(self, reason: str, text: str, position: int) -> None:
        self.reason, self.text, self.position = reason, text, position
        there = (
            f"at character {position + 1}: {text[position : position + 30]}" if position < len(text) else "at the end"
        )
        super().__init__(f"{reason} ({there})")


class Columns(Protocol):
    """What a filter is applied to."""

    @property
    def kinds(self) -> Mapping[str, Kind]:
        """Column -> what it holds."""

    def matching(self, name: str, test: Callable[[Column], Tensor]) -> Tensor:
        """(rows,) bool: where the column passes a test, which gives a bool per row of a column."""


@dataclass(frozen=True)
class Comparison:
    """A column compared with values.

    Args:
        column: Its name.
        comparison: A row of `COMPARISONS`, or "missing".
        values: Of the column's type: texts, numbers, or (first, last) microseconds of dates.
    """

    column: str
    comparison: str
    values: tuple[Any, ...] = ()

    def mask(self, columns: Columns) -> Tensor:
        """(rows,) bool."""
        if self.comparison == "missing":
            return ~columns.matching(self.column, lambda column: column.present())
        return columns.matching(self.column, self._holds)

    def _holds(self, column: Column) -> Tensor:
        if isinstance(column, TextColumn):
            return _truth(column.texts, self._text_test()).index_select(0, column.codes + 1)
        if isinstance(column, ListColumn):
            found = torch.zeros(len(column), dtype=torch.bool)
            found[column.owners()[_truth(column.texts, set(self.values).__contains__)[1:][column.codes.long()]]] = True
            return found
        if isinstance(column, NumberColumn):
            if self.comparison in ORDERS:
                return ORDERS[self.comparison](column.values, self.values[0])
            return torch.isin(column.values, torch.tensor(self.values, dtype=torch.float64))
        return self._dates(column)

    def _text_test(self) -> Callable[[str], bool]:
        values = self.values
        if self.comparison == "contains":
            return lambda text: str(values[0]) in text
        if self.comparison in ORDERS:
            order = ORDERS[self.comparison]
            return lambda text: bool(order(text, values[0]))
        return set(values).__contains__

    def _dates(self, column: DateColumn) -> Tensor:
        values, has = column.values, column.present()
        found = torch.zeros(len(column), dtype=torch.bool)
        for first, last in self.values:
            # before the first moment of the day, or after its last
            at = last if self.comparison in ("<=", ">") else first
            found |= (
                ORDERS[self.comparison](values, at)
                if self.comparison in ORDERS
                else (values >= first) & (values <= last)
            )
        return found & has


@dataclass(frozen=True)
class Not:
    """The opposite of a term."""

    term: Term

    def mask(self, columns: Columns) -> Tensor:
        """(rows,) bool."""
        return ~self.term.mask(columns)


@dataclass(frozen=True)
class Terms:
    """Terms that must all hold ("and"), or one of which must ("or")."""

    terms: tuple[Term, ...]
    word: str

    def mask(self, columns: Columns) -> Tensor:
        """(rows,) bool."""
        found = self.terms[0].mask(columns)
        for term in self.terms[1:]:
            found = found & term.mask(columns) if self.word == "and" else found | term.mask(columns)
        return found


Term: TypeAlias = Comparison | Not | Terms


@dataclass(frozen=True)
class Token:
    """A piece of a filter: its text without quotes, where it begins, and whether it was quoted."""

    text: str
    position: int
    is_quoted: bool = False

    @property
    def word(self) -> str:
        """The text as a word of the language, "" if it was quoted."""
        return "" if self.is_quoted else self.text.lower()


def parse_where(text: str, kinds: Mapping[str, Kind]) -> Term:
    """The filter in `text` for columns of these kinds.

    Raises:
        WhereError: If it is no filter, names no column, or compares a column with what it cannot be.

    Example:
        >>> parse_where("price < 20", {"price": "number"})
        Comparison(column='price', comparison='<', values=(20.0,))
    """
    return _Parser(text, kinds).parse()


def about_columns(kinds: Mapping[str, Kind]) -> str:
    """The columns with their types, for a message."""
    named = [f"{name} ({kind})" for name, kind in list(kinds.items())[:LISTED]]
    more = f" and {len(kinds) - LISTED:,} more" if len(kinds) > LISTED else ""
    return ", ".join(named) + more


class _Parser:
    """Reads tokens from left to right."""

    def __init__(self, text: str, kinds: Mapping[str, Kind]) -> None:
        if len(text) > LONGEST:
            raise WhereError(f"a filter must have at most {LONGEST:,} characters, got {len(text):,}", "", 0)
        self.text, self.kinds = text, kinds
        self.tokens = self._tokens()
        self.next = 0

    def parse(self) -> Term:
        if not self.tokens:
            raise WhereError("a filter must compare a column, such as price < 20, got nothing", self.text, 0)
        found = self._either(0)
        if (token := self._peek()) is not None:
            before = self.tokens[self.next - 1]
            is_text = re.fullmatch(r"[\w.-]+", token.text) and token.text not in self.kinds and not token.is_quoted
            hint = f"; quote a text of several words: '{before.text} {token.text}'" if is_text else ""
            self._fail(f"a comparison must be followed by and, or, or the end, got {token.text!r}{hint}", token)
        return found

    def _tokens(self) -> list[Token]:
        found, at = [], 0
        while at < len(self.text):
            match = TOKEN.match(self.text, at)
            if match is None:
                what = "an open quote" if self.text[at] in "'\"" else repr(self.text[at])
                raise WhereError(f"a filter has columns, comparisons and values, got {what}", self.text, at)
            if match["quoted"]:
                quote = match["quoted"][0]
                found.append(Token(match["quoted"][1:-1].replace(2 * quote, quote), at, True))
            elif not match["space"]:
                found.append(Token(match[0], at))
            at = match.end()
        return found

    def _peek(self) -> Token | None:
        return self.tokens[self.next] if self.next < len(self.tokens) else None

    def _is(self, *words: str) -> bool:
        token = self._peek()
        return token is not None and token.word in words

    def _take(self, what: str) -> Token:
        token = self._peek()
        if token is None:
            raise WhereError(f"{what}, but the filter ends", self.text, len(self.text))
        self.next += 1
        return token

    def _fail(self, reason: str, token: Token) -> NoReturn:
        raise WhereError(reason, self.text, token.position)

    def _either(self, depth: int) -> Term:
        found = [self._all(depth)]
        while self._is("or"):
            self.next += 1
            found.append(self._all(depth))
        return found[0] if len(found) == 1 else Terms(tuple(found), "or")

    def _all(self, depth: int) -> Term:
        found = [self._term(depth)]
        while self._is("and"):
            self.next += 1
            found.append(self._term(depth))
        return found[0] if len(found) == 1 else Terms(tuple(found), "and")

    def _term(self, depth: int) -> Term:
        token = self._take("a column must follow here")
        if depth > DEEPEST:
            self._fail(f"a filter must have at most {DEEPEST} terms within each other, got more", token)
        if token.word == "not":
            return Not(self._term(depth + 1))
        if token.word == "(":
            found = self._either(depth + 1)
            end = self._take("a parenthesis must be closed")
            if end.word != ")":
                self._fail(f"a parenthesis must be closed after a comparison, got {end.text!r}", end)
            return found
        return self._comparison(token)

    def _comparison(self, column: Token) -> Term:
        if column.word in ("and", "or", "in", "is", "contains", "=", "!=", *ORDERS, *SAME, ")", ","):
            self._fail(f"a comparison must begin with a column, got {column.text!r}", column)
        if column.text not in self.kinds:
            near = did_you_mean(column.text, self.kinds)
            self._fail(
                f"a filter must name columns of the index, {about_columns(self.kinds)}, got {column.text!r}{near}",
                column,
            )
        kind = self.kinds[column.text]
        sign = self._take(f"the column {column.text} must be compared, such as {_example(column.text, kind)}")
        word = SAME.get(sign.word, sign.word)
        if word == "is":
            return self._missing(column)
        negated = word in ("not", "!=")
        if word == "not":
            sign = self._take("not must be followed by in or contains")
            word = sign.word
            if word not in ("in", "contains"):
                self._fail(f"not must be followed by in or contains here, got {sign.text!r}", sign)
        word = "=" if word == "!=" else word
        if word not in COMPARISONS[kind]:
            self._refuse(column.text, kind, word, sign)
        values = self._values(column.text, kind, word)
        found = Comparison(column.text, word, values)
        return Not(found) if negated else found

    def _missing(self, column: Token) -> Term:
        word = self._take("is must be followed by missing")
        negated = word.word == "not"
        if negated:
            word = self._take("is not must be followed by missing")
        if word.word != "missing":
            self._fail(f"{column.text} is must be followed by missing or not missing, got {word.text!r}", word)
        found = Comparison(column.text, "missing")
        return Not(found) if negated else found

    def _refuse(self, name: str, kind: Kind, word: str, sign: Token) -> NoReturn:
        known = ", ".join((*COMPARISONS[kind], "is missing")).replace("=, <,", "=, !=, <,")
        if any(word in comparisons for comparisons in COMPARISONS.values()):
            self._fail(f"the column {name} is a {kind}, which can be compared by {known}, got {sign.text!r}", sign)
        self._fail(f"the column {name} must be compared by one of {known}, got {sign.text!r}", sign)

    def _values(self, name: str, kind: Kind, word: str) -> tuple[object, ...]:
        if word != "in":
            return (self._value(name, kind),)
        opening = self._take(f"{name} in must be followed by values in parentheses")
        if opening.word != "(":
            self._fail(f"{name} in must be followed by values in parentheses, got {opening.text!r}", opening)
        values = [self._value(name, kind)]
        while True:
            end = self._take(f"the values of {name} must end with a parenthesis")
            if end.word == ")":
                return tuple(values)
            if end.word != ",":
                self._fail(f"the values of {name} must be divided by commas, got {end.text!r}", end)
            values.append(self._value(name, kind))

    def _value(self, name: str, kind: Kind) -> object:
        token = self._take(f"the column {name} must be compared with a value")
        if not token.is_quoted and TOKEN.fullmatch(token.text)["sign"]:  # type: ignore[index]
            self._fail(f"the column {name} must be compared with a value, got {token.text!r}", token)
        if token.word in ("and", "or", "not", "in", "is", "contains", "missing"):
            self._fail(f"the column {name} must be compared with a value; quote the text {token.text!r}", token)
        if kind == "number":
            number = parse_number(token.text)
            if number is None:
                self._fail(f"the column {name} is a number, such as 20 or 3.5, got {token.text!r}", token)
            return number
        if kind == "date":
            day = parse_date(token.text)
            if day is None:
                self._fail(f"the column {name} is a date, such as 2024-05-01, got {token.text!r}", token)
            first, has_time = microseconds(day), len(token.text) > len("2024-05-01")
            return first, first if has_time else first + timedelta(days=1) // timedelta(microseconds=1) - 1
        return token.text


def _truth(texts: tuple[str, ...], test: Callable[[str], bool]) -> Tensor:
    """(1 + texts,) bool: False for a missing one, then whether each text passes."""
    return torch.tensor([False, *map(test, texts)], dtype=torch.bool)


def _example(name: str, kind: Kind) -> str:
    values = {"text": "= a", "number": "< 20", "date": ">= 2024-05-01", "list": "contains a"}
    return f"{name} {values[kind]}"
