"""A PostgreSQL server with pgvector, made by the package pgserver."""

import subprocess
import time

import pytest


class PostgresServer:
    """A server in `folder`; as root, pgserver runs it as another user."""

    def __init__(self, folder):
        pgserver = pytest.importorskip("pgserver", reason="a real PostgreSQL comes with the package pgserver")
        try:
            self._server = pgserver.get_server(folder, cleanup_mode="stop")
        except (OSError, AssertionError, subprocess.SubprocessError) as error:
            pytest.skip(f"PostgreSQL cannot be started here: {error}")
        self.folder = folder
        self.url = self._server.get_uri()

    def stop(self):
        """Stop as a crash does: without waiting for clients, and without a checkpoint."""
        self._control("-m", "immediate", "stop")

    def start(self):
        self._server.ensure_postgres_running()

    def start_after(self, seconds):
        time.sleep(seconds)
        self.start()

    def rows(self, statement, *values):
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement, values)
            return cursor.fetchall() if cursor.description else []

    def close(self):
        self._server.cleanup()

    def _control(self, *arguments):
        from pgserver._commands import pg_ctl

        pg_ctl(["-w", *arguments], pgdata=self.folder, user=self._server.system_user)
