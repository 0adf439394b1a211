"""The API: search, why, map, audit."""

import asyncio
import csv
import io
import math
import shutil
import threading
from dataclasses import replace
from unittest import mock

import httpx
import pytest
import torch
from PIL import Image

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")

from api_client import BASE, application, ask, got, image_bytes, service_of, upload
from running_server import wait_until

from pfml.audit import audit_run, read_decisions
from pfml.energy import class_potential
from pfml.field import PowerLaw
from pfml.runs.saved_loss import load_field
from pfml.search import ImageIndex, Threshold, verdict_of
from pfml.serving import Limits, create_app
from pfml.serving.gallery import Gallery
from pfml.serving.images import Thumbnails
from pfml.serving.service import CPU_BATCH

pytestmark = pytest.mark.usefixtures("one_thread")
BOLD = "red & <b>bold</b>"


@pytest.fixture(scope="module")
def app(made_run):
    return application(made_run)


@pytest.fixture(scope="module")
def gallery(made_run):
    return Gallery.open(made_run, device="cpu")


def file_of(gallery, image):
    with open(gallery.index.entry(image).path, "rb") as file:
        return file.read()


def image_of(gallery, class_name):
    return next(entry.id for entry in gallery.index.entries() if entry.class_name == class_name)


def test_the_status_says_what_is_served(app):
    status = got(app, "/api/status")
    assert (status["run"], status["images"], status["classes"], status["proxies"]) == ("run", 48, 4, 6)
    assert status["threshold"]["value"] == -0.05
    assert status["law_is_of_run"]
    assert status["suspects"] == 5


def test_classes_say_whether_they_were_trained_on(app):
    classes = {one["name"]: (one["images"], one["trained"]) for one in got(app, "/api/classes")}
    assert classes == {"blue": (10, True), "green": (14, True), BOLD: (12, True), "gray": (12, False)}


def test_images_come_in_pages_and_by_class(app):
    first, second = (got(app, "/api/images", limit=30, offset=offset) for offset in (0, 30))
    assert first["total"] == 48
    assert len({one["id"] for one in first["images"] + second["images"]}) == 48
    mixed = got(app, "/api/images", order="mixed", limit=48)["images"]
    assert {one["id"] for one in mixed} == {one["id"] for one in first["images"] + second["images"]}
    assert all(len({one["class_name"] for one in mixed[k : k + 4]}) == 4 for k in range(0, 40, 4))
    only = got(app, "/api/images", class_name=BOLD)
    assert {one["class_name"] for one in only["images"]} == {BOLD}
    assert only["total"] == 12


def test_names_do_not_tell_where_the_folder_lies(app, made_run):
    text = ask(app, "GET", "/api/images").text + ask(app, "GET", "/api/audit").text
    assert str(made_run.parent) not in text


def test_an_upload_finds_itself_first_and_the_order_of_the_index(app, gallery):
    answer = upload(app, file_of(gallery, 30), k=7).json()
    assert len(answer["hits"]) == 7
    assert answer["hits"][0]["id"] == 30
    assert answer["hits"][0]["distance"] < 1e-5
    vector = gallery.embedder.encode([gallery.index.entry(30).path])
    [expected] = gallery.index.search(vector, 7, model=gallery.model)
    assert [hit["id"] for hit in answer["hits"]] == [hit.id for hit in expected]


def test_an_upload_can_be_searched_by_again_without_sending_it(app, gallery):
    name = upload(app, file_of(gallery, 30)).json()["query"]["upload"]
    again = got(app, "/api/search", upload=name, k=3)
    assert again["hits"][0]["id"] == 30
    assert ask(app, "GET", "/api/search", params={"upload": "other"}).status_code == 404


def test_an_indexed_image_finds_others_but_not_itself(app, gallery):
    answer = got(app, "/api/search", id=3, k=5)
    assert answer["query"]["image"]["id"] == 3
    assert 3 not in [hit["id"] for hit in answer["hits"]]
    [expected] = gallery.index.search(gallery.index.vectors([3]), 6, model=gallery.model)
    assert [hit["id"] for hit in answer["hits"]] == [hit.id for hit in expected if hit.id != 3]


