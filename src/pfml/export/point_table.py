"""Points as an Arrow table, for databases that are files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pfml.search import Points

if TYPE_CHECKING:
    import pyarrow

__all__ = ["point_schema", "point_table", "require_schema"]


def point_schema(dimension: int) -> pyarrow.Schema:
    """The columns of points: id, path, class_name, model, metadata (JSON), version, vector."""
    import pyarrow

    text = pyarrow.string()
    columns = {"id": text, "path": text, "class_name": text, "model": text, "metadata": text, "version": text}
    fields = [pyarrow.field(name, kind, nullable=name == "class_name") for name, kind in columns.items()]
    vector = pyarrow.field("vector", pyarrow.list_(pyarrow.float32(), dimension), nullable=False)
    return pyarrow.schema([*fields, vector])


def point_table(points: Points, versions: Sequence[str]) -> pyarrow.Table:
    """Points and their versions as rows of `point_schema`."""
    import pyarrow

    dimension = points.vectors.shape[1]
    flat = pyarrow.array(points.vectors.numpy().reshape(-1))
    rows = points.payloads
    columns = [
        points.ids,
        [row["path"] for row in rows],
        [row["class_name"] for row in rows],
        [row["model"] for row in rows],
        [json.dumps(row.get("metadata") or {}, sort_keys=True) for row in rows],
        versions,
    ]
    arrays = [pyarrow.array(column, pyarrow.string()) for column in columns]
    vectors = pyarrow.FixedSizeListArray.from_arrays(flat, dimension)
    return pyarrow.Table.from_arrays([*arrays, vectors], schema=point_schema(dimension))


def require_schema(found: pyarrow.Schema, dimension: int, what: str) -> None:
    """Raise ValueError unless the columns are those of `point_schema`; `what` has them."""
    wanted = point_schema(dimension)
    types = dict(zip(found.names, found.types, strict=True))
    differing = [field.name for field in wanted if types.get(field.name) != field.type]
    if differing:
        raise ValueError(
            f"{what} must have points of {dimension} dimensions that pfml exported, got another column "
            f"{differing[0]!r}: choose another name"
        )
