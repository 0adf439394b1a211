"""Bundles: the run that they were made of is the oracle."""

import json
import shutil

import pytest
import torch

import pfml
from pfml.export import export_bundle, load_bundle
from pfml.models.embedder import EMBEDDER
from pfml.runs.saved_loss import LOSS, load_field
from pfml.search import ImageIndex, ModelIdentity, OtherModelError, verdict_of
from pfml.search.index_folder import INDEX
from pfml.search.threshold import THRESHOLD
from pfml.storage.files import DamagedFileError
from pfml.storage.sealed_tensors import read_sealed_tensors, write_sealed_tensors
from small_runs import few_glyphs, save_index, save_model, save_run, save_threshold

ALL = ("model", "preprocessing", "loss", "threshold", "index")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    save_run(folder)
    return folder


@pytest.fixture(scope="module")
def packed(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundles")
    assert export_bundle(run, folder / "bundle") == ALL
    assert export_bundle(run, folder / "bundle.zip") == ALL
    return folder


@pytest.fixture
def copied(packed, tmp_path):
    """A bundle of one's own to tamper with."""
    return shutil.copytree(packed / "bundle", tmp_path / "bundle")


@pytest.mark.parametrize("name", ["bundle", "bundle.zip"])
def test_one_call_loads_what_the_run_had(name, run, packed):
    bundle = pfml.load_bundle(str(packed / name))
    queries = few_glyphs("AK").images
    embedder = pfml.load_embedder(run)
    points = embedder.encode(queries)
    assert torch.equal(bundle.encode(queries), points)
    expected = ImageIndex.open(run / "index").search(points, 3, model=ModelIdentity.of(embedder))
    assert bundle.search(queries, 3) == expected
    assert bundle.is_unknown(queries) == [hits[0].distance > 0.01 for hits in expected]
    assert {True, False} == set(bundle.is_unknown(queries))
    verdicts = bundle.verdicts(queries)
    near = bundle.index.search(points, 24, model=bundle.model)
    assert verdicts == [verdict_of(hits, threshold=bundle.threshold) for hits in near]
    assert {verdict.of for verdict in verdicts} == {24}
    assert torch.equal(bundle.field.proxies, load_field(run).proxies)
    assert bundle.field.class_names == ("x", "y")
    assert bundle.card.startswith("# An image embedder")
    assert bundle.onnx is None


def test_a_search_may_be_kept_to_some_classes(packed):
    bundle = load_bundle(packed / "bundle")
    hits = bundle.search(few_glyphs("B").images[:1], 5, class_names=["C"])[0]
    assert [hit.class_name for hit in hits] == ["C"] * 5


def test_an_archive_leaves_nothing_behind_when_its_bundle_is_gone(packed):
    bundle = load_bundle(packed / "bundle.zip")
    folder = bundle.index.path.parent
    assert (folder / "bundle.json").is_file()
    del bundle
    assert not folder.exists()


def test_the_same_run_gives_the_same_archive(run, packed, tmp_path):
    export_bundle(run, tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == (packed / "bundle.zip").read_bytes()


def test_every_file_is_listed_and_none_is_a_pickle(packed):
    files = json.loads((packed / "bundle" / "bundle.json").read_text())["files"]
    present = {p.relative_to(packed / "bundle").as_posix() for p in (packed / "bundle").rglob("*") if p.is_file()}
    assert set(files) == present - {"bundle.json"}
    assert {name.rpartition(".")[2] for name in files} == {"json", "md", "safetensors"}
    assert "index/lock" not in files


def test_the_preprocessing_is_described(packed):
    described = json.loads((packed / "bundle" / "preprocessing.json").read_text())
    assert described["input"]["shape"] == ["batch", 3, 32, 32]
    assert described["output"]["shape"] == ["batch", 8]


@pytest.mark.parametrize(
    "name",
    ["README.md", "preprocessing.json", "threshold.json", "model/model.json", "model/README.md", "index/index.json"],
)
def test_a_changed_file_is_refused_by_name(name, copied):
    content = bytearray((copied / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copied / name).write_bytes(content)
    with pytest.raises(DamagedFileError, match=f"{name} must have sha256"):
        load_bundle(copied)


def test_changed_weights_are_refused_by_name(copied):
    (weights,) = (copied / "model").glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-50] ^= 1
    weights.write_bytes(content)
    with pytest.raises(DamagedFileError, match=f"{weights.name} must have sha256"):
        load_bundle(copied)


def test_a_file_cut_short_or_missing_or_added_is_refused_by_name(copied):
    original = (copied / "threshold.json").read_bytes()
    (copied / "threshold.json").write_bytes(original[:-5])
    with pytest.raises(DamagedFileError, match=r"threshold.json must have [\d,]+ bytes, got"):
        load_bundle(copied)
    (copied / "threshold.json").unlink()
    with pytest.raises(DamagedFileError, match="threshold.json is listed .* no such file"):
        load_bundle(copied)
    (copied / "threshold.json").write_bytes(original)
    (copied / "index" / "shard-00.safetensors").write_bytes(b"")
    with pytest.raises(DamagedFileError, match=r"shard-00.safetensors is not listed"):
        load_bundle(copied)


def test_a_link_is_refused_by_name(copied, tmp_path):
    target = shutil.copyfile(copied / "README.md", tmp_path / "elsewhere.md")
    (copied / "README.md").unlink()
    (copied / "README.md").symlink_to(target)
    with pytest.raises(DamagedFileError, match="README.md must be a file or a folder, got a link"):
        load_bundle(copied)


def test_a_changed_manifest_is_refused(copied):
    path = copied / "bundle.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["README.md"]["sha256"] = "0" * 64
    path.write_text(json.dumps(manifest))
    with pytest.raises(DamagedFileError, match="bundle.json does not match its own checksum"):
        load_bundle(copied)
    path.write_text(json.dumps({**manifest, "format_version": 2}))
    with pytest.raises(DamagedFileError, match="must be a pfml bundle of format version 1, got version 2"):
        load_bundle(copied)
    for content in ("[]", "{", '{"kind": "other"}'):
        path.write_text(content)
        with pytest.raises(DamagedFileError, match=r"bundle.json must be"):
            load_bundle(copied)


def test_what_is_missing_is_said_when_it_is_asked_for(tmp_path):
    embedder = save_model(tmp_path / "model")
    assert export_bundle(tmp_path / "model", tmp_path / "bundle") == ("model", "preprocessing")
    bundle = load_bundle(tmp_path / "bundle")
    images = few_glyphs().images[:2]
    assert torch.equal(bundle.encode(images, batch_size=1), embedder.encode(images, batch_size=1))
    assert bundle.field is bundle.index is bundle.threshold is None
    with pytest.raises(ValueError, match="must have an index to be searched, but has none: run pfml index"):
        bundle.search(images)
    with pytest.raises(ValueError, match="must have a threshold .* pfml calibrate"):
        bundle.is_unknown(images)


@pytest.mark.parametrize("part", ["index", "threshold"])
def test_parts_of_another_model_are_refused_and_nothing_is_left(part, tmp_path):
    run = tmp_path / "run"
    other = save_model(run / "model")
    save_model(run / "model", seed=1)
    if part == "index":
        save_index(run / "index", other)
    else:
        save_threshold(run, other)
    with pytest.raises(OtherModelError, match=f"the {part} of .*run belongs to"):
        export_bundle(run, tmp_path / "bundle.zip")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_nothing_is_overwritten(run, packed):
    for name in ("bundle", "bundle.zip"):
        with pytest.raises(FileExistsError, match="must not exist yet"):
            export_bundle(run, packed / name)


def test_what_is_no_bundle_or_no_run_is_refused(tmp_path, run):
    with pytest.raises(FileNotFoundError, match="must be a bundle, a folder or a .zip file"):
        load_bundle(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="no bundle.json in it"):
        load_bundle(run)
    with pytest.raises(FileNotFoundError, match="no model.json in either"):
        export_bundle(tmp_path, tmp_path / "bundle")


def test_an_index_that_changes_while_it_is_packed_is_an_error_and_not_half_an_index(run, tmp_path):
    broken = shutil.copytree(run, tmp_path / "run")
    next((broken / "index").glob("shard-*.safetensors")).unlink()
    with pytest.raises(FileNotFoundError, match="must be there to be copied.*try again"):
        export_bundle(broken, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


FORMATS = {"model/model.json": EMBEDDER, "loss/loss.json": LOSS, "threshold.json": THRESHOLD, "index/index.json": INDEX}


@pytest.mark.parametrize("manifest", FORMATS)
def test_a_writer_between_two_reads_does_not_give_a_bundle_of_two_states(tmp_path, monkeypatch, manifest):
    embedder = save_run(tmp_path / "run")
    path, form = tmp_path / "run" / manifest, FORMATS[manifest]
    before, copy = path.read_bytes(), shutil.copyfile
    # the writer has renamed its manifest into place, and not yet removed the tensors before
    monkeypatch.setattr("pfml.storage.sealed_tensors._remove_left_over", lambda *_: None)

    def copied_late(source, target):
        if source.parent == path.parent and path.read_bytes() == before:
            content, tensors = read_sealed_tensors(path.parent, path.stem, form)
            write_sealed_tensors(path.parent, path.stem, tensors, {**content, "later": True}, form)
        return copy(source, target)

    monkeypatch.setattr("pfml.storage.sealed_tensors.shutil.copyfile", copied_late)
    assert export_bundle(tmp_path / "run", tmp_path / "bundle") == ALL
    assert path.read_bytes() != before
    assert (tmp_path / "bundle" / manifest).read_bytes() == before
    assert torch.equal(
        load_bundle(tmp_path / "bundle").encode(few_glyphs().images), embedder.encode(few_glyphs().images)
    )


def test_a_model_that_is_replaced_while_it_is_packed_is_packed_as_it_was_or_as_it_is(tmp_path, monkeypatch):
    embedder = save_model(tmp_path / "run" / "model")
    load = pfml.load_embedder

    def loaded(folder):
        found = load(folder)
        save_model(tmp_path / "run" / "model", seed=1)
        return found

    monkeypatch.setattr("pfml.export.bundle.load_embedder", loaded)
    save_index(tmp_path / "run" / "index", embedder)
    export_bundle(tmp_path / "run", tmp_path / "bundle.zip")
    bundle = load_bundle(tmp_path / "bundle.zip")  # which refuses an index of another model
    assert bundle.model == bundle.index.model == ModelIdentity.of(embedder)


def test_a_damaged_file_is_named_before_it_is_packed(tmp_path):
    save_run(tmp_path / "run")
    (victim,) = (tmp_path / "run" / "loss").glob("*.safetensors")
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    with pytest.raises(DamagedFileError, match=f"run/loss/{victim.name} is not what loss.json says"):
        export_bundle(tmp_path / "run", tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
