"""Timeouts of connections, over sockets, by a clock that the test sets forward."""

import asyncio
import socket
import threading

import pytest

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")

from running_server import GET, LIMIT, Clock, answer_of, connected, running, wait_until

from pfml.serving.connection import BYTES_PER_SECOND, Timeouts
from pfml.serving.server import listening_socket

POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
TIMEOUTS = Timeouts(request=100, read=100, poll_interval=0.02, drain=0.1)
DISCONNECTED, RELEASED = threading.Event(), threading.Event()
#: Methods and paths of the requests of a test that have reached the application.
REQUESTS = []


async def app(scope, receive, send):
    """The number of bytes of the body; after `RELEASED` for /late, 30 MB of zeros for /large, 401 for /refused."""
    REQUESTS.append((scope["method"], scope["path"]))
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
    while scope["path"] == "/late" and not RELEASED.is_set():
        await asyncio.sleep(0.01)
    content = bytes(30_000_000) if scope["path"] == "/large" else str(seen).encode()
    length = (b"content-length", str(len(content)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": content})


@pytest.fixture(scope="module")
def server():
    clock = Clock()
    with running(app, TIMEOUTS, clock=clock) as server:
        server.clock = clock
        yield server
        clock.now += 1000  # the drain of the shutdown
        server.force_exit = True


@pytest.fixture(autouse=True)
def _nothing_has_happened():
    for event in (DISCONNECTED, RELEASED):
        event.clear()
    REQUESTS.clear()


@pytest.fixture
def port(server):
    return server.port


@pytest.fixture
def clock(server):
    return server.clock


def all_received(client):
    """Everything until the server closes, "" if it only does that."""
    parts = []
    try:
        while some := client.recv(2**16):
            parts.append(some)
    except ConnectionError:
        pass
    return b"".join(parts)


def test_small_responses_are_sent_at_once(server, port):
    with connected(port, GET % b"/") as client:
        assert answer_of(client)[0] == 200
        sockets = [one.transport.get_extra_info("socket") for one in server.server_state.connections]
        assert sockets
        assert all(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in sockets)


def test_connections_queue_until_the_server_is_ready():
    listening = listening_socket("127.0.0.1", 0)
    with connected(listening.getsockname()[1], GET % b"/") as client, running(app, listening=listening):
        assert answer_of(client)[2] == b"0"


def is_open(server, client):
    return client.getsockname() in server.connections.by_client


def test_a_silent_connection_is_closed(server, clock):
    with connected(server.port) as client:
        wait_until(lambda: is_open(server, client))
        clock.advance_past_polls(99)
        assert is_open(server, client)
        clock.advance(2)
        assert all_received(client).startswith(b"HTTP/1.1 408 ")


def test_a_dripping_head_is_closed(server, clock):
    with connected(server.port) as client:
        wait_until(lambda: is_open(server, client))
        for byte in b"GET / HTTP/1.1\r\nhost: x\r\n":
            try:
                client.sendall(bytes([byte]))
            except ConnectionError:
                break
            clock.advance(5)
        assert all_received(client).startswith(b"HTTP/1.1 408 ")


def test_a_dripping_body_is_closed_and_its_request_gets_a_disconnect(server, clock):
    with connected(server.port, POST % 1000 + b"a few bytes") as client:
        wait_until(lambda: ("POST", "/") in REQUESTS)
        clock.advance(101)
        assert all_received(client).startswith(b"HTTP/1.1 408 ")
    assert DISCONNECTED.wait(LIMIT)


def test_a_dripping_second_request_is_closed_too(server, clock):
    with connected(server.port, GET % b"/") as client:
        assert answer_of(client)[2] == b"0"
        clock.advance_past_polls(200)  # idle between requests, for which uvicorn has its own timeout
        assert is_open(server, client)
        client.sendall(b"GET / HTT")
        connection = server.connections.by_client[client.getsockname()]
        wait_until(lambda: connection._received == 9)
        clock.advance(101)
        assert all_received(client).startswith(b"HTTP/1.1 408 ")


def test_a_pipelined_body_that_stops_is_closed_too(server, clock):
    with connected(server.port, GET % b"/" + POST % 1000 + b"a few bytes") as client:
        with client.makefile("rb") as stream:
            assert stream.readline().startswith(b"HTTP/1.1 200 ")
        wait_until(lambda: ("POST", "/") in REQUESTS)
        clock.advance(101)
        assert b"HTTP/1.1 408 " in all_received(client)
    assert DISCONNECTED.wait(LIMIT)


def test_pipelined_requests_are_all_answered(port):
    with connected(port, GET % b"/" + 2 * (POST % 3 + b"abc")) as client:
        answer = b""
        while answer.count(b"200 OK") < 3 and (some := client.recv(2**16)):
            answer += some
        assert answer.count(b"200 OK") == 3


def test_a_request_after_a_refused_one_has_its_whole_timeout(server, clock):
    following = GET % b"/"
    with connected(server.port, POST.replace(b"/ ", b"/refused ") % 10 + b"abc") as client:
        assert answer_of(client)[0] == 401
        connection = server.connections.by_client[client.getsockname()]
        clock.advance_past_polls(60)
        client.sendall(b"defghij" + following[:9])
        wait_until(lambda: connection._received_at == clock.now)
        clock.advance_past_polls(60)  # together more than a request has
        client.sendall(following[9:])
        assert answer_of(client)[2] == b"0"


def test_a_slow_but_steady_body_is_accepted(server, clock):
    rounds, content = 4, bytes(100 * BYTES_PER_SECOND)
    with connected(server.port, POST % (rounds * len(content))) as client:
        wait_until(lambda: ("POST", "/") in REQUESTS)
        connection = server.connections.by_client[client.getsockname()]
        for number in range(1, rounds + 1):
            client.sendall(content)
            wait_until(lambda: connection._received >= number * len(content) or connection._began is None)  # noqa: B023
            clock.advance_past_polls(90)
        assert answer_of(client)[2] == str(rounds * len(content)).encode()


def test_a_slow_response_is_no_timeout_of_the_client(server, clock):
    with connected(server.port, GET % b"/late") as client:
        wait_until(lambda: ("GET", "/late") in REQUESTS)
        clock.advance_past_polls(1000)
        RELEASED.set()
        assert answer_of(client)[0] == 200


def unread(server, client):
    """Bytes of a response that the client has left unread."""
    return server.connections.by_client[client.getsockname()].transport.get_write_buffer_size()


def test_a_client_that_does_not_read_is_disconnected(server, clock):
    with connected(server.port, GET % b"/large") as client:
        wait_until(lambda: is_open(server, client) and unread(server, client))
        clock.advance_past_polls(99)
        assert is_open(server, client)
        # step by step: the system may still be taking some of the response, which counts as progress
        wait_until(lambda: clock.advance(1) or not is_open(server, client))
        wait_until(lambda: not server.server_state.tasks)


def test_a_client_that_reads_slowly_gets_the_whole_response(server, clock):
    got = 0
    with connected(server.port, (GET % b"/large").replace(b"host", b"connection: close\r\nhost")) as client:
        while some := client.recv(2_000_000, socket.MSG_WAITALL):
            got += len(some)
            if is_open(server, client) and unread(server, client):
                clock.advance(20)  # less than a timeout for all that the system holds between both
    assert got > 30_000_000


def test_invalid_bytes_within_a_body_get_one_response(port, capfd):
    with connected(port) as client:
        client.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n")
        answer = all_received(client)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1
    assert DISCONNECTED.wait(LIMIT)
    assert "Traceback" not in capfd.readouterr().err
