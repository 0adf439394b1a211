"""Files that an earlier pfml wrote (`tests/fixtures/make_formats.py`) still load; those of another version say so."""

import json
import shutil
import zipfile
from datetime import datetime
from pathlib import Path

import pytest
import torch

from pfml.ensemble import Ensemble, read_ensemble
from pfml.evaluation import evaluate
from pfml.export import load_bundle
from pfml.models import load_embedder
from pfml.models.backbone_table import BACKBONES
from pfml.runs.checkpoint import load_checkpoint, load_chosen_epoch
from pfml.runs.config_files import read_config
from pfml.runs.folder import RunFolder
from pfml.runs.saved_loss import load_field
from pfml.search import ImageIndex, ModelIdentity, Threshold, open_run, verdict_of
from pfml.storage.embeddings import open_embeddings, read_embeddings
from pfml.storage.files import DamagedFileError
from pfml.storage.manifest import FormatVersionError, digest_of
from pfml.training import LossConfig, train
from small_data import few_glyphs, small_config
from tiny_network import TINY

FORMATS = Path(__file__).parents[1] / "fixtures" / "formats"


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(BACKBONES, "tiny", TINY)


@pytest.fixture
def copied(tmp_path):
    return shutil.copytree(FORMATS, tmp_path / "formats")


def test_the_fixtures_are_small():
    assert sum(file.stat().st_size for file in FORMATS.rglob("*")) < 500_000


def test_a_run_evaluates_as_it_did_when_it_was_written():
    run = FORMATS / "run"
    results = RunFolder(run).read_results()
    metrics = evaluate(load_embedder(run), few_glyphs(), recall_at=(1,), device="cpu")
    assert metrics.recall[1] == pytest.approx(results["last"]["test"]["recall_at_1"], abs=0.05)
    assert results["last"]["epoch"] == 2
    assert [entry["step"] for entry in RunFolder(run).entries("step")] == list(range(1, 9))
    assert load_field(run).proxies.shape == (8, 2, 8)


def test_a_checkpoint_resumes(copied):
    _, state = load_checkpoint(FORMATS / "run" / "checkpoints")
    assert state["config"]["epochs"] == 2
    embedder = load_embedder(copied / "run")
    results = train(few_glyphs(), embedder, small_config(), out=copied / "run", resume=True)
    assert results["last"]["epoch"] == 2


def test_a_chosen_epoch_and_an_ensemble_are_read():
    [weight] = load_chosen_epoch(FORMATS / "run" / "checkpoints", 2).values()
    assert torch.equal(weight, torch.arange(6.0).view(2, 3))
    config, ensemble = read_ensemble(FORMATS / "ensemble")
    assert (config.loss, config.epochs, ensemble) == (LossConfig("proxy-anchor"), 3, Ensemble(2, 7))


def test_an_index_is_searched_with_its_run():
    opened = open_run(FORMATS / "run", device="cpu")
    images = few_glyphs().test.images
    hits = opened.gallery.search(opened.embedder.encode(images[1:4]), 1, model=opened.model)
    assert [found[0].path for found in hits] == ["/letters/001.png", "/letters/002.png", "/letters/003.png"]
    assert max(found[0].distance for found in hits) < 1e-3
    assert (len(opened.gallery), opened.gallery.num_shards) == (len(images) - 1, 2)
    assert 0 < opened.threshold.distance < 2
    assert opened.threshold.scoring.name == "combination"
    verdicts = [
        verdict_of(near, threshold=opened.threshold, spread_of=opened.gallery.class_spread)
        for near in opened.gallery.search(opened.embedder.encode(images[1:4]), 24, model=opened.model)
    ]
    assert all(verdict.is_known for verdict in verdicts), "they are in the index themselves"


def test_an_index_has_its_metadata():
    index = ImageIndex.open(FORMATS / "metadata-index")
    rows = {entry.path: dict(entry.metadata) for entry in index.entries()}
    assert rows == {
        "a.jpg": {"price": 3.5, "brand": "Acme", "taken": datetime(2024, 5, 1), "tags": ("red", "blue")},
        "b.jpg": {"price": 20.0, "brand": "Bolt", "taken": datetime(2024, 5, 1, 12, 30)},
        "c.jpg": {"brand": "Cork"},
    }
    assert index.matching("tags contains red or price = 20").tolist() == [0, 1]
    assert ImageIndex.open(FORMATS / "run" / "index").columns == {"class": "text", "path": "text"}, "one of before"


