"""`pfml embed` to a folder, and `pfml index --embeddings`."""

import json
import subprocess
import sys

import numpy
import pytest
import torch
from command_output import failure, said, said_in_part
from safetensors.numpy import load_file

from pfml.search import ImageIndex, ImageShard
from pfml.storage.embeddings import open_embeddings, read_embeddings
from processes import as_launched
from small_collection import NAMES, files_of, write_collection
from small_data import small_embedder

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def workspace(tmp_path, monkeypatch):
    """A saved model, images, and no torchrun."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    small_embedder().save(tmp_path / "run")
    write_collection(tmp_path / "images")
    return tmp_path


def test_a_folder_and_one_file_hold_the_same(workspace, capsys):
    assert said(capsys, "embed", "run", "images", "--out=vectors", "--batch-size=5") == (
        "vectors: 23 added, 8 dimensions\n"
    )
    said(capsys, "embed", "run", "images", "--out=vectors.npz", "--batch-size=5", "--workers=1")
    paths, vectors = read_embeddings("vectors")
    names, expected = read_embeddings("vectors.npz")
    assert paths == [str(workspace / name) for name in names]
    torch.testing.assert_close(vectors, expected, atol=1e-6, rtol=0)


def test_shards_type_and_ending_are_as_asked(workspace, capsys):
    said(capsys, "embed", "run", "images", "--out=birds.v2/", "--shard-images=10", "--dtype=float16", "--workers=1")
    arrays = [load_file(file)["vectors"] for file in (workspace / "birds.v2").glob("shard-*.safetensors")]
    assert sorted(map(len, arrays)) == [3, 10, 10]
    assert {array.dtype for array in arrays} == {numpy.dtype("float16")}
    assert "23 unchanged" in said(capsys, "embed", "run", "images", "--out=birds.v2")  # it is a folder by now
    assert "must stay float16" in failure("embed", "run", "images", "--out=birds.v2", "--dtype=float32")


def test_shards_are_written_beside_each_other_and_completed(workspace, capsys, monkeypatch):
    first = said(capsys, "embed", "run", "images", "--out=vectors", "--shard=1/3")
    assert "shard 1/3, " in first
    as_launched(monkeypatch, "1", "3")
    assert "shard 2/3, " in said(capsys, "embed", "run", "images", "--out=vectors")
    found = open_embeddings("vectors").paths
    assert found == [
        path for path in map(str, sorted(workspace.glob("images/*/*"))) if not ImageShard(3, 3).holds(path)
    ]
    assert f"{23 - len(found)} added, {len(found)} unchanged, " in said(
        capsys, "embed", "run", "images", "--out=vectors", "--shard=all"
    )


def test_what_cannot_be_read_or_was_damaged_is_said(workspace, capsys):
    (workspace / "images/a/bad.png").write_text("no image")
    printed = said_in_part(capsys, "embed", "run", "images", "--out=vectors")
    assert "bad.png: is not an image" in printed
    assert "23 added, 1 unreadable" in printed
    [shard] = (workspace / "vectors").glob("shard-*")
    shard.write_bytes(b"")
    printed = said_in_part(capsys, "embed", "run", "images", "--out=vectors")
    assert f"embedded again: {shard.relative_to(workspace)} must be a whole vector shard" in printed
    assert "23 added" in printed


def test_one_file_leaves_out_what_cannot_be_read_too(workspace, capsys):
    (workspace / "images/a/bad.png").write_text("no image")
    whole = (workspace / "images" / NAMES[0]).read_bytes()
    (workspace / "images/a/cut.png").write_bytes(whole[:-40])  # with a good header
    printed = said_in_part(capsys, "embed", "run", "images", "--out=vectors.npz")
    assert "left out: images/a/bad.png: is not an image" in printed
    assert "left out: images/a/cut.png: " in printed
    assert "vectors.npz: 23 images in 8 dimensions, 2 unreadable\n" in printed
    paths, vectors = read_embeddings("vectors.npz")
    assert (len(paths), len(vectors)) == (23, 23)
    assert not {"images/a/bad.png", "images/a/cut.png"} & set(paths)
    message = failure("embed", "run", "images/a/bad.png", "--out=none.npz")
    assert "images/a/bad.png: is not an image" in message
    assert not (workspace / "none.npz").exists()


def test_under_torchrun_a_file_that_is_left_out_does_not_end_the_other_ranks(workspace, capsys, monkeypatch):
    (workspace / "images/a/bad.png").write_text("no image")
    for rank in "012":
        as_launched(monkeypatch, rank, "3")
        said(capsys, "embed", "run", "images", "--out=vectors")  # a status would make torchrun end them
    assert len(open_embeddings("vectors").paths) == 23


@pytest.mark.parametrize("option", ["--shard=1/2", "--dtype=float16", "--shard-images=3"])
def test_one_file_has_no_shards_or_types(option):
    assert "need a folder, not one file" in failure("embed", "run", "images", "--out=vectors.npz", option)


def test_an_archive_is_no_work_for_torchrun(monkeypatch, capsys):
    as_launched(monkeypatch, "1", "3")
    assert failure("embed", "run", "images", "--out=vectors.npz") == "1"
    assert "torchrun need a folder" in capsys.readouterr().err


def test_another_model_and_a_wrong_shard_are_refused(workspace, capsys):
    said(capsys, "embed", "run", "images", "--out=vectors")
    torch.manual_seed(9)
    small_embedder().save(workspace / "other")
    assert "the embeddings vectors belongs to convnet" in failure("embed", "other", "images", "--out=vectors")
    assert "a shard must be from 1/2 to 2/2" in failure("embed", "run", "images", "--out=vectors", "--shard=3/2")


def test_an_index_is_made_from_embeddings_and_answers_the_same(workspace, capsys):
    said(capsys, "embed", "run", "images", "--out=vectors", "--shard=1/2")
    said(capsys, "embed", "run", "images", "--out=vectors", "--shard=2/2")
    printed = said(capsys, "index", "run", "images", "--embeddings=vectors")
    assert "23 vectors taken from vectors, 0 images embedded" in printed
    said(capsys, "index", "run", "images", "--out=direct")
    assert list(ImageIndex.open("run/index").entries()) == list(ImageIndex.open("direct").entries())
    query = f"images/{NAMES[4]}"
    found, expected = (
        json.loads(said(capsys, "search", "run", query, "--json", "--k=5", *where))["results"][0]["hits"]
        for where in ((), ("--index=direct",))
    )
    assert [hit["path"] for hit in found] == [hit["path"] for hit in expected]
    assert "--embeddings needs the images too" in failure("index", "run", "--embeddings=vectors", "--compact")
    assert "no embeddings.json" in failure("index", "run", "images", "--embeddings=images")


@pytest.mark.slow
def test_torchrun_gives_each_process_its_shard(workspace, capsys):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "-m", "pfml"]
    subprocess.run([*command, "embed", "run", "images", "--out=vectors", "--shard-images=4"], check=True)
    before = files_of(workspace / "vectors")
    assert "0 added, 23 unchanged" in said(capsys, "embed", "run", "images", "--out=vectors")
    assert files_of(workspace / "vectors") == before
