"""A tiny trained run with an index, a threshold and an audit, made once."""

import csv
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image

from pfml.audit import audit_run, write_suspects
from pfml.models import EmbedderConfig, load_embedder
from pfml.search import ImageIndex, ModelIdentity, list_images, update_index
from pfml.training import DataConfig, LossConfig, RunConfig, run
from small_data import small_config
from small_threshold import made_threshold

#: One name is there to be escaped.
COLORS = {
    "blue": (20, 40, 220),
    "green": (30, 200, 40),
    "red & <b>bold</b>": (220, 30, 30),
    "gray": (128, 128, 128),
}
IMAGES = 12


def write_images(folder):
    """Three training classes and one unseen class, as a table with splits; two blue images have the label green."""
    random = torch.Generator().manual_seed(0)
    rows = []
    for name, color in COLORS.items():
        for number in range(IMAGES):
            shift = torch.randint(-25, 26, (3, 24, 24), generator=random)
            level = (torch.tensor(color)[:, None, None] + shift).clamp(0, 255).byte()
            file = f"{name[:4].strip()}-{number}.png"
            Image.fromarray(level.permute(1, 2, 0).contiguous().numpy()).save(folder / file)
            label = "green" if name == "blue" and number < 2 else name
            rows.append((file, label, "test" if name == "gray" else "train"))
    with open(folder / "table.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "split"), *rows])
    return folder / "table.csv"


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A request waits for the newest index, however busy the machine is."""
    from running_server import LIMIT

    monkeypatch.setattr("pfml.serving.gallery.REFRESH_PATIENCE", LIMIT)


@pytest.fixture(scope="session")
def made_run(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("serving")
    table = write_images(folder)
    small = small_config()
    config = RunConfig(
        epochs=2,
        warm_up_epochs=0,
        batch_norm="train",
        batch=replace(small.batch, size=12, samples_per_class=4),
        optimizer=small.optimizer,
        loss=LossConfig("pfml", {"proxies_per_class": 2}),
        device="cpu",
        data=DataConfig(str(table)),
        model=EmbedderConfig("convnet", embedding_dim=8, pooling="avg+max"),
    )
    run(config, folder / "run")
    embedder = load_embedder(folder / "run")
    model = ModelIdentity.of(embedder)
    index = ImageIndex.create(folder / "run" / "index", model, embedder.embedding_dim)
    update_index(index, embedder, list_images(table))
    found, _ = audit_run(folder / "run", device="cpu")
    write_suspects(folder / "run" / "audit" / "suspects.csv", found.suspects(found.ranked(5)), found.listed(0.5))
    made_threshold(value=-0.05, distance=0.05, model=model).save(folder / "run")
    torch.set_num_threads(threads)
    return folder / "run"


@pytest.fixture
def small_run(made_run, tmp_path):
    """A copy that a test may change; the images stay where they are."""
    return shutil.copytree(made_run, tmp_path / "run")


# the page in a browser: one browser, one page and one server for all tests of a module


@pytest.fixture(scope="module")
def browser():
    """Chromium; only while a module runs, since an event loop runs as long."""
    from browser_page import CHROMIUM
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served_run(made_run, tmp_path_factory):
    return shutil.copytree(made_run, tmp_path_factory.mktemp("page") / "run")


@pytest.fixture(scope="module")
def service(served_run):
    from api_client import service_of

    service = service_of(served_run)
    yield service
    service.close()


@pytest.fixture(scope="module")
def address(service):
    from running_server import running

    from pfml.serving import create_app

    with running(create_app(service)) as server:
        yield f"http://127.0.0.1:{server.port}/"


def said(message):
    """An error of the console and the address that it is about."""
    return f"{message.text} {message.location['url']}"


@pytest.fixture(scope="module")
def one_page(browser, address):
    """A page that lists errors of its scripts, and any request to elsewhere, as `wrong`."""
    from browser_page import WIDE
    from running_server import LIMIT

    page = browser.new_context(viewport=WIDE).new_page()
    page.set_default_timeout(1000 * LIMIT)
    page.wrong = []
    page.on("pageerror", lambda error: page.wrong.append(str(error)))
    page.on("console", lambda message: page.wrong.append(said(message)) if message.type == "error" else None)
    page.on(
        "request",
        lambda request: None if request.url.startswith((address, "blob:")) else page.wrong.append(request.url),
    )
    yield page
    page.context.close()


@pytest.fixture
def unloaded(one_page):
    """The page as the last test left it; what goes wrong on it fails the test."""
    one_page.wrong.clear()
    yield one_page
    assert one_page.wrong == []


@pytest.fixture
def page(unloaded, address):
    """The page at 1280 pixels, loaded again."""
    from browser_page import load

    load(unloaded, address)
    return unloaded
