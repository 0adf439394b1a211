"""The vector databases that an index can be exported to: one visible table.

A new one is a module with a function `export_vectors` of the signature of `ExportVectors`, and a row of
`VECTOR_DATABASES`; `pfml export --to NAME` reads the table. A module is imported when its database is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pfml.packages import require_packages

if TYPE_CHECKING:
    from pfml.search import ImageIndex

__all__ = ["VECTOR_DATABASES", "ExportVectors", "IndexExport", "VectorDatabase", "export_index"]


@dataclass(frozen=True)
class VectorDatabase:
    """A row of the table.

    Args:
        title: Its name as people write it.
        module: The module that has `export_vectors`.
        package: What that imports.
        install: What pip installs the package by.
    """

    title: str
    module: str
    package: str
    install: str


#: Name -> database. The key of a server is read from the environment variable NAME_API_KEY.
VECTOR_DATABASES = {
    "qdrant": VectorDatabase("Qdrant", "pfml.export.qdrant", package="qdrant_client", install="pfml[qdrant]"),
}


@dataclass(frozen=True)
class IndexExport:
    """The result of an export to a vector database.

    Args:
        collection: Its name.
        points: How many were written.
        stale: Points of the collection whose image the index no longer has.
    """

    collection: str
    points: int
    stale: int


class ExportVectors(Protocol):
    """Writes the vectors of an index, with path and class as payload, to a collection; makes it if it is missing."""

    def __call__(
        self, index: ImageIndex, collection: str, *, url: str | None, path: Path | None, api_key: str | None
    ) -> IndexExport:
        """The arguments are those of `export_index`; exactly one of `url` and `path` is given."""


def export_index(
    index: ImageIndex,
    database: str,
    collection: str,
    *,
    url: str | None = None,
    path: str | Path | None = None,
    api_key: str | None = None,
) -> IndexExport:
    """Export the vectors of `index`, with path and class as payload, to a collection of a vector database.

    Args:
        index: Stays as it is.
        database: A name in `VECTOR_DATABASES`.
        collection: Its name; it is made if it is missing.
        url: Address of a server; this or `path`.
        path: Folder of a local database, which needs no server.
        api_key: Key of the server, if it asks for one.

    Raises:
        OtherModelError: If the collection has vectors of another model or of unknown origin.
    """
    if database not in VECTOR_DATABASES:
        raise ValueError(f"database must be one of {', '.join(VECTOR_DATABASES)}, got {database!r}")
    if (url is None) == (path is None):
        raise ValueError(f"either the address of a server or a folder must be given, got url={url!r} and path={path}")
    if not collection:
        raise ValueError("the collection must have a name, got an empty one")
    row = VECTOR_DATABASES[database]
    require_packages(row.package, purpose=f"the export to {row.title}", install=row.install)
    export_vectors: ExportVectors = import_module(row.module).export_vectors
    return export_vectors(index, collection, url=url, path=None if path is None else Path(path), api_key=api_key)
