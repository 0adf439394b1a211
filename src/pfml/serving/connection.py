"""A connection that must get on: without a bound, clients that send a byte now and then would hold all places.

uvicorn closes connections that are idle between requests, but waits for ever for the rest of a request, and for a
client that does not read its answer. Here a request has a time that grows with what has arrived, so that a slow line
is served and one that only drips is not, and an answer must leave the buffer bit by bit.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["BoundedConnection"]

#: Seconds that a request has to arrive, at least.
REQUEST_SECONDS = 20.0
#: Bytes that earn it a further second: a full upload of 10 MiB may take twenty minutes.
BYTES_PER_SECOND = 2**13
#: Seconds in which a client must read something of its answer.
READING_SECONDS = 30.0
#: Seconds from one look at a connection to the next.
LOOK_EVERY = 1.0
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedConnection(H11Protocol):
    """uvicorn's connection, closed when its client is too slow."""

    request_seconds = REQUEST_SECONDS
    reading_seconds = READING_SECONDS
    look_every = LOOK_EVERY

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._began: float | None = None  # when the request did that is arriving
        self._received = 0  # bytes of it
        self._unread = 0  # bytes of the answer that waited at the last progress
        self._read_at = 0.0  # when that was
        self._next_look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._began = self.loop.time()
        self._next_look = self.loop.call_later(self.look_every, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._began is None:
            self._began, self._received = self.loop.time(), 0
        self._received += len(data)
        was_refused = self._is_refused()
        super().data_received(data)
        if was_refused and not self._is_refused():  # all of it has arrived, and the next request has a time of its own
            self._began, self._received = self.loop.time(), 0

    def on_response_complete(self) -> None:
        is_refused = self._is_refused()
        super().on_response_complete()
        if not is_refused:
            # a request that came before its turn, with a part of its body, has begun here and not when data arrives
            self._began = None if self.conn.their_state is h11.IDLE else self.loop.time()
            self._received = 0

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP; in the middle of a body, whatever works on the request answers nobody then."""
        has_answer = self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE)
        self._give_up_request()
        if has_answer:
            self.transport.close()
        else:
            super().send_400_response(msg)

    def _is_refused(self) -> bool:
        """Whether a request has its answer, and is still arriving."""
        is_answered = self.cycle is not None and self.cycle.response_complete
        return is_answered and self.conn.their_state is h11.SEND_BODY

    def _give_up_request(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _look(self) -> None:
        """Close the connection if its client is too slow, else look again later."""
        now = self.loop.time()
        if self._is_not_reading(now):
            self.transport.abort()
            return
        if self._is_dripping(now) and not self.transport.is_closing():
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # no answer has begun
                self.transport.write(TOO_SLOW)
            self._give_up_request()
            self.transport.close()
        self._next_look = self.loop.call_later(self.look_every, self._look)

    def _is_dripping(self, now: float) -> bool:
        """Whether the request should have arrived by now."""
        if self._began is None or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            return False
        return now - self._began > self.request_seconds + self._received / BYTES_PER_SECOND

    def _is_not_reading(self, now: float) -> bool:
        """Whether the answer has waited for its reader for too long."""
        unread = self.transport.get_write_buffer_size()
        if unread == 0 or unread != self._unread:
            self._unread, self._read_at = unread, now
        return now - self._read_at > self.reading_seconds
