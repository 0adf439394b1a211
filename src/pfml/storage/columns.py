"""Typed columns of what is known about images: texts, numbers, dates and lists of texts, any of which may be missing.

A column takes a few bytes per row: texts are codes into a dictionary of the different ones, numbers are float64, dates
are int64. A `Table` is columns of one length, and lies in tensors that a safetensors file can hold:

columns    (bytes,) uint8, JSON: [name, kind] of each column
K.values   number: (n,) float64, NaN where the value is missing; date: (n,) int64 microseconds since 1970
K.codes    text: (n,) int32, -1 where it is missing; list: (items,) int32
K.offsets  list: (n + 1,) int64, row r has the items from offsets[r] to offsets[r + 1]
K.texts    text, list: (bytes,) uint8, JSON: the different texts
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

import torch
from torch import Tensor

from pfml.storage.values import Kind, Value, kind_of, microseconds, moment, plain_value

__all__ = ["Column", "DateColumn", "ListColumn", "NumberColumn", "Row", "Table", "TextColumn", "column_of"]

#: A date that is missing.
NO_DATE = -(2**63)


@dataclass(frozen=True, eq=False)
class NumberColumn:
    """Numbers.

    Args:
        values: (n,) float64, NaN where the value is missing.
    """

    values: Tensor
    kind: Kind = "number"

    def __len__(self) -> int:
        return len(self.values)

    def value(self, row: int) -> Value | None:
        """The value of a row, None if it is missing."""
        found = float(self.values[row])
        return None if found != found else found

    def present(self) -> Tensor:
        """(n,) bool: the rows that have a value."""
        return ~self.values.isnan()

    def rows(self, chosen: Tensor) -> NumberColumn:
        """The values of these rows."""
        return NumberColumn(self.values[chosen])

    def tensors(self) -> dict[str, Tensor]:
        """What a file holds of the column."""
        return {"values": self.values}


@dataclass(frozen=True, eq=False)
class DateColumn:
    """Dates, with or without a time.

    Args:
        values: (n,) int64, microseconds since 1970, `NO_DATE` where the value is missing.
    """

    values: Tensor
    kind: Kind = "date"

    def __len__(self) -> int:
        return len(self.values)

    def value(self, row: int) -> Value | None:
        """The value of a row, None if it is missing."""
        found = int(self.values[row])
        return None if found == NO_DATE else moment(found)

    def present(self) -> Tensor:
        """(n,) bool: the rows that have a value."""
        return self.values != NO_DATE

    def rows(self, chosen: Tensor) -> DateColumn:
        """The values of these rows."""
        return DateColumn(self.values[chosen])

    def tensors(self) -> dict[str, Tensor]:
        """What a file holds of the column."""
        return {"values": self.values}


@dataclass(frozen=True, eq=False)
class TextColumn:
    """Texts, each stored once.

    Args:
        codes: (n,) int32, the position of each row's text in `texts`, -1 where the value is missing.
        texts: All different.
    """

    codes: Tensor
    texts: tuple[str, ...]
    kind: Kind = "text"

    def __len__(self) -> int:
        return len(self.codes)

    def value(self, row: int) -> Value | None:
        """The value of a row, None if it is missing."""
        code = int(self.codes[row])
        return None if code < 0 else self.texts[code]

    def present(self) -> Tensor:
        """(n,) bool: the rows that have a value."""
        return self.codes >= 0

    def rows(self, chosen: Tensor) -> TextColumn:
        """The values of these rows, with the texts that occur in them."""
        return TextColumn(*_used(self.codes[chosen], self.texts))

    def tensors(self) -> dict[str, Tensor]:
        """What a file holds of the column."""
        return {"codes": self.codes, "texts": _json_bytes(self.texts)}


@dataclass(frozen=True, eq=False)
class ListColumn:
    """Lists of texts, each text stored once; a list without items is missing.

    Args:
        offsets: (n + 1,) int64; the items of row r are those from offsets[r] to offsets[r + 1].
        codes: (items,) int32, the position of each item in `texts`.
        texts: All different.
    """

    offsets: Tensor
    codes: Tensor
    texts: tuple[str, ...]
    kind: Kind = "list"

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def value(self, row: int) -> Value | None:
        """The value of a row, None if it is missing."""
        first, last = self.offsets[row : row + 2].tolist()
        return tuple(self.texts[code] for code in self.codes[first:last].tolist()) or None

    def present(self) -> Tensor:
        """(n,) bool: the rows that have a value."""
        return self.offsets[1:] > self.offsets[:-1]

    def rows(self, chosen: Tensor) -> ListColumn:
        """The values of these rows, with the texts that occur in them."""
        counts = (self.offsets[1:] - self.offsets[:-1])[chosen]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        within = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(counts)
        items = self.offsets[:-1][chosen].repeat_interleave(counts) + within
        return ListColumn(offsets, *_used(self.codes[items], self.texts))

    def owners(self) -> Tensor:
        """(items,) the row of each item."""
        return torch.arange(len(self)).repeat_interleave(self.offsets[1:] - self.offsets[:-1])

    def tensors(self) -> dict[str, Tensor]:
        """What a file holds of the column."""
        return {"offsets": self.offsets, "codes": self.codes, "texts": _json_bytes(self.texts)}


Column: TypeAlias = NumberColumn | DateColumn | TextColumn | ListColumn


class Row(Mapping[str, Value]):
    """What is known about one image: column -> value, without those that are missing; a view of a table."""

    __slots__ = ("_row", "_table")

    def __init__(self, table: Table, row: int) -> None:
        self._table, self._row = table, row

    def __getitem__(self, name: str) -> Value:
        found = self._table.columns[name].value(self._row)
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for name, column in self._table.columns.items() if column.value(self._row) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return dict, (dict(self),)  # a copy is of the row, not of the table


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of one length.

    Args:
        length: Number of rows.
        columns: By name.
    """

    length: int
    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            if len(column) != self.length:
                raise ValueError(f"the column {name} must have {self.length:,} rows, got {len(column):,}")

    def __len__(self) -> int:
        return self.length

    @property
    def kinds(self) -> dict[str, Kind]:
        """Column -> what it holds."""
        return {name: column.kind for name, column in self.columns.items()}

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Table:
        """The table of rows, each a mapping of columns to texts, numbers, dates or lists of texts; None is missing.

        Example:
            >>> table = Table.of([{"price": 3, "tags": ["red"]}, {"price": None, "brand": "Acme"}])
            >>> table.kinds, dict(table.row(1))
            ({'price': 'number', 'tags': 'list', 'brand': 'text'}, {'brand': 'Acme'})
        """
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {}
        for name in names:
            values = [plain_value(row.get(name), f"{name} of row {k}") for k, row in enumerate(rows)]
            kinds = {kind_of(value): k for k, value in enumerate(values) if value is not None}
            if len(kinds) > 1:
                (one, first), (other, second) = list(kinds.items())[:2]
                raise ValueError(
                    f"{name} must be of one type in all rows, got a {one} in row {first} and a {other} in row {second}"
                )
            if kinds:
                columns[name] = column_of(next(iter(kinds)), values)
        return cls(len(rows), columns)

    def row(self, row: int) -> Row:
        """What the table says of a row."""
        return Row(self, row)

    def rows(self, chosen: Tensor) -> Table:
        """These rows, in that order."""
        return Table(len(chosen), {name: column.rows(chosen) for name, column in self.columns.items()})

    @staticmethod
    def joined(tables: Sequence[Table]) -> Table:
        """All rows of all tables; columns of one name must be of one kind where they have values."""
        names = dict.fromkeys(name for table in tables for name in table.columns)
        columns = {}
        for name in names:
            parts = [(len(table), table.columns.get(name)) for table in tables]
            used = [(size, column if column is not None and column.present().any() else None) for size, column in parts]
            if any(column is not None for _, column in used):
                columns[name] = _joined(used)
        return Table(sum(len(table) for table in tables), columns)

    def tensors(self) -> dict[str, Tensor]:
        """What a file holds of the table; see the head of this module."""
        described = [[name, column.kind] for name, column in self.columns.items()]
        found = {"columns": _json_bytes(described)}
        for k, column in enumerate(self.columns.values()):
            found |= {f"{k}.{name}": tensor for name, tensor in column.tensors().items()}
        return found

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], length: int) -> Table:
        """What `tensors` returned; KeyError, TypeError or ValueError for anything else."""
        columns: dict[str, Column] = {}
        for k, (name, kind) in enumerate(_from_json(tensors["columns"])):
            columns[str(name)] = _read(kind, {part: tensors.get(f"{k}.{part}") for part in _PARTS[kind]})
        return cls(length, columns)


