"""Several processes behind one socket: a new index under load, replaced processes, sessions, uploads, shutdown."""

import json
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")

from api_client import image_bytes
from running_server import LIMIT, ServerProcess, answer_of, connected, wait_until

from pfml.cli import main
from pfml.search import ImageIndex
from pfml.serving.metrics import FOLDER_VARIABLE, Metrics
from pfml.serving.processes import PREFIX, _shared_folder

pytestmark = pytest.mark.skipif(os.name == "nt", reason="several processes need signals of Unix")
TOKEN = "a token of enough letters"
HEAD = f"host: 127.0.0.1\r\nauthorization: Bearer {TOKEN}\r\n"


@pytest.fixture(scope="module")
def run(made_run, tmp_path_factory):
    import shutil

    return shutil.copytree(made_run, tmp_path_factory.mktemp("processes") / "run")


@pytest.fixture(scope="module")
def server(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    options = ["--processes", "2", "--port", "0", "--map", "pca", "--token", TOKEN, "--rate-limit", "100000/s"]
    options += ["--add-to", str(folder / "added"), "--access-log", str(folder / "log")]
    server = ServerProcess(folder, main, ["serve", str(run), *options])
    server.folder = folder
    yield server
    if server.process.is_alive():
        server.signal(signal.SIGTERM)
        server.end()


def ask(server, method, path, body=b"", kind="", head=HEAD):
    """Status, head and body of a request on a new connection."""
    lines = f"{method} {path} HTTP/1.1\r\n{head}content-length: {len(body)}\r\n"
    lines += f"content-type: {kind}\r\n\r\n" if kind else "\r\n"
    with connected(server.port, lines.encode() + body) as client:
        return answer_of(client)


def processes(server):
    """The processes that answer, by the metrics."""
    _, _, body = ask(server, "GET", "/metrics")
    return {int(pid) for pid in re.findall(rb'pfml_resident_memory_bytes\{pid="(\d+)"\}', body)}


def upload(name):
    content = f'--x\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'.encode() + image_bytes()
    return content + b"\r\n--x--\r\n", "multipart/form-data; boundary=x"


class Load:
    """Clients that search by id until the end of the block; `wrong` has what was not 200."""

    def __init__(self, server, clients=4):
        self.server, self.wrong, self.count, self.is_over = server, [], 0, False
        self.threads = [threading.Thread(target=self._ask, args=(k,)) for k in range(clients)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.is_over = True
        for thread in self.threads:
            thread.join(LIMIT)

    def _ask(self, number):
        request = f"GET /api/search?id={3 + number}&k=3 HTTP/1.1\r\n{HEAD}\r\n".encode()
        client = connected(self.server.port)
        while not self.is_over:
            client.sendall(request)
            status, head, _ = answer_of(client)
            self.count += 1
            if status != 200:
                self.wrong.append(status)
            if status == 0 or b"connection: close" in head:
                client = connected(self.server.port)


def test_all_processes_answer_and_metrics_are_of_all(server):
    wait_until(lambda: len(processes(server)) == 2)
    assert server.process.pid not in processes(server)
    # the least of all processes: one that has just started has none yet
    wait_until(lambda: b"pfml_index_images 48.0" in ask(server, "GET", "/metrics")[2])
    _, _, body = ask(server, "GET", "/metrics")
    before = int(re.search(rb'route="/health",status="200"\} (\d+)', body)[1]) if b"/health" in body else 0
    for _ in range(20):
        assert ask(server, "GET", "/health")[0] == 200
    _, _, body = ask(server, "GET", "/metrics")
    assert int(re.search(rb'route="/health",status="200"\} (\d+)', body)[1]) == before + 20


def test_metrics_leave_out_the_empty_file_of_a_process_that_starts_or_died_starting(tmp_path, monkeypatch):
    from prometheus_client.mmap_dict import MmapedDict, mmap_key

    key = mmap_key("pfml_answers", "pfml_answers_total", [], [], "Answers.")
    MmapedDict(str(tmp_path / "counter_7.db")).write_value(key, 3, 0)
    (tmp_path / "counter_8.db").touch()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    assert b"pfml_answers_total 3.0" in Metrics().text()[0]


def test_a_session_and_an_upload_hold_in_every_process(server):
    form = f"token={TOKEN}".replace(" ", "+").encode()
    status, head, _ = ask(server, "POST", "/login", form, "application/x-www-form-urlencoded", "host: 127.0.0.1\r\n")
    assert status == 303
    cookie = re.search(rb"set-cookie: ([^;]+)", head)[1].decode()
    with_cookie = f"host: 127.0.0.1\r\ncookie: {cookie}\r\n"
    status, _, body = ask(server, "POST", "/api/search", *upload("x.png"), with_cookie)
    assert status == 200
    key = json.loads(body)["query"]["upload"]
    answers = [ask(server, "GET", f"/api/search?upload={key}&k=2", head=with_cookie) for _ in range(24)]
    assert {status for status, *_ in answers} == {200}
    assert len({body for *_, body in answers}) == 1
    lines = [json.loads(line) for line in (server.folder / "log").read_text().splitlines()]
    assert {line["process"] for line in lines} == processes(server)
    assert ask(server, "GET", "/api/search?upload=..%2Fbuckets")[0] == 404


def test_a_new_index_is_taken_up_by_all_under_load_without_an_error(server, run):
    index = ImageIndex.open(run / "index")
    before = index.generation
    with Load(server) as load:
        for number in range(5):
            index.add(index.vectors([3, 4]), [f"new-{number}-a", f"new-{number}-b"], ["blue", ""], model=index.model)
        index.remove(paths=["new-0-a"])
        index.compact(grace_seconds=0.0)
        wait_until(lambda: f"pfml_index_generation {before + 7}.0".encode() in ask(server, "GET", "/metrics")[2])
    assert load.wrong == []
    assert load.count > 20
    assert b"pfml_index_images 57.0" in ask(server, "GET", "/metrics")[2]


def test_images_that_several_processes_add_at_once_are_all_there(server, run):
    before = ImageIndex.open(run / "index").generation
    answers = []
    form = [upload(f"{k}.png") for k in range(8)]
    threads = [
        threading.Thread(target=lambda k=k: answers.append(ask(server, "POST", "/api/images", *form[k])))
        for k in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert [status for status, *_ in answers] == [201] * 8
    ids = {json.loads(body)["images"][0]["id"] for *_, body in answers}
    assert len(ids) == 8
    assert ImageIndex.open(run / "index").generation == before + 8
    for one in ids:
        assert {ask(server, "GET", f"/api/images/{one}")[0] for _ in range(4)} == {200}, "in every process"
    assert sorted(path.name for path in (server.folder / "added").iterdir()) == [f"{k}.png" for k in range(8)]


def test_a_process_that_dies_is_replaced(server):
    victim = min(processes(server))
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: len(processes(server) - {victim}) == 2)
    assert f"process {victim} of the server ended with status -9: it is replaced" in server.errors
    assert ask(server, "GET", "/ready")[0] == 200


def test_sighup_replaces_all_under_load_without_an_error(server):
    before = processes(server)
    with Load(server, 2) as load:
        server.signal(signal.SIGHUP)
        wait_until(lambda: len(found := processes(server)) == 2 and not found & before)
    assert load.wrong == []


def test_shutdown_answers_what_was_sent_and_leaves_nothing(server):
    pids = processes(server)
    requests = f"GET /api/search?id=3 HTTP/1.1\r\n{HEAD}\r\n".encode()
    clients = [connected(server.port, requests) for _ in range(32)]
    server.signal(signal.SIGTERM)
    assert [answer_of(client)[0] for client in clients] == [200] * 32
    assert server.end() == 0, server.errors
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids) or sys.platform != "linux")
    with pytest.raises(ConnectionRefusedError):
        connected(server.port)
    assert "Traceback" not in server.errors, server.errors
    assert TOKEN not in server.out + server.errors


