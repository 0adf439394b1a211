"""The end of a server: who has sent a request is answered, whatever it was doing when it was told to end."""

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

from api_client import picture_bytes

from pfml.serving.connection import Pace
from pfml.serving.server import GracefulServer, listening_socket

GET = b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n"


async def app(scope, receive, send):
    """An answer, after a while for /late and /never; /block keeps the whole server from doing anything else."""
    if scope["path"] == "/block":
        time.sleep(0.4)
    await asyncio.sleep({"/late": 0.3, "/never": 60}.get(scope["path"], 0))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.contextmanager
def running(**options):
    """A server in a thread, and its port; it is told to end as a signal would tell it."""
    listening = listening_socket("127.0.0.1", 0)
    port = listening.getsockname()[1]
    server = GracefulServer(app, Pace(), lifespan="off", log_level="error", **options)
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
    caller = socket.create_connection(("127.0.0.1", port))
    caller.settimeout(20)
    caller.sendall(sent)
    return caller


def answer_of(caller):
    """Status and head of an answer, which is read to its end; 0 if the connection was reset or closed instead."""
    received = b""
    try:
        while b"\r\n\r\n" not in received and (part := caller.recv(2**16)):
            received += part
        head, _, body = received.lower().partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        while head and len(body) < int(length[1]) and (part := caller.recv(2**16)):
            body += part
    except ConnectionError:
        return 0, b""
    return (int(head.split()[1]), head) if head else (0, b"")


def test_those_who_wait_to_be_taken_are_answered():
    with running() as (server, port):
        assert answer_of(connected(port, GET % b"/"))[0] == 200
        blocking = connected(port, GET % b"/block")
        time.sleep(0.1)
        callers = [connected(port, GET % b"/") for _ in range(40)]  # nobody accepts them meanwhile
        server.should_exit = True
        assert [answer_of(caller)[0] for caller in (blocking, *callers)] == [200] * 41
        server.thread.join(10)
        assert not server.thread.is_alive()


def test_a_request_that_lies_unread_on_a_kept_connection_is_answered_and_the_connection_closed():
    with running() as (server, port):
        callers = [connected(port, GET % b"/") for _ in range(20)]
        assert [answer_of(caller)[0] for caller in callers] == [200] * 20
        blocking = connected(port, GET % b"/block")
        time.sleep(0.1)
        for caller in callers:
            caller.sendall(GET % b"/")
        server.should_exit = True
        found = [answer_of(caller) for caller in callers]
        assert [status for status, _ in found] == [200] * 20
        assert all(b"connection: close" in head for _, head in found)
        assert all(caller.recv(1) == b"" for caller in callers)
        assert answer_of(blocking)[0] == 200


def test_a_connection_that_was_just_made_may_still_send_its_request():
    with running() as (server, port):
        caller = connected(port)
        server.should_exit = True
        time.sleep(0.2)
        caller.sendall(GET % b"/")
        assert answer_of(caller)[0] == 200


def test_who_calls_after_the_end_is_refused():
    with running() as (server, port):
        late = connected(port, GET % b"/late")
        server.should_exit = True
        time.sleep(0.25)
        with pytest.raises(ConnectionRefusedError):
            connected(port)
        assert answer_of(late)[0] == 200


def test_idle_connections_do_not_hold_up_the_end():
    with running() as (server, port):
        idle = [connected(port), connected(port, GET % b"/"), connected(port, b"GET / HT")]
        assert answer_of(idle[1])[0] == 200
        began = time.monotonic()
        server.should_exit = True
        server.thread.join(10)
        assert time.monotonic() - began < 3


def test_what_takes_too_long_is_answered_with_503(capfd):
    with running(timeout_graceful_shutdown=1) as (server, port):
        callers = [connected(port, GET % b"/never") for _ in range(3)]
        time.sleep(0.2)
        server.should_exit = True
        found = [answer_of(caller) for caller in callers]
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
        assert [answer_of(caller)[0] for caller in kept] == [200] * 64
        sent, statuses, lock = threading.Semaphore(0), [], threading.Lock()

        def ask(number):
            caller = kept[number] if number < len(kept) else connected(port)
            caller.sendall(GET % b"/")
            sent.release()
            status = answer_of(caller)[0]
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
    "rubbish": (BOUNDARY, b"rubbish that is no form"),
    "a wrong boundary": (BOUNDARY, b"--y\r\nContent-Disposition: form-data; name=file\r\n\r\nz\r\n--y--\r\n"),
    "colors": (BOUNDARY, b"--x\r\n\x1b[31mred\x07: 1\r\n\r\nz\r\n--x--\r\n"),
    "data after its end": (BOUNDARY, b"--x\r\nContent-Disposition: form-data; name=k\r\n\r\n1\r\n--x--\r\nand more"),
    "no boundary": (b"multipart/form-data", b"--x\r\n\r\n--x--\r\n"),
}


@pytest.mark.skipif(os.name == "nt", reason="SIGTERM ends a process at once there")
def test_pfml_serve_answers_uploads_at_its_end_and_prints_nothing_of_bad_bodies(small_run):
    command = [sys.executable, "-m", "pfml.cli", "serve", str(small_run), "--port", "0", "--map", "pca"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        said = process.stdout.readline()
        port = int(re.search(r":(\d+)/", said)[1])
        head = b"POST /api/search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
        for kind, body in BAD_BODIES.values():
            assert answer_of(connected(port, head % (kind, len(body)) + body))[0] in (400, 422)
        picture = picture_bytes()
        form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + picture + b"\r\n--x--\r\n"
        callers = [connected(port, head % (BOUNDARY, len(form)) + form) for _ in range(48)]
        (small_run / "index" / "index.json").write_text("{")
        process.send_signal(signal.SIGTERM)
        assert [answer_of(caller)[0] for caller in callers] == [200] * 48
        _, errors = process.communicate(timeout=30)
    assert process.returncode in (0, -signal.SIGTERM)
    line = r"\d{4}-\d\d-\d\d [\d:,]+ WARNING pfml\.serving\.gallery: the index stays as it was"
    which_model, *logged = errors.splitlines()
    assert which_model.startswith(f"the model of {small_run}: epoch")
    assert all(re.match(line, one) for one in logged), errors
