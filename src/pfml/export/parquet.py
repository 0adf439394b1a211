"""A Parquet file of the vectors of an index: written whole, row group by row group, and renamed into place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pfml.export.point_table import point_schema, point_table, require_schema
from pfml.export.vector_databases import other_model_error
from pfml.search import ModelIdentity, Points
from pfml.storage.files import named_errors, remove_partials, replacing

__all__ = ["open_collection"]


@contextmanager
def open_collection(
    name: str, model: ModelIdentity, dimension: int, *, url: str | None, path: Path | None, api_key: str | None
) -> Iterator[ParquetFile]:
    """The file `path`, or NAME.parquet in the folder `path`; see `pfml.export.vector_databases.OpenCollection`.

    Rows come in the order of the index.
    """
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetWriter

    assert path is not None
    file = path if path.suffix == ".parquet" else path / f"{name}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    before = _stored_ids(file, model, dimension) if file.exists() else []
    try:
        remove_partials(file.parent, f"{file.name}.*")  # of an export that was killed
        with replacing(file) as opened, ParquetWriter(opened, point_schema(dimension)) as writer:
            yield ParquetFile(writer, before)
    except ArrowException as error:
        raise OSError(f"{file} could not be written: {error}") from None


class ParquetFile:
    """A `pfml.export.vector_databases.Collection` that takes the place of an earlier file.

    Args:
        writer: Of the new file.
        before: The ids of the earlier file.
    """

    batch_size = 8192

    def __init__(self, writer: Any, before: Sequence[str]) -> None:
        self.writer = writer
        self.before = before

    def versions(self, ids: Sequence[str]) -> dict[str, str]:
        """None: all points are written."""
        return {}

    def upsert(self, points: Points, versions: Sequence[str]) -> None:
        """Write points, replacing those of the same ids."""
        self.writer.write_table(point_table(points, versions))

    def ids(self) -> Sequence[str]:
        """The ids of the earlier file."""
        return self.before

    def delete(self, ids: Sequence[str]) -> None:
        """The new file does not have them."""


def _stored_ids(file: Path, model: ModelIdentity, dimension: int) -> list[str]:
    """The ids of a file that an earlier export wrote, which must belong to the same model."""
    from pyarrow import ArrowException, parquet

    ids: list[str] = []
    with named_errors(file, "a Parquet file", ArrowException), parquet.ParquetFile(file) as opened:
        require_schema(opened.schema_arrow, dimension, str(file))
        for batch in opened.iter_batches(columns=["id", "model"]):
            if set(batch["model"].unique().to_pylist()) - {model.digest}:
                raise other_model_error(model, str(file))
            ids += batch["id"].to_pylist()
    return ids
