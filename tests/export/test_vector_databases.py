"""The table of vector databases: a new one is a module and a row."""

import pytest

from pfml.cli import main
from pfml.export import VECTOR_DATABASES, VectorDatabase, export_index
from small_runs import save_index, save_model

MODULE = """
from pfml.export import IndexExport

def export_vectors(index, collection, *, url, path, api_key):
    lines = [f"{entry.path} {entry.class_name}" for entry in index.entries()]
    (path / collection).write_text("\\n".join(lines))
    return IndexExport(collection, len(lines), 1)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run with an index, and a vector database of text files, added as a contributor adds one."""
    run = tmp_path / "birds"
    save_index(run / "index", save_model(run / "model"))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "text_database.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "package")
    row = VectorDatabase("Text", "text_database", package="text_database", install="text-database")
    monkeypatch.setitem(VECTOR_DATABASES, "text", row)
    (run / "text").mkdir()
    return run


def test_a_module_and_a_row_add_a_database_to_the_command(run, capsys):
    main(["export", str(run), "--to", "text"])
    printed = capsys.readouterr().out
    lines = (run / "text" / "birds").read_text().splitlines()
    assert "letters/002.png A" in lines
    assert f"{len(lines)} points in the collection 'birds'" in printed
    assert "1 points there belong to images that the index no longer has" in printed


def test_the_help_names_all_databases(run, capsys):
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    printed = capsys.readouterr().out
    assert "qdrant" in printed
    assert "text" in printed


def test_an_unknown_database_is_refused_with_the_known_ones(run):
    with pytest.raises(ValueError, match="database must be one of qdrant, text, got 'nothing'"):
        export_index(None, "nothing", "birds", path=run)
