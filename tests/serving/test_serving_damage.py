"""Files of the run that are damaged while the server runs: it keeps the last valid state, and reports it."""

import os
import stat
from pathlib import Path

import pytest
import torch

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")

from api_client import application, ask, got, service_of

from pfml.search import ImageIndex, ModelIdentity
from pfml.serving import create_app
from pfml.serving.gallery import Gallery

pytestmark = pytest.mark.usefixtures("one_thread", "refreshes_at_once")


@pytest.fixture
def refreshes_at_once(monkeypatch):
    monkeypatch.setattr("pfml.serving.gallery.REFRESH_INTERVAL", 0.0)


@pytest.fixture
def from_files(monkeypatch):
    """An index that is too large to be held in memory."""
    monkeypatch.setattr("pfml.serving.gallery.HOLD_BYTES", 0)
    monkeypatch.setattr("pfml.storage.shard.SMALL_BYTES", 0)


def shard_of(run):
    [path] = (run / "index").glob("shard-*.safetensors")
    return path


def overwrite(path):
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.seek(size // 10)
        file.write(b"\xff" * (size * 8 // 10))


def hits_of(app):
    return [(hit["id"], hit["distance"]) for hit in got(app, "/api/search", id=3, k=5)["hits"]]


def test_a_server_with_a_whole_index_is_ready(made_run):
    app = application(made_run)
    assert got(app, "/ready") == {"ready": True, "problem": None}
    assert got(app, "/api/status")["problem"] is None


@pytest.mark.parametrize("damage", ["half", "gone", "folder", "other model"])
def test_a_damaged_or_deleted_manifest_leaves_the_previous_state_and_is_reported(small_run, caplog, damage):
    app = application(small_run)
    before, manifest = hits_of(app), small_run / "index" / "index.json"
    whole = manifest.read_bytes()
    if damage == "half":
        manifest.write_bytes(whole[: len(whole) // 2])
    elif damage == "other model":
        manifest.unlink()
        ImageIndex.create(small_run / "index", ModelIdentity("f" * 64), 8)
    else:
        manifest.unlink()
        if damage == "folder":
            manifest.mkdir()
    for _ in range(3):
        assert hits_of(app) == before
        assert got(app, "/api/classes")
        assert got(app, "/api/why", id=3)
    answer = ask(app, "GET", "/ready")
    assert answer.status_code == 200
    assert answer.json()["ready"] is True
    assert "48 images" in answer.json()["problem"]
    assert str(small_run) not in answer.text
    assert got(app, "/api/status")["problem"] == answer.json()["problem"]
    said = [line for line in caplog.messages if "the index stays as it was" in line]
    assert len(said) == 1, "it is logged once"
    if manifest.is_dir():
        manifest.rmdir()
    for left in (small_run / "index").glob("index-*") if damage == "other model" else ():
        left.unlink()
    if damage != "other model":
        manifest.write_bytes(whole)
        assert got(app, "/ready") == {"ready": True, "problem": None}
        assert any("can be read again" in line for line in caplog.messages)


def test_the_next_valid_state_is_served_after_a_damaged_one(small_run):
    app, manifest = application(small_run), small_run / "index" / "index.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(b"{")
    assert got(app, "/api/status")["images"] == 48
    manifest.write_bytes(whole)
    index = ImageIndex.open(small_run / "index")
    index.add(torch.eye(8)[:1], ["new.png"], ["new class"], model=index.model)
    assert got(app, "/api/status")["images"] == 49


def test_shards_that_are_damaged_on_disk_are_served_from_memory_and_reported(small_run, caplog):
    app = application(small_run)
    before = hits_of(app)
    overwrite(shard_of(small_run))
    os.truncate(shard_of(small_run), 1000)
    assert hits_of(app) == before
    answer = got(app, "/ready")
    assert answer["ready"] is True
    assert shard_of(small_run).name in answer["problem"]
    assert got(app, "/api/status")["problem"] == answer["problem"]
    assert any(shard_of(small_run).name in line for line in caplog.messages)


def cut_short(path):
    os.truncate(path, 1000)


@pytest.mark.parametrize("damage", [overwrite, cut_short])
@pytest.mark.usefixtures("from_files")
def test_a_large_index_that_is_damaged_is_a_503_with_a_reason_and_not_ready(small_run, damage):
    app = application(small_run)
    before, whole = hits_of(app), shard_of(small_run).read_bytes()
    damage(shard_of(small_run))
    for path in ("/api/search?id=3", "/api/why?id=3"):
        answer = ask(app, "GET", path)
        assert answer.status_code == 503, answer.text
        assert "index" in answer.json()["error"]
        assert str(small_run) not in answer.text
    answer = ask(app, "GET", "/ready")
    assert answer.status_code == 503
    assert answer.json()["ready"] is False
    assert shard_of(small_run).name in answer.json()["problem"]
    with open(shard_of(small_run), "r+b") as file:
        file.write(whole)
    assert hits_of(app) == before
    assert got(app, "/ready")["ready"] is True


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.usefixtures("from_files")
def test_a_server_maps_no_file_of_its_run(small_run):
    service = service_of(small_run)
    app = create_app(service)
    hits_of(app)
    for _ in range(2):  # made, and read again
        service.maps.current()
        service.maps._thread.join()
        service.maps._made = None
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    assert [name for name in mapped if str(small_run) in name] == []


def test_a_probe_needs_no_token_and_learns_no_path(small_run):
    from pfml.serving import Access

    app = application(small_run, Access("0.0.0.0", "a token of enough letters"))
    (small_run / "index" / "index.json").unlink()
    answer = ask(app, "GET", "/ready")
    assert answer.status_code == 200
    assert str(small_run) not in answer.text
    assert ask(app, "GET", "/ready", headers={"host": "evil.example"}).status_code == 421


def test_the_server_holds_a_small_index_in_memory(made_run, monkeypatch):
    monkeypatch.setattr("pfml.storage.shard.SMALL_BYTES", 0)
    assert Gallery.open(made_run, device="cpu").index.is_held


def unwritable(folder, monkeypatch):
    """Make a folder read-only; root may write anywhere, and is told no by the function that writes."""
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.access(folder, os.W_OK):

        def refused(path, content):
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr("pfml.serving.audit_queue.write_csv", refused)


def test_a_decision_that_cannot_be_written_is_a_503_with_advice(small_run, monkeypatch):
    app = application(small_run)
    key = got(app, "/api/audit")["suspects"][0]["key"]
    unwritable(small_run / "audit", monkeypatch)
    try:
        for method, body in (("PUT", {"decision": "accept"}), ("DELETE", None)):
            answer = ask(app, method, f"/api/audit/{key}", json=body)
            assert answer.status_code == 503, answer.text
            assert "audit/decisions.csv" in answer.json()["error"]
            assert "may not write" in answer.json()["error"]
            assert str(small_run) not in answer.text
        assert got(app, "/api/audit")["decided"] == 0
    finally:
        (small_run / "audit").chmod(0o700)
    monkeypatch.undo()
    assert ask(app, "PUT", f"/api/audit/{key}", json={"decision": "accept"}).status_code == 200


def test_a_decision_on_a_full_disk_is_a_507(small_run, monkeypatch):
    app = application(small_run)
    key = got(app, "/api/audit")["suspects"][0]["key"]

    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("pfml.serving.audit_queue.write_csv", full)
    answer = ask(app, "PUT", f"/api/audit/{key}", json={"decision": "accept"})
    assert answer.status_code == 507
    assert "No space left" in answer.json()["error"]
