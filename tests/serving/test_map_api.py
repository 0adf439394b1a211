"""The API of the map and of selected images: values of a column, tags, relabeling, tables."""

import csv
import io
from datetime import datetime

import pytest

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")

from api_client import application, ask, got

from pfml.serving.embedding_map import chosen_method


@pytest.fixture
def app(small_run):
    return application(small_run)


@pytest.fixture
def mapped(app):
    while (found := got(app, "/api/map"))["state"] != "ready":
        pass
    return found


def changed(app, **edit):
    return ask(app, "POST", "/api/edits", json=edit)


def test_a_map_can_be_colored_by_the_columns_of_the_index(app, mapped):
    assert mapped["columns"] == ["split"]
    found = got(app, "/api/map/values", column="class")
    assert len(found["values"]) == len(mapped["ids"])
    assert found["kind"] == "text"
    assert [found["names"][int(k)] for k in found["values"]] == [mapped["class_names"][k] for k in mapped["labels"]]
    answer = ask(app, "GET", "/api/map/values", params={"column": "splitt"})
    assert (answer.status_code, answer.json()["error"]) == (
        404,
        "the index has no column 'splitt'; did you mean 'split'?",
    )


def test_numbers_and_dates_have_a_scale(app, mapped):
    index = app.service.gallery.index
    entries = list(index.entries())[:3]
    prices = [{"price": 2.5, "day": "2024-05-01"}, {"price": 10.0, "day": "2024-06-01"}, {}]
    index.set_metadata(
        [entry.path for entry in entries],
        [{**one, "day": datetime.fromisoformat(one["day"])} if one else {} for one in prices],
    )
    found = got(app, "/api/map/values", column="price")
    known = dict(zip(mapped["ids"], found["values"], strict=True))
    assert [known[entry.id] for entry in entries] == [2.5, 10.0, None]
    assert (found["kind"], found["low"], found["high"], found["low_text"]) == ("number", 2.5, 10.0, "2.5")
    days = got(app, "/api/map/values", column="day")
    assert (days["low_text"], days["high_text"]) == ("2024-05-01", "2024-06-01")


def test_selected_images_are_tagged_relabeled_and_written_as_a_table(app, mapped):
    first, second = mapped["ids"][:2]
    assert got(app, "/api/tags") == []
    assert changed(app, kind="tag", images=[first, second], tag=" to check ").status_code == 201
    assert got(app, "/api/tags") == ["to check"]
    done = changed(app, kind="relabel", images=[first], into="=cmd").json()
    assert done["text"] == "relabeled 1 image as =cmd"
    assert got(app, f"/api/images/{first}")["class_name"] == "=cmd"
    answer = ask(app, "POST", "/api/images/table", json={"images": [first, second]})
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["id"] for row in rows] == [str(first), str(second)]
    assert rows[0]["class"] == "'=cmd", "no formula"
    assert {row["tags"] for row in rows} == {"to check"}
    assert ask(app, "POST", "/api/images/table", json={"images": [999]}).status_code == 404
    assert changed(app, kind="tag", images=[first]).status_code == 422
    assert changed(app, kind="relabel", images=[first], into="x" * 201).status_code == 409
    assert changed(app, kind="relabel", images=[first] * 20_001, into="x").status_code == 422


@pytest.mark.parametrize(
    ("method", "images", "points", "has_umap", "expected"),
    [
        ("auto", 5000, None, True, ("tsne", 5000)),
        ("auto", 5001, None, True, ("umap", 100_000)),
        ("auto", 5001, None, False, ("tsne", 5000)),
        ("auto", 10**6, 3000, True, ("tsne", 3000)),
        ("pca", 10**6, None, True, ("pca", 100_000)),
        ("tsne", 10**6, 20_000, True, ("tsne", 20_000)),
    ],
)
def test_the_method_of_the_map_follows_the_size(monkeypatch, method, images, points, has_umap, expected):
    monkeypatch.setattr("pfml.serving.embedding_map.find_spec", lambda _: object() if has_umap else None)
    assert chosen_method(method, images, points) == expected


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="auto, tsne, umap, pca, got 'som'"):
        chosen_method("som", 10, None)
