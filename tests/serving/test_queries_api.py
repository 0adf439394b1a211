"""The API of filters, metadata, queries of several images, and crops."""

import io
import json
import shutil

import numpy
import pytest
import torch
from PIL import Image

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")

from api_client import ask, got, image_bytes, service_of

from pfml.search import ImageIndex
from pfml.serving import create_app
from pfml.serving.images import Crop, Upload


@pytest.fixture(scope="module")
def app(made_run, tmp_path_factory):
    run = shutil.copytree(made_run, tmp_path_factory.mktemp("queries") / "run")
    index = ImageIndex.open(run / "index")
    entries = list(index.entries())
    rows = [{"price": float(entry.id), "tags": ["odd" if entry.id % 2 else "even"]} for entry in entries]
    index.set_metadata([entry.path for entry in entries], rows)
    service = service_of(run)
    yield create_app(service)
    service.close()


def query(app, **values):
    return ask(app, "POST", "/api/query", json=values)


def sent(app, content, **form):
    return ask(app, "POST", "/api/uploads", files={"file": ("x.png", content)}, data=form)


def test_columns_are_listed_with_types_and_examples(app):
    columns = {one["name"]: one for one in got(app, "/api/columns")}
    assert {name: one["type"] for name, one in columns.items()} == {
        "class": "text",
        "path": "text",
        "price": "number",
        "tags": "list",
    }
    assert columns["price"]["examples"] == ["0", "1", "2"]


def test_searches_and_lists_are_filtered_and_hits_carry_metadata(app):
    hits = got(app, "/api/search", id=3, where="price < 20 and tags contains even", k=50)["hits"]
    assert {hit["id"] for hit in hits} == set(range(0, 20, 2))
    assert all(hit["metadata"] == {"price": hit["id"], "tags": ["even"]} for hit in hits)
    listed = got(app, "/api/images", where="price in (4, 7)")
    assert (listed["total"], {one["id"] for one in listed["images"]}) == (2, {4, 7})
    assert got(app, "/api/images/5")["metadata"] == {"price": 5.0, "tags": ["odd"]}
    posted = ask(
        app, "POST", "/api/search", files={"file": ("x.png", image_bytes())}, data={"where": "path contains blue"}
    )
    assert {hit["name"][:4] for hit in posted.json()["hits"]} == {"blue"}


@pytest.mark.parametrize("path", ["/api/search?id=3&where=", "/api/images?where="])
def test_a_filter_that_names_no_column_is_an_error_of_the_request(app, path):
    answer = ask(app, "GET", path + "prise < 3")
    assert answer.status_code == 422
    assert "got 'prise'; did you mean 'price'" in answer.json()["error"]


def test_a_path_of_a_filter_names_no_folder_of_the_machine(app, made_run):
    assert got(app, "/api/images", where=f"path contains '{made_run.parent.name}'")["total"] == 0


def test_ids_and_uploads_are_mixed_in_a_query(app):
    key = sent(app, image_bytes((30, 200, 40))).json()["upload"]
    answer = query(app, like=[{"id": 1}, {"upload": key}], unlike=[{"id": 30}], combine="any", k=100)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert {hit["id"] for hit in found["hits"]} == set(range(48)) - {1, 30}
    assert (found["unknown"], found["verdict"]["is_known"]) == (None, None), "a threshold is one of single images"
    plain = query(app, like=[{"id": 1}]).json()
    alone = got(app, "/api/search", id=1)
    assert plain == alone
    moved = query(app, like=[{"id": 1}], unlike=[{"id": 30}]).json()
    assert [hit["id"] for hit in moved["hits"]] != [hit["id"] for hit in alone["hits"]]


@pytest.mark.parametrize(
    ("values", "status", "words"),
    [
        ({"like": []}, 422, "like"),
        ({"like": [{}]}, 422, "either id or upload"),
        ({"like": [{"id": 1, "upload": "x"}]}, 422, "either id or upload"),
        ({"like": [{"id": 4711}]}, 404, "no image 4711"),
        ({"like": [{"upload": "gone"}]}, 404, "no longer kept"),
        ({"like": [{"id": 1}], "combine": "max"}, 422, "combine"),
        ({"like": [{"id": 1}], "where": "price <"}, 422, "the column price must be compared with a value"),
        ({"like": [{"id": 1, "crop": {"x": 0.9, "y": 0, "width": 0.5, "height": 1}}]}, 422, "within the image"),
        ({"like": [{"id": 1, "crop": {"x": 0, "y": 0, "width": 0.1, "height": 1}}]}, 422, "at least 8 pixels"),
    ],
)
def test_bad_queries_say_what_is_wrong(app, values, status, words):
    answer = query(app, **values)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]


def test_a_crop_is_an_image_of_its_own(app):
    two = Image.new("RGB", (60, 30), (20, 40, 220))
    two.paste((220, 30, 30), (30, 0, 60, 30))
    out = io.BytesIO()
    two.save(out, "PNG")
    half = image_bytes((220, 30, 30), size=(30, 30))
    cropped = sent(app, out.getvalue(), crop="0.5,0,0.5,1").json()["upload"]
    whole = sent(app, half).json()["upload"]
    one, other = (query(app, like=[{"upload": key}]).json()["hits"] for key in (cropped, whole))
    assert [hit["id"] for hit in one] == [hit["id"] for hit in other]
    assert one[0]["distance"] == pytest.approx(other[0]["distance"], abs=1e-5)
    for crop in ("1,2", "a,b,c,d", "0,0,2,2", "0,0,nan,1"):
        answer = sent(app, half, crop=crop)
        assert (answer.status_code, "crop" in answer.json()["error"]) == (422, True)


def test_a_crop_of_an_indexed_image_leaves_it_out(app):
    crop = {"x": 0.0, "y": 0.0, "width": 1.0, "height": 1.0}
    whole = query(app, like=[{"id": 2}]).json()
    part = query(app, like=[{"id": 2, "crop": crop}]).json()
    assert part["hits"][0]["distance"] == pytest.approx(whole["hits"][0]["distance"], abs=1e-4)
    assert 2 not in {hit["id"] for hit in part["hits"]}
    assert json.dumps(part["query"]) == json.dumps(whole["query"])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_crop_is_of_the_image_as_it_is_shown(orientation):
    from PIL import ImageOps

    stored = Image.fromarray(torch.arange(40 * 60 * 3).remainder(251).reshape(40, 60, 3).byte().numpy())
    exif = Image.Exif()
    exif[0x0112] = orientation
    out = io.BytesIO()
    stored.save(out, "PNG", exif=exif)
    crop = Crop(0.1, 0.2, 0.4, 0.5)
    part = Upload(out.getvalue(), 2400).pixels(crop)
    shown = ImageOps.exif_transpose(Image.open(io.BytesIO(out.getvalue())))
    width, height = shown.size
    box = (round(0.1 * width), round(0.2 * height), round(0.5 * width), round(0.7 * height))
    expected = sorted(map(tuple, numpy.asarray(shown.crop(box)).reshape(-1, 3).tolist()))
    assert sorted(map(tuple, part.permute(1, 2, 0).reshape(-1, 3).tolist())) == expected
