"""The server: an application at an address, until it is interrupted."""

from __future__ import annotations

import contextlib
import socket

import uvicorn

from pfml.serving.app import create_app
from pfml.serving.connection import BoundedConnection
from pfml.serving.guard import Access
from pfml.serving.service import Service

__all__ = ["address_of", "serve"]

#: Seconds that requests have to end when the server does.
PATIENCE = 5
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


def serve(service: Service, access: Access, port: int) -> None:
    """Answer requests until SIGINT or SIGTERM; requests under way are then answered, new ones are not taken."""
    with listening_socket(access.host, port) as listening:
        print(f"pfml serve: {address_of(access.host, listening.getsockname()[1])}  (Ctrl-C ends it)", flush=True)
        config = uvicorn.Config(
            create_app(service, access),
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # a header of the request says nothing about who asks
            http=BoundedConnection,
            ws="none",
            limit_concurrency=CONNECTIONS,
            timeout_graceful_shutdown=PATIENCE,
        )
        # uvicorn hands the signal on once all is closed: for a server it is no interruption, but the usual end
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listening])
