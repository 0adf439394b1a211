"""Embedding through a real Ray: two actors, one of which is killed."""

import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from tempfile import TemporaryDirectory

import pytest
import torch
from command_output import failure, said_in_part
from logging_network import LoggingNetwork

from pfml.data.preprocessing import Preprocessing
from pfml.models import Embedder
from pfml.search import embed_collection
from pfml.search.embedding import LocalEngine
from pfml.search.ray_engine import RayEngine
from pfml.storage.embeddings import read_embeddings
from small_collection import SMALL, files_of, write_collection
from small_data import small_embedder

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def _ray():
    """One Ray for all tests: three CPUs, for two actors and their readers."""
    ray = pytest.importorskip("ray", reason="--engine ray needs the extra ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # workers import the network of this folder
        ray.init(
            "local",
            num_cpus=3,
            object_store_memory=100 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
        )
        yield
        ray.shutdown()


@pytest.fixture
def images(tmp_path):
    folder = write_collection(tmp_path / "images")
    (tmp_path / "images" / "b" / "bad.png").write_text("no image")
    return folder


@pytest.mark.slow  # Ray takes its time to replace a worker
@pytest.mark.usefixtures("_ray")
def test_the_images_of_a_worker_that_dies_are_embedded_once_by_another(tmp_path, images, capsys):
    network = LoggingNetwork(tmp_path / "log", seconds=0.3)
    embedder = Embedder.wrap(network, Preprocessing(16, 16))
    killed = []

    def killing(rows, description, total):
        if description != "embedding":
            yield from rows
            return
        for row in rows:
            yield row
            if not killed:
                killed.append(network.processes()[-1])  # which is at a batch
                os.kill(killed[0], signal.SIGKILL)

    on_ray = embed_collection(
        tmp_path / "ray", embedder, [tmp_path / "images"], engine=RayEngine(actors=2), track=killing, **SMALL
    )
    local = embed_collection(tmp_path / "local", embedder, [tmp_path / "images"], **SMALL)
    assert (on_ray.added, [str(each) for each in on_ray.failures]) == (
        local.added,
        [str(each) for each in local.failures],
    )
    assert local.added == 23
    assert "bad.png" in str(local.failures[0])
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "local")  # byte for byte
    processes = network.processes()
    last = max(k for k, process in enumerate(processes) if process == killed[0])
    assert last < len(processes) - 1
    assert len(set(processes)) >= 2
    assert capsys.readouterr().out == ""
    again = embed_collection(tmp_path / "ray", embedder, [tmp_path / "images"], engine=RayEngine(actors=2), **SMALL)
    assert again.unchanged == 23


@pytest.mark.slow  # Ray takes a minute to read two lists
@pytest.mark.usefixtures("_ray")
def test_the_command_writes_what_the_local_engine_writes(tmp_path, images, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    small_embedder().save(tmp_path / "run")
    options = ["embed", "run", "images", "images/a/00.png", "images/../images/a/00.png", "--batch-size=12"]
    on_ray = said_in_part(capsys, *options, "--out=ray.npz", "--engine=ray", "--actors=2")
    assert on_ray == said_in_part(capsys, *options, "--out=local.npz").replace("local.npz", "ray.npz")
    (names, vectors), (expected_names, expected) = (read_embeddings(f"{name}.npz") for name in ("ray", "local"))
    assert names == expected_names
    # batches are filled with the next images where one process leaves out an unreadable one: equal but for rounding
    torch.testing.assert_close(vectors, expected, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("_ray")
def test_more_than_the_cluster_has_is_refused():
    for engine in (RayEngine(actors=3), RayEngine(actors=1, gpus_per_actor=1.0)):
        with pytest.raises(ValueError, match="but the Ray cluster has 3 and 0: ask for fewer with --actors"):
            list(engine.embed(small_embedder(), [["a.png"]], batch_size=1, workers=1))


@pytest.mark.usefixtures("_ray")
def test_an_error_of_a_worker_is_one_sentence(monkeypatch):
    row = {"number": 0, "batch": 0, "error": "RuntimeError: CUDA out of memory"}
    monkeypatch.setattr(RayEngine, "_rows", lambda *_: (each for each in [row]))
    with pytest.raises(OSError, match="^a worker could not embed its images: RuntimeError: CUDA out of memory$"):
        list(RayEngine().embed(small_embedder(), [["a.png"]], batch_size=1, workers=1))


@pytest.mark.parametrize("engine", [LocalEngine(), RayEngine()])
def test_no_images_are_no_vectors(engine):
    for lists in ([], [[]]):
        found = list(engine.embed(small_embedder(), lists, batch_size=2, workers=1))
        assert [number for number, _ in found] == list(range(len(lists)))
        assert all(each.vectors.shape == (0, 8) and each.vectors.dtype == torch.float32 for _, each in found)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--actors=2"], "--actors must go with --engine ray"),
        (["--gpus-per-actor=1"], "--gpus-per-actor must go with --engine ray"),
        (["--engine=ray", "--shard=1/2"], "must go without --shard and torchrun: Ray divides the images itself"),
        (["--engine=ray", "--device=cuda:1"], "--device must be auto, cpu or cuda with --engine ray"),
        (["--engine=ray", "--actors=0"], "actors must be at least 1, got 0"),
        (["--engine=ray", "--gpus-per-actor=-1"], "gpus_per_actor must be at least 0, got -1"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(options, said, tmp_path):
    assert said in failure("embed", tmp_path, tmp_path, "--out=x", *options)


def test_a_missing_ray_is_named_with_its_extra_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("pfml.packages.find_spec", lambda name: None)
    said = failure("embed", tmp_path, tmp_path, f"--out={tmp_path / 'vectors'}", "--engine=ray")
    assert "needs the package ray: pip install 'pfml[ray]'" in said
    assert not (tmp_path / "vectors").exists()


@pytest.mark.slow
def test_an_interrupted_command_ends_and_the_next_resumes(tmp_path, images, request):
    pytest.importorskip("ray", reason="--engine ray needs the extra ray")
    short = TemporaryDirectory(prefix="ray-")  # Ray's sockets have paths of 107 bytes at most
    request.addfinalizer(short.cleanup)
    small_embedder().save(tmp_path / "run")
    for number in range(10):  # so many that the command cannot end before it is interrupted
        shutil.copytree(images / "a", images / f"a{number}")
    shards = math.ceil(len([path for path in images.rglob("*") if path.is_file() and path.name != "bad.png"]) / 2)
    command = [sys.executable, "-m", "pfml", "embed", "run", "images", "--out=ray", "--shard-images=2", "--engine=ray"]
    environment = {**os.environ, "RAY_TMPDIR": short.name}
    with subprocess.Popen(
        [*command, "--batch-size=1", "--actors=2"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while not list((tmp_path / "ray").glob("shard-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 130, said
    assert said.endswith("pfml embed: interrupted\n")
    written = len(list((tmp_path / "ray").glob("shard-*")))
    subprocess.run(command, cwd=tmp_path, env=environment, check=False, timeout=200)
    assert 0 < written < len(list((tmp_path / "ray").glob("shard-*"))) == shards
