"""Every vector database of the table stays in step with the index; a new one is a module and a row."""

import pytest
import torch
from database_readers import READERS

from pfml.cli import main
from pfml.export import VECTOR_DATABASES, VectorDatabase, export_index
from pfml.export.vector_databases import shown_address
from pfml.search import Edit, ModelIdentity, OtherModelError
from pfml.search.index import point_id
from small_runs import few_glyphs, save_index, save_model

MODULE = """
from contextlib import contextmanager

class Text:
    batch_size = 10

    def __init__(self, file):
        self.file = file
        self.lines = dict(line.split(" ", 1) for line in file.read_text().splitlines()) if file.exists() else {}

    def versions(self, ids):
        return {id: self.lines[id].split(" ", 1)[0] for id in ids if id in self.lines}

    def upsert(self, points, versions):
        for id, payload, version in zip(points.ids, points.payloads, versions):
            self.lines[id] = f"{version} {payload['path']} {payload['class_name']}"

    def ids(self):
        return list(self.lines)

    def delete(self, ids):
        for id in ids:
            del self.lines[id]

@contextmanager
def open_collection(name, model, dimension, *, url, path, api_key):
    text = Text(path / name)
    yield text
    text.file.write_text("".join(f"{id} {line}\\n" for id, line in text.lines.items()))
"""


@pytest.fixture(params=READERS)
def reader(request, tmp_path):
    postgres = request.getfixturevalue("postgres") if request.param == "postgres" else None
    return READERS[request.param](tmp_path, postgres)


def exported(reader, index, **options):
    database = next(name for name, kind in READERS.items() if isinstance(reader, kind))
    return export_index(index, database, reader.collection, **reader.address, **options)


def writes_all(reader):
    return isinstance(reader, READERS["parquet"])


def as_expected(index):
    """Id -> payload and vector, straight from the index."""
    points = list(index.points(1000))
    return {
        id_: (payload["path"], payload["class_name"], payload["model"], payload.get("metadata") or {}, vector)
        for some in points
        for id_, payload, vector in zip(some.ids, some.payloads, some.vectors.tolist(), strict=True)
    }


def test_all_databases_are_tested():
    assert READERS.keys() == VECTOR_DATABASES.keys()


def test_searching_there_finds_what_our_search_finds(reader, embedder, index):
    result = exported(reader, index, batch_size=7)
    assert (result.points, result.written, result.deleted, result.kept) == (len(index), len(index), 0, 0)
    queries = embedder.encode(few_glyphs("ABK").images[::5])
    for query, hits in zip(queries, index.search(queries, 5, model=ModelIdentity.of(embedder)), strict=True):
        found = reader.nearest(query, 5)
        distances = torch.tensor([distance for *_, distance in found], dtype=torch.float64)
        torch.testing.assert_close(distances, torch.tensor([hit.distance for hit in hits]).double(), atol=1e-5, rtol=0)
        # equal distances may come in any order
        assert {(path, name) for path, name, _ in found} == {(hit.path, hit.class_name) for hit in hits}


def test_additions_changes_and_removals_of_the_index_are_taken_over(reader, embedder, index):
    exported(reader, index)
    model = ModelIdentity.of(embedder)
    paths = [entry.path for entry in index.entries()]
    index.add(torch.eye(8)[:2], [paths[0], "new.png"], ["another", ""], model=model)
    index.remove(paths=paths[1:4])
    index.edit(Edit("rename", class_name="B", into="beta"))
    renamed = index.class_counts()["beta"]
    result = exported(reader, index, batch_size=10)
    changed = len(index) if writes_all(reader) else 2 + renamed
    assert (result.points, result.written, result.deleted) == (len(index), changed, 3)
    assert reader.points() == as_expected(index)
    assert reader.points()[point_id("new.png")][1] is None
    again = exported(reader, index)
    assert (again.written, again.deleted) == (len(index) if writes_all(reader) else 0, 0)
    assert reader.points() == as_expected(index)


