"""What is known of the entries of an index: which metadata shard speaks of each, and columns that a filter tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from pfml.storage.columns import Column, Table, TextColumn, column_of
from pfml.storage.metadata_shard import MetadataShard
from pfml.storage.shard import VectorShard
from pfml.storage.values import Kind, Value, json_value, shown_value

__all__ = ["OWN_COLUMNS", "EntryColumns", "EntryMetadata", "json_metadata", "require_kinds", "short_path", "valid_text"]

#: Columns that every index has, so that no other may have these names.
OWN_COLUMNS: dict[str, Kind] = {"class": "text", "path": "text"}
#: The column of the tags that people gave on the page (`pfml.search.edits`), beside what a table calls so.
TAGS = "tags"


class EntryMetadata:
    """The metadata of the rows of an index.

    Args:
        ids: (rows,) int64 of the entries, ascending.
        shards: Of two that speak of one entry, the last counts.
    """

    def __init__(self, ids: Tensor, shards: Sequence[MetadataShard]) -> None:
        self.shards = shards
        self._owner = torch.full((len(ids),), -1, dtype=torch.int32)
        self._place = torch.zeros(len(ids), dtype=torch.int64)
        for number, shard in enumerate(shards):
            rows = torch.searchsorted(ids, shard.ids)
            here = rows < len(ids)
            here[here.clone()] = ids[rows[here]] == shard.ids[here]
            self._owner[rows[here]] = number
            self._place[rows[here]] = here.nonzero()[:, 0]

    def row(self, row: int) -> Mapping[str, Value]:
        """The metadata of a row."""
        owner = int(self._owner[row])
        return {} if owner < 0 else self.shards[owner].table.row(int(self._place[row]))

    def kinds(self, rows: Tensor) -> dict[str, Kind]:
        """Column -> what it holds, of the columns that have a value in one of these (rows,) bool."""
        found: dict[str, Kind] = {}
        for number, shard in enumerate(self.shards):
            places = self._place[(self._owner == number) & rows]
            for name, column in shard.table.columns.items():
                if bool(column.present()[places].any()):
                    found.setdefault(name, column.kind)
        return found

    def unused(self, rows: Tensor) -> tuple[int, ...]:
        """Numbers of the shards that say nothing that counts of these (rows,) bool."""
        used = set(self._owner[rows].unique().tolist())
        return tuple(number for number in range(len(self.shards)) if number not in used)

    def table(self, rows: Tensor) -> Table:
        """The metadata of these rows, in their order."""
        owners, places = self._owner[rows], self._place[rows]
        tables, order = [], []
        for number in owners.unique().tolist():
            here = (owners == number).nonzero()[:, 0]
            tables.append(self.shards[number].table.rows(places[here]) if number >= 0 else Table(len(here), {}))
            order.append(here)
        return Table.joined(tables).rows(torch.cat(order).argsort()) if tables else Table(0, {})

    def matching(self, name: str, kind: Kind, test: Callable[[Column], Tensor]) -> Tensor:
        """(rows,) bool: where a column of this kind passes a test; rows without it do not."""
        found = torch.zeros(len(self._owner), dtype=torch.bool)
        for number, shard in enumerate(self.shards):
            column = shard.table.columns.get(name)
            if column is not None and column.kind == kind:  # of another kind it has no value that counts
                rows, places = self._spans[number]
                found[rows] = test(column)[places]
        return found

    @cached_property
    def _spans(self) -> list[tuple[Tensor | slice, Tensor | slice]]:
        """For each shard the rows that it speaks of, and where: slices where they follow one another, as mostly."""
        found: list[tuple[Tensor | slice, Tensor | slice]] = []
        for number in range(len(self.shards)):
            rows = (self._owner == number).nonzero()[:, 0]
            found.append((_slice(rows), _slice(self._place[rows])))
        return found


def _slice(rows: Tensor) -> Tensor | slice:
    """Rows that follow one another as a slice, which needs no copy; else these rows."""
    if len(rows) and bool((rows.diff() == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def require_kinds(table: Table, kinds: Mapping[str, Kind], where: str) -> None:
    """Raise ValueError if a column of `table` has another type than what `where` has already, or a name it may not."""
    for name, column in table.columns.items():
        if name in OWN_COLUMNS or not name.strip():
            raise ValueError(f"a column of metadata must not be called {name!r}: this is not a name that it can have")
        if name in kinds and kinds[name] != column.kind and bool(column.present().any()):
            raise ValueError(
                f"the column {name} of {where} is a {kinds[name]}, got a {column.kind}: give it this type "
                f"(--columns {name}:{kinds[name]}), or another name"
            )


def short_path(path: str, source: str) -> str:
    """The path of an image relative to the folder, or to the folder of the table, that it was found by.

    It names no folder above that one; elsewhere it is the name of the file with its folder.

    Example:
        >>> short_path("/photos/2019/a.jpg", "/photos"), short_path("/photos/2019/a.jpg", "/lists/table.csv")
        ('2019/a.jpg', '2019/a.jpg')
    """
    folder = os.path.dirname(source) if source.endswith(".csv") else source
    if folder and path.startswith(folder.rstrip(os.sep) + os.sep):
        return path[len(folder.rstrip(os.sep)) + 1 :]
    return os.sep.join(path.rsplit(os.sep, 2)[-2:]).removeprefix(os.sep)


def all_tags(metadata: Mapping[str, Value], tags: Sequence[str]) -> tuple[str, ...]:
    """The tags of an image: what its table calls tags, and then those that people gave."""
    given = metadata.get(TAGS, ())
    return tuple(dict.fromkeys((*(given if isinstance(given, tuple) else (shown_value(given),)), *tags)))


def json_metadata(metadata: Mapping[str, Value]) -> dict[str, str | float | list[str]]:
    """Metadata as JSON has them, in valid Unicode; dates are ISO texts."""
    found = {}
    for name, value in metadata.items():
        plain = json_value(value)
        found[valid_text(name)] = [valid_text(one) for one in plain] if isinstance(plain, list) else plain
        if isinstance(plain, str):
            found[valid_text(name)] = valid_text(plain)
    return found


def valid_text(text: str) -> str:
    """`text` with escapes for what is no valid Unicode, which JSON cannot carry."""
    return text.encode("utf-8", errors="backslashreplace").decode()


class EntryColumns:
    """The columns of an index that a filter can name (`pfml.search.where.Columns`): metadata, class and path.

    Args:
        metadata: Of the rows.
        live: (rows,) bool: those that count.
        classes: Of the rows.
        tags: Row -> the tags that people gave.
        shards: With the rows.
    """

    def __init__(
        self,
        metadata: EntryMetadata,
        live: Tensor,
        classes: TextColumn,
        tags: Mapping[int, tuple[str, ...]],
        shards: Sequence[VectorShard],
    ) -> None:
        self.kinds: dict[str, Kind] = {**OWN_COLUMNS, **metadata.kinds(live)}
        if tags:
            self.kinds[TAGS] = "list"
        self._metadata, self._classes, self._tags, self._shards = metadata, classes, tags, shards
        self._own: dict[str, Column] = {}

    def matching(self, name: str, test: Callable[[Column], Tensor]) -> Tensor:
        """(rows,) bool: where a column passes a test."""
        if name not in OWN_COLUMNS and not (name == TAGS and self._tags):
            return self._metadata.matching(name, self.kinds[name], test)
        if name not in self._own:
            self._own[name] = {"class": self._named, "path": self._paths, TAGS: self._all_tags}[name]()
        return test(self._own[name])

    def _named(self) -> TextColumn:
        codes, texts = self._classes.codes, self._classes.texts
        if "" in texts:  # no class is no value
            codes = codes.masked_fill(codes == texts.index(""), -1)
        return TextColumn(codes, texts)

    def _all_tags(self) -> Column:
        rows = range(sum(len(shard) for shard in self._shards))
        every = (all_tags(self._metadata.row(row), self._tags.get(row, ())) for row in rows)
        return column_of("list", [tags or None for tags in every])

    def _paths(self) -> TextColumn:
        rows = (
            (path, source) for shard in self._shards for path, source in zip(shard.paths, shard.sources, strict=True)
        )
        paths = tuple(short_path(path, source) for path, source in rows)
        return TextColumn(torch.arange(len(paths), dtype=torch.int32), paths)
