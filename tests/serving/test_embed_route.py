"""POST /api/embed: uploads become vectors."""

import io

import numpy
import pytest
import torch

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")

from api_client import application, ask, image_bytes

from pfml.search.embedding import embed_files

pytestmark = pytest.mark.usefixtures("one_thread")
COLORS = [(20, 40, 220), (220, 30, 30), (30, 200, 40)]


@pytest.fixture(scope="module")
def app(made_run):
    return application(made_run, upload_bytes=20_000, images=4)


def embed(app, *contents, accept="application/json"):
    files = [("file", (f"{k}.png", content)) for k, content in enumerate(contents)]
    return ask(app, "POST", "/api/embed", files=files, headers={"accept": accept})


@pytest.fixture(scope="module")
def expected(app, tmp_path_factory):
    """The vectors as the index has them: of files."""
    folder = tmp_path_factory.mktemp("files")
    for k, color in enumerate(COLORS):
        (folder / f"{k}.png").write_bytes(image_bytes(color))
    paths = [str(folder / f"{k}.png") for k in range(len(COLORS))]
    found = embed_files(app.service.gallery.embedder, paths, batch_size=4, workers=1).vectors
    return torch.nn.functional.normalize(found).numpy()


def test_vectors_are_those_of_the_index_in_the_order_of_the_files(app, expected):
    answer = embed(app, *map(image_bytes, COLORS))
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert (body["dimension"], body["digest"]) == (8, app.service.gallery.model.digest)
    assert numpy.allclose(body["vectors"], expected, atol=1e-5)


def test_vectors_come_as_bytes_or_as_an_npy_file_if_asked(app, expected):
    contents = [image_bytes(color) for color in COLORS]
    raw = embed(app, *contents, accept="application/octet-stream")
    assert raw.headers["content-type"] == "application/octet-stream"
    assert raw.headers["x-pfml-shape"] == "3,8"
    assert numpy.allclose(numpy.frombuffer(raw.content, "<f4").reshape(3, 8), expected, atol=1e-5)
    file = embed(app, *contents, accept="text/html, application/x-npy;q=0.9")
    assert numpy.allclose(numpy.load(io.BytesIO(file.content), allow_pickle=False), expected, atol=1e-5)


def test_limits_are_those_of_searches(app):
    assert embed(app, *[image_bytes()] * 4).status_code == 200
    assert "at most 4 images, got 5" in embed(app, *[image_bytes()] * 5).json()["error"]
    assert embed(app, image_bytes(), b"\xff" * 20_001).status_code == 413
    assert embed(app, b"\xff" * 200_000).status_code == 413
    assert embed(app, image_bytes(), b"no image").status_code == 415
    assert embed(app, image_bytes()[:60]).status_code == 422
    assert ask(app, "POST", "/api/embed").status_code == 422
    assert app.service.upload_bytes.amount == 0
    assert app.service.searches_by_upload.amount == 0
