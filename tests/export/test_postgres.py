"""A real PostgreSQL with pgvector; what all databases have in common is in test_vector_databases.py."""

import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from dataclasses import replace

import pytest
import torch

from pfml.cli import main
from pfml.export import export_index
from pfml.search import ImageIndex, ModelIdentity

EXPORT = """
import sys, time
from pfml.export import export_index
from pfml.search import ImageIndex

def slowly(batches, description, total):
    for batch in batches:
        yield batch
        print("written", flush=True)
        time.sleep(0.3)

export_index(ImageIndex.open(sys.argv[1]), "postgres", sys.argv[2], url=sys.argv[3], batch_size=4, track=slowly)
"""


@pytest.fixture
def table():
    return f"letters-{uuid.uuid4().hex[:8]}"


def count(postgres, table):
    """Rows, different ids."""
    return postgres.rows(f'SELECT count(*), count(DISTINCT id) FROM "{table}"')[0]


def test_a_server_that_stops_in_the_middle_is_waited_for(postgres, index, table):
    restarts = []

    def stopping(batches, description, total):
        for number, batch in enumerate(batches):
            if number == 3:
                postgres.stop()
                restarts.append(threading.Thread(target=postgres.start_after, args=[0.5]))
                restarts[0].start()
            yield batch

    result = export_index(index, "postgres", table, url=postgres.url, batch_size=5, track=stopping)
    restarts[0].join()
    assert result.written == len(index)
    assert count(postgres, table) == (len(index), len(index))


def test_a_server_that_stays_away_is_an_error_and_the_next_export_writes_the_rest(postgres, index, table):
    def stopping(batches, description, total):
        for number, batch in enumerate(batches):
            if number == 3:
                postgres.stop()
            yield batch

    try:
        with pytest.raises(ConnectionError, match="gone for 1 s: the same command writes what is missing"):
            export_index(index, "postgres", table, url=postgres.url, batch_size=5, track=stopping, retry_seconds=1)
    finally:
        postgres.start()
    assert count(postgres, table) == (15, 15)
    result = export_index(index, "postgres", table, url=postgres.url)
    assert (result.points, result.written) == (len(index), len(index) - 15)
    assert count(postgres, table) == (len(index), len(index))


def test_an_export_that_is_killed_is_resumed_by_the_next(postgres, index, table):
    command = [sys.executable, "-c", EXPORT, str(index.path), table, postgres.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(3):
            assert process.stdout.readline() == "written\n"
        os.kill(process.pid, signal.SIGKILL)
    rows, ids = count(postgres, table)
    assert rows == ids
    assert 12 <= rows < len(index)
    assert export_index(index, "postgres", table, url=postgres.url).written == len(index) - rows
    assert count(postgres, table) == (len(index), len(index))


def test_hnsw_is_built_once_and_finds_the_nearest(postgres, index, table, embedder):
    for _ in range(2):
        export_index(index, "postgres", table, url=postgres.url, hnsw=True)
    [(found,)] = postgres.rows(
        "SELECT indexdef FROM pg_indexes WHERE tablename = %s AND indexdef LIKE '%%hnsw%%'", table
    )
    assert "USING hnsw (vector vector_l2_ops)" in found
    query = torch.nn.functional.normalize(torch.ones(1, 8))
    [hits] = index.search(query, 3, model=ModelIdentity.of(embedder))
    import psycopg

    with psycopg.connect(postgres.url) as connection:
        connection.execute("SET enable_seqscan = off")
        near = f'SELECT path FROM "{table}" ORDER BY vector <-> %s::vector LIMIT 3'
        vector = str(query[0].tolist())
        plan = "\n".join(line for (line,) in connection.execute(f"EXPLAIN {near}", [vector]))
        assert "Index Scan using" in plan
        assert {path for (path,) in connection.execute(near, [vector])} == {hit.path for hit in hits}


def test_a_table_of_something_else_is_refused(postgres, index, table):
    postgres.rows(f'CREATE TABLE "{table}" (id uuid PRIMARY KEY, path integer)')
    with pytest.raises(ValueError, match="8 dimensions that pfml exported, got integer for path: choose another"):
        export_index(index, "postgres", table, url=postgres.url)
    other = f"{table}-3"
    export_index(_index_of(index, 3), "postgres", other, url=postgres.url)
    with pytest.raises(ValueError, match=r"got vector\(3\) for vector: choose another"):
        export_index(index, "postgres", other, url=postgres.url)


def test_names_are_quoted_and_texts_may_hold_anything(postgres, embedder, tmp_path, table):
    model = ModelIdentity.of(embedder)
    odd = ImageIndex.create(tmp_path / "odd", model, 8)
    odd.add(torch.eye(8)[:2], ['caf\udce9 "\t\\N.jpg', "x.jpg"], ["a\0b", "'; DROP TABLE x; --"], model=model)
    name = f'"{table[-8:]}"; drop'
    export_index(odd, "postgres", name, url=postgres.url)
    quoted = '"' + name.replace('"', '""') + '"'
    assert sorted(postgres.rows(f"SELECT path, class_name FROM {quoted}")) == [
        ('caf\\udce9 "\t\\N.jpg', "a\\x00b"),
        ("x.jpg", "'; DROP TABLE x; --"),
    ]
    assert export_index(odd, "postgres", name, url=postgres.url).written == 0
    with pytest.raises(ValueError, match="at most 63 bytes"):
        export_index(odd, "postgres", "x" * 64, url=postgres.url)


def test_metadata_is_jsonb(postgres, index, table, monkeypatch):
    points = index.points

    def with_metadata(batch_size):
        for some in points(batch_size):
            payloads = tuple({**each, "metadata": {"price": 3.5, "tags": ["a"]}} for each in some.payloads)
            yield replace(some, payloads=payloads)

    monkeypatch.setattr(index, "points", with_metadata)
    export_index(index, "postgres", table, url=postgres.url)
    cheap = f"SELECT count(*) FROM \"{table}\" WHERE (metadata->>'price')::float < 4 AND metadata->'tags' ? 'a'"
    assert postgres.rows(cheap) == [(len(index),)]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://me:hush@127.0.0.1:9/birds", "server postgresql://me@127.0.0.1:9/birds must answer"),
        ("postgresql://me:hu/sh@127.0.0.1/birds", "cannot be read: write @ / : % of a password as %40"),
        ("postgresql://me:hu@sh@127.0.0.1/birds", "cannot be read: write @ / : % of a password as %40"),
        ("postgresql://me:hu%sh@127.0.0.1/birds", "cannot be read: write @ / : % of a password as %40"),
        ("host=127.0.0.1 password=hush", "must be postgresql://user@host:port/database"),
    ],
)
def test_a_server_that_cannot_be_reached_is_an_error_without_the_password(url, said, index, capsys):
    with pytest.raises((ConnectionError, ValueError)) as error:
        export_index(index, "postgres", "letters", url=url)
    assert said in str(error.value)
    assert "hu" not in str(error.value)


def test_the_command_shows_no_password(postgres, index, table, capsys):
    url = f"{postgres.url}&password=hush"
    main(["export", str(index.path.parent), "--to", "postgres", "--url", url, "--collection", table, "--json"])
    printed = capsys.readouterr()
    assert "hush" not in printed.out + printed.err
    assert json.loads(printed.out)["written"] == len(index)


def _index_of(index, dimension):
    made = ImageIndex.create(index.path.parent / f"of {dimension}", index.model, dimension)
    made.add(torch.eye(dimension), [f"{k}.png" for k in range(dimension)], model=index.model)
    return made