def test_a_search_is_of_the_asked_classes_only(app, gallery):
    answer = got(app, "/api/search", id=image_of(gallery, "blue"), k=48, class_name=[BOLD, "gray"])
    assert {hit["class_name"] for hit in answer["hits"]} == {BOLD, "gray"}
    assert len(answer["hits"]) == 24
    sent = upload(app, image_bytes(), k=48, class_name=["gray"]).json()
    assert {hit["class_name"] for hit in sent["hits"]} == {"gray"}
    assert ask(app, "GET", "/api/search", params={"id": 3, "class_name": "violet"}).status_code == 404


def test_a_trained_class_without_images_finds_nothing(small_run):
    ImageIndex.open(small_run / "index").remove(class_names=["green"])
    app = application(small_run)
    answer = got(app, "/api/search", id=3, class_name="green")
    assert answer["hits"] == []
    assert answer["verdict"]["class_name"] not in (None, "green"), "the verdict is of all classes of the index"
    assert {one["name"]: one["images"] for one in got(app, "/api/classes")}["green"] == 0


def test_a_search_has_a_verdict(app, gallery):
    answer = got(app, "/api/search", id=3, k=5)
    [near] = gallery.index.search(gallery.index.vectors([3]), 25, model=gallery.model)
    expected = verdict_of([hit for hit in near if hit.id != 3], threshold=gallery.threshold)
    assert answer["verdict"] == {
        "class_name": expected.class_name,
        "votes": expected.votes,
        "of": 24,
        "potential": pytest.approx(expected.potential),
        "margin": pytest.approx(expected.margin),
        "is_known": True,
        "score": pytest.approx(-answer["hits"][0]["distance"]),
    }
    assert answer["unknown"] is False
    only = got(app, "/api/search", id=3, k=5, class_name="gray")
    assert only["verdict"] == answer["verdict"], "whatever classes are searched"
    sent = upload(app, file_of(gallery, 30)).json()
    assert (sent["verdict"]["is_known"], sent["verdict"]["class_name"]) == (True, gallery.index.entry(30).class_name)


def test_what_is_near_nothing_is_unknown(small_run):
    index = ImageIndex.open(small_run / "index")
    nearest = min(hit.distance for hit in index.search(index.vectors([3]), 2, model=index.model)[0][1:])
    replace(Threshold.load(small_run), value=-nearest / 2).save(small_run)
    answer = got(application(small_run), "/api/search", id=3)
    assert (answer["unknown"], answer["verdict"]["is_known"]) == (True, False)
    index.remove(class_names=[name for name in index.class_counts() if name != "gray"])
    index.remove(paths=[entry.path for entry in list(index.entries())[1:]])
    [last] = index.entries()
    alone = got(application(small_run), "/api/search", id=last.id)
    assert (alone["hits"], alone["unknown"], alone["verdict"]["class_name"]) == ([], True, None)


def test_without_a_threshold_nothing_is_said_about_unknown(small_run):
    (small_run / "threshold.json").unlink()
    answer = got(application(small_run), "/api/search", id=3)
    assert answer["unknown"] is answer["verdict"]["is_known"] is answer["verdict"]["score"] is None
    assert answer["verdict"]["class_name"] == answer["hits"][0]["class_name"]


@pytest.mark.parametrize("k", [0, 201, "many"])
def test_k_has_bounds(app, k):
    answer = ask(app, "GET", "/api/search", params={"id": 3, "k": k})
    assert answer.status_code == 422
    assert answer.json()["error"].startswith("k: ")


def test_a_search_needs_one_query(app):
    assert ask(app, "GET", "/api/search").status_code == 422
    assert ask(app, "GET", "/api/search", params={"id": 1, "upload": "x"}).status_code == 422


def test_an_image_can_be_had_in_its_full_size(tmp_path):
    Image.new("RGB", (3000, 1000)).save(tmp_path / "wide.png")
    jpegs = Thumbnails()
    sizes = [Image.open(io.BytesIO(jpegs.get(0, str(tmp_path / "wide.png"), size))).size for size in ("large", "full")]
    assert sizes == [(896, 299), (3000, 1000)]


