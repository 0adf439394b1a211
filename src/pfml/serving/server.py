"""The server: an application at an address, until it is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import time
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from pfml.serving.app import create_app
from pfml.serving.connection import Connections, Pace, all_waiting
from pfml.serving.guard import Access
from pfml.serving.service import Service

__all__ = ["LOGGING", "OneLine", "address_of", "serve"]

#: Characters that move the cursor, color or clear a terminal, or begin a line.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


class OneLine(logging.Formatter):
    """Time, level, who says it, and the message with its control characters escaped; a traceback has its lines."""

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
        # a body that is no form is the client's affair, who is told: 400
        "python_multipart": {"level": "ERROR"},
        "multipart": {"level": "ERROR"},
    },
}


#: Seconds that requests have to end when the server does; what is not answered by then gets 503.
PATIENCE = 25
#: Seconds that requests have to begin then, on connections that are open.
LAST_CALL = 2.0
#: Connections at a time.
CONNECTIONS = 512


def address_of(host: str, port: int) -> str:
    """Where a browser finds the page."""
    reachable = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    return f"http://{f'[{reachable}]' if ':' in reachable else reachable}:{port}/"


def listening_socket(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; port 0 for any free one.

    Callers wait from now on, and are answered once the server runs: an address that was printed is never refused.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # said to be TCP, since asyncio sends answers at once on such sockets only: on others their second part waits until
    # the client has acknowledged the first, 40 ms on Linux
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
    """uvicorn's server, which ends after everyone who has called is answered.

    uvicorn closes its socket, and then every connection on which it has not read a request yet: those who wait to be
    taken, and those whose request lies unread in the system, would find their connection reset.

    Args:
        app: What answers.
        pace: How slow clients may be.
        options: Of `uvicorn.Config`.
    """

    def __init__(self, app: ASGIApp, pace: Pace | None = None, **options: Any) -> None:
        self.connections = Connections(pace)
        config = uvicorn.Config(
            self.connections.before(app),
            interface="asgi3",
            http="h11",  # what uvicorn always has; others may be installed, and differ in what they refuse
            ws="none",
            proxy_headers=False,  # a header of the request says nothing about who asks
            **options,
        )
        config.load()
        self.connections.protocol = config.http_protocol_class
        config.http_protocol_class = self.connections  # type: ignore[assignment]
        super().__init__(config)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more callers, answer those that are there, and end."""
        self.connections.is_ending = True
        for _ in range(3):  # rounds of the loop, in which it takes those who wait itself
            await asyncio.sleep(0)
        waiting = [caller for listening in sockets or [] for caller in all_waiting(listening)]
        for server in self.servers:  # at once: who calls from now on is refused, and not reset
            server.close()
        await self.connections.take(waiting)
        quiet_from = time.monotonic() + self.connections.pace.quiet_seconds
        until = time.monotonic() + LAST_CALL
        while not self.force_exit and time.monotonic() < until:
            if self.connections.is_quiet() and time.monotonic() > quiet_from:
                break
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)


def serve(service: Service, access: Access, port: int) -> None:
    """Answer requests until SIGINT or SIGTERM; requests under way are then answered, new ones are not taken."""
    with listening_socket(access.host, port) as listening:
        print(f"pfml serve: {address_of(access.host, listening.getsockname()[1])}  (Ctrl-C ends it)", flush=True)
        server = GracefulServer(
            create_app(service, access),
            log_config=LOGGING,
            access_log=False,
            server_header=False,
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=PATIENCE,
        )
        # uvicorn hands the signal on once all is closed: for a server it is no interruption, but the usual end
        with contextlib.suppress(KeyboardInterrupt):
            server.run(sockets=[listening])
