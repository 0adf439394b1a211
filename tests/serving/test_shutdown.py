"""Graceful shutdown: every request that was sent before it is answered."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")

from api_client import image_bytes

from pfml.serving.connection import Timeouts
from pfml.serving.server import GracefulServer, listening_socket

GET = b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n"


async def app(scope, receive, send):
    """A response, after a while for /late and /never; /block blocks the event loop."""
    if scope["path"] == "/block":
        time.sleep(0.4)
    await asyncio.sleep({"/late": 0.3, "/never": 60}.get(scope["path"], 0))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.contextmanager
def running(**options):
    """A server in a thread, and its port; its shutdown is requested as a signal requests it."""
    listening = listening_socket("127.0.0.1", 0)
    port = listening.getsockname()[1]
    server = GracefulServer(app, Timeouts(), lifespan="off", log_level="error", **options)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    server.thread = thread
    while not server.started:
        time.sleep(0.01)
    try:
        yield server, port
    finally:
        server.should_exit = True
        thread.join(20)


def connected(port, sent=b""):
    client = socket.create_connection(("127.0.0.1", port))
    client.settimeout(20)
    client.sendall(sent)
    return client


def answer_of(client):
    """Status and head of a response; 0 if the connection was reset or closed instead."""
    received = b""
    try:
        while b"\r\n\r\n" not in received and (part := client.recv(2**16)):
            received += part
        head, _, body = received.lower().partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        while head and len(body) < int(length[1]) and (part := client.recv(2**16)):
            body += part
    except ConnectionError:
        return 0, b""
    return (int(head.split()[1]), head) if head else (0, b"")


def test_connections_in_the_queue_of_the_socket_are_answered():
    with running() as (server, port):
        assert answer_of(connected(port, GET % b"/"))[0] == 200
        blocking = connected(port, GET % b"/block")
        time.sleep(0.1)
        clients = [connected(port, GET % b"/") for _ in range(40)]  # they stay in the queue of the socket
        server.should_exit = True
        assert [answer_of(client)[0] for client in (blocking, *clients)] == [200] * 41
        server.thread.join(10)
        assert not server.thread.is_alive()


def test_an_unread_request_on_a_keep_alive_connection_is_answered_and_the_connection_closed():
    with running() as (server, port):
        clients = [connected(port, GET % b"/") for _ in range(20)]
        assert [answer_of(client)[0] for client in clients] == [200] * 20
        blocking = connected(port, GET % b"/block")
        time.sleep(0.1)
        for client in clients:
            client.sendall(GET % b"/")
        server.should_exit = True
        found = [answer_of(client) for client in clients]
        assert [status for status, _ in found] == [200] * 20
        assert all(b"connection: close" in head for _, head in found)
        assert all(client.recv(1) == b"" for client in clients)
        assert answer_of(blocking)[0] == 200


def test_a_new_connection_may_still_send_its_request():
    with running() as (server, port):
        client = connected(port)
        server.should_exit = True
        time.sleep(0.2)
        client.sendall(GET % b"/")
        assert answer_of(client)[0] == 200


def test_connections_after_the_shutdown_request_are_refused():
    with running() as (server, port):
        late = connected(port, GET % b"/late")
        server.should_exit = True
        time.sleep(0.25)
        with pytest.raises(ConnectionRefusedError):
            connected(port)
        assert answer_of(late)[0] == 200


def test_idle_connections_do_not_delay_the_shutdown():
    with running() as (server, port):
        idle = [connected(port), connected(port, GET % b"/"), connected(port, b"GET / HT")]
        assert answer_of(idle[1])[0] == 200
        began = time.monotonic()
        server.should_exit = True
        server.thread.join(10)
        assert time.monotonic() - began < 3


def test_requests_that_take_too_long_get_503(capfd):
    with running(timeout_graceful_shutdown=1) as (server, port):
        clients = [connected(port, GET % b"/never") for _ in range(3)]
        time.sleep(0.2)
        server.should_exit = True
        found = [answer_of(client) for client in clients]
        assert [status for status, _ in found] == [503] * 3
        assert all(b"retry-after" in head for _, head in found)
    assert "Traceback" not in capfd.readouterr().err


#: A server of searches that take a while, in a process of its own, as `pfml serve` runs one.
PROGRAM = """
import asyncio
from pfml.serving.server import GracefulServer, listening_socket

async def app(scope, receive, send):
    await asyncio.sleep(0.2)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})

listening = listening_socket("127.0.0.1", 0)
print(listening.getsockname()[1], flush=True)
GracefulServer(app, lifespan="off", log_level="warning").run(sockets=[listening])
"""


@pytest.mark.skipif(os.name == "nt", reason="SIGTERM ends a process at once there")
def test_all_of_192_requests_in_flight_at_sigterm_are_answered():
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline())
        kept = [connected(port, GET % b"/") for _ in range(64)]
        assert [answer_of(client)[0] for client in kept] == [200] * 64
        sent, statuses, lock = threading.Semaphore(0), [], threading.Lock()

        def ask(number):
            client = kept[number] if number < len(kept) else connected(port)
            client.sendall(GET % b"/")
            sent.release()
            status = answer_of(client)[0]
            with lock:
                statuses.append(status)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(192)]
        for thread in threads:
            thread.start()
        for _ in threads:
            sent.acquire()
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(20)
        _, said = process.communicate(timeout=20)
    assert statuses == [200] * 192
    assert said == ""


BOUNDARY = b"multipart/form-data; boundary=x"
BAD_BODIES = {
    "no form": (BOUNDARY, b"bytes that are no form"),
    "a wrong boundary": (BOUNDARY, b"--y\r\nContent-Disposition: form-data; name=file\r\n\r\nz\r\n--y--\r\n"),
    "colors": (BOUNDARY, b"--x\r\n\x1b[31mred\x07: 1\r\n\r\nz\r\n--x--\r\n"),
    "data after its end": (BOUNDARY, b"--x\r\nContent-Disposition: form-data; name=k\r\n\r\n1\r\n--x--\r\nand more"),
    "no boundary": (b"multipart/form-data", b"--x\r\n\r\n--x--\r\n"),
}


@pytest.mark.skipif(os.name == "nt", reason="SIGTERM ends a process at once there")
def test_pfml_serve_answers_uploads_at_shutdown_and_logs_no_malformed_bodies(small_run):
    command = [sys.executable, "-m", "pfml", "serve", str(small_run), "--port", "0", "--map", "pca"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        said = process.stdout.readline()
        port = int(re.search(r":(\d+)/", said)[1])
        head = b"POST /api/search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
        for kind, body in BAD_BODIES.values():
            assert answer_of(connected(port, head % (kind, len(body)) + body))[0] in (400, 422)
        content = image_bytes()
        form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + content + b"\r\n--x--\r\n"
        clients = [connected(port, head % (BOUNDARY, len(form)) + form) for _ in range(48)]
        (small_run / "index" / "index.json").write_text("{")
        process.send_signal(signal.SIGTERM)
        assert [answer_of(client)[0] for client in clients] == [200] * 48
        _, errors = process.communicate(timeout=30)
    assert process.returncode in (0, -signal.SIGTERM)
    line = r"\d{4}-\d\d-\d\d [\d:,]+ WARNING pfml\.serving\.gallery: the index stays as it was"
    which_model, *logged = errors.splitlines()
    assert which_model.startswith(f"the model of {small_run}: epoch")
    assert all(re.match(line, one) for one in logged), errors
