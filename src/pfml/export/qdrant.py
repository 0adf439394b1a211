"""Export of an index to a Qdrant collection, in a folder (local mode) or on a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pfml.export.vector_databases import IndexExport
from pfml.search import ImageIndex, OtherModelError, Points

__all__ = ["export_vectors"]

BATCH = 256


def export_vectors(
    index: ImageIndex,
    collection: str,
    *,
    url: str | None = None,
    path: Path | None = None,
    api_key: str | None = None,
    batch_size: int = BATCH,
) -> IndexExport:
    """Export the vectors of `index` to a Qdrant collection; the arguments are those of `export_index`.

    The id of a point is a function of its path, so that a second export updates points and duplicates none.
    The distance is Euclidean: the scores of the collection are the distances of the index.

    Args:
        index: Stays as it is.
        collection: Its name.
        url: Address of a server; this or `path`.
        path: A folder, for Qdrant's local mode, which needs no server.
        api_key: Key of the server, if it asks for one.
        batch_size: Points that are sent at once.

    Raises:
        OtherModelError: If the collection has vectors of another model or of unknown origin.
    """
    with _client(url, path, api_key) as client:
        _create_or_check(client, collection, index)
        written = 0
        for points in index.points(batch_size):
            client.upsert(collection, _point_structs(points), wait=True)
            written += len(points.ids)
        stale = client.count(collection, exact=True).count - written
    return IndexExport(collection, written, stale)


@contextmanager
def _client(url: str | None, path: Path | None, api_key: str | None) -> Iterator[Any]:
    """A client; an error of the connection is an OSError that names the server."""
    from qdrant_client import QdrantClient
    from qdrant_client.http.exceptions import ApiException

    try:
        client = QdrantClient(url=url, api_key=api_key) if path is None else QdrantClient(path=str(path))
    except RuntimeError as error:  # how it says that another process has the folder open
        raise OSError(f"{path} must be free to be written to, got: {error}") from None
    try:
        yield client
    except ApiException as error:
        reason = " ".join(str(error).split())[:300]
        raise ConnectionError(f"the Qdrant server {url} must answer and accept the points, got: {reason}") from None
    finally:
        client.close()


def _create_or_check(client: Any, collection: str, index: ImageIndex) -> None:
    """Make the collection, or check that it fits the index."""
    from qdrant_client import models

    wanted = models.VectorParams(size=index.dimension, distance=models.Distance.EUCLID)
    if not client.collection_exists(collection):
        client.create_collection(collection, vectors_config=wanted)
        return
    found = client.get_collection(collection).config.params.vectors
    shape = (getattr(found, "size", None), getattr(found, "distance", None))
    if shape != (wanted.size, wanted.distance):
        raise ValueError(
            f"the collection {collection!r} must have unnamed vectors of {wanted.size} dimensions with Euclidean "
            f"distance, got {found}: choose another with --collection"
        )
    ours = models.FieldCondition(key="model", match=models.MatchValue(value=index.model.digest))
    foreign, _ = client.scroll(collection, scroll_filter=models.Filter(must_not=[ours]), limit=1)
    if foreign:
        raise OtherModelError(
            f"the collection {collection!r} must have vectors of {index.model} only, got a point of another model: "
            f"distances between them mean nothing; choose another with --collection"
        )


def _point_structs(points: Points) -> list[Any]:
    from qdrant_client import models

    return [
        models.PointStruct(id=point, vector=vector, payload=payload)
        for point, vector, payload in zip(points.ids, points.vectors.tolist(), points.payloads, strict=True)
    ]
