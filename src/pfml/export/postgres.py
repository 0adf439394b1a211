"""A table of PostgreSQL with a column of pgvector, on a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from pfml.export.vector_databases import other_model_error, shown_address
from pfml.search import ModelIdentity, Points

__all__ = ["open_collection"]

#: Column -> type, of all but the vector.
COLUMNS = {
    "id": "uuid",
    "path": "text",
    "class_name": "text",
    "model": "text",
    "metadata": "jsonb",
    "version": "text",
}
#: Bytes of a name that PostgreSQL does not cut off.
LONGEST_NAME = 63
#: Dimensions of a vector that pgvector stores, and of one that it builds an HNSW index of.
MOST_DIMENSIONS, MOST_HNSW_DIMENSIONS = 16_000, 2_000
#: Seconds without an answer after which a connection is lost.
CONNECT_SECONDS, SILENT_SECONDS = 10, 30
#: Rows of ids that are read at once.
FETCHED = 10_000


@contextmanager
def open_collection(
    name: str, model: ModelIdentity, dimension: int, *, url: str | None, path: Path | None, api_key: str | None
) -> Iterator[PostgresTable]:
    """The table of this name; see `pfml.export.vector_databases.OpenCollection`.

    The password is `api_key`, or in the address, or where PostgreSQL's own programs look: PGPASSWORD, ~/.pgpass.
    """
    assert url is not None
    if len(name.encode()) > LONGEST_NAME:
        raise ValueError(f"the name of a table must have at most {LONGEST_NAME} bytes, got {name!r}: use --collection")
    if dimension > MOST_DIMENSIONS:
        raise ValueError(f"pgvector stores vectors of at most {MOST_DIMENSIONS:,} dimensions, got {dimension:,}")
    table = PostgresTable(name, dimension, url, api_key)
    try:
        table.create_or_check(model)
        yield table
    finally:
        table.close()


class PostgresTable:
    """A `pfml.export.vector_databases.Collection` of PostgreSQL: a transaction for each batch, all of it or nothing.

    Args:
        name: Of the table.
        dimension: D of its vectors.
        url: postgresql://...
        password: None for that of the address or of the environment.
    """

    batch_size = 1024

    def __init__(self, name: str, dimension: int, url: str, password: str | None) -> None:
        from psycopg import sql

        self.name = name
        self.dimension = dimension
        self.server = shown_address(url)
        self._parameters = _parameters(url, password)
        self._table = sql.Identifier(name)
        self._columns = sql.SQL(", ").join(map(sql.Identifier, (*COLUMNS, "vector")))
        self._connection: Any = None

    def create_or_check(self, model: ModelIdentity) -> None:
        """Make the extension and the table, or check that the table fits."""
        import psycopg

        with self._transaction() as cursor:
            try:
                if not cursor.execute("SELECT 1 FROM pg_extension WHERE extname = 'vector'").fetchone():
                    cursor.execute("CREATE EXTENSION vector")
            except (psycopg.errors.FeatureNotSupported, psycopg.errors.InsufficientPrivilege) as error:
                raise OSError(
                    f"the PostgreSQL server {self.server} must have the extension vector (pgvector), "
                    f"got: {_reason(error)}"
                ) from None
        with self._transaction() as cursor:
            types = {**COLUMNS, "vector": f"vector({self.dimension})"}
            found = self._column_types(cursor)
            if not found:
                kinds = ", ".join(f'"{column}" {kind}{_constraint(column)}' for column, kind in types.items())
                cursor.execute(self._sql(f"CREATE TABLE {{table}} ({kinds})"))
                return
            differing = [column for column, kind in types.items() if found.get(column) != kind]
            if differing:
                raise ValueError(
                    f"the table {self.name!r} must have points of {self.dimension} dimensions that pfml exported, got "
                    f"{found.get(differing[0], 'no column')} for {differing[0]}: choose another with --collection"
                )
            if cursor.execute(self._sql("SELECT 1 FROM {table} WHERE model <> %s LIMIT 1"), [model.digest]).fetchone():
                raise other_model_error(model, f"the table {self.name!r}")

    def versions(self, ids: Sequence[str]) -> dict[str, str]:
        """Id -> stored version, of those of `ids` that are there."""
        with self._transaction() as cursor:
            cursor.execute(self._sql("SELECT id, version FROM {table} WHERE id = ANY(%s)"), [list(map(UUID, ids))])
            return {str(id_): version for id_, version in cursor}

    def upsert(self, points: Points, versions: Sequence[str]) -> None:
        """Write points, replacing those of the same ids."""
        from psycopg.types.json import Jsonb

        rows = zip(points.ids, points.vectors.numpy(), points.payloads, versions, strict=True)
        updates = ", ".join(f'"{column}" = excluded."{column}"' for column in (*COLUMNS, "vector") if column != "id")
        with self._transaction() as cursor:
            # a COPY and one INSERT take less than half the time of an INSERT for each row, in a pipeline
            cursor.execute(self._sql("CREATE TEMPORARY TABLE exported_points (LIKE {table}) ON COMMIT DROP"))
            with cursor.copy(self._sql("COPY exported_points ({columns}) FROM STDIN (FORMAT BINARY)")) as copy:
                copy.set_types([*COLUMNS.values(), "vector"])
                for id_, vector, payload, version in rows:
                    path, name = _storable(payload["path"]), _storable(payload["class_name"])
                    metadata = Jsonb(_storable(payload.get("metadata") or {}))
                    copy.write_row((UUID(id_), path, name, payload["model"], metadata, version, vector))
            cursor.execute(
                self._sql(
                    "INSERT INTO {table} ({columns}) SELECT {columns} FROM exported_points "
                    f"ON CONFLICT (id) DO UPDATE SET {updates}"
                )
            )

    def ids(self) -> Iterator[str]:
        """The ids of all points."""
        with self._transaction(server_cursor="exported_ids") as cursor:
            cursor.itersize = FETCHED
            cursor.execute(self._sql("SELECT id FROM {table}"))
            for (id_,) in cursor:
                yield str(id_)

    def delete(self, ids: Sequence[str]) -> None:
        """Delete points."""
        with self._transaction() as cursor:
            cursor.execute(self._sql("DELETE FROM {table} WHERE id = ANY(%s)"), [list(map(UUID, ids))])

    def build_hnsw(self) -> None:
        """Build an HNSW index of the Euclidean distance, unless there is one."""
        if self.dimension > MOST_HNSW_DIMENSIONS:
            raise ValueError(
                f"pgvector builds an HNSW index of at most {MOST_HNSW_DIMENSIONS:,} dimensions, got "
                f"{self.dimension:,}: leave out --hnsw"
            )
        with self._transaction() as cursor:
            found = cursor.execute(
                "SELECT 1 FROM pg_indexes WHERE schemaname = ANY(current_schemas(false)) AND tablename = %s "
                "AND indexdef LIKE '%%USING hnsw (vector vector_l2_ops)%%'",
                [self.name],
            ).fetchone()
            if not found:
                cursor.execute(self._sql("CREATE INDEX ON {table} USING hnsw (vector vector_l2_ops)"))

    def close(self) -> None:
        """Close the connection, if it is open."""
        if self._connection is not None:
            self._connection.close()

    @contextmanager
    def _transaction(self, server_cursor: str = "") -> Iterator[Any]:
        """A cursor in a transaction, on a new connection if the last was lost; the errors of the server name it."""
        import psycopg

        try:
            connection = self._connected()
            with connection.transaction(), connection.cursor(server_cursor) as cursor:
                yield cursor
        except psycopg.Error as error:
            is_lost = self._connection is None or self._connection.closed
            kind = ConnectionError if is_lost else OSError
            raise kind(
                f"the PostgreSQL server {self.server} must answer and accept the points, got: {_reason(error)}"
            ) from None

    def _connected(self) -> Any:
        import psycopg
        from pgvector.psycopg import register_vector

        if self._connection is None or self._connection.closed:
            self._connection = None
            # without prepared statements, which a pool of connections before the server may lose
            self._connection = psycopg.connect(**self._parameters, autocommit=True, prepare_threshold=None)
        if self._connection.adapters.types.get("vector") is None and self._has_extension():
            register_vector(self._connection)
        return self._connection

    def _has_extension(self) -> bool:
        return bool(self._connection.execute("SELECT 1 FROM pg_type WHERE typname = 'vector'").fetchone())

    def _column_types(self, cursor: Any) -> dict[str, str]:
        """Column -> type of the table as it is, empty if there is none."""
        cursor.execute(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped",
            [self._table.as_string(self._connection)],
        )
        return dict(cursor.fetchall())

    def _sql(self, statement: str) -> Any:
        from psycopg import sql

        return sql.SQL(statement).format(table=self._table, columns=self._columns)


def _parameters(url: str, password: str | None) -> dict[str, Any]:
    """The parameters of a connection by its address, which may have some of its own."""
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    wanted = "the address of a PostgreSQL server must be postgresql://user@host:port/database"
    if not url.startswith(("postgresql://", "postgres://")):
        raise ValueError(f"{wanted}, got one that begins otherwise")
    try:
        given = conninfo_to_dict(url)
        # a password that is not escaped is taken for a port, a host or a database, which errors would show
        if "@" in f"{given.get('host', '')}{given.get('dbname', '')}" or not _is_port(str(given.get("port", ""))):
            raise ProgrammingError("a part of the password in the wrong place")
    except ProgrammingError:
        raise ValueError(
            f"{wanted}, got one that cannot be read: write @ / : % of a password as %40 %2F %3A %25"
        ) from None
    ours = {
        "connect_timeout": CONNECT_SECONDS,
        "tcp_user_timeout": SILENT_SECONDS * 1000,
        "keepalives_idle": SILENT_SECONDS,
        "application_name": "pfml export",
    }
    return {**ours, **given, **({} if password is None else {"password": password})}


def _is_port(text: str) -> bool:
    return all(one.isdecimal() for one in text.split(",")) if text else True


def _constraint(column: str) -> str:
    return {"id": " PRIMARY KEY", "class_name": ""}.get(column, " NOT NULL")


def _storable(value: Any) -> Any:
    """`value` without the character NUL, which PostgreSQL cannot store in a text."""
    if isinstance(value, str):
        return value.replace("\0", "\\x00")
    if isinstance(value, dict):
        return {_storable(key): _storable(each) for key, each in value.items()}
    return [_storable(each) for each in value] if isinstance(value, list) else value


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