def test_a_server_that_cannot_start_says_why_in_one_sentence(made_run, tmp_path):
    options = ["serve", str(made_run), "--index", str(tmp_path), "--processes", "2", "--port", "0"]
    with pytest.raises(SystemExit, match="must hold an index, but there is none"):
        main(options)


def test_processes_end_when_their_supervisor_is_killed(made_run, tmp_path):
    server = ServerProcess(tmp_path, main, ["serve", str(made_run), "--processes", "2", "--port", "0", "--map", "pca"])
    plain = "host: 127.0.0.1\r\n"
    found = rb'pfml_resident_memory_bytes\{pid="(\d+)"\}'
    pids = [int(pid) for pid in re.findall(found, ask(server, "GET", "/metrics", head=plain)[2])]
    assert pids
    server.signal(signal.SIGKILL)
    server.end()

    def is_refused():
        try:
            connected(server.port).close()
        except ConnectionRefusedError:
            return True

    wait_until(is_refused)


def test_the_folder_of_a_killed_server_is_removed_and_that_of_a_running_one_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / f"{PREFIX}left"
    (left / "metrics").mkdir(parents=True)
    with _shared_folder() as running, _shared_folder() as second:
        assert not left.exists()
        assert running.is_dir()
        assert (second / "metrics").is_dir()
        assert running.stat().st_mode & 0o077 == 0
    assert list(tmp_path.iterdir()) == []
