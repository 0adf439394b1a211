"""Fixtures of the tests of exports."""

import pytest
from postgres_server import PostgresServer

from small_runs import save_index, save_model


@pytest.fixture(scope="session")
def postgres(tmp_path_factory):
    """A real PostgreSQL server, for all tests of a process."""
    server = PostgresServer(tmp_path_factory.mktemp("postgres") / "data")
    yield server
    server.close()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def index(embedder, tmp_path):
    return save_index(tmp_path / "index", embedder)
