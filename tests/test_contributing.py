"""The worked examples of CONTRIBUTING.md work: each is added to the package in memory, and run."""

import importlib.util
import math
import re
import shutil
import sqlite3
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import torch
import uvicorn
from PIL import Image

import pfml
from pfml.backends import fused, split_precision
from pfml.cli import main
from pfml.data import load_data
from pfml.evaluation import retrieval_metrics
from pfml.export import export_index
from pfml.methods import LossConfig, create_loss
from pfml.models import EmbedderConfig
from pfml.runs.config import BatchConfig, DataConfig, RunConfig
from pfml.training import run, train
from small_data import few_glyphs, small_config, small_embedder
from small_index import small_index
from small_runs import save_run

ROOT = Path(__file__).parents[1]
SOURCE = Path(pfml.__file__).parents[1]
#: Section -> how many source files it may touch.
MOST_FILES = {
    "A decay law": 2,
    "A loss": 2,
    "A data set": 2,
    "A metric": 1,
    "A vector database": 2,
    "A server page": 3,
}
#: What examples add a row to.
TABLES = ("METHODS", "DATASETS", "METRICS", "VECTOR_DATABASES", "GPU_LAWS")


def blocks():
    """Section -> (file, code) of its code blocks."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = {}
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0]
        found[title] = re.findall(
            r"^```\w+\n(?:#|//|<!--) (src/\S+)(?: -->)?\n(.*?)^```", section, re.MULTILINE | re.DOTALL
        )
    return found


BLOCKS = blocks()


@pytest.fixture
def added(monkeypatch, tmp_path):
    """A function that adds the Python of a section, and returns its names; everything is taken back afterwards."""
    tables = []

    def add(section):
        names = {}
        for file, code in BLOCKS[section]:
            if not file.endswith(".py"):
                continue
            name = file.removeprefix("src/").removesuffix(".py").replace("/", ".")
            written = tmp_path / "added" / name / Path(file).name  # a real file: Triton reads the source of its kernels
            written.parent.mkdir(parents=True)
            written.write_text(code, encoding="utf-8")
            if (SOURCE / file.removeprefix("src/")).exists():
                module = importlib.import_module(name)
                inside = dict(vars(module))
                tables.extend((inside[table], dict(inside[table])) for table in TABLES if table in inside)
                exec(compile(code, str(written), "exec"), inside)
                for new in inside.keys() - vars(module).keys():
                    monkeypatch.setattr(module, new, inside[new], raising=False)
                names |= inside
            else:
                spec = importlib.util.spec_from_file_location(name, written)
                module = importlib.util.module_from_spec(spec)
                monkeypatch.setitem(sys.modules, name, module)
                spec.loader.exec_module(module)
                names |= vars(module)
        return names

    yield add
    for table, before in reversed(tables):
        table.clear()
        table.update(before)


@pytest.mark.parametrize("section", MOST_FILES)
def test_an_example_touches_few_files(section):
    files = {file for file, _ in BLOCKS[section]}
    assert 1 <= len(files) <= MOST_FILES[section], f"CONTRIBUTING.md, {section}: {sorted(files)}"


def test_every_example_is_run():
    assert set(BLOCKS) == set(MOST_FILES), "a section of CONTRIBUTING.md without a test, or the reverse"


def test_a_decay_law(added, quick_interpreter):
    law = added("A decay law")["GaussianLaw"](width=0.4)
    assert law.attraction(torch.tensor(0.4)).item() == pytest.approx(-1 / math.e)
    points = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.arange(12) % 3
    on_gpu = fused.INSTALLED and (torch.cuda.is_available() or split_precision.INTERPRETED)
    results = {}
    for backend in ("dense", "tiled", *(["triton"] if on_gpu else [])):
        torch.manual_seed(1)
        loss = pfml.PotentialFieldLoss(3, 8, proxies_per_class=2, potential=law, backend=backend)
        energy = loss(points, labels)
        results[backend] = (energy, *torch.autograd.grad(energy, [points, loss.proxies]))
    for computed in results.values():
        for value, expected in zip(computed, results["dense"], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


def test_a_loss(added, tmp_path, capsys):
    added("A loss")
    embeddings, labels = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 0, 2, 2, 5, 5])
    loss = create_loss(LossConfig("prototype", {"temperature": 0.2}), 6, 4)
    points = torch.nn.functional.normalize(embeddings)
    expected = 0.0
    for k in range(6):
        means = [torch.nn.functional.normalize(points[labels == c].mean(0), dim=0) for c in (0, 2, 5)]
        scores = torch.stack([points[k] @ mean / 0.2 for mean in means])
        expected -= scores.log_softmax(0)[(0, 2, 5).index(int(labels[k]))].item() / 6
    assert loss(embeddings, labels).item() == pytest.approx(expected, rel=1e-5)
    main(["methods"])
    assert "prototype" in capsys.readouterr().out
    results = train(few_glyphs(), small_embedder(), small_config(loss=LossConfig("prototype")), out=tmp_path / "run")
    assert results["last"]["epoch"] == 2


def write_pets(folder):
    (folder / "images").mkdir(parents=True)
    for k, breed in enumerate(("Abyssinian", "great_dane", "pug", "Sphynx")):
        for number in range(1, 9):
            color = tuple((60 * k + 20 * number * (channel == k % 3)) % 256 for channel in range(3))
            Image.new("RGB", (32, 32), color).save(folder / "images" / f"{breed}_{number}.jpg")
    return folder


def test_a_data_set(added, tmp_path):
    added("A data set")
    root = write_pets(tmp_path / "pets")
    data = load_data("pets", root)
    assert (data.train.class_names, data.test.class_names) == (("Abyssinian", "Sphynx"), ("great_dane", "pug"))
    assert (len(data.train), len(data.test)) == (16, 16)
    small = small_config()
    config = RunConfig(
        data=DataConfig("pets", root),
        model=EmbedderConfig("convnet", embedding_dim=8),
        epochs=1,
        warm_up_epochs=0,
        batch=BatchConfig(size=8, samples_per_class=4),
        batch_norm="train",
        optimizer=small.optimizer,
        loss=small.loss,
        device="cpu",
    )
    results = run(config, tmp_path / "run")
    assert results["last"]["epoch"] == 1
    with pytest.raises(FileNotFoundError, match="BREED_NUMBER"):
        load_data("pets", tmp_path)


def test_a_metric(added, tmp_path):
    added("A metric")
    points = torch.nn.functional.normalize(torch.randn(20, 3, generator=torch.Generator().manual_seed(0)))
    labels = torch.arange(20) % 5
    expected = 0.0
    for k in range(20):
        nearest = [i for i in (points @ points[k]).argsort(descending=True).tolist() if i != k]
        expected += 1 / (1 + [int(labels[i]) for i in nearest].index(int(labels[k]))) / 20
    assert retrieval_metrics(points, labels).as_dict()["mean_reciprocal_rank"] == pytest.approx(expected)
    results = train(few_glyphs(), small_embedder(), small_config(epochs=1), out=tmp_path / "run")
    assert 0 < results["last"]["test"]["mean_reciprocal_rank"] <= 1
    assert "MRR" in (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")


def test_a_vector_database(added, tmp_path):
    added("A vector database")
    index = small_index(tmp_path / "index")
    for written in (len(index), 0):  # the second export changes nothing
        exported = export_index(index, "sqlite", "birds", path=tmp_path / "out")
        assert (exported.points, exported.written, exported.deleted) == (len(index), written, 0)
    with closing(sqlite3.connect(tmp_path / "out" / "birds.sqlite")) as database:
        rows = {
            path: (name, vector) for path, name, vector in database.execute("SELECT path, class, vector FROM images")
        }
    for entry in index.entries():
        name, vector = rows[entry.path]
        assert name == entry.class_name
        assert torch.equal(torch.frombuffer(bytearray(vector), dtype=torch.float32), index.vectors([entry.id])[0])
    index.remove(paths=[next(index.entries()).path])
    assert export_index(index, "sqlite", "birds", path=tmp_path / "out").deleted == 1
    main(["export", str(tmp_path), "--to=sqlite"])
    assert [file.suffix for file in (tmp_path / "sqlite").iterdir()] == [".sqlite"]
    with pytest.raises(ValueError, match="SQLite has no server"):
        export_index(index, "sqlite", "birds", url="http://localhost")


@pytest.fixture
def page_folder(monkeypatch, tmp_path):
    """A copy of the folder of the page with the script and the section of the example."""
    pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")
    from pfml.serving import app
    from pfml.serving.routers import page

    code = dict(BLOCKS["A server page"])
    folder = shutil.copytree(page.PAGE, tmp_path / "page")
    (folder / "counts.js").write_text(code["src/pfml/serving/page/counts.js"], encoding="utf-8")
    index = (folder / "index.html").read_text(encoding="utf-8")
    section = code["src/pfml/serving/page/index.html"]
    (folder / "index.html").write_text(index.replace("</main>", f"{section}</main>"), encoding="utf-8")
    for module in (app, page):
        monkeypatch.setattr(module, "PAGE", folder)
    return folder


def test_a_server_page(added, page_folder, monkeypatch, tmp_path):
    from pfml.serving import Access, Gallery, Service, create_app, routers

    added("A server page")
    found = tmp_path / "added" / "pfml.serving.routers.counts"
    monkeypatch.setattr(routers, "__path__", [*routers.__path__, str(found)])
    save_run(tmp_path / "run")
    app = create_app(Service(Gallery.open(tmp_path / "run", device="cpu"), map_method="pca"), Access())

    config = uvicorn.Config(app, port=0, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        expected = Gallery.open(tmp_path / "run", device="cpu").index.class_counts()
        counts = httpx.get(f"{address}/api/counts").json()
        assert {one["class_name"]: one["images"] for one in counts} == dict(expected)
        assert [one["images"] for one in counts] == sorted(expected.values(), reverse=True)
        if shutil.which("chromium"):
            assert listed(f"{address}/#counts") == [f"{one['class_name']}: {one['images']}" for one in counts]
    finally:
        server.should_exit = True
        thread.join()


def listed(address):
    """The lines that a browser shows on the page of the example."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the page is tested through the package playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(address)
        playwright.expect(page.locator("#counts li").first).to_be_visible(timeout=60_000)
        lines = page.locator("#counts li").all_inner_texts()
        browser.close()
    return lines
