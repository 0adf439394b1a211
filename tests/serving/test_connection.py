"""Timeouts of connections, over sockets, short enough to wait for."""

import asyncio
import contextlib
import socket
import threading
import time

import pytest

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")
from pfml.serving.connection import BYTES_PER_SECOND, Timeouts
from pfml.serving.server import GracefulServer, listening_socket

POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"


SHORT = Timeouts(request=0.6, read=0.6, poll_interval=0.05)


async def app(scope, receive, send):
    """The number of bytes of the body; after a while for /late, 30 MB of zeros for /large, 401 for /refused."""
    if scope["type"] != "http":
        return
    if scope["path"] == "/refused":  # before the body has arrived
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"no"})
        return
    seen, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            DISCONNECTED.set()
            return
        seen, more = seen + len(message["body"]), message["more_body"]
    if scope["path"] == "/late":
        await asyncio.sleep(1.5)
    content = bytes(30_000_000) if scope["path"] == "/large" else str(seen).encode()
    length = (b"content-length", str(len(content)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": content})


DISCONNECTED = threading.Event()


@contextlib.contextmanager
def running(listening, **options):
    """The server of `app` at a socket, in a thread."""
    server = GracefulServer(app, SHORT, lifespan="off", log_level="error", timeout_keep_alive=5, **options)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def server():
    with listening_socket("127.0.0.1", 0) as listening, running(listening) as server:
        server.port = listening.getsockname()[1]
        yield server


@pytest.fixture
def port(server):
    return server.port


def connected(port):
    client = socket.create_connection(("127.0.0.1", port))
    client.settimeout(10)
    return client


def answered(client):
    """Head and body of a response with a content-length."""
    with client.makefile("rb") as stream:
        head = b"".join(iter(stream.readline, b"\r\n"))
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return head, stream.read(length)


def all_received(client):
    """Everything until the server closes, "" if it only does that."""
    parts = []
    try:
        while part := client.recv(2**16):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def test_small_responses_are_sent_at_once(server, port):
    with connected(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
        sockets = [one.transport.get_extra_info("socket") for one in server.server_state.connections]
        assert sockets
        assert all(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in sockets)


def test_connections_queue_until_the_server_is_ready():
    with listening_socket("127.0.0.1", 0) as listening, connected(listening.getsockname()[1]) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        with running(listening):
            assert answered(client)[1] == b"0"


def test_a_silent_connection_is_closed(port):
    with connected(port) as client:
        began = time.monotonic()
        assert all_received(client).startswith(b"HTTP/1.1 408 ")
        assert 0.5 < time.monotonic() - began < 5


def test_a_dripping_head_is_closed(port):
    with connected(port) as client:
        for byte in b"GET / HTTP/1.1\r\nhost: x\r\n":
            try:
                client.sendall(bytes([byte]))
            except ConnectionError:
                break
            time.sleep(0.05)
        assert all_received(client).startswith(b"HTTP/1.1 408 ")


def test_a_dripping_body_is_closed_and_its_request_gets_a_disconnect(port):
    DISCONNECTED.clear()
    with connected(port) as client:
        client.sendall(POST % 1000 + b"a few bytes")
        assert all_received(client).startswith(b"HTTP/1.1 408 ")
    assert DISCONNECTED.wait(5)


def test_a_dripping_second_request_is_closed_too(port):
    with connected(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answered(client)[1] == b"0"
        time.sleep(0.8)  # idle between requests, for which uvicorn has its own timeout
        client.sendall(b"GET / HTT")
        assert all_received(client).startswith(b"HTTP/1.1 408 ")


def test_a_pipelined_body_that_stops_is_closed_too(port):
    DISCONNECTED.clear()
    with connected(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + POST % 1000 + b"a few bytes")
        assert answered(client)[1] == b"0"
        began = time.monotonic()
        assert all_received(client).startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - began < 5
    assert DISCONNECTED.wait(5)


def test_pipelined_requests_are_all_answered(port):
    with connected(port) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + 2 * (POST % 3 + b"abc"))
        answer = b""
        while answer.count(b"200 OK") < 3 and (part := client.recv(2**16)):
            answer += part
        assert answer.count(b"200 OK") == 3


def test_a_request_after_a_refused_one_has_its_whole_timeout(port):
    following = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    with connected(port) as client:
        client.sendall(POST.replace(b"/ ", b"/refused ") % 10 + b"abc")
        assert answered(client)[0].startswith(b"HTTP/1.1 401 ")
        time.sleep(0.4)
        client.sendall(b"defghij" + following[:9])
        time.sleep(0.4)  # together more than a request has
        client.sendall(following[9:])
        assert answered(client)[1] == b"0"


def test_a_slow_but_steady_body_is_accepted(port):
    pieces = 12
    with connected(port) as client:
        client.sendall(POST % (pieces * BYTES_PER_SECOND // 4))
        for _ in range(pieces):
            client.sendall(bytes(BYTES_PER_SECOND // 4))
            time.sleep(0.15)
        assert answered(client)[1] == str(pieces * BYTES_PER_SECOND // 4).encode()


def test_a_slow_response_is_no_timeout_of_the_client(port):
    with connected(port) as client:
        client.sendall(b"GET /late HTTP/1.1\r\nhost: x\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_does_not_read_is_disconnected(server):
    with connected(server.port) as client:
        client.sendall(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n")
        end = time.monotonic() + 10
        while not server.server_state.connections and time.monotonic() < end:
            time.sleep(0.01)
        began = time.monotonic()
        while server.server_state.connections and time.monotonic() < end:
            time.sleep(0.01)
        assert 0.4 < time.monotonic() - began < 5
        assert not server.server_state.tasks


def test_a_client_that_reads_slowly_gets_the_whole_response(port):
    got = 0
    with connected(port) as client:
        client.sendall(b"GET /large HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        while part := client.recv(2_000_000):
            got += len(part)
            time.sleep(0.03)
    assert got > 30_000_000


def test_invalid_bytes_within_a_body_get_one_response(port, capfd):
    DISCONNECTED.clear()
    with connected(port) as client:
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n")
        answer = all_received(client)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert DISCONNECTED.wait(5)
    assert "Traceback" not in capfd.readouterr().err
