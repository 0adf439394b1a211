"""Graceful shutdown: every request that was sent before it is answered."""

import asyncio
import contextlib
import os
import re
import signal
import threading

import pytest

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")

from api_client import image_bytes
from running_server import GET, LIMIT, ServerProcess, answer_of, connected, running, wait_until

from pfml.cli import main
from pfml.serving import server as server_module
from pfml.serving.connection import Timeouts
from pfml.serving.server import GracefulServer, listening_socket

TOKEN = "a token that no log may show"


class App:
    """A response at once; of /late after `released`; of /never never."""

    def __init__(self):
        self.entered = []
        self.released = threading.Event()

    async def __call__(self, scope, receive, send):
        path = scope["path"]
        self.entered.append(path)
        while path == "/never" or (path == "/late" and not self.released.is_set()):
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def has_got(self, path, count=1):
        """Wait until so many requests of a path have reached the application."""
        wait_until(lambda: self.entered.count(path) >= count)


@contextlib.contextmanager
def blocked_at_shutdown(server):
    """Request the shutdown, and block the event loop where it begins: what is sent in this block is still unread."""
    begun, released, shutdown = threading.Event(), threading.Event(), server.shutdown

    async def blocked(sockets=None):
        begun.set()
        released.wait(LIMIT)
        for listening in sockets:  # else the event loop may accept them all in its next turn
            asyncio.get_running_loop().remove_reader(listening)
        await shutdown(sockets)

    server.shutdown = blocked
    server.should_exit = True
    assert begun.wait(LIMIT)
    yield
    released.set()


@pytest.fixture
def drain(monkeypatch):
    """Timeouts of a server that drains its connections for longer than a test takes; the test ends it by force."""
    monkeypatch.setattr("pfml.serving.server.DRAIN_SECONDS", LIMIT)
    return Timeouts(drain=LIMIT)


@pytest.fixture
def app():
    app = App()
    yield app
    app.released.set()


def statuses_of(clients):
    return [answer_of(client)[0] for client in clients]


def test_connections_in_the_queue_of_the_socket_are_answered(app):
    with running(app) as server:
        assert answer_of(connected(server.port, GET % b"/"))[0] == 200
        with blocked_at_shutdown(server):
            clients = [connected(server.port, GET % b"/") for _ in range(40)]
        assert statuses_of(clients) == [200] * 40
        server.thread.join(LIMIT)
        assert not server.thread.is_alive()


def test_an_unread_request_on_a_keep_alive_connection_is_answered_and_the_connection_closed(app):
    with running(app) as server:
        clients = [connected(server.port, GET % b"/") for _ in range(20)]
        assert statuses_of(clients) == [200] * 20
        with blocked_at_shutdown(server):
            for client in clients:
                client.sendall(GET % b"/")
        found = [answer_of(client) for client in clients]
        assert [status for status, *_ in found] == [200] * 20
        assert all(b"connection: close" in head for _, head, _ in found)
        assert all(client.recv(1) == b"" for client in clients)


def test_a_new_connection_may_still_send_its_request(app, drain):
    with running(app, drain) as server:
        client = connected(server.port)
        server.should_exit = True
        wait_until(lambda: server.connections.is_shutting_down)
        client.sendall(GET % b"/")
        assert answer_of(client)[0] == 200
        server.force_exit = True


def test_connections_after_the_shutdown_request_are_refused_at_once(app, drain):
    with running(app, drain) as server:
        late = connected(server.port, GET % b"/late")
        app.has_got("/late")
        listening = server.servers[0]
        server.should_exit = True
        wait_until(lambda: not listening.is_serving())
        with pytest.raises(ConnectionRefusedError):
            connected(server.port)
        app.released.set()
        assert answer_of(late)[0] == 200
        server.force_exit = True


def test_idle_connections_do_not_delay_the_shutdown(app):
    with running(app, Timeouts(request=1000)) as server:
        idle = [connected(server.port), connected(server.port, GET % b"/"), connected(server.port, b"GET / HT")]
        assert answer_of(idle[1])[0] == 200
        server.should_exit = True
        server.thread.join(LIMIT)
        assert not server.thread.is_alive()


