"""Files that are whole or absent."""

from __future__ import annotations

import errno
import os
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from unittest import mock

import pytest
import torch

import pfml.storage.files
from pfml.storage.files import (
    DamagedFileError,
    create_atomically,
    load_tensors,
    refuse_non_finite,
    save_tensors,
    sha256_of,
    write_atomically,
)
from pfml.storage.lock import locked_folder
from pfml.storage.manifest import Format
from pfml.storage.sealed_tensors import read_sealed_tensors, write_sealed_tensors
from processes import failures_of_several

FORM = Format("map", 1, "draw it again")


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"a": torch.randn(5, 7, generator=generator), "b": torch.arange(11)}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_atomically(tmp_path / "note", b"first")
    write_atomically(tmp_path / "note", b"second")
    assert (tmp_path / "note").read_bytes() == b"second"
    digest = save_tensors(tmp_path / "t.safetensors", some_tensors())
    loaded = load_tensors(tmp_path / "t.safetensors", digest)
    assert loaded.keys() == some_tensors().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in some_tensors().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["note", "t.safetensors"]


def test_the_sha256_is_that_of_the_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "abc", b"abc")
    assert sha256_of(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert save_tensors(tmp_path / "t", some_tensors()) == sha256_of(tmp_path / "t")


def test_metadata_is_stored(tmp_path: Path) -> None:
    from safetensors import safe_open

    save_tensors(tmp_path / "t", some_tensors(), {"step": "7"})
    with safe_open(tmp_path / "t", framework="pt") as file:
        assert file.metadata() == {"step": "7"}


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    digest = save_tensors(tmp_path / "t", some_tensors())

    def fail(*arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(pfml.storage.files.os, failing, fail)
    with pytest.raises(OSError, match="disk full"):
        save_tensors(tmp_path / "t", {"a": torch.zeros(3)})
    with pytest.raises(OSError, match="disk full"):
        write_atomically(tmp_path / "t", b"other")
    monkeypatch.undo()
    assert load_tensors(tmp_path / "t", digest).keys() == {"a", "b"}
    assert os.listdir(tmp_path) == ["t"]


def test_file_and_folder_are_forced_to_disk_around_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(pfml.storage.files.os, "fsync", lambda file: (events.append("fsync"), fsync(file)))
    monkeypatch.setattr(pfml.storage.files.os, "replace", lambda a, b: (events.append("rename"), replace(a, b)))
    write_atomically(tmp_path / "note", b"text")
    save_tensors(tmp_path / "t", some_tensors())
    assert events == ["fsync", "rename", "fsync"] * 2


def test_tied_strided_and_sliced_tensors_are_stored(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {"one": base, "same": base, "turned": base.T, "part": base[1:3, ::2], "none": base[:0]}
    loaded = load_tensors(tmp_path / "t", save_tensors(tmp_path / "t", tensors))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_parameter_that_needs_a_gradient_is_stored(tmp_path: Path) -> None:
    save_tensors(tmp_path / "t", {"w": torch.nn.Parameter(torch.ones(3))})
    assert not load_tensors(tmp_path / "t")["w"].requires_grad


def test_a_flipped_bit_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    digest = save_tensors(path, some_tensors())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match="t.safetensors must have sha256"):
        load_tensors(path, digest)


@pytest.mark.parametrize("kept", [0, 4, 40, -1])
def test_a_truncated_file_is_refused_by_name_with_and_without_a_checksum(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "t.safetensors"
    digest = save_tensors(path, some_tensors())
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DamagedFileError, match="t.safetensors"):
        load_tensors(path, digest)
    with pytest.raises(DamagedFileError, match="t.safetensors must be a whole safetensors file"):
        load_tensors(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone.safetensors"):
        load_tensors(tmp_path / "gone.safetensors")


def test_numbers_that_are_not_finite_are_refused_by_tensor_and_place() -> None:
    refuse_non_finite(some_tensors(), "here")
    with pytest.raises(DamagedFileError, match=r"1 NaN or Inf of 3 numbers in 'w' of model.safetensors"):
        refuse_non_finite({"w": torch.tensor([0.0, float("nan"), 1.0])}, "model.safetensors")
    with pytest.raises(DamagedFileError, match="'w'"):
        refuse_non_finite({"w": torch.tensor([float("inf")])}, "here")


def write_often(folder: Path, number: int, together: Barrier, failures: SimpleQueue[str]) -> None:
    """Replace tensors and read them, again and again."""
    torch.set_num_threads(1)
    together.wait(60)
    for turn in range(20):
        try:
            content = {"number": number, "turn": turn}
            write_sealed_tensors(folder, "map", {"x": torch.tensor([number, turn])}, content, FORM)
            content, tensors = read_sealed_tensors(folder, "map", FORM)
            if tensors["x"].tolist() != [content["number"], content["turn"]]:
                failures.put(f"the tensors {tensors} beside {content}")
        except Exception as error:
            failures.put(f"{number}, {turn}: {error!r}")


def create_often(folder: Path, number: int, together: Barrier, failures: SimpleQueue[str]) -> None:
    """Create 30 files beside others that do so; a file that says it was created by both is a failure."""
    for k in range(30):
        together.wait(60)
        try:
            create_atomically(folder / f"{k}", f"{number}".encode())
            own = True
        except FileExistsError:
            own = False
        if ((folder / f"{k}").read_text() == f"{number}") != own:
            failures.put(f"process {number} and file {k}: created {own}")
        together.wait(60)


def test_of_several_that_create_a_file_at_once_one_does(tmp_path: Path) -> None:
    assert failures_of_several(2, create_often, tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 30


def test_a_file_is_created_once_where_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = mock.Mock(side_effect=PermissionError(errno.EPERM, "no links"))
    monkeypatch.delattr("os.O_TMPFILE", raising=False)  # such a file is given its name by a link, too
    monkeypatch.setattr("os.link", tried)
    create_atomically(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        create_atomically(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"
    assert tried.call_count == 2
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot lock folders")
def test_two_writers_of_one_folder_do_not_disturb_each_other(tmp_path: Path) -> None:
    assert failures_of_several(2, write_often, tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot lock folders")
def test_a_writer_that_waits_in_vain_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfml.storage.sealed_tensors.PATIENCE", 0.05)
    with (
        locked_folder(tmp_path),
        pytest.raises(TimeoutError, match=r"has been written by another process for 0\.05 s"),
    ):
        write_sealed_tensors(tmp_path, "map", {"x": torch.ones(1)}, {}, FORM)
    write_sealed_tensors(tmp_path, "map", {"x": torch.ones(1)}, {}, FORM)


def test_tensors_are_read_from_a_folder_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "caf\udce9" / "t.safetensors"
    path.parent.mkdir()
    sha256 = save_tensors(path, {"a": torch.arange(3)})
    assert load_tensors(path, sha256)["a"].tolist() == [0, 1, 2]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedFileError, match="must be a whole safetensors file"):
        load_tensors(path)
