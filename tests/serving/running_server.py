"""Servers in a thread or in a process of their own, and clients that speak to them over sockets.

Nothing here waits for a time to pass, but for what must happen; `LIMIT` is for a test that fails.
"""

import contextlib
import os
import re
import socket
import sys
import threading
import time

from pfml.serving.connection import Timeouts
from pfml.serving.server import GracefulServer, listening_socket
from processes import CONTEXT

#: Seconds after which something that must happen has not.
LIMIT = 60
#: Of a first process, whose fork server imports torch on a busy machine.
START_LIMIT = 300
GET = b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n"


def wait_until(condition, limit=LIMIT):
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, f"it has not happened within {limit} s"
        time.sleep(0.005)


class Clock:
    """Time that passes when a test says so: the timeouts of a connection end at once, or never."""

    def __init__(self):
        self.now = 1000.0
        self.asked = 0

    def __call__(self):
        self.asked += 1
        return self.now

    def advance(self, seconds):
        self.now += seconds

    def advance_past_polls(self, seconds):
        """Let time pass, and wait until open connections have been polled since."""
        self.now += seconds
        asked = self.asked
        wait_until(lambda: self.asked > asked + 4)


@contextlib.contextmanager
def running(app, timeouts=None, listening=None, **options):
    """A server of `app` in a thread, with its `port`; its shutdown is requested as a signal requests it."""
    listening = listening or listening_socket("127.0.0.1", 0)
    # idle connections stay open: on a busy machine uvicorn's five seconds may pass between two requests of a test
    options = {"lifespan": "off", "log_level": "error", "timeout_keep_alive": LIMIT, **options}
    server = GracefulServer(app, timeouts or Timeouts(), **options)
    server.port = listening.getsockname()[1]
    server.thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    server.thread.start()
    wait_until(lambda: server.started or not server.thread.is_alive())
    assert server.started
    try:
        yield server
    finally:
        server.should_exit = True
        server.thread.join(LIMIT)


def connected(port, sent=b""):
    client = socket.create_connection(("127.0.0.1", port))
    client.settimeout(LIMIT)
    client.sendall(sent)
    return client


def answer_of(client):
    """Status, head and body of a response; 0 if the connection was reset or closed instead."""
    received = b""
    try:
        while b"\r\n\r\n" not in received and (some := client.recv(2**16)):
            received += some
        head, _, body = received.partition(b"\r\n\r\n")
        head = head.lower()
        length = re.search(rb"content-length: (\d+)", head)
        while head and len(body) < int(length[1]) and (some := client.recv(2**16)):
            body += some
    except ConnectionError:
        return 0, b"", b""
    return (int(head.split()[1]), head, body) if head else (0, b"", b"")


class ServerProcess:
    """A function in a process of its own, which prints the address that it serves at.

    Args:
        folder: For what it prints, to `out` and `errors`.
        target: Called as target(*arguments).
    """

    def __init__(self, folder, target, *arguments):
        self._files = folder / "out", folder / "errors"
        self.process = CONTEXT.Process(target=_printing_to, args=(*self._files, target, *arguments))
        self.process.start()
        wait_until(lambda: re.search(r":\d+/", self.out) or not self.process.is_alive(), START_LIMIT)
        assert self.process.is_alive(), self.errors
        self.port = int(re.search(r":(\d+)/", self.out)[1])

    @property
    def out(self):
        return self._files[0].read_text() if self._files[0].exists() else ""

    @property
    def errors(self):
        return self._files[1].read_text() if self._files[1].exists() else ""

    def signal(self, number):
        os.kill(self.process.pid, number)

    def end(self):
        """Wait for its end; its exit status, negative for a signal."""
        self.process.join(LIMIT)
        assert self.process.exitcode is not None, "it has not ended within a minute"
        return self.process.exitcode


def _printing_to(out, errors, target, *arguments):
    for path, stream in ((out, sys.stdout), (errors, sys.stderr)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream.fileno())
    target(*arguments)
