"""Requests that a server leaves without an answer when it is told to end (Linux, macOS).

python benchmarks/server_shutdown.py
python benchmarks/server_shutdown.py --plain       # with the shutdown of uvicorn itself

A server in a process of its own takes 0.2 s for each request. Clients ask all the time, on kept connections or on a new
one for each request. After a while the server gets SIGTERM. A request counts as reset if it was sent on a connection
that the server had accepted and not announced to close, and no answer came; those that were sent before the signal are
counted apart.
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import threading
import time

PROGRAM = """
import asyncio, sys, uvicorn
from pfml.serving.server import GracefulServer, listening_socket

async def app(scope, receive, send):
    await asyncio.sleep(0.2)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})

if sys.argv[1] == "plain":
    GracefulServer.shutdown = uvicorn.Server.shutdown
listening = listening_socket("127.0.0.1", 0)
print(listening.getsockname()[1], flush=True)
GracefulServer(app, lifespan="off", log_level="warning", timeout_graceful_shutdown=5).run(sockets=[listening])
"""
REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class Client(threading.Thread):
    """Asks until it is refused; `answers` has the time of each request, and whether it was answered."""

    def __init__(self, port: int, keeps: bool) -> None:
        super().__init__(daemon=True)
        self.port = port
        self.keeps = keeps
        self.answers: list[tuple[float, bool]] = []

    def run(self) -> None:
        connection: socket.socket | None = None
        while True:
            try:
                if connection is None:
                    connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
            except OSError:
                return
            sent = time.monotonic()
            answer = self._asked(connection)
            self.answers.append((sent, bool(answer)))
            if not answer or b"connection: close" in answer.lower():
                return
            if not self.keeps:
                connection.close()
                connection = None

    def _asked(self, connection: socket.socket) -> bytes:
        received = b""
        try:
            connection.sendall(REQUEST)
            while not received.endswith(b"ok") and (part := connection.recv(2**16)):
                received += part
        except OSError:
            return b""
        return received


def trial(kind: str, clients: int, keeps: bool, seconds: float) -> tuple[int, int, int]:
    """Requests, and how many of those sent before and after the signal were reset."""
    command = [sys.executable, "-c", PROGRAM, kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        asking = [Client(port, keeps) for _ in range(clients)]
        for one in asking:
            one.start()
        time.sleep(seconds)
        told = time.monotonic()
        process.send_signal(signal.SIGTERM)
        for one in asking:
            one.join(60)
    answers = [answer for one in asking for answer in one.answers]
    before = sum(1 for sent, answered in answers if not answered and sent <= told)
    after = sum(1 for sent, answered in answers if not answered and sent > told)
    return len(answers), before, after


def main() -> None:
    """Print the counts of some trials."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--clients", type=int, default=192)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.5)
    options = parser.parse_args()
    for keeps in (True, False):
        for _ in range(options.trials):
            asked, before, after = trial(
                "plain" if options.plain else "graceful", options.clients, keeps, options.seconds
            )
            words = "kept connections" if keeps else "new connections "
            print(f"{words}: {asked:,} requests, reset: {before} sent before the signal, {after} after it", flush=True)


if __name__ == "__main__":
    main()
