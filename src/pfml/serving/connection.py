"""A connection that must get on: without a bound, clients that send a byte now and then would hold all places.

uvicorn closes connections that are idle between requests, but waits for ever for the rest of a request, and for a
client that does not read its answer. Here a request has a time that grows with what has arrived, so that a slow line
is served and one that only drips is not, and an answer must leave the buffer bit by bit.

uvicorn's own connection is watched from two sides, each by a public interface: the bytes, as an `asyncio.Protocol` that
hands all calls on to it, and the requests, as an ASGI application that stands before all others. Both belong together
by the address of the client.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Connections", "Pace", "all_waiting"]

#: Bytes that earn a request a further second: a full upload of 10 MiB may take twenty minutes.
BYTES_PER_SECOND = 2**13
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
ENDING = json.dumps({"error": "the server ends before it could answer: try again when it is back"}).encode()
CLOSE = (b"connection", b"close")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pace:
    """How slow a client may be.

    Args:
        request_seconds: That a request has to arrive, at least.
        reading_seconds: In which a client must read something of its answer.
        look_every: Seconds from one look at a connection to the next.
        quiet_seconds: For which a connection must have been silent when the server ends, before it is closed: a request
            may be on its way.
    """

    request_seconds: float = 20.0
    reading_seconds: float = 30.0
    look_every: float = 1.0
    quiet_seconds: float = 0.25


class Connections:
    """All connections of a server: makes them for uvicorn, and tells them of the requests that pass.

    Args:
        pace: How slow clients may be.
    """

    #: What makes uvicorn's own connections.
    protocol: Callable[..., asyncio.Protocol]

    def __init__(self, pace: Pace | None = None) -> None:
        self.pace = pace or Pace()
        self.is_ending = False
        self.by_client: dict[tuple[str, int], BoundedConnection] = {}
        self._options: dict[str, Any] | None = None

    def __call__(self, **options: Any) -> BoundedConnection:
        """A new connection, with the options that uvicorn gives to its own."""
        self._options = options
        return BoundedConnection(self.protocol(**options), self)

    def before(self, app: ASGIApp) -> ASGIApp:
        """The application that tells the connections of requests, and passes these on to `app`."""

        async def told(scope: Scope, receive: Receive, send: Send) -> None:
            connection = self.by_client.get(tuple(scope.get("client") or ()))  # type: ignore[arg-type]
            if scope["type"] != "http" or connection is None:
                await app(scope, receive, send)
            else:
                await connection.answer(app, scope, receive, send)

        return told

    async def take(self, callers: list[socket.socket]) -> None:
        """Make connections of callers that were accepted elsewhere."""
        loop, options = asyncio.get_running_loop(), self._options
        for caller in callers:
            if options is None:  # the first callers of all come in the moment in which the server ends
                caller.close()
            else:
                await loop.connect_accepted_socket(lambda: self(**options), caller)

    def is_quiet(self) -> bool:
        """Whether no request seems to be on its way."""
        now = asyncio.get_running_loop().time()
        return all(one.is_quiet(now) for one in self.by_client.values())


class BoundedConnection(asyncio.Protocol):
    """A connection of uvicorn, closed when its client is too slow.

    Args:
        inner: uvicorn's own, which speaks HTTP.
        connections: All of the server.
    """

    def __init__(self, inner: asyncio.Protocol, connections: Connections) -> None:
        self.inner = inner
        self.connections = connections
        self.pace = connections.pace
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport
        self._client: tuple[str, int] | None = None
        self._lost = asyncio.Event()
        self._began: float | None = None  # when the request did that is arriving
        self._received = 0  # bytes of it
        self._is_answering = False
        self._has_begun_answer = False
        self._heard_at = 0.0  # when something came last
        self._unread = 0  # bytes of the answer that waited at the last progress
        self._read_at = 0.0  # when that was
        self._next_look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the clocks of a new connection."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._began = self._heard_at = self._read_at = self.loop.time()
        peer = transport.get_extra_info("peername")
        if isinstance(peer, tuple):
            self._client = str(peer[0]), int(peer[1])
            self.connections.by_client[self._client] = self
        self._next_look = self.loop.call_later(self.pace.look_every, self._look)
        self.inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks and tell the inner protocol."""
        if self._next_look is not None:
            self._next_look.cancel()
        if self._client is not None and self.connections.by_client.get(self._client) is self:
            del self.connections.by_client[self._client]
        self.inner.connection_lost(exc)
        self._lost.set()

    def data_received(self, data: bytes) -> None:
        """Note when data came, then pass it on."""
        self._heard_at = self.loop.time()
        # while a request is being answered, this is the next one, which waits for us
        if self._began is None and not self._is_answering:
            self._began, self._received = self._heard_at, 0
        self._received += len(data)
        try:
            self.inner.data_received(data)
        except Exception as error:  # no HTTP, and in the middle of an answer, where uvicorn cannot say so
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
        """Whether nothing has come for a while, or a request is being answered, which the server waits for anyway."""
        return self._is_answering or now - self._heard_at >= self.pace.quiet_seconds

    async def answer(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a request answered by `app`, and watch how far it is."""
        self._is_answering, self._has_begun_answer, is_complete = True, False, False
        if not _has_body(scope):
            self._began = None
        elif self._began is None:  # it came before its turn, with a part of its body
            self._began, self._received = self.loop.time(), 0

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
                self._has_begun_answer = True
                if self.connections.is_ending:
                    kept = [(name, value) for name, value in message.get("headers", []) if name.lower() != CLOSE[0]]
                    message = {**message, "headers": [*kept, CLOSE]}
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                is_complete = True
                # before it is sent: uvicorn may then begin with the next request
                self._is_answering, self._began, self._heard_at = False, None, self.loop.time()
            await send(message)

        try:
            await app(scope, receiving, sending)
        except asyncio.CancelledError:
            if not self.connections.is_ending or self._has_begun_answer:
                raise
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(ENDING)).encode())]
            await sending({"type": "http.response.start", "status": 503, "headers": [*headers, (b"retry-after", b"5")]})
            await sending({"type": "http.response.body", "body": ENDING})
        finally:
            if not is_complete:
                self._is_answering = False
                if self.transport.is_closing():
                    await self._lost.wait()  # so that uvicorn knows why there is no answer

    def _look(self) -> None:
        """Close the connection if its client is too slow, else look again later."""
        now = self.loop.time()
        if self._is_not_reading(now):
            self.transport.abort()
            return
        if self._is_dripping(now) and not self.transport.is_closing():
            if not (self._is_answering and self._has_begun_answer):
                self.transport.write(TOO_SLOW)
            self.transport.close()
        self._next_look = self.loop.call_later(self.pace.look_every, self._look)

    def _is_dripping(self, now: float) -> bool:
        """Whether the request should have arrived by now."""
        if self._began is None:
            return False
        return now - self._began > self.pace.request_seconds + self._received / BYTES_PER_SECOND

    def _is_not_reading(self, now: float) -> bool:
        """Whether the answer has waited for its reader for too long."""
        unread = self.transport.get_write_buffer_size()
        if unread == 0 or unread != self._unread:
            self._unread, self._read_at = unread, now
        return now - self._read_at > self.pace.reading_seconds


def all_waiting(listening: socket.socket) -> list[socket.socket]:
    """The callers that wait at a socket, accepted."""
    accepted = []
    listening.setblocking(False)
    with suppress(OSError):  # nobody waits any more
        while True:
            accepted.append(listening.accept()[0])
    return accepted


def _has_body(scope: Scope) -> bool:
    """Whether more than the head of a request is to come."""
    headers = dict(scope["headers"])
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip(b"0 ") != b""