def test_points_of_another_index_are_kept_if_asked(reader, embedder, index, tmp_path):
    exported(reader, index)
    gone = [entry.path for entry in index.entries()][:3]
    before = reader.points()
    index.remove(paths=gone)
    if writes_all(reader):
        with pytest.raises(ValueError, match="keep must be left out for Parquet"):
            exported(reader, index, keep=True)
        return
    result = exported(reader, index, keep=True)
    assert (result.points, result.written, result.deleted, result.kept) == (len(index), 0, 0, 3)
    assert reader.points() == before


def test_vectors_of_another_model_are_refused(reader, index, tmp_path):
    exported(reader, index)
    before = reader.points()
    other = save_index(tmp_path / "other", save_model(tmp_path / "model", seed=5))
    with pytest.raises(OtherModelError, match="letters.* must have vectors of .* only"):
        exported(reader, other)
    assert reader.points() == before


def test_an_empty_index_empties_the_collection(reader, index):
    exported(reader, index)
    count = len(index)
    index.remove(class_names=list(index.class_counts()))
    result = exported(reader, index)
    assert (result.points, result.written, result.deleted) == (0, 0, count)
    assert reader.points() == {}


def test_progress_is_shown_by_batches(index, tmp_path):
    asked = []

    def track(items, description, total):
        asked.append((description, total))
        return items

    export_index(index, "parquet", "letters", path=tmp_path, batch_size=10, track=track)
    assert asked == [("exporting", 5)]
    assert (tmp_path / "letters.parquet").is_file()


@pytest.mark.parametrize(
    ("database", "options", "said"),
    [
        ("postgres", {"path": "x"}, "PostgreSQL needs the address of a server, such as postgresql://"),
        ("parquet", {"url": "http://u:pass@x"}, "Parquet has no server.* got the address http://u@x"),
        ("qdrant", {"path": "x", "hnsw": True}, "hnsw must be left out for Qdrant"),
        ("lancedb", {"path": "x", "batch_size": 0}, "batch_size must be at least 1, got 0"),
    ],
)
def test_what_a_database_cannot_do_is_refused(database, options, said, index):
    with pytest.raises(ValueError, match=said):
        export_index(index, database, "letters", **options)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:se@c/ret@host:5432/db", "postgresql://me@host:5432/db"),
        (
            "postgresql://me@host/db?sslmode=require&password=secret",
            "postgresql://me@host/db?sslmode=require&password=...",
        ),
        ("http://localhost:6333", "http://localhost:6333"),
        ("https://host:6333/?api-key=secret", "https://host:6333/?api-key=..."),
    ],
)
def test_a_password_is_not_shown(url, shown):
    assert shown_address(url) == shown


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run with an index, and a vector database of text files, added as a contributor adds one."""
    run = tmp_path / "birds"
    save_index(run / "index", save_model(run / "model"))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "text_database.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "package")
    row = VectorDatabase("Text", "text_database", packages=("text_database",), install="text-database")
    monkeypatch.setitem(VECTOR_DATABASES, "text", row)
    (run / "text").mkdir()
    return run


def test_a_module_and_a_row_add_a_database_to_the_command(run, capsys):
    main(["export", str(run), "--to", "text"])
    lines = (run / "text" / "birds").read_text().splitlines()
    assert any(line.endswith(" letters/002.png A") for line in lines)
    assert f"{len(lines)} points in the collection 'birds', {len(lines)} written, 0 deleted" in capsys.readouterr().out
    (run / "text" / "birds").write_text("\n".join([*lines[1:], "an-id a-version a-path None\n"]))
    main(["export", str(run), "--to", "text", "--keep"])
    assert "1 points there belong to images that the index does not have; they stay" in capsys.readouterr().out
    main(["export", str(run), "--to", "text"])
    assert "0 written, 1 deleted" in capsys.readouterr().out


def test_the_help_names_all_databases(run, capsys):
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    printed = capsys.readouterr().out
    assert "qdrant" in printed
    assert "text" in printed


def test_an_unknown_database_is_refused_with_the_known_ones(run):
    with pytest.raises(
        ValueError, match="database must be one of postgres, qdrant, lancedb, parquet, text, got 'nothing'"
    ):
        export_index(None, "nothing", "birds", path=run)
