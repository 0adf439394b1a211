"""A LanceDB table, in a folder or at an address that LanceDB knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from pfml.export.point_table import point_schema, point_table, require_schema
from pfml.export.vector_databases import other_model_error
from pfml.search import ModelIdentity, Points

__all__ = ["open_collection"]


@contextmanager
def open_collection(
    name: str, model: ModelIdentity, dimension: int, *, url: str | None, path: Path | None, api_key: str | None
) -> Iterator[LanceCollection]:
    """The table of this name; see `pfml.export.vector_databases.OpenCollection`."""
    import lancedb

    try:
        database = lancedb.connect(str(path) if url is None else url, api_key=api_key)
        table = database.create_table(name, schema=point_schema(dimension), exist_ok=True)
    except RuntimeError as error:  # how it says that a folder cannot be written, or an address not be reached
        raise OSError(f"LanceDB must be able to open the table {name!r}, got: {_first_line(error)}") from None
    require_schema(table.schema, dimension, f"the table {name!r}")
    if table.count_rows(f"model <> '{model.digest}'"):
        raise other_model_error(model, f"the table {name!r}")
    yield (collection := LanceCollection(table))
    if collection.has_changed:
        table.optimize()  # many small fragments as few


class LanceCollection:
    """A `pfml.export.vector_databases.Collection` of LanceDB.

    Args:
        table: Its columns are those of `point_schema`.
    """

    batch_size = 8192

    def __init__(self, table: Any) -> None:
        self.table = table
        self.has_changed = False

    @cached_property
    def _stored(self) -> dict[str, str]:
        """Id -> version of all rows, read once: a filter by ids would read the whole column for each batch."""
        stored: dict[str, str] = {}
        for batch in self._columns("id", "version"):
            stored.update(zip(batch["id"].to_pylist(), batch["version"].to_pylist(), strict=True))
        return stored

    def versions(self, ids: Sequence[str]) -> dict[str, str]:
        """Id -> stored version, of those of `ids` that are there."""
        return {each: self._stored[each] for each in ids if each in self._stored}

    def upsert(self, points: Points, versions: Sequence[str]) -> None:
        """Write points, replacing those of the same ids."""
        merge = self.table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        merge.execute(point_table(points, versions))
        self.has_changed = True

    def ids(self) -> Iterator[str]:
        """The ids of all points."""
        for batch in self._columns("id"):
            yield from batch["id"].to_pylist()

    def delete(self, ids: Sequence[str]) -> None:
        """Delete points."""
        self.table.delete(f"id IN ({', '.join(map(_quoted, ids))})")
        self.has_changed = True

    def _columns(self, *names: str) -> Any:
        return self.table.search().select(list(names)).limit(max(1, self.table.count_rows())).to_batches()


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:300]
