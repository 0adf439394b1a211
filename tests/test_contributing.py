"""The worked examples of CONTRIBUTING.md work: each is added to the package in memory, and run."""

import importlib.util
import math
import re
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from PIL import Image

import pfml
from pfml.cli import main
from pfml.data import load_data
from pfml.evaluation import retrieval_metrics
from pfml.export import export_index
from pfml.methods import LossConfig, create_loss
from pfml.models import EmbedderConfig
from pfml.runs.config import BatchConfig, DataConfig, RunConfig
from pfml.training import run, train
from small_data import letters, small_config, small_embedder
from small_index import small_index

ROOT = Path(__file__).parents[1]
SOURCE = Path(pfml.__file__).parents[1]
#: Section -> how many source files it may touch.
MOST_FILES = {
    "A decay law": 2,
    "A loss": 2,
    "A data set": 2,
    "A metric": 1,
    "A vector database": 2,
}
#: What examples add a row to.
TABLES = ("METHODS", "DATASETS", "METRICS", "VECTOR_DATABASES")


def blocks():
    """Section -> (file, code) of its code blocks."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = {}
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0]
        found[title] = re.findall(r"^```\w+\n(?:#|//) (src/\S+)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    return found


BLOCKS = blocks()


@pytest.fixture
def added(monkeypatch, tmp_path):
    """A function that adds the example of a section, and returns its names; everything is taken back afterwards."""
    tables = []

    def add(section):
        names = {}
        for file, code in BLOCKS[section]:
            module = file.removeprefix("src/").removesuffix(".py").replace("/", ".")
            if (SOURCE / file.removeprefix("src/")).exists():
                place = importlib.import_module(module)
                inside = dict(vars(place))
                tables.extend((inside[name], dict(inside[name])) for name in TABLES if name in inside)
                exec(compile(code, file, "exec"), inside)
                names |= inside
            else:
                written = tmp_path / "added" / Path(file).name
                written.parent.mkdir(exist_ok=True)
                written.write_text(code, encoding="utf-8")
                spec = importlib.util.spec_from_file_location(module, written)
                loaded = importlib.util.module_from_spec(spec)
                monkeypatch.setitem(sys.modules, module, loaded)
                spec.loader.exec_module(loaded)
                names |= vars(loaded)
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


def test_a_decay_law(added):
    law = added("A decay law")["GaussianLaw"](width=0.4)
    assert law.attraction(torch.tensor(0.4)).item() == pytest.approx(-1 / math.e)
    torch.manual_seed(0)
    points, labels = torch.randn(12, 8), torch.arange(12) % 3
    energies = {}
    for backend in ("dense", "tiled"):
        torch.manual_seed(1)
        loss = pfml.PotentialFieldLoss(3, 8, proxies_per_class=2, potential=law, backend=backend)
        energy = loss(points.requires_grad_(), labels)
        energy.backward()
        energies[backend] = energy.item()
        assert loss.proxies.grad.abs().max() > 0
    assert energies["tiled"] == pytest.approx(energies["dense"], rel=1e-5)


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
    results = train(small_embedder(), letters(), small_config(loss=LossConfig("prototype")), out=tmp_path / "run")
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
    results = train(small_embedder(), letters(), small_config(epochs=1), out=tmp_path / "run")
    assert 0 < results["last"]["test"]["mean_reciprocal_rank"] <= 1
    assert "MRR" in (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")


def test_a_vector_database(added, tmp_path):
    added("A vector database")
    index = small_index(tmp_path / "index")
    for _ in range(2):  # the second export changes nothing
        exported = export_index(index, "sqlite", "birds", path=tmp_path / "out")
        assert (exported.collection, exported.points, exported.stale) == ("birds", len(index), 0)
    with closing(sqlite3.connect(tmp_path / "out" / "birds.sqlite")) as database:
        rows = {path: (name, vector) for path, name, vector in database.execute("SELECT * FROM images")}
    for entry in index.entries():
        name, vector = rows[entry.path]
        assert name == entry.class_name
        assert torch.equal(torch.frombuffer(bytearray(vector), dtype=torch.float32), index.vectors([entry.id])[0])
    main(["export", str(tmp_path), "--to=sqlite"])
    assert [file.suffix for file in (tmp_path / "sqlite").iterdir()] == [".sqlite"]
    with pytest.raises(ValueError, match="SQLite has no server"):
        export_index(index, "sqlite", "birds", url="http://localhost")