def test_indexed_images_are_served_as_jpeg_by_id(app):
    answer = ask(app, "GET", "/api/images/3/jpeg")
    assert answer.headers["content-type"] == "image/jpeg"
    small, large = (
        Image.open(io.BytesIO(ask(app, "GET", f"/api/images/3/jpeg?size={size}").content)).size
        for size in ("thumbnail", "large")
    )
    assert small == large == (96, 96), "tiny images are enlarged by whole pixels"
    for image in (48, -1, 10**30):
        assert ask(app, "GET", f"/api/images/{image}/jpeg").status_code == 404
    assert ask(app, "GET", "/api/images/..%2F..%2Fetc%2Fpasswd/jpeg").status_code in (404, 422)


def test_a_missing_file_is_a_404_with_a_reason(small_run, tmp_path):
    service = service_of(small_run)
    path = tmp_path / "gone.png"
    service.gallery.index.add(torch.eye(8)[:1], [path], ["blue"], model=service.gallery.model)
    answer = ask(create_app(service), "GET", "/api/images/48/jpeg")
    assert answer.status_code == 404
    assert "missing" in answer.json()["error"]


def test_the_terms_of_why_are_those_of_the_equations(app, gallery):
    image = image_of(gallery, BOLD)
    answer = got(app, "/api/why", id=image, top=100)
    contents = gallery.contents()
    others = contents.ids != image
    points = torch.cat([contents.points[others], contents.proxies]).double()
    labels = torch.cat([contents.labels[others], contents.proxy_labels])
    label = contents.class_names.index(answer["class_name"])
    here = gallery.index.vectors([image]).double()
    expected = class_potential(here, label, points, labels, law=gallery.field.law)
    assert answer["total"] + answer["constant"] == pytest.approx(float(expected), rel=1e-9)
    listed = answer["attracting"] + answer["repelling"]
    assert image not in [one["id"] for one in listed if one["kind"] == "image"]
    assert {one["kind"] for one in listed} == {"image", "proxy"}
    order = [(one["potential"], one["distance"]) for one in answer["attracting"]]
    assert order == sorted(order), "strongest first, of equal ones the nearest"
    nearest = answer["attracting"][0]
    assert nearest["potential"] == pytest.approx(float(gallery.law.attraction(torch.tensor(nearest["distance"]))))


def test_without_a_law_of_the_run_why_takes_the_calibrated_one(small_run):
    def law():
        gallery = Gallery.open(small_run, device="cpu")
        gallery.refresh()  # reads the threshold
        return gallery.law

    calibrated, of_run = Threshold.load(small_run).scoring.law, load_field(small_run).law
    assert law() == of_run != calibrated
    for name in ("loss", "checkpoints"):
        shutil.rmtree(small_run / name)
    assert law() == calibrated
    assert got(application(small_run), "/api/why", id=3)["law"] == str(calibrated)
    (small_run / "threshold.json").unlink()
    assert law() == PowerLaw()


@pytest.mark.parametrize("top", [1, 3, 100])
def test_listed_and_other_terms_add_up_to_the_total(app, top):
    answer = got(app, "/api/why", id=20, top=top)
    groups = [answer["other_attracting"], answer["other_repelling"]]
    listed = answer["attracting"] + answer["repelling"]
    assert max(len(answer["attracting"]), len(answer["repelling"])) <= top
    for key, total in (("potential", "total"), ("share", "total_share")):
        assert math.fsum(one[key] for one in listed + groups) == pytest.approx(answer[total], rel=1e-9)
    assert len(listed) + sum(group["count"] for group in groups) == 48 - 1 + 6
    assert sum(abs(one["share"]) for one in listed + groups) == pytest.approx(1)
    assert all(one["potential"] < 0 for one in answer["attracting"])
    assert all(one["potential"] > 0 for one in answer["repelling"])


def test_why_is_asked_of_any_class_and_of_uploads(app, gallery):
    image = image_of(gallery, BOLD)
    own, other = got(app, "/api/why", id=image), got(app, "/api/why", id=image, class_name="blue")
    assert own["class_name"] == BOLD
    assert {one["class_name"] for one in other["attracting"]} == {"blue"}
    assert other["total"] > own["total"]
    sent = upload(app, file_of(gallery, 40)).json()
    answer = got(app, "/api/why", upload=sent["query"]["upload"])
    assert answer["class_name"] == answer["classes"][0]["class_name"]
    assert answer["attracting"][0]["potential"] <= answer["attracting"][-1]["potential"]