def test_requests_that_take_too_long_get_503(app, capfd):
    with running(app, timeout_graceful_shutdown=1) as server:
        clients = [connected(server.port, GET % b"/never") for _ in range(3)]
        app.has_got("/never", 3)
        server.should_exit = True
        found = [answer_of(client) for client in clients]
        assert [status for status, *_ in found] == [503] * 3
        assert all(b"retry-after" in head for _, head, _ in found)
    assert "Traceback" not in capfd.readouterr().err


async def slow_app(scope, receive, send):
    await asyncio.sleep(0.2)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def serve_slowly():
    """A server of searches that take a while, as `pfml serve` runs one."""
    listening = listening_socket("127.0.0.1", 0)
    print(f"http://127.0.0.1:{listening.getsockname()[1]}/", flush=True)
    server_module.DRAIN_SECONDS = LIMIT  # in this process: a busy machine may need longer to read all requests
    options = {"lifespan": "off", "log_level": "warning", "timeout_keep_alive": LIMIT}
    GracefulServer(slow_app, **options).run(sockets=[listening])


@pytest.mark.skipif(os.name == "nt", reason="SIGTERM ends a process at once there")
def test_all_of_192_requests_in_flight_at_sigterm_are_answered(tmp_path):
    server = ServerProcess(tmp_path, serve_slowly)
    clients = [connected(server.port, GET % b"/") for _ in range(64)]
    assert statuses_of(clients) == [200] * 64
    clients += [connected(server.port) for _ in range(128)]
    for client in clients:
        client.sendall(GET % b"/")
    server.signal(signal.SIGTERM)
    assert statuses_of(clients) == [200] * 192
    assert server.end() in (0, -signal.SIGTERM)
    assert server.errors == ""


BOUNDARY = b"multipart/form-data; boundary=x"
BAD_BODIES = {
    "no form": (BOUNDARY, b"bytes that are no form"),
    "a wrong boundary": (BOUNDARY, b"--y\r\nContent-Disposition: form-data; name=file\r\n\r\nz\r\n--y--\r\n"),
    "colors": (BOUNDARY, b"--x\r\n\x1b[31mred\x07: 1\r\n\r\nz\r\n--x--\r\n"),
    "data after its end": (BOUNDARY, b"--x\r\nContent-Disposition: form-data; name=k\r\n\r\n1\r\n--x--\r\nand more"),
    "no boundary": (b"multipart/form-data", b"--x\r\n\r\n--x--\r\n"),
}
HEAD = (
    b"POST /api/search HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer " + TOKEN.encode() + b"\r\n"
    b"content-type: %s\r\ncontent-length: %d\r\n\r\n"
)


@pytest.mark.skipif(os.name == "nt", reason="SIGINT does not reach another process there")
def test_pfml_serve_answers_uploads_at_ctrl_c_and_logs_neither_malformed_bodies_nor_its_token(small_run, tmp_path):
    command = ["serve", str(small_run), "--port", "0", "--map", "pca", "--host", "0.0.0.0", "--token", TOKEN]
    server = ServerProcess(tmp_path, main, command)
    for kind, body in BAD_BODIES.values():
        assert answer_of(connected(server.port, HEAD % (kind, len(body)) + body))[0] in (400, 422)
    content = image_bytes()
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + content + b"\r\n--x--\r\n"
    clients = [connected(server.port, HEAD % (BOUNDARY, len(form)) + form) for _ in range(48)]
    (small_run / "index" / "index.json").write_text("{")
    server.signal(signal.SIGINT)
    assert statuses_of(clients) == [200] * 48
    assert server.end() == 0, server.errors
    assert TOKEN not in server.out + server.errors
    line = r"\d{4}-\d\d-\d\d [\d:,]+ WARNING pfml\.serving\.gallery: the index stays as it was"
    which_model, *logged = server.errors.splitlines()
    assert which_model.startswith(f"the model of {small_run}: epoch")
    assert all(re.match(line, one) for one in logged), server.errors