def test_an_embedded_collection_has_the_vectors_of_the_run():
    paths, vectors = read_embeddings(FORMATS / "collection")
    collection = open_embeddings(FORMATS / "collection")
    embedder = load_embedder(FORMATS / "run")
    assert collection.settings.model_digest == ModelIdentity.of(embedder).digest
    assert collection.unreadable == {"/letters/bad.png": "is not an image"}
    torch.testing.assert_close(vectors, embedder.encode(few_glyphs().test.images[: len(paths)]), atol=1e-4, rtol=0)
    assert collection.file(paths[3]).size == 103


@pytest.mark.parametrize("name", ["bundle", "bundle.zip"])
def test_a_bundle_searches(name):
    bundle = load_bundle(FORMATS / name)
    [hits] = bundle.search(few_glyphs().test.images[5:6], k=3)
    assert hits[0].path == "/letters/005.png"
    assert bundle.field.proxies.shape[2] == 8
    assert bundle.threshold is not None


def with_version(text, version, *, sealed):
    """A manifest of another version, with its checksum put right or not."""
    values = {**json.loads(text), "format_version": version}
    if sealed:
        del values["manifest_sha256"]
        values["manifest_sha256"] = digest_of(values)
    return json.dumps(values)


def other_shard(path, version, *, sealed):
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"]["pfml"] = with_version(header["__metadata__"]["pfml"], version, sealed=sealed)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def other_zip(path, version, *, sealed):
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    contents["bundle.json"] = with_version(contents["bundle.json"], version, sealed=sealed).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)


def other_manifest(path, version, *, sealed):
    path.write_text(with_version(path.read_text(), version, sealed=sealed))


#: file -> how it gets another version, what reads it, the version of today
READERS = {
    "run/model/model.json": (other_manifest, lambda path: load_embedder(path.parent), "an embedder", 1),
    "run/loss/loss.json": (other_manifest, lambda path: load_field(path.parents[1]), "a loss", 1),
    "run/checkpoints/last.json": (other_manifest, lambda path: load_checkpoint(path.parent), "a checkpoint", 1),
    "run/checkpoints/chosen-2.json": (
        other_manifest,
        lambda path: load_chosen_epoch(path.parent, 2),
        "a chosen epoch",
        1,
    ),
    "ensemble/ensemble.json": (other_manifest, lambda path: read_ensemble(path.parent), "an ensemble", 1),
    "run/results.json": (other_manifest, lambda path: RunFolder(path.parent).read_results(), "results of a run", 1),
    "run/threshold.json": (other_manifest, lambda path: Threshold.load(path.parent), "a distance threshold", 2),
    "run/index/index.json": (other_manifest, lambda path: ImageIndex.open(path.parent), "an image index", 2),
    "collection/embeddings.json": (
        other_manifest,
        lambda path: read_embeddings(path.parent),
        "an embedded collection",
        2,
    ),
    "collection/shard-*": (other_shard, lambda path: read_embeddings(path.parent), "a vector shard", 1),
    "bundle/bundle.json": (other_manifest, lambda path: load_bundle(path.parent), "a pfml bundle", 1),
    "bundle.zip": (other_zip, load_bundle, "a pfml bundle", 1),
}


@pytest.mark.parametrize("pattern", READERS)
def test_a_file_of_another_version_is_refused_with_both_versions_and_advice(copied, pattern):
    change, read, kind, version = READERS[pattern]
    path = min(copied.glob(pattern))
    whole = path.read_bytes()
    read(path)
    message = rf"{path.name}.* must be .*{kind} of format version {version}, got version 99: "
    change(path, 99, sealed=True)
    with pytest.raises(FormatVersionError, match=message + "use the pfml that wrote it, or "):
        read(path)
    path.write_bytes(whole)
    change(path, 99, sealed=False)
    with pytest.raises(DamagedFileError, match=message + "it does not match its own checksum"):
        read(path)


def test_a_run_folder_of_another_version_is_refused(copied):
    path = copied / "run" / "config.yaml"
    path.write_text(path.read_text().replace("format version 1", "format version 99"))
    with pytest.raises(FormatVersionError, match="format version 1, got version 99"):
        read_config(path)