def test_an_upload_that_is_in_the_index_does_not_act_on_itself(app, gallery):
    sent = upload(app, file_of(gallery, 40)).json()["query"]["upload"]
    for class_name in ("blue", BOLD):
        known, new = (
            got(app, "/api/why", class_name=class_name, top=100, **which) for which in ({"id": 40}, {"upload": sent})
        )
        assert (known["left_out"], new["left_out"]) == (0, 1)
        assert new["total"] == pytest.approx(known["total"], rel=1e-3)
        listed = [one["id"] for one in new["attracting"] + new["repelling"] if one["kind"] == "image"]
        assert 40 not in listed
    assert got(app, "/api/why", upload=sent)["class_name"] == got(app, "/api/why", id=40)["classes"][0]["class_name"]


def map_of(app):
    wait_until(lambda: got(app, "/api/map")["state"] == "ready")
    return got(app, "/api/map")


def test_the_map_has_all_images_and_proxies_and_is_cached(small_run):
    answer = map_of(application(small_run))
    assert answer["ids"] == list(range(48))
    assert len(answer["proxy_x"]) == len(answer["proxy_labels"]) == 6
    assert all(0 <= value <= 1 for value in answer["x"] + answer["y"] + answer["proxy_x"] + answer["proxy_y"])
    assert answer["class_names"][answer["labels"][30]] == got(application(small_run), "/api/images/30")["class_name"]
    kept = (small_run / "serve" / "map.json").stat()
    assert map_of(application(small_run)) == answer
    assert (small_run / "serve" / "map.json").stat().st_mtime_ns == kept.st_mtime_ns, "the map was computed again"


