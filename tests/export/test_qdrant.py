"""Qdrant in local mode; what all databases have in common is in test_vector_databases.py."""

import pytest
import torch

from pfml.export import export_index
from pfml.search import ImageIndex, ModelIdentity
from pfml.search.index import point_id


def export_vectors(index, collection, **options):
    return export_index(index, "qdrant", collection, **options)


@pytest.fixture
def opened(tmp_path):
    """Opens the collection's folder as another program would."""
    clients = []

    def client():
        from qdrant_client import QdrantClient

        clients.append(QdrantClient(path=str(tmp_path / "qdrant")))
        return clients[-1]

    yield client
    for each in clients:
        each.close()


def test_points_of_an_export_without_versions_are_written_again(index, tmp_path, opened):
    export_vectors(index, "letters", path=tmp_path / "qdrant")
    client = opened()
    client.delete_payload("letters", ["version"], points=[point_id(entry.path) for entry in index.entries()])
    client.close()
    assert export_vectors(index, "letters", path=tmp_path / "qdrant").written == len(index)


def test_ids_are_read_page_by_page(index, tmp_path, monkeypatch):
    monkeypatch.setattr("pfml.export.qdrant.SCROLLED", 4)
    export_vectors(index, "letters", path=tmp_path / "qdrant")
    index.remove(paths=[entry.path for entry in list(index.entries())[:3]])
    assert export_vectors(index, "letters", path=tmp_path / "qdrant").deleted == 3


def test_batches_have_the_asked_size(index, tmp_path, monkeypatch):
    from qdrant_client import QdrantClient

    sizes = []
    upsert = QdrantClient.upsert

    def counting(self, collection_name, points, **options):
        sizes.append(len(points))
        return upsert(self, collection_name, points, **options)

    monkeypatch.setattr(QdrantClient, "upsert", counting)
    export_vectors(index, "letters", path=tmp_path / "qdrant", batch_size=20)
    assert sizes == [20] * (len(index) // 20) + [len(index) % 20]


def test_a_collection_of_another_shape_is_refused(index, tmp_path, opened):
    from qdrant_client import models

    client = opened()
    client.create_collection("small", vectors_config=models.VectorParams(size=3, distance=models.Distance.EUCLID))
    client.create_collection("cosine", vectors_config=models.VectorParams(size=8, distance=models.Distance.COSINE))
    client.close()
    for name in ("small", "cosine"):
        with pytest.raises(ValueError, match="8 dimensions with Euclidean distance, got .*--collection"):
            export_vectors(index, name, path=tmp_path / "qdrant")


def test_a_path_that_is_no_unicode_is_carried_with_escapes(embedder, tmp_path, opened):
    model = ModelIdentity.of(embedder)
    index = ImageIndex.create(tmp_path / "index", model, 8)
    index.add(torch.eye(8)[:2], ["caf\udce9.jpg", "x.jpg"], model=model)
    export_vectors(index, "odd", path=tmp_path / "qdrant")
    points, _ = opened().scroll("odd")
    assert sorted(point.payload["path"] for point in points) == ["caf\\udce9.jpg", "x.jpg"]
    assert [point.payload["class_name"] for point in points] == [None, None]


def test_a_server_that_does_not_answer_is_an_error_that_names_it(index):
    with pytest.raises(ConnectionError, match="server http://127.0.0.1:9 must answer"):
        export_vectors(index, "letters", url="http://127.0.0.1:9")


def test_a_folder_that_another_client_has_is_an_error_that_names_it(index, tmp_path):
    from qdrant_client import QdrantClient

    other = QdrantClient(path=str(tmp_path / "qdrant"))
    with pytest.raises(OSError, match=r"qdrant must be free to be written to"):
        export_vectors(index, "birds", path=tmp_path / "qdrant")
    other.close()
    assert export_vectors(index, "birds", path=tmp_path / "qdrant").points == len(index)


@pytest.mark.parametrize("addresses", [{}, {"url": "http://localhost", "path": "folder"}])
def test_either_a_server_or_a_folder_must_be_given(addresses, index):
    with pytest.raises(ValueError, match="either the address of a server or a folder"):
        export_index(index, "qdrant", "letters", **addresses)


def test_empty_names_and_batches_are_refused(index, tmp_path):
    with pytest.raises(ValueError, match="must have a name"):
        export_index(index, "qdrant", "", path=tmp_path)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        export_vectors(index, "letters", path=tmp_path, batch_size=0)


def test_a_missing_package_is_named_with_its_extra(index, tmp_path, monkeypatch):
    monkeypatch.setattr("pfml.packages.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"qdrant-client: pip install 'pfml\[qdrant\]'"):
        export_index(index, "qdrant", "letters", path=tmp_path)
