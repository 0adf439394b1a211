"""The server: serves an application at an address until a shutdown request (SIGINT or SIGTERM)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import time
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from pfml.serving.access_log import AccessLog
from pfml.serving.app import create_app
from pfml.serving.connection import Connections, Timeouts, accept_pending
from pfml.serving.middleware import Access
from pfml.serving.service import Service

__all__ = [
    "LOGGING",
    "GracefulServer",
    "OneLine",
    "address_of",
    "announce",
    "create_server",
    "listening_socket",
    "serve",
]

#: Characters that move the cursor, set colors, clear a terminal, or begin a line.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


class OneLine(logging.Formatter):
    """A log record as one line with control characters escaped; tracebacks keep their lines."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        """The line of a record."""
        record.message = CONTROL.sub(_escaped, record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's own name
        """The traceback of a record."""
        return "\n".join(CONTROL.sub(_escaped, line) for line in super().formatException(ei).split("\n"))


#: For `logging.config.dictConfig`, as uvicorn takes it.
LOGGING: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"()": OneLine}},
    "handlers": {"terminal": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}},
    "root": {"handlers": ["terminal"], "level": "WARNING"},
    "loggers": {
        # a malformed form is answered with 400, and not logged
        "python_multipart": {"level": "ERROR"},
        "multipart": {"level": "ERROR"},
    },
}


#: Seconds that requests have to finish at shutdown; then they get 503.
SHUTDOWN_SECONDS = 25
#: Seconds in which open connections may still send a request at shutdown.
DRAIN_SECONDS = 2.0
#: Connections at a time.
CONNECTIONS = 512


def address_of(host: str, port: int) -> str:
    """The URL of the page."""
    reachable = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return f"http://{f'[{reachable}]' if ':' in reachable else reachable}:{port}/"


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; port 0 for any free one.

    The socket is bound early; connections queue until the server is ready. So an address that was printed never
    refuses a connection.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # IPPROTO_TCP is explicit since asyncio sets TCP_NODELAY on such sockets only: else the second packet of a response
    # would wait until the client has acknowledged the first, 40 ms on Linux
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(CONNECTIONS)
    except OSError as error:
        listening.close()
        raise OSError(f"port {port} of {host} must be free, got: {error.strerror}; choose --port") from None
    return listening


class GracefulServer(uvicorn.Server):
    """uvicorn's server with a graceful shutdown: every request that was sent before it is answered.

    uvicorn closes its socket, and then every connection on which it has not read a request yet. It would reset
    connections in the queue of the socket, and those with a request that is still unread.

    Args:
        app: The ASGI application.
        timeouts: Of clients.
        clock: Seconds that never go back.
        most: Connections at a time; None for any number.
        on_start: Called when requests are answered.
        options: Of `uvicorn.Config`.
    """

    def __init__(
        self,
        app: ASGIApp,
        timeouts: Timeouts | None = None,
        clock: Callable[[], float] = time.monotonic,
        most: int | None = None,
        on_start: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        self.connections = Connections(timeouts, clock, most)
        self.on_start = on_start
        config = uvicorn.Config(
            self.connections.wrap(app),
            interface="asgi3",
            http="h11",  # always installed; other parsers differ in what they refuse
            ws="none",
            proxy_headers=False,  # a header does not prove who sent the request
            **options,
        )
        config.load()
        self.connections.protocol = config.http_protocol_class
        config.http_protocol_class = self.connections  # type: ignore[assignment]
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application and answer requests."""
        await super().startup(sockets)
        if self.started and self.on_start is not None:
            self.on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no new connections, answer the open ones, and stop."""
        self.connections.is_shutting_down = True
        for listening in sockets or []:
            asyncio.get_running_loop().remove_reader(listening)
        for _ in range(3):  # the event loop has accepted some connections that it has not begun to serve
            await asyncio.sleep(0)
        pending = [accepted for listening in sockets or [] for accepted in accept_pending(listening)]
        for server in self.servers:  # at once: later connections are refused, and not reset
            server.close()
        await self.connections.adopt(
            pending, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        now = self.connections.clock
        quiet_from, until = now() + self.connections.timeouts.drain, now() + DRAIN_SECONDS
        while not self.force_exit and now() < until:
            if self.connections.is_quiet() and now() > quiet_from:
                break
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)


def create_server(app: ASGIApp, **options: Any) -> GracefulServer:
    """A server of the application with the limits of `pfml serve`; `options` are those of `GracefulServer`."""
    return GracefulServer(
        app,
        most=CONNECTIONS,
        log_config=LOGGING,
        access_log=False,  # uvicorn's own, which has query strings
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        **options,
    )


def announce(host: str, listening: socket.socket) -> None:
    """Print the address; scripts read it from the first line."""
    print(f"pfml serve: {address_of(host, listening.getsockname()[1])}  (Ctrl-C to stop)", flush=True)


def serve(service: Service, access: Access, port: int, *, log: AccessLog | None = None) -> None:
    """Serve until SIGINT or SIGTERM; then answer the requests that were sent, accept no new ones, and return."""
    with listening_socket(access.host, port) as listening:
        announce(access.host, listening)
        server = create_server(create_app(service, access, log=log))
        # uvicorn raises the signal again after its shutdown; for a server that is the usual end
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
