"""Collections read as other programs read them: each database's own client, nothing of pfml."""

import json
import uuid

import numpy


class Postgres:
    def __init__(self, folder, postgres):
        self.server = postgres
        self.collection = f"letters {uuid.uuid4().hex[:8]}"  # the server is shared by tests
        self.address = {"url": postgres.url}

    def nearest(self, query, k):
        vector = str(query.tolist())
        return self.server.rows(
            f'SELECT path, class_name, vector <-> %s::vector AS r FROM "{self.collection}" ORDER BY r LIMIT %s',
            vector,
            k,
        )

    def points(self):
        rows = self.server.rows(f'SELECT id, path, class_name, model, metadata, vector::text FROM "{self.collection}"')
        return {str(key): (*rest, _floats(vector)) for key, *rest, vector in rows}


class Qdrant:
    def __init__(self, folder, postgres):
        self.folder = folder / "qdrant"
        self.collection = "letters"
        self.address = {"path": self.folder}

    def _call(self, name, *arguments, **options):
        from qdrant_client import QdrantClient

        client = QdrantClient(path=str(self.folder))
        try:
            return getattr(client, name)(self.collection, *arguments, **options)
        finally:
            client.close()

    def nearest(self, query, k):
        found = self._call("query_points", query=query.tolist(), limit=k).points
        return [(each.payload["path"], each.payload["class_name"], each.score) for each in found]

    def points(self):
        found, _ = self._call("scroll", limit=1000, with_vectors=True)
        return {each.id: (*_plain(each.payload), each.vector) for each in found}


class Lance:
    def __init__(self, folder, postgres):
        self.folder = folder / "lancedb"
        self.collection = "letters"
        self.address = {"path": self.folder}

    def table(self):
        import lancedb

        return lancedb.connect(str(self.folder)).open_table(self.collection)

    def nearest(self, query, k):
        found = self.table().search(query.tolist()).limit(k).to_list()
        return [(each["path"], each["class_name"], each["_distance"] ** 0.5) for each in found]

    def points(self):
        return {each["id"]: _row(each) for each in self.table().to_arrow().to_pylist()}


class Parquet:
    def __init__(self, folder, postgres):
        self.file = folder / "vectors" / "letters.parquet"
        self.collection = "letters"
        self.address = {"path": self.file}

    def table(self):
        from pyarrow import parquet

        return parquet.read_table(self.file)

    def nearest(self, query, k):
        table = self.table()
        vectors = table["vector"].combine_chunks().flatten().to_numpy().reshape(len(table), -1)
        distances = numpy.linalg.norm(vectors - query.numpy(), axis=1)
        rows = table.select(["path", "class_name"]).to_pylist()
        return [(rows[k]["path"], rows[k]["class_name"], distances[k]) for k in distances.argsort()[:k].tolist()]

    def points(self):
        return {each["id"]: _row(each) for each in self.table().to_pylist()}


def _floats(text):
    return numpy.array(json.loads(text), dtype=numpy.float32).tolist()


def _plain(payload):
    return payload["path"], payload["class_name"], payload["model"], payload.get("metadata") or {}


def _row(row):
    return *_plain({**row, "metadata": json.loads(row["metadata"])}), row["vector"]


READERS = {"postgres": Postgres, "qdrant": Qdrant, "lancedb": Lance, "parquet": Parquet}
