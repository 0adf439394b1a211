"""The vector databases that an index can be exported to: one visible table, and one way to keep them in step.

A new one is a module with a function `open_collection` of the signature of `OpenCollection`, and a row of
`VECTOR_DATABASES`; `pfml export --to NAME` reads the table. A module is imported when its database is asked for.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pfml.packages import require_packages

if TYPE_CHECKING:
    from pfml.data.decoding import Track
    from pfml.search import ImageIndex, ModelIdentity, OtherModelError, Points

__all__ = [
    "VECTOR_DATABASES",
    "Collection",
    "IndexExport",
    "OpenCollection",
    "VectorDatabase",
    "export_index",
    "other_model_error",
    "shown_address",
]

Result = TypeVar("Result")

#: Seconds that a server may be gone in the middle of an export.
RETRY_SECONDS = 60.0
#: Seconds before the first attempt to reach it again; they double up to the last.
FIRST_WAIT, LAST_WAIT = 0.25, 8.0


@dataclass(frozen=True)
class VectorDatabase:
    """A row of the table.

    Args:
        title: Its name as people write it.
        module: The module that has `open_collection`.
        packages: What that imports.
        install: What pip installs the packages by.
        url: An address to give, such as "http://localhost:6333"; "" if it has no server.
        is_local: Whether it can be a folder or a file.
        is_whole: Whether each export replaces the collection, so that none of its points can be kept.
        hnsw: Whether the collection has `build_hnsw`.
    """

    title: str
    module: str
    packages: tuple[str, ...]
    install: str
    url: str = ""
    is_local: bool = True
    is_whole: bool = False
    hnsw: bool = False


#: Name -> database. The key of a server is read from the environment variable NAME_API_KEY.
VECTOR_DATABASES = {
    "postgres": VectorDatabase(
        "PostgreSQL",
        "pfml.export.postgres",
        packages=("psycopg", "pgvector"),
        install="pfml[postgres]",
        url="postgresql://user@host/database",
        is_local=False,
        hnsw=True,
    ),
    "qdrant": VectorDatabase(
        "Qdrant",
        "pfml.export.qdrant",
        packages=("qdrant_client",),
        install="pfml[qdrant]",
        url="http://localhost:6333",
    ),
    "lancedb": VectorDatabase(
        "LanceDB", "pfml.export.lancedb", packages=("lancedb",), install="pfml[lancedb]", url="s3://bucket/folder"
    ),
    "parquet": VectorDatabase(
        "Parquet", "pfml.export.parquet", packages=("pyarrow",), install="pfml[parquet]", is_whole=True
    ),
}


@dataclass(frozen=True)
class IndexExport:
    """The result of an export to a vector database.

    Args:
        collection: Its name.
        points: How many the index has.
        written: Of these, such as were new or had changed.
        deleted: Points of the collection whose images the index no longer has, which were deleted.
        kept: Such points that were kept.
    """

    collection: str
    points: int
    written: int
    deleted: int = 0
    kept: int = 0


class Collection(Protocol):
    """An opened collection of a vector database.

    A method that raises ConnectionError is called again with the same arguments, so all may be repeated.
    """

    @property
    def batch_size(self) -> int:
        """Points that are written at once."""

    def versions(self, ids: Sequence[str]) -> Mapping[str, str]:
        """Id -> stored version, of those of `ids` that are there."""

    def upsert(self, points: Points, versions: Sequence[str]) -> None:
        """Write points, replacing those of the same ids, and the version of each."""

    def ids(self) -> Iterable[str]:
        """The ids of all points."""

    def delete(self, ids: Sequence[str]) -> None:
        """Delete points."""


class OpenCollection(Protocol):
    """Opens a collection for vectors of a model; makes it if it is missing."""

    def __call__(
        self,
        name: str,
        model: ModelIdentity,
        dimension: int,
        *,
        url: str | None,
        path: Path | None,
        api_key: str | None,
    ) -> AbstractContextManager[Collection]:
        """Exactly one of `url` and `path` is given.

        Raises:
            OtherModelError: If the collection has vectors of another model or of unknown origin.
        """


def export_index(
    index: ImageIndex,
    database: str,
    collection: str,
    *,
    url: str | None = None,
    path: str | Path | None = None,
    api_key: str | None = None,
    keep: bool = False,
    hnsw: bool = False,
    batch_size: int | None = None,
    retry_seconds: float = RETRY_SECONDS,
    track: Track | None = None,
) -> IndexExport:
    """Bring a collection of a vector database into step with `index`: vectors, with path and class as payload.

    The id of a point is a function of its path, and its version a digest of its vector and payload. Only points whose
    version is not there are written, so the same call again, after an error or a kill, writes what is missing.

    Args:
        index: Stays as it is.
        database: A name in `VECTOR_DATABASES`.
        collection: Its name; it is made if it is missing.
        url: Address of a server; this or `path`.
        path: Folder of a local database, which needs no server.
        api_key: Key of the server, if it asks for one.
        keep: Keep points whose images the index does not have, such as those of another index.
        hnsw: Build an HNSW index at the end: faster searching, which may miss neighbors.
        batch_size: Points that are written at once; None for what suits the database.
        retry_seconds: How long a server may be gone in the middle.
        track: Shows the progress, as track(iterable, description, total).

    Raises:
        OtherModelError: If the collection has vectors of another model or of unknown origin.
        ConnectionError: If the server does not answer, or is gone for longer than `retry_seconds`.
    """
    if database not in VECTOR_DATABASES:
        raise ValueError(f"database must be one of {', '.join(VECTOR_DATABASES)}, got {database!r}")
    row = VECTOR_DATABASES[database]
    _refuse_address(row, url, path)
    _refuse_options(row, collection, batch_size, keep, hnsw)
    require_packages(*row.packages, purpose=f"the export to {row.title}", install=row.install)
    open_collection: OpenCollection = import_module(row.module).open_collection
    folder = None if path is None else Path(path)
    opened = open_collection(collection, index.model, index.dimension, url=url, path=folder, api_key=api_key)
    with opened as there:
        return _synchronize(index, collection, there, keep, hnsw, batch_size, retry_seconds, track)


def shown_address(url: str) -> str:
    """The address of a server without the password in it, for messages."""
    without = re.sub(r"(://[^:/?#@]*):.*@", r"\1@", url)
    return re.sub(r"(?i)([?&][^=&]*(?:password|key|token|secret)[^=&]*)=[^&]*", r"\1=...", without)


def other_model_error(model: ModelIdentity, what: str) -> OtherModelError:
    """The error of a collection that has points of another model than this one."""
    from pfml.search import OtherModelError

    return OtherModelError(
        f"{what} must have vectors of {model} only, got a point of another model: distances between them mean nothing; "
        f"choose another with --collection"
    )


def _refuse_address(row: VectorDatabase, url: str | None, path: object) -> None:
    if not row.url and url is not None:
        raise ValueError(f"{row.title} has no server, so a path must be given, got the address {shown_address(url)}")
    if not row.is_local and url is None:
        raise ValueError(f"{row.title} needs the address of a server, such as {row.url}: give it with --url")
    if (url is None) == (path is None):
        shown = None if url is None else shown_address(url)
        raise ValueError(f"either the address of a server or a folder must be given, got url={shown!r} and path={path}")


def _refuse_options(row: VectorDatabase, collection: str, batch_size: int | None, keep: bool, hnsw: bool) -> None:
    if not collection:
        raise ValueError("the collection must have a name, got an empty one")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if keep and row.is_whole:
        raise ValueError(f"keep must be left out for {row.title}: each export writes the whole file")
    if hnsw and not row.hnsw:
        able = ", ".join(name for name, each in VECTOR_DATABASES.items() if each.hnsw)
        raise ValueError(f"hnsw must be left out for {row.title}: pfml builds an HNSW index in {able} only")


def _synchronize(
    index: ImageIndex,
    name: str,
    collection: Collection,
    keep: bool,
    hnsw: bool,
    batch_size: int | None,
    retry_seconds: float,
    track: Track | None,
) -> IndexExport:
    """Write what the collection lacks, then delete what the index does not have."""
    patience = _Patience(retry_seconds)
    size = batch_size or collection.batch_size
    ids: set[str] = set()
    written = 0
    batches: Iterable[Points] = index.points(size)
    if track is not None:
        batches = track(batches, "exporting", -(-len(index) // size))
    for points in batches:
        some, versions = _changed(points, patience(collection.versions, points.ids))
        if versions:
            patience(collection.upsert, some, versions)
        ids.update(points.ids)
        written += len(versions)
    stale = patience(lambda: [each for each in collection.ids() if each not in ids])
    for first in range(0, 0 if keep else len(stale), size):
        patience(collection.delete, stale[first : first + size])
    if hnsw:
        patience(collection.build_hnsw)  # type: ignore[attr-defined]
    return IndexExport(name, len(ids), written, 0 if keep else len(stale), len(stale) if keep else 0)


def _changed(points: Points, stored: Mapping[str, str]) -> tuple[Points, list[str]]:
    """Those points whose version is not stored, and their versions."""
    versions = [
        blake2b(vector.tobytes() + json.dumps(payload, sort_keys=True).encode(), digest_size=16).hexdigest()
        for vector, payload in zip(points.vectors.numpy(), points.payloads, strict=True)
    ]
    rows = [row for row, id_ in enumerate(points.ids) if stored.get(id_) != versions[row]]
    some = replace(
        points,
        ids=tuple(points.ids[row] for row in rows),
        vectors=points.vectors[rows],
        payloads=tuple(points.payloads[row] for row in rows),
    )
    return some, [versions[row] for row in rows]


class _Patience:
    """Calls a function again while the server is gone, with exponential back-off.

    Args:
        seconds: From the first failure in a row until the error is raised.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, function: Callable[..., Result], *arguments: Any) -> Result:
        wait, deadline = FIRST_WAIT, None
        while True:
            try:
                return function(*arguments)
            except ConnectionError as error:
                now = time.monotonic()
                deadline = now + self.seconds if deadline is None else deadline
                if now + wait > deadline:
                    raise ConnectionError(
                        f"{error}; it was gone for {self.seconds:.0f} s: the same command writes what is missing"
                    ) from None
            time.sleep(wait)
            wait = min(2 * wait, LAST_WAIT)
