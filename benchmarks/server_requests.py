"""Requests byte by byte, right or wrong, and a client that sends them; Python's own library only."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import zlib

__all__ = ["FORM_TYPE", "Client", "form", "png", "request", "upload"]

#: Seconds after which a client that waits for an answer counts as hung.
PATIENCE = 60.0
BOUNDARY = "a-boundary"
FORM_TYPE = f"multipart/form-data; boundary={BOUNDARY}"


def png(width: int, height: int, claimed: tuple[int, int] | None = None) -> bytes:
    """A black picture, or one that claims to be of another size."""
    lines = zlib.compress(bytes((1 + 3 * width) * height), 1)
    header = b"IHDR" + struct.pack(">IIBBBBB", *(claimed or (width, height)), 8, 2, 0, 0, 0)
    parts = (header, b"IDAT" + lines, b"IEND")
    framed = (struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def form(content: bytes, name: str = "file") -> bytes:
    """A multipart body with one file."""
    head = f'Content-Disposition: form-data; name="{name}"; filename="x.png"\r\nContent-Type: image/png\r\n\r\n'
    return f"--{BOUNDARY}\r\n{head}".encode() + content + f"\r\n--{BOUNDARY}--\r\n".encode()


def request(method: str, target: str, body: bytes | None = None, **headers: str | bytes) -> bytes:
    """A whole request, if the headers are right; `content_type="..."` becomes content-type."""
    lines = {"host": "127.0.0.1", **({} if body is None else {"content_length": str(len(body))}), **headers}
    head = f"{method} {target} HTTP/1.1\r\n".encode()
    for name, value in lines.items():
        content = value.encode() if isinstance(value, str) else value
        head += name.replace("_", "-").encode() + b": " + content + b"\r\n"
    return head + b"\r\n" + (body or b"")


def upload(content: bytes, **headers: str | bytes) -> bytes:
    """A search by an image that is sent."""
    return request("POST", "/api/search", form(content), content_type=FORM_TYPE, **headers)


class Client:
    """One connection after the other to a server on this machine."""

    def __init__(self, port: int, seed: int) -> None:
        self.port = port
        self.random = random.Random(seed)

    async def answer(self, *pieces: bytes, pause: float = 0.0) -> str:
        """The status of the answer to a request that is sent in pieces."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            async with asyncio.timeout(PATIENCE):
                sending = asyncio.ensure_future(self._send(writer, pieces, pause))
                line = await reader.readline()
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                return line.split()[1].decode() if line.startswith(b"HTTP/1.1 ") else "closed"
        except TimeoutError:
            return "hung"
        except ConnectionError:
            return "closed"
        finally:
            writer.transport.abort()

    async def break_off(self, content: bytes, after: float) -> str:
        """Send, wait, and reset the connection without reading an answer."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(content)
            await asyncio.sleep(after)
        finally:
            held: socket.socket = writer.get_extra_info("socket")
            held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close becomes a reset
            writer.transport.abort()
        return "closed"

    @staticmethod
    async def _send(writer: asyncio.StreamWriter, pieces: tuple[bytes, ...], pause: float) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