_PARTS = {"number": ("values",), "date": ("values",), "text": ("codes", "texts"), "list": ("offsets", "codes", "texts")}


def column_of(kind: Kind, values: Sequence[Value | None]) -> Column:
    """The column of these values, None where one is missing."""
    if kind == "number":
        return NumberColumn(torch.tensor([float("nan") if v is None else v for v in values], dtype=torch.float64))
    if kind == "date":
        found = [microseconds(value) if isinstance(value, datetime) else NO_DATE for value in values]
        return DateColumn(torch.tensor(found, dtype=torch.int64))
    code_of: dict[str, int] = {}
    if kind == "text":
        codes = [-1 if value is None else code_of.setdefault(str(value), len(code_of)) for value in values]
        return TextColumn(torch.tensor(codes, dtype=torch.int32), tuple(code_of))
    lists = [value if isinstance(value, tuple) else () for value in values]
    items = [code_of.setdefault(item, len(code_of)) for some in lists for item in some]
    counts = torch.tensor([len(some) for some in lists], dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return ListColumn(offsets, torch.tensor(items, dtype=torch.int32), tuple(code_of))


def _used(codes: Tensor, texts: tuple[str, ...]) -> tuple[Tensor, tuple[str, ...]]:
    """Codes into the texts that occur, and these."""
    found, places = codes.unique(return_inverse=True)
    kept = found.tolist()
    is_missing = bool(kept) and kept[0] < 0
    return (places - int(is_missing)).to(torch.int32), tuple(texts[code] for code in kept[int(is_missing) :])


def _joined(parts: Sequence[tuple[int, Column | None]]) -> Column:
    """One column of several, of which one at least has values; None stands for missing values only."""
    have = [column for _, column in parts if column is not None]
    first = have[0]
    if any(column.kind != first.kind for column in have):
        raise ValueError(f"columns of one name must be of one type, got {', '.join(column.kind for column in have)}")
    if isinstance(first, NumberColumn | DateColumn):
        missing: float = float("nan") if isinstance(first, NumberColumn) else NO_DATE
        values = [
            torch.full((size,), missing, dtype=first.values.dtype) if column is None else column.tensors()["values"]
            for size, column in parts
        ]
        return type(first)(torch.cat(values))
    code_of: dict[str, int] = {}
    codes, counts = [], []
    for size, column in parts:
        if column is None:
            codes.append(torch.full((size if first.kind == "text" else 0,), -1, dtype=torch.int32))
            counts.append(torch.zeros(size, dtype=torch.int64))
            continue
        assert isinstance(column, TextColumn | ListColumn)
        places = [-1, *(code_of.setdefault(text, len(code_of)) for text in column.texts)]
        codes.append(torch.tensor(places, dtype=torch.int32).index_select(0, column.codes + 1))
        if isinstance(column, ListColumn):
            counts.append(column.offsets[1:] - column.offsets[:-1])
    if isinstance(first, TextColumn):
        return TextColumn(torch.cat(codes), tuple(code_of))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(counts).cumsum(0)])
    return ListColumn(offsets, torch.cat(codes), tuple(code_of))


