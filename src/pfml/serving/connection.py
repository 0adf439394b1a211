"""Timeouts of connections, against clients that send or read too slowly (slowloris), and a drain at shutdown.

uvicorn closes connections that are idle between requests, but waits without limit for the rest of a request, and for a
client that does not read its response. Here the time of a request grows with the bytes that have arrived, so that a
slow line is served and a dripping one is not; and a response must leave the buffer steadily.

This is ours since `pfml serve` is used without a reverse proxy, which would set these limits (docs/SERVE.md has both).
uvicorn's connections are wrapped through two public interfaces: the bytes by an `asyncio.Protocol` that forwards all
calls, the requests by an ASGI application. Both are matched by the address of the client.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pfml.version import __version__

__all__ = ["Connections", "Timeouts", "accept_pending"]

#: Bytes that extend the timeout of a request by a second: an upload of 10 MiB may take twenty minutes.
BYTES_PER_SECOND = 2**13
VERSION = (b"x-pfml-version", __version__.encode())
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n%s: %s\r\n\r\n" % VERSION
SHUTTING_DOWN = "the server shut down before it could answer: try again when it is back"
CROWDED = "the server has as many connections as it takes: try again in a moment"
CLOSE = (b"connection", b"close")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timeouts:
    """Timeouts of a connection, in seconds.

    Args:
        request: Until a request must have arrived, and more for what has arrived (`BYTES_PER_SECOND`).
        read: Until a client must have read some of its response.
        poll_interval: Between two checks of a connection.
        drain: For which a connection must have been silent before it is closed at shutdown: a request may be in flight.
    """

    request: float = 20.0
    read: float = 30.0
    poll_interval: float = 1.0
    drain: float = 0.25


class Connections:
    """The connections of a server: a factory for uvicorn, which wraps its protocol and the application.

    Args:
        timeouts: Of clients.
        clock: Seconds that never go back.
        most: Connections at a time; requests on further ones get 503. None for any number.
    """

    #: Factory of uvicorn's own connections.
    protocol: Callable[..., asyncio.Protocol]

    def __init__(
        self,
        timeouts: Timeouts | None = None,
        clock: Callable[[], float] = time.monotonic,
        most: int | None = None,
    ) -> None:
        self.timeouts = timeouts or Timeouts()
        self.clock = clock
        self.most = most
        self.is_shutting_down = False
        self.by_client: dict[tuple[str, int], TimedConnection] = {}

    def __call__(self, **options: Any) -> TimedConnection:
        """A new connection, with the options that uvicorn passes to its own."""
        return TimedConnection(self.protocol(**options), self)

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """`app` behind an application that reports requests to their connections."""

        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            connection = self.by_client.get(tuple(scope.get("client") or ()))
            if scope["type"] != "http" or connection is None:
                await app(scope, receive, send)
            elif self.most is not None and len(self.by_client) > self.most:
                await connection.respond(_crowded, scope, receive, send)
            else:
                await connection.respond(app, scope, receive, send)

        return wrapped

    async def adopt(self, sockets: list[socket.socket], **options: Any) -> None:
        """Serve connections that were accepted by `accept_pending`, with the options that uvicorn passes to its own."""
        loop = asyncio.get_running_loop()
        for accepted in sockets:
            await loop.connect_accepted_socket(lambda: self(**options), accepted)

    def is_quiet(self) -> bool:
        """Whether no request seems to be in flight."""
        now = self.clock()
        return all(one.is_quiet(now) for one in self.by_client.values())


class TimedConnection(asyncio.Protocol):
    """A connection of uvicorn with timeouts.

    Args:
        inner: uvicorn's own connection, which implements HTTP.
        connections: All of the server.
    """

    def __init__(self, inner: asyncio.Protocol, connections: Connections) -> None:
        self.inner = inner
        self.connections = connections
        self.timeouts = connections.timeouts
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport
        self._client: tuple[str, int] | None = None
        self._lost = asyncio.Event()
        self._began: float | None = None  # when the arriving request began
        self._received = 0  # bytes of that request
        self._is_responding = False
        self._has_begun_response = False
        self._received_at = 0.0  # when the last byte arrived
        self._unread = 0  # bytes of the response in the buffer at the last progress
        self._read_at = 0.0  # when that progress was
        self._next_poll: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timeouts of a new connection."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._began = self._received_at = self._read_at = self.connections.clock()
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self._client = str(peer[0]), int(peer[1])
            self.connections.by_client[self._client] = self
        self._next_poll = self.loop.call_later(self.timeouts.poll_interval, self._poll)
        self.inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeouts, and tell the inner protocol."""
        if self._next_poll is not None:
            self._next_poll.cancel()
        if self._client is not None and self.connections.by_client.get(self._client) is self:
            del self.connections.by_client[self._client]
        self.inner.connection_lost(exc)
        self._lost.set()

    def data_received(self, data: bytes) -> None:
        """Record when data arrived, and pass it on."""
        self._received_at = self.connections.clock()
        # during a response this is the next request, which waits for the server
        if self._began is None and not self._is_responding:
            self._began, self._received = self._received_at, 0
        self._received += len(data)
        try:
            self.inner.data_received(data)
        except Exception as error:  # invalid HTTP in the middle of a response, where uvicorn cannot answer 400
            log.info("a connection was closed: %r", error)
            self.transport.close()

    def eof_received(self) -> bool | None:
        """Pass on the end of the client's data."""
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        """Pass on that the client reads slowly."""
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass on that the client reads again."""
        self.inner.resume_writing()

    def is_quiet(self, now: float) -> bool:
        """Whether nothing arrived for a while, or a response is under way, which the shutdown waits for anyway."""
        return self._is_responding or now - self._received_at >= self.timeouts.drain

    async def respond(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Let `app` respond to a request, and track how far it is."""
        self._is_responding, self._has_begun_response, is_complete = True, False, False
        if not _has_body(scope):
            self._began = None
        elif self._began is None:  # it was pipelined, with a part of its body
            self._began, self._received = self.connections.clock(), 0

        async def receiving() -> Message:
            message = await receive()
            if message["type"] != "http.request" or not message.get("more_body", False):
                self._began = None
            return message

        async def sending(message: Message) -> None:
            nonlocal is_complete
            if self.transport.is_closing():
                return
            if message["type"] == "http.response.start":
                self._has_begun_response = True
                if self.connections.is_shutting_down:
                    kept = [(name, value) for name, value in message.get("headers", []) if name.lower() != CLOSE[0]]
                    message = {**message, "headers": [*kept, CLOSE]}
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                is_complete = True
                # before it is sent: uvicorn may then begin with the next request
                self._is_responding, self._began, self._received_at = False, None, self.connections.clock()
            await send(message)

        try:
            await app(scope, receiving, sending)
        except asyncio.CancelledError:
            if not self.connections.is_shutting_down or self._has_begun_response:
                raise
            await _unavailable(sending, SHUTTING_DOWN, 5)
        finally:
            if not is_complete:
                self._is_responding = False
                if self.transport.is_closing():
                    await self._lost.wait()  # so that uvicorn knows why there is no response

    def _poll(self) -> None:
        """Close the connection if a timeout has passed; else check again later."""
        now = self.connections.clock()
        if self._is_not_reading(now):
            self.transport.abort()
            return
        if self._is_dripping(now) and not self.transport.is_closing():
            if not (self._is_responding and self._has_begun_response):
                self.transport.write(TOO_SLOW)
            self.transport.close()
        self._next_poll = self.loop.call_later(self.timeouts.poll_interval, self._poll)

    def _is_dripping(self, now: float) -> bool:
        """Whether the request should have arrived by now."""
        if self._began is None:
            return False
        return now - self._began > self.timeouts.request + self._received / BYTES_PER_SECOND

    def _is_not_reading(self, now: float) -> bool:
        """Whether the client has read nothing of its response for too long."""
        unread = self.transport.get_write_buffer_size()
        if unread == 0 or unread != self._unread:
            self._unread, self._read_at = unread, now
        return now - self._read_at > self.timeouts.read


def accept_pending(listening: socket.socket) -> list[socket.socket]:
    """Accept all connections in the queue of a socket."""
    accepted = []
    listening.setblocking(False)
    with suppress(OSError):  # the queue is empty
        while True:
            accepted.append(listening.accept()[0])
    return accepted


async def _crowded(_: Scope, __: Receive, send: Send) -> None:
    """The application of connections beyond the limit."""
    await _unavailable(send, CROWDED, 1)


async def _unavailable(send: Send, error: str, retry_after: int) -> None:
    """Answer 503."""
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", str(retry_after).encode()),
        VERSION,
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _has_body(scope: Scope) -> bool:
    """Whether a request has a body."""
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip(b"0 ") != b""
