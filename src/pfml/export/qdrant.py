"""A Qdrant collection, in a folder (local mode) or on a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pfml.export.vector_databases import other_model_error, shown_address
from pfml.search import ModelIdentity, Points

__all__ = ["open_collection"]

#: Ids that are read at once.
SCROLLED = 10_000


@contextmanager
def open_collection(
    name: str, model: ModelIdentity, dimension: int, *, url: str | None, path: Path | None, api_key: str | None
) -> Iterator[QdrantCollection]:
    """The collection of this name; see `pfml.export.vector_databases.OpenCollection`.

    The distance is Euclidean: the scores of the collection are the distances of the index.
    """
    from qdrant_client import QdrantClient

    try:
        client = QdrantClient(url=url, api_key=api_key) if path is None else QdrantClient(path=str(path))
    except RuntimeError as error:  # how it says that another process has the folder open
        raise OSError(f"{path} must be free to be written to, got: {error}") from None
    try:
        collection = QdrantCollection(client, name, url)
        collection.create_or_check(model, dimension)
        yield collection
    finally:
        client.close()


class QdrantCollection:
    """A `pfml.export.vector_databases.Collection` of Qdrant.

    Args:
        client: Of the database.
        name: Of the collection.
        url: Of the server, for errors; None in local mode.
    """

    batch_size = 256

    def __init__(self, client: Any, name: str, url: str | None) -> None:
        self.client = client
        self.name = name
        self.server = None if url is None else shown_address(url)

    def create_or_check(self, model: ModelIdentity, dimension: int) -> None:
        """Make the collection, or check that it fits."""
        from qdrant_client import models

        wanted = models.VectorParams(size=dimension, distance=models.Distance.EUCLID)
        with self._named_errors():
            if not self.client.collection_exists(self.name):
                self.client.create_collection(self.name, vectors_config=wanted)
                return
            found = self.client.get_collection(self.name).config.params.vectors
            ours = models.FieldCondition(key="model", match=models.MatchValue(value=model.digest))
            foreign, _ = self.client.scroll(self.name, scroll_filter=models.Filter(must_not=[ours]), limit=1)
        shape = (getattr(found, "size", None), getattr(found, "distance", None))
        if shape != (wanted.size, wanted.distance):
            raise ValueError(
                f"the collection {self.name!r} must have unnamed vectors of {wanted.size} dimensions with Euclidean "
                f"distance, got {found}: choose another with --collection"
            )
        if foreign:
            raise other_model_error(model, f"the collection {self.name!r}")

    def versions(self, ids: Sequence[str]) -> dict[str, str]:
        """Id -> stored version, of those of `ids` that are there."""
        with self._named_errors():
            found = self.client.retrieve(self.name, list(ids), with_payload=["version"])
        return {str(point.id): point.payload["version"] for point in found if "version" in (point.payload or {})}

    def upsert(self, points: Points, versions: Sequence[str]) -> None:
        """Write points, replacing those of the same ids."""
        from qdrant_client import models

        rows = zip(points.ids, points.vectors.tolist(), points.payloads, versions, strict=True)
        structs = [
            models.PointStruct(id=point, vector=vector, payload={**payload, "version": version})
            for point, vector, payload, version in rows
        ]
        with self._named_errors():
            self.client.upsert(self.name, structs, wait=True)

    def ids(self) -> Iterator[str]:
        """The ids of all points."""
        offset, is_first = None, True
        while is_first or offset is not None:
            with self._named_errors():
                points, offset = self.client.scroll(self.name, limit=SCROLLED, offset=offset, with_payload=False)
            is_first = False
            yield from (str(point.id) for point in points)

    def delete(self, ids: Sequence[str]) -> None:
        """Delete points."""
        with self._named_errors():
            self.client.delete(self.name, points_selector=list(ids), wait=True)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        """Name the server in its errors; such as may pass are a ConnectionError."""
        from qdrant_client.http.exceptions import ApiException, UnexpectedResponse

        try:
            yield
        except ApiException as error:
            reason = " ".join(str(error).split())[:300]
            refused = isinstance(error, UnexpectedResponse) and (error.status_code or 500) < 500
            kind = OSError if refused else ConnectionError
            raise kind(f"the Qdrant server {self.server} must answer and accept the points, got: {reason}") from None