def test_a_damaged_map_is_computed_again(small_run):
    answer = map_of(application(small_run))
    [file] = (small_run / "serve").glob("map-*.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    assert map_of(application(small_run)) == answer


def test_the_map_of_a_large_index_is_a_subsample(made_run, tmp_path):
    service = service_of(made_run, map_points=10)
    service.maps.folder = tmp_path
    answer = map_of(create_app(service))
    assert len(answer["ids"]) == len(answer["x"]) == 10
    assert answer["images"] == 48


def test_the_potential_attracts_at_the_class_and_repels_at_other_classes(app):
    points = map_of(app)
    answer = got(app, "/api/map/potential", class_name=BOLD)
    values = torch.tensor(answer["values"]).reshape(answer["side"], answer["side"])
    assert values.abs().max() <= 1
    label = points["class_names"].index(BOLD)

    def value_at(x, y):
        step = (answer["high"] - answer["low"]) / answer["side"]
        return float(values[int((answer["high"] - y) / step), int((x - answer["low"]) / step)])

    def mean(same):
        chosen = [k for k, one in enumerate(points["labels"]) if (one == label) == same]
        return sum(value_at(points["x"][k], points["y"][k]) for k in chosen) / len(chosen)

    assert mean(True) < 0 < mean(False)
    assert "illustration" in answer["explanation"]


def test_images_that_pfml_index_adds_are_served(small_run, monkeypatch):
    monkeypatch.setattr("pfml.serving.gallery.REFRESH_INTERVAL", 0.0)
    app = application(small_run)
    assert got(app, "/api/status")["images"] == 48
    index = ImageIndex.open(small_run / "index")
    index.add(torch.eye(8)[:1], ["new.png"], ["new class"], model=index.model)
    assert got(app, "/api/status")["images"] == 49
    assert "new class" in [one["name"] for one in got(app, "/api/classes")]
    assert got(app, "/api/search", id=48, k=1)["hits"]


def test_a_threshold_that_pfml_calibrate_writes_is_served(small_run, monkeypatch, caplog):
    monkeypatch.setattr("pfml.serving.gallery.REFRESH_INTERVAL", 0.0)
    found, file = Threshold.load(small_run), small_run / "threshold.json"
    file.unlink()
    app = application(small_run)
    assert got(app, "/api/search", id=3)["threshold"] is None
    found.save(small_run)
    answer = got(app, "/api/search", id=3)
    assert answer["threshold"] == {
        "score": "distance",
        "value": -0.05,
        "false_accept_rate": 0.01,
        "false_accepts": {"value": 0.01, "low": 0.0, "high": 0.05},
        "is_measured": True,
    }
    assert answer["unknown"] is False
    replace(found, value=0.0).save(small_run)
    assert got(app, "/api/search", id=3)["unknown"] is True
    whole = file.read_bytes()
    file.write_bytes(whole[:40])  # half of a copy: what was read before holds, and it is said once
    assert got(app, "/api/status")["threshold"]["value"] == 0.0
    assert got(app, "/api/status")["threshold"]["value"] == 0.0
    assert len([line for line in caplog.messages if "the threshold stays as it was" in line]) == 1
    replace(found, value=-1.5, model=replace(found.model, digest="0" * 64)).save(small_run)
    assert got(app, "/api/status")["threshold"]["value"] == 0.0, "the scores of another model mean something else"
    replace(found, value=-0.5).save(small_run)
    assert got(app, "/api/status")["threshold"]["value"] == -0.5


def test_an_unchanged_threshold_is_not_read_again(small_run, monkeypatch):
    monkeypatch.setattr("pfml.serving.gallery.REFRESH_INTERVAL", 0.0)
    app = application(small_run)
    monkeypatch.setattr("pfml.search.Threshold.load", lambda run: pytest.fail("it was read"))
    assert got(app, "/api/status")["threshold"]["value"] == -0.05


def decisions(run):
    with open(run / "audit" / "decisions.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_suspects_come_with_neighbors(app):
    answer = got(app, "/api/audit")
    assert answer["available"]
    assert answer["class_names"] == ["blue", "gray", "green", BOLD], "also a class that the index alone has"
    first = answer["suspects"][0]
    assert (first["given"], first["suggested"]) == ("green", "blue")
    whole = got(app, f"/api/audit/{first['key']}")
    assert len(whole["neighbors"]) == 8
    assert whole["image"] not in [one["id"] for one in whole["neighbors"]]


def test_decisions_are_saved_as_the_audit_reads_them(small_run):
    app = application(small_run)
    keys = [one["key"] for one in got(app, "/api/audit")["suspects"]]
    bodies = [{"decision": "accept"}, {"decision": "reject"}, {"decision": "drop"}]
    bodies.append({"decision": "relabel", "label": BOLD})
    for key, body in zip(keys, bodies, strict=False):
        assert ask(app, "PUT", f"/api/audit/{key}", json=body).status_code == 200
    rows = decisions(small_run)
    assert [(row["decision"], row["label"]) for row in rows] == [
        *[("accept", "blue"), ("reject", "green"), ("drop", ""), ("relabel", BOLD)]
    ]
    found, _ = audit_run(small_run, device="cpu")
    names = found.images.class_names
    read = read_decisions(small_run / "audit" / "decisions.csv", found)
    assert [None if label is None else names[label] for label in read.values()] == ["blue", "green", None, BOLD]
    assert got(app, "/api/audit")["decided"] == 4
    assert got(application(small_run), "/api/audit")["suspects"][3]["decision"] == {
        "decision": "relabel",
        "label": BOLD,
    }


def test_a_decision_can_be_changed_and_withdrawn(small_run):
    app = application(small_run)
    key = got(app, "/api/audit")["suspects"][0]["key"]
    for decision in ("accept", "reject"):
        ask(app, "PUT", f"/api/audit/{key}", json={"decision": decision})
    assert [row["decision"] for row in decisions(small_run)] == ["reject"]
    assert ask(app, "DELETE", f"/api/audit/{key}").status_code == 204
    assert decisions(small_run) == []


def test_copies_come_in_groups_and_can_be_decided_about(small_run):
    app = application(small_run)
    assert got(app, "/api/audit/copies") == []
    paths = [entry.path for entry in ImageIndex.open(small_run / "index").entries()][20:22]
    rows = [("group", "path", "part", "class", "copy", "across_classes", "across_parts")]
    rows += [(1, path, part, "blue", "exact", "no", "yes") for path, part in zip(paths, ("train", "test"), strict=True)]
    with open(small_run / "audit" / "duplicates.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    [group] = got(app, "/api/audit/copies")
    assert (group["exact"], group["across_classes"], group["across_parts"]) == (True, False, True)
    assert [(one["image"], one["part"], one["class_name"]) for one in group["images"]] == [
        (20, "train", "blue"),
        (21, "test", "blue"),
    ]
    key = group["images"][1]["key"]
    assert ask(app, "PUT", f"/api/audit/{key}", json={"decision": "drop"}).status_code == 200
    assert [(row["path"], row["decision"]) for row in decisions(small_run)] == [(paths[1], "drop")]
    assert got(app, "/api/audit/copies")[0]["images"][1]["decision"] == {"decision": "drop", "label": ""}
    assert ask(app, "DELETE", f"/api/audit/{key}").status_code == 204
    assert decisions(small_run) == []
    (small_run / "audit" / "duplicates.csv").write_text("anything\nelse\n")
    answer = ask(app, "GET", "/api/audit/copies")
    assert 400 <= answer.status_code < 500
    assert "run pfml audit again" in answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "status"),
    [({"decision": "maybe"}, 422), ({"decision": "relabel"}, 404), ({"decision": "relabel", "label": "puce"}, 404)],
)
def test_bad_decisions_are_refused_and_nothing_is_written(small_run, body, status):
    app = application(small_run)
    key = got(app, "/api/audit")["suspects"][0]["key"]
    answer = ask(app, "PUT", f"/api/audit/{key}", json=body)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert ask(app, "PUT", "/api/audit/none", json={"decision": "accept"}).status_code == 404
    assert not (small_run / "audit" / "decisions.csv").exists()


def test_without_an_audit_the_queue_is_empty(small_run):
    (small_run / "audit" / "suspects.csv").unlink()
    answer = got(application(small_run), "/api/audit")
    assert (answer["available"], answer["suspects"]) == (False, [])


def test_waiting_images_are_embedded_in_batches(made_run):
    service, sizes = service_of(made_run), []
    forward = service.embedding.function

    def watched(crops):
        if not sizes:  # the first batch ends when all other images wait
            wait_until(lambda: len(crops) + service.embedding._waiting.qsize() == 24)
        sizes.append(len(crops))
        return forward(crops)

    service.embedding.function = watched

    async def embeddings():
        sent = [service.embedded(image_bytes((k, 40, 220))) for k in range(0, 240, 10)]
        return await asyncio.gather(*sent)

    together = torch.stack(asyncio.run(embeddings()))
    assert sum(sizes) == 24
    assert max(sizes) == CPU_BATCH
    alone = service.gallery.embedder.encode([Image.new("RGB", (24, 24), (k, 40, 220)) for k in range(0, 240, 10)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_an_error_of_the_model_reaches_all_requests_and_the_server_keeps_serving(made_run):
    service = service_of(made_run)
    forward, service.embedding.function = service.embedding.function, lambda crops: crops[len(crops)]
    with pytest.raises(IndexError):
        asyncio.run(service.embedded(image_bytes()))
    service.embedding.function = forward
    assert asyncio.run(service.embedded(image_bytes())).shape == (8,)


def test_fifty_concurrent_searches_are_all_correct(app, gallery):
    files = {image: file_of(gallery, image) for image in range(0, 48, 4)}
    chosen = [list(files)[k % len(files)] for k in range(50)]

    async def searches():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=BASE) as client:
            sent = [client.post("/api/search", files={"file": ("x", files[image])}) for image in chosen]
            return await asyncio.gather(*sent)

    answers = asyncio.run(searches())
    assert [answer.status_code for answer in answers] == [200] * 50
    assert [answer.json()["hits"][0]["id"] for answer in answers] == chosen


def held(service, monkeypatch):
    """An event that all crops of the service wait for."""
    go, cropped = threading.Event(), service.cropped

    def slow(sent):
        go.wait(60)
        return cropped(sent)

    monkeypatch.setattr(service, "cropped", slow)
    return go


async def completed(sent, count):
    """Wait until `count` of the requests have an answer, and return those."""
    waiting = iter(asyncio.as_completed(sent, timeout=60))
    return [await next(waiting) for _ in range(count)]


def test_waiting_uploads_share_a_limit_of_bytes(made_run, monkeypatch):
    content = image_bytes()
    service = service_of(made_run, limits=Limits(waiting_bytes=2 * len(content) + 1))
    app, go = create_app(service), held(service, monkeypatch)

    async def searches():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=BASE) as client:
            sent = [asyncio.ensure_future(client.post("/api/search", files={"file": ("x", content)})) for _ in range(4)]
            await completed(sent, 2)  # the refused ones: the others wait for `go`
            go.set()
            return [*await asyncio.gather(*sent), await client.post("/api/search", files={"file": ("x", content)})]

    *answers, later = asyncio.run(searches())
    assert sorted(answer.status_code for answer in answers) == [200, 200, 503, 503]
    busy = next(answer for answer in answers if answer.status_code == 503)
    assert busy.headers["retry-after"] == "1"
    assert "bytes of uploads" in busy.json()["error"]
    assert later.status_code == 200, "bytes are released after the response"


def test_an_upload_larger_than_the_limit_of_bytes_is_admitted_alone(made_run):
    app = create_app(service_of(made_run, limits=Limits(waiting_bytes=1)))
    assert ask(app, "POST", "/api/search", files={"file": ("x", image_bytes())}).status_code == 200


def test_beyond_its_bound_the_server_responds_503_and_keeps_serving(made_run, monkeypatch):
    service = service_of(made_run, limits=Limits(waiting=2))
    app, go = create_app(service), held(service, monkeypatch)

    async def searches():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=BASE) as client:
            sent = [
                asyncio.ensure_future(client.post("/api/search", files={"file": ("x", image_bytes())}))
                for _ in range(6)
            ]
            refused = await completed(sent, 4)
            meanwhile = await client.get("/api/status")  # the loop is not blocked
            go.set()
            return refused, meanwhile, await asyncio.gather(*sent)

    refused, meanwhile, answers = asyncio.run(searches())
    assert all(answer.status_code == 503 for answer in refused)
    assert meanwhile.status_code == 200
    assert sorted(answer.status_code for answer in answers) == [200, 200, 503, 503, 503, 503]
    busy = next(answer for answer in answers if answer.status_code == 503)
    assert busy.headers["retry-after"] == "1"
    assert "busy" in busy.json()["error"]
    assert upload(app, image_bytes()).status_code == 200, "slots are free again"


