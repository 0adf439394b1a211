"""Qdrant in local mode: searching there is compared with our own search."""

import pytest
import torch

from pfml.export import export_index
from pfml.export.qdrant import export_vectors
from pfml.search import ImageIndex, ModelIdentity, OtherModelError
from pfml.search.index import point_id
from small_runs import few_glyphs, save_index, save_model


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def index(embedder, tmp_path):
    return save_index(tmp_path / "index", embedder)


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


def test_searching_there_finds_what_our_search_finds(embedder, index, tmp_path, opened):
    result = export_vectors(index, "letters", path=tmp_path / "qdrant", batch_size=7)
    assert (result.points, result.stale) == (len(index), 0)
    points = embedder.encode(few_glyphs("ABK").images[::5])
    expected = index.search(points, 5, model=ModelIdentity.of(embedder))
    client = opened()
    for point, hits in zip(points, expected, strict=True):
        found = client.query_points("letters", query=point.tolist(), limit=5).points
        assert torch.allclose(
            torch.tensor([each.score for each in found]), torch.tensor([hit.distance for hit in hits]), atol=2e-6
        )
        # equal distances may come in any order
        assert {each.payload["path"] for each in found} == {hit.path for hit in hits}
        named = {each.payload["path"]: each.payload["class_name"] for each in found}
        assert named == {hit.path: hit.class_name for hit in hits}


def test_a_second_export_changes_what_has_changed_and_adds_nothing_twice(embedder, index, tmp_path, opened):
    export_vectors(index, "letters", path=tmp_path / "qdrant")
    path = next(index.entries()).path
    model = ModelIdentity.of(embedder)
    index.add(torch.ones(1, 8), [path], ["another"], model=model)
    result = export_vectors(index, "letters", path=tmp_path / "qdrant")
    assert (result.points, result.stale) == (len(index), 0)
    client = opened()
    assert client.count("letters").count == len(index)
    (point,) = client.retrieve("letters", [point_id(path)], with_vectors=True)
    assert point.payload == {"path": path, "class_name": "another", "model": model.digest, "metadata": {}}
    assert torch.allclose(torch.tensor(point.vector), torch.full((8,), 8**-0.5))


def test_points_that_the_index_no_longer_has_are_counted(index, tmp_path):
    export_vectors(index, "letters", path=tmp_path / "qdrant")
    index.remove(paths=[entry.path for entry in list(index.entries())[:3]])
    assert export_vectors(index, "letters", path=tmp_path / "qdrant").stale == 3


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


def test_a_collection_of_another_model_is_refused(index, tmp_path):
    export_vectors(index, "letters", path=tmp_path / "qdrant")
    other = save_index(tmp_path / "other", save_model(tmp_path / "model", seed=5))
    with pytest.raises(OtherModelError, match="collection 'letters' must have vectors of .* only"):
        export_vectors(other, "letters", path=tmp_path / "qdrant")
    assert export_vectors(other, "others", path=tmp_path / "qdrant").points == len(other)


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