def _read(kind: str, tensors: Mapping[str, Tensor | None]) -> Column:
    """A column of a file; ValueError for what cannot be one."""
    if any(tensor is None for tensor in tensors.values()):
        raise ValueError(f"a column of the type {kind} without {', '.join(k for k, t in tensors.items() if t is None)}")
    found = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if kind == "number":
        return NumberColumn(_of_type(found["values"], torch.float64))
    if kind == "date":
        return DateColumn(_of_type(found["values"], torch.int64))
    codes, texts = _of_type(found["codes"], torch.int32), tuple(map(str, _from_json(found["texts"])))
    least = -1 if kind == "text" else 0
    if len(codes) and not (int(codes.min()) >= least and int(codes.max()) < len(texts)):
        raise ValueError(f"codes must lie in [{least}, {len(texts)}), got {int(codes.min())} to {int(codes.max())}")
    if kind == "text":
        return TextColumn(codes, texts)
    offsets = _of_type(found["offsets"], torch.int64)
    if not len(offsets) or int(offsets[0]) or int(offsets[-1]) != len(codes) or bool((offsets.diff() < 0).any()):
        raise ValueError(f"offsets must ascend from 0 to {len(codes)}")
    return ListColumn(offsets, codes, texts)


def _of_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype != dtype or tensor.ndim != 1:
        raise ValueError(f"a column must be {dtype} in one dimension, got {tensor.dtype} in {tensor.ndim}")
    return tensor


def _json_bytes(content: Any) -> Tensor:
    # escapes, so that texts that are no valid Unicode come back as they are
    return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)


def _from_json(tensor: Tensor) -> Any:
    return json.loads(_of_type(tensor, torch.uint8).numpy().tobytes())