def test_the_api_describes_itself_with_types_and_without_the_network(app):
    answer = got(app, "/api/openapi.json")
    assert {"/api/search", "/api/why", "/api/map", "/api/audit/{key}"} <= set(answer["paths"])
    found = answer["paths"]["/api/search"]["post"]["responses"]
    assert found["200"]["content"]["application/json"]["schema"]["$ref"].endswith("SearchResponse")
    assert found["413"]["content"]["application/json"]["schema"]["$ref"].endswith("ErrorResponse")
    for path in ("/", "/api/docs", "/login", "/page/api.js", "/page/docs.js", "/page/style.css"):
        text = ask(app, "GET", path, follow_redirects=True).text
        assert "http://" not in text.replace("http://www.w3.org", "")
        assert "https://" not in text


@pytest.mark.parametrize("path", ["/api/search?id={}", "/api/why?id={}", "/api/images/{}", "/api/images/{}/jpeg"])
def test_a_number_beyond_64_bits_is_no_image(app, path):
    for number in (2**63, -(2**70), 10**30):
        answer = ask(app, "GET", path.format(number))
        assert answer.status_code == 404
        assert "has no image" in answer.json()["error"]


def test_responses_name_no_folder_of_the_machine(small_run, monkeypatch, caplog):
    service = service_of(small_run)
    app = create_app(service)
    suspects = small_run / "audit" / "suspects.csv"
    with open(suspects, newline="") as file:
        rows = list(csv.DictReader(file))
    rows[0]["path"] = "/home/somebody/photos/blue/x.png"
    with open(suspects, "w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    assert got(app, "/api/audit")["suspects"][0]["name"] == "blue/x.png"
    monkeypatch.setattr(service.audit, "suspects", mock.Mock(side_effect=ValueError(f"{suspects} must be new")))
    answer = ask(app, "GET", "/api/audit")
    assert (answer.status_code, answer.json()) == (409, {"error": "audit/suspects.csv must be new"})
    assert str(suspects) in caplog.text, "the log has the whole path"


def test_classes_whose_names_differ_in_bytes_that_are_no_utf_8_are_told_apart(small_run):
    service = service_of(small_run)
    names = ("caf\udce9", "caf\udce8")
    service.gallery.index.class_counts = lambda: dict.fromkeys(names, 1)
    shown_names = [one["name"] for one in got(create_app(service), "/api/classes")]
    assert {r"caf\xe8", r"caf\xe9"} <= set(shown_names)
    assert [service.class_named(rf"caf\x{byte}") for byte in ("e9", "e8")] == list(names)
