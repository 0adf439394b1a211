"""`pfml export` as a user calls it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from pfml.cli import main
from pfml.data import RetrievalData
from pfml.data.decoding import UnreadableImagesError
from pfml.export import load_bundle, onnx
from pfml.models import EmbedderConfig, load_embedder
from pfml.runs.config import DataConfig, RunConfig
from pfml.runs.config_files import write_config
from small_runs import few_glyphs, save_run


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    run = tmp_path_factory.mktemp("runs") / "my run"
    save_run(run)
    write_config(run / "config.yaml", RunConfig(data=DataConfig("glyphs"), model=EmbedderConfig("convnet")))
    return run


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "my run")


@pytest.fixture(scope="module")
def written():
    """The ONNX file of the run's model, by the first test that exports it."""
    return {}


@pytest.fixture
def _exported_once(written, monkeypatch):
    """Exports of the model of the run; torch traces it once, which takes most of the time."""
    write = onnx._write

    def write_or_copy(embedder, path, description):
        if not written:
            write(embedder, path, description)
            written["onnx"] = path.read_bytes()
        path.write_bytes(written["onnx"])

    monkeypatch.setattr(onnx, "_write", write_or_copy)


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for k, pixels in enumerate(few_glyphs().images[:3]):
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / f"{k}.png")
    return folder


def failure(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(list(map(str, arguments)))
    return f"{caught.value.code} {capsys.readouterr().err}"


@pytest.mark.usefixtures("_exported_once")
def test_to_onnx_checks_on_images_of_the_data_and_prints_the_largest_difference(run, capsys, monkeypatch):
    import onnxruntime

    data = RetrievalData("letters", few_glyphs("KL"), few_glyphs())
    monkeypatch.setattr(onnx, "load_listed", lambda config: data)
    main(["export", str(run), "--to", "onnx", "--json"])
    printed = capsys.readouterr()
    assert "the largest difference between onnxruntime and torch is" in printed.err
    assert "on 8 images" in printed.err
    written = json.loads(printed.out)
    assert (written["to"], written["path"], written["images"]) == ("onnx", str(run / "onnx" / "model.onnx"), 8)
    assert 0 <= written["largest_difference"] < 1e-4
    assert (run / "onnx" / "model.preprocessing.json").is_file()
    pixels = data.test.images[:2].float() / 255
    found = onnxruntime.InferenceSession(str(run / "onnx" / "model.onnx")).run(None, {"images": pixels.numpy()})[0]
    assert (torch.from_numpy(found) - load_embedder(run).encode(data.test.images[:2])).abs().max() < 1e-4


@pytest.mark.usefixtures("_exported_once")
def test_to_a_bundle_with_onnx_in_a_zip(run, images, tmp_path, capsys):
    out = tmp_path / "out" / "b.zip"
    main(["export", str(run), "--to", "bundle", "--with-onnx", "--images", str(images), "--out", str(out)])
    assert "model, preprocessing, loss, threshold, index, onnx" in capsys.readouterr().out
    bundle = load_bundle(out)
    assert bundle.onnx.is_file()
    assert len(bundle.search([images / "0.png"], 4)[0]) == 4


def test_to_a_bundle_says_what_it_lacks(run, capsys):
    shutil.rmtree(run / "index")
    main(["export", str(run), "--to", "bundle", "--json"])
    printed = capsys.readouterr()
    assert "it has no index" in printed.err
    assert "threshold, since" not in printed.err
    parts = ["model", "preprocessing", "loss", "threshold"]
    assert json.loads(printed.out) == {"to": "bundle", "path": str(run / "bundle"), "parts": parts}
    assert load_bundle(run / "bundle").index is None


def test_to_qdrant_in_a_folder(run, tmp_path, capsys):
    from qdrant_client import QdrantClient

    main(["export", str(run), "--to", "qdrant"])
    assert "points in the collection 'my-run'" in capsys.readouterr().out
    other = shutil.move(run / "index", tmp_path / "index")
    main(
        [
            "export",
            str(run),
            "--to",
            "qdrant",
            "--path",
            str(tmp_path / "q"),
            "--collection",
            "x",
            "--index",
            str(other),
            "--json",
            "--quiet",
        ]
    )
    printed = json.loads(capsys.readouterr().out)
    counts = {"points": 46, "written": 46, "deleted": 0, "kept": 0}
    assert printed == {"to": "qdrant", "path": str(tmp_path / "q"), "collection": "x", **counts}
    for folder, collection in ((run / "qdrant", "my-run"), (tmp_path / "q", "x")):
        client = QdrantClient(path=str(folder))
        assert client.count(collection).count == 3 * 16 - 2
        client.close()


def test_a_server_gets_the_key_of_the_environment_and_a_folder_does_not(run, monkeypatch):
    asked = []

    def note(index, database, collection, **options):
        asked.append({name: options[name] for name in ("url", "path", "api_key")})
        raise ValueError("enough")

    monkeypatch.setattr("pfml.export.export_index", note)
    monkeypatch.setenv("QDRANT_API_KEY", "key")
    for options in (["--url", "http://somewhere"], []):
        with pytest.raises(SystemExit):
            main(["export", str(run), "--to", "qdrant", *options])
    assert asked == [
        {"url": "http://somewhere", "path": None, "api_key": "key"},
        {"url": None, "path": run / "qdrant", "api_key": None},
    ]


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("onnx", ["--url", "http://x"]),
        ("onnx", ["--with-onnx"]),
        ("bundle", ["--collection", "x"]),
        ("qdrant", ["--out", "x"]),
        ("qdrant", ["--images", "x"]),
    ],
)
def test_an_option_of_another_target_is_refused(to, options, run, capsys):
    assert f"{options[0]} must be left out with --to {to}" in failure(["export", run, "--to", to, *options], capsys)


def test_images_without_anything_to_check_are_refused(run, images, capsys):
    assert "--images must go with --with-onnx" in failure(["export", run, "--to", "bundle", "--images", images], capsys)


def test_an_unknown_target_is_refused(run, capsys):
    assert "qdrant" in failure(["export", run, "--to", "pickle"], capsys)


def test_a_model_without_data_asks_for_images(run, tmp_path, capsys):
    alone = shutil.copytree(run / "model", tmp_path / "alone")
    assert "give images to check the export on with --images" in failure(["export", alone, "--to", "onnx"], capsys)


def test_the_model_of_a_run_knows_the_data_of_the_run(run, monkeypatch):
    monkeypatch.chdir(run / "model")
    assert onnx.run_folder(Path()) == run.resolve()
    assert onnx.run_folder(run / "model") == run.resolve()
    assert onnx.run_folder(run) == run


def test_a_few_images_are_spread_over_all(images):
    chosen = onnx.check_images(Path("nowhere"), [images], count=2)
    assert [path.name for path in chosen.images] == ["0.png", "2.png"]


def test_a_broken_image_is_left_out_of_the_few_that_an_export_is_checked_on(images):
    files = sorted(path for path in images.rglob("*") if path.is_file())
    files[0].write_bytes(b"no image")
    chosen = onnx.check_images(Path("nowhere"), [images], count=len(files))
    assert len(chosen) == len(files) - 1
    for file in files:
        file.write_bytes(b"no image")
    with pytest.raises(UnreadableImagesError):
        onnx.check_images(Path("nowhere"), [images])
