"""A real small file system that fills up: an OSError, and the save before it as it was."""

import os
import subprocess

import pytest
from savers import SAVERS, error_of_saving, fill

from processes import CONTEXT

MEBIBYTE = 2**20
#: a model of 60 kB needs less room to fail than a checkpoint of 1.6 MB
ROOM = {
    "checkpoint": MEBIBYTE,
    "model": 20_000,
    "bundle archive": MEBIBYTE,
    "index": 2_000,
    "index edits": 0,
    "results store": 8_000,
}


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 16 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("name", SAVERS)
def test_a_full_disk_is_an_oserror_and_the_save_before_it_stays(name, small_disk, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # an archive is put together elsewhere
    saver, folder = SAVERS[name], small_disk / "saves"
    folder.mkdir()
    saver.save(folder, 0)
    saver.save(folder, 1)
    before = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    ballast = fill(small_disk, ROOM[name])
    answers = CONTEXT.Queue()
    writer = CONTEXT.Process(target=error_of_saving, args=(name, folder, 2, answers))
    writer.start()
    kind, message = answers.get(timeout=300)
    writer.join()
    assert kind, f"{name} was saved on a full disk"
    assert "(no OSError)" not in kind, f"{kind}: {message}"
    assert saver.read(folder) == 1
    after = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    assert after == before
    ballast.unlink()
    saver.save(folder, 2)
    assert saver.read(folder) == 2
