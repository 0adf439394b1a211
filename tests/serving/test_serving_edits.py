"""Edits over the API: classes renamed, merged and deleted, images deleted, all of it undone, and what follows."""

import asyncio
import csv
import errno
from pathlib import Path

import httpx
import pytest
import torch

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")

from api_client import BASE, application, ask, got, service_of
from running_server import wait_until

from pfml.audit import audit_run, corrections_of, read_decisions
from pfml.search import Edit, ImageIndex
from pfml.serving import Access, create_app
from pfml.serving.embedding_map import remaining_map

pytestmark = pytest.mark.usefixtures("one_thread")
BOLD = "red & <b>bold</b>"
TOKEN = "a token for the edit tests"


@pytest.fixture
def service(small_run):
    made = service_of(small_run)
    yield made
    made.close()


@pytest.fixture
def app(service):
    return create_app(service)


def post(app, kind, class_name="", into="", images=(), **options):
    body = {"kind": kind, "class_name": class_name, "into": into, "images": list(images)}
    return ask(app, "POST", "/api/edits", json=body, **options)


def edited(app, *arguments, **options):
    answer = post(app, *arguments, **options)
    assert answer.status_code == 201, answer.text
    return answer.json()


def undone(app, number):
    answer = ask(app, "DELETE", f"/api/edits/{number}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def classes_of(app):
    return {one["name"]: one["images"] for one in got(app, "/api/classes")}


def map_of(app):
    wait_until(lambda: got(app, "/api/map")["state"] == "ready")
    return got(app, "/api/map")


def shown_by(app):
    """All that the views of the page show."""
    status = got(app, "/api/status")
    del status["generation"]
    images, found, why = (
        got(app, "/api/images", limit=200),
        got(app, "/api/search", id=0, k=48),
        got(app, "/api/why", id=0),
    )
    return [status, map_of(app), got(app, "/api/classes"), got(app, "/api/audit"), images, found, why]


def test_a_renamed_class_is_called_so_in_every_view_at_once_and_after_a_restart(app, small_run):
    before = map_of(app)
    labels = dict(zip(before["ids"], (before["class_names"][k] for k in before["labels"]), strict=True))
    done = edited(app, "rename", "blue", "navy <i>")
    assert (done["text"], done["images"], done["blocked_by"]) == ("renamed blue to navy <i>", 10, None)
    for served in (app, application(small_run)):
        assert classes_of(served) == {"navy <i>": 10, "green": 14, BOLD: 12, "gray": 12}
        [one] = [one for one in got(served, "/api/classes") if one["name"] == "navy <i>"]
        assert (one["trained"], one["given"]) == (True, ["blue"])
        assert got(served, f"/api/images/{one['example']}")["class_name"] == "navy <i>"
        image = next(image for image, name in labels.items() if name == "blue")
        assert got(served, "/api/search", id=image)["verdict"]["class_name"] == "navy <i>"
        assert got(served, "/api/search", id=3, class_name="navy <i>", k=48)["hits"][0]["class_name"] == "navy <i>"
        assert ask(served, "GET", "/api/search", params={"id": 3, "class_name": "blue"}).status_code == 404
        suspect = got(served, "/api/audit")["suspects"][0]
        assert (suspect["given"], suspect["suggested"]) == ("green", "navy <i>")
        assert got(served, "/api/edits") == [done]
    now = got(app, "/api/map")
    assert now["state"] == "ready", "a name moves no point"
    assert (now["x"], now["ids"], now["proxy_x"]) == (before["x"], before["ids"], before["proxy_x"])
    assert [now["class_names"][k] for k in now["labels"]] == [
        {"blue": "navy <i>"}.get(name, name) for name in labels.values()
    ]
    [proxy] = {now["class_names"][k] for k in now["proxy_labels"]} - {"green", BOLD}
    assert proxy == "navy <i>", "proxies follow"
    assert got(app, "/api/map/potential", class_name="navy <i>")["values"]
    pulls = got(app, "/api/why", id=image, top=100)
    assert {one["class_name"] for one in pulls["attracting"]} == {"navy <i>"}
    assert {one["kind"] for one in pulls["attracting"]} == {"image", "proxy"}


def test_a_merged_class_votes_as_one_settles_suspects_and_makes_the_rates_stale(app):
    assert got(app, "/api/status")["threshold"]["is_measured"] is True
    suspects = got(app, "/api/audit")["suspects"]
    settled = [one["key"] for one in suspects if {one["given"], one["suggested"]} == {"green", "blue"}]
    assert settled
    edited(app, "merge", "blue", "green")
    assert classes_of(app) == {"green": 24, BOLD: 12, "gray": 12}
    assert {one["name"]: one["given"] for one in got(app, "/api/classes")}["green"] == ["blue", "green"]
    answer = got(app, "/api/audit")
    assert [one["key"] for one in answer["suspects"]] == [
        one["key"] for one in suspects if one["key"] not in settled
    ], "an image of the one that may be of the other is where it belongs"
    assert answer["class_names"] == ["gray", "green", BOLD]
    assert got(app, "/api/status")["suspects"] == len(answer["suspects"])
    assert ask(app, "GET", f"/api/audit/{settled[0]}").status_code == 404
    found = got(app, "/api/search", id=30, k=48)
    assert found["threshold"]["is_measured"] is False
    assert len(map_of(app)["class_names"]) == 3
    assert {one["class_name"] for one in got(app, "/api/why", id=0)["classes"]} == {"green", BOLD, "gray"}


def test_a_deleted_class_leaves_every_view_with_its_proxies_and_files_stay(app, service):
    before, files = map_of(app), [entry.path for entry in service.gallery.index.entries()]
    edited(app, "delete", BOLD)
    assert classes_of(app) == {"blue": 10, "green": 14, "gray": 12}
    status = got(app, "/api/status")
    assert (status["images"], status["classes"], status["proxies"]) == (36, 3, 4)
    now = got(app, "/api/map")
    assert now["state"] == "ready", "what is left stays where it is"
    left = [k for k, label in enumerate(before["labels"]) if before["class_names"][label] != BOLD]
    assert [now["ids"], now["x"]] == [[before[name][k] for k in left] for name in ("ids", "x")]
    assert len(now["proxy_x"]) == 4
    assert BOLD not in {one["class_name"] for one in got(app, "/api/search", id=3, k=48)["hits"]}
    terms = got(app, "/api/why", id=3, top=100)
    assert BOLD not in {one["class_name"] for one in terms["attracting"] + terms["repelling"]}
    assert BOLD not in {name for one in got(app, "/api/audit")["suspects"] for name in (one["given"], one["suggested"])}
    assert all(Path(path).is_file() for path in files), "no file was touched"


def test_images_are_deleted_by_id(app, small_run):
    done = edited(app, "leave_out", images=[3, 7])
    assert (done["text"], done["class_name"]) == ("deleted 2 images", "")
    for served in (app, application(small_run)):
        assert got(served, "/api/status")["images"] == 46
        for path in ("/api/images/3", "/api/images/3/jpeg", "/api/search?id=3", "/api/why?id=7"):
            assert ask(served, "GET", path).status_code == 404
        assert not {3, 7} & {hit["id"] for hit in got(served, "/api/search", id=0, k=48)["hits"]}


def test_undo_gives_back_all_that_was_shown(app):
    states, numbers = [shown_by(app)], []
    for edit in (
        ("rename", "gray", "silver"),
        ("leave_out", "", "", [3, 20]),
        ("merge", "silver", BOLD),
        ("delete", BOLD),
    ):
        numbers.append(edited(app, *edit)["number"])
        states.append(shown_by(app))
        assert states[-1] != states[-2]
    refused = ask(app, "DELETE", f"/api/edits/{numbers[0]}")
    assert (refused.status_code, refused.json()["error"]) == (
        409,
        f"what was done later must be undone first: merged silver into {BOLD} (12 images)",
    )
    listed = {one["number"]: one["blocked_by"] for one in got(app, "/api/edits")}
    assert listed == {
        numbers[3]: None,
        numbers[2]: f"deleted {BOLD} (24 images)",
        numbers[1]: None,
        numbers[0]: f"merged silver into {BOLD} (12 images)",
    }
    for number in reversed(numbers):
        states.pop()
        assert undone(app, number)["missing"] == 0
        assert shown_by(app) == states[-1]
    assert ask(app, "DELETE", f"/api/edits/{numbers[0]}").status_code == 409


def test_undo_says_what_was_compacted_away(app, small_run):
    number = edited(app, "delete", "gray")["number"]
    ImageIndex.open(small_run / "index").compact()
    assert undone(app, number) == {"text": "deleted gray (12 images)", "missing": 12}


@pytest.mark.parametrize(
    ("edit", "status", "said"),
    [
        (("rename", "violet", "x"), 404, "no class 'violet'"),
        (("rename", "blue", "green"), 409, "merge 'blue' into it"),
        (("rename", "blue", "  "), 422, "must be given class_name and into alone"),
        (("rename", "blue", "x\ny"), 409, "printable"),
        (("rename", "", "x"), 422, "must be given class_name and into"),
        (("merge", "blue", "violet"), 404, "no class 'violet'"),
        (("merge", "blue", "blue"), 409, "into another one"),
        (("delete", "blue", "green"), 422, "class_name alone"),
        (("delete", "green"), 409, "'green' must have images in the index"),
        (("merge", "blue", "green"), 409, "'green' must have images in the index"),
        (("leave_out", "", "", [4, 10**30]), 404, "no image"),
        (("leave_out",), 422, "paths alone"),
        (("explode", "blue"), 422, "kind"),
    ],
)
def test_an_edit_that_is_not_possible_is_refused_in_a_sentence(app, small_run, edit, status, said):
    if "must have images" in said:
        ImageIndex.open(small_run / "index").remove(class_names=["green"])
        app = application(small_run)
    answer = post(app, *edit)
    assert (answer.status_code, said in answer.json()["error"]) == (status, True), answer.text
    assert str(small_run) not in answer.text
    assert got(app, "/api/edits") == []


def test_a_new_name_loses_the_spaces_around_it(app):
    assert edited(app, "rename", "blue", "  navy ")["into"] == "navy"


def test_edits_need_the_token_and_the_pages_own_origin(small_run):
    app, bearer = application(small_run, Access(token=TOKEN)), {"authorization": f"Bearer {TOKEN}"}
    assert post(app, "delete", "blue").status_code == 401
    assert ask(app, "DELETE", "/api/edits/1").status_code == 401
    assert ask(app, "GET", "/api/edits").status_code == 401
    assert post(app, "delete", "blue", headers={**bearer, "origin": "http://evil.example"}).status_code == 403
    assert not len(ImageIndex.open(small_run / "index").edits)
    assert post(app, "delete", "blue", headers=bearer).status_code == 201
    assert len(ImageIndex.open(small_run / "index").edits) == 1


def test_an_index_that_another_process_writes_is_busy(app, small_run):
    other = ImageIndex.open(small_run / "index")
    with other.writing():
        answer = post(app, "delete", "blue")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert "another process is writing the index" in answer.json()["error"]
        assert ask(app, "DELETE", "/api/edits/1").status_code == 503
    edited(app, "delete", "blue")


def test_an_index_that_may_not_be_written_refuses_edits_and_is_served(app, small_run):
    lock = small_run / "index" / "lock"
    lock.unlink()
    lock.mkdir()  # a folder in its place: no user may write it, not even root
    answer = post(app, "delete", "blue")
    assert answer.status_code == 503
    assert "nothing was saved: pfml serve cannot write index/index.json" in answer.json()["error"]
    assert str(small_run) not in answer.text
    assert classes_of(app)["blue"] == 10
    lock.rmdir()
    edited(app, "delete", "blue")


def test_a_full_disk_refuses_edits_with_507(app, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pfml.storage.manifest.write_atomically", full)
        answer = post(app, "delete", "blue")
    assert answer.status_code == 507
    assert "free space on the disk" in answer.json()["error"]
    assert got(app, "/api/edits") == []


def test_edits_of_many_requests_at_once_are_all_made(app, small_run):
    bodies = [
        *({"kind": "rename", "class_name": name, "into": f"{name} again"} for name in ("blue", "green", "gray")),
        *({"kind": "leave_out", "images": [image]} for image in (3, 14, 28, 40)),
    ]

    async def edits():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=BASE) as client:
            reads = [client.get("/api/search", params={"id": 30, "k": 48}) for _ in range(12)]
            return await asyncio.gather(*(client.post("/api/edits", json=body) for body in bodies), *reads)

    answers = asyncio.run(edits())
    assert [answer.status_code for answer in answers] == [201] * len(bodies) + [200] * 12
    names = {"blue again", "green again", "gray again", BOLD}
    for served in (app, application(small_run)):
        assert set(classes_of(served)) == names
        assert sum(classes_of(served).values()) == 44


def test_a_server_takes_up_edits_of_another_process(app, small_run, monkeypatch):
    monkeypatch.setattr("pfml.serving.gallery.REFRESH_INTERVAL", 0.0)
    generation = got(app, "/api/status")["generation"]
    ImageIndex.open(small_run / "index").edit(Edit("rename", "blue", "navy"))
    assert "navy" in classes_of(app)
    assert got(app, "/api/status")["generation"] == generation + 1
    assert [one["text"] for one in got(app, "/api/edits")] == ["renamed blue to navy"]


def written(run):
    with open(run / "audit" / "decisions.csv", newline="") as file:
        return [(row["decision"], row["label"]) for row in csv.DictReader(file)]


def test_decisions_are_written_with_the_classes_of_the_audit_and_shown_with_new_names(app, small_run):
    edited(app, "rename", "blue", "navy")
    first, second, *_ = got(app, "/api/audit")["suspects"]
    accepted = ask(app, "PUT", f"/api/audit/{first['key']}", json={"decision": "accept"}).json()
    assert accepted == {"decision": "accept", "label": "navy"}
    assert (
        ask(app, "PUT", f"/api/audit/{second['key']}", json={"decision": "relabel", "label": "blue"}).status_code == 404
    )
    ask(app, "PUT", f"/api/audit/{second['key']}", json={"decision": "relabel", "label": "navy"})
    assert written(small_run) == [("accept", "blue"), ("relabel", "blue")]
    assert [one["decision"]["label"] for one in got(app, "/api/audit")["suspects"][:2]] == ["navy", "navy"]
    found, _ = audit_run(small_run, device="cpu")
    names = found.images.class_names
    table = small_run / "audit" / "decisions.csv"
    assert [names[label] for label in read_decisions(table, found).values()] == ["blue", "blue"]
    corrected = corrections_of(found, policy="keep", decisions=[table, small_run / "index"]).apply(found.images)
    assert set(corrected.class_names) == {"navy", "green", BOLD, "gray"}
    undone(app, got(app, "/api/edits")[0]["number"])
    assert [one["decision"]["label"] for one in got(app, "/api/audit")["suspects"][:2]] == ["blue", "blue"]


def test_a_suggestion_that_was_deleted_cannot_be_accepted(app):
    first = got(app, "/api/audit")["suspects"][0]
    edited(app, "delete", first["suggested"])
    [same] = [one for one in got(app, "/api/audit")["suspects"] if one["key"] == first["key"]]
    assert same["suggested"] == ""
    answer = ask(app, "PUT", f"/api/audit/{first['key']}", json={"decision": "accept"})
    assert (answer.status_code, "was deleted" in answer.json()["error"]) == (409, True)
    assert ask(app, "PUT", f"/api/audit/{first['key']}", json={"decision": "reject"}).status_code == 200


def test_a_suspect_that_was_deleted_is_settled_and_copies_have_new_names(app, small_run):
    first = got(app, "/api/audit")["suspects"][0]
    edited(app, "leave_out", images=[first["image"]])
    assert first["key"] not in [one["key"] for one in got(app, "/api/audit")["suspects"]]
    paths = [entry.path for entry in ImageIndex.open(small_run / "index").entries()][20:22]
    rows = [("group", "path", "part", "class", "copy", "across_classes", "across_parts")]
    rows += [(1, path, "train", name, "exact", "yes", "no") for path, name in zip(paths, ("green", BOLD), strict=True)]
    with open(small_run / "audit" / "duplicates.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    edited(app, "rename", "green", "lime")
    edited(app, "delete", BOLD)
    [group] = got(app, "/api/audit/copies")
    assert [one["class_name"] for one in group["images"]] == ["lime", ""]
    key = group["images"][0]["key"]
    ask(app, "PUT", f"/api/audit/{key}", json={"decision": "drop"})
    assert written(small_run) == [("drop", "")]


def write_similar(run, *rows):
    with open(run / "audit" / "classes.csv", "w", newline="") as file:
        csv.writer(file).writerows([("advice", "classes", "images", "share", "examples"), *rows])


def test_classes_that_may_be_one_are_listed_until_they_are_merged(app, service, small_run):
    assert got(app, "/api/classes/similar") == []
    example = {entry.class_name: entry for entry in service.gallery.index.entries()}
    blue, green, gray = (example[name] for name in ("blue", "green", "gray"))
    write_similar(
        small_run,
        ("merge", "green; blue", "14; 10", "0.950", f"{green.path}; {blue.path}"),
        ("merge", "gray; violet", "12; 9", "0.900", f"{gray.path}; violet/1.png"),
        ("split", "gray", "6; 6", "0.010", f"{gray.path}; {gray.path}"),
    )
    first, second = got(app, "/api/classes/similar")
    assert first == {
        "class_name": "blue",
        "into": "green",
        "images": [10, 14],
        "share": 0.95,
        "examples": [blue.id, green.id],
    }, "the smaller one first"
    assert (second["class_name"], second["into"], second["images"], second["examples"]) == (
        *("violet", "gray"),
        [0, 12],
        [None, gray.id],
    )
    number = edited(app, "merge", "blue", "green")["number"]
    assert [one["into"] for one in got(app, "/api/classes/similar")] == ["gray"]
    undone(app, number)
    edited(app, "rename", "blue", "navy")
    assert got(app, "/api/classes/similar")[0]["class_name"] == "navy"
    edited(app, "delete", "navy")
    assert len(got(app, "/api/classes/similar")) == 1


def test_a_class_whose_name_has_the_separator_is_read_rightly(app, small_run, service):
    service.gallery.edit(Edit("rename", "blue", "x"))  # names in the table are those of sources
    index = ImageIndex.open(small_run / "index")
    index.add(torch.eye(8)[:2], ["1.png", "2.png"], ["a; b", "c"], model=index.model)
    service.gallery._refreshed_at = 0.0
    for cell, names in (("a; b; c", {"a; b", "c"}), ("c; a; b", {"a; b", "c"}), ("blue; a; b", {"x", "a; b"})):
        write_similar(small_run, ("merge", cell, "1; 1", "0.9", "1.png; 2.png"))
        [one] = got(app, "/api/classes/similar")
        assert {one["class_name"], one["into"]} == names


def test_a_damaged_table_of_classes_says_what_to_do(app, small_run):
    write_similar(small_run, ("merge", "alone", "1; 1", "0.9", "1.png; 2.png"))
    answer = ask(app, "GET", "/api/classes/similar")
    assert (answer.status_code, "run pfml audit again" in answer.json()["error"]) == (409, True)


def test_a_map_is_computed_again_for_an_added_image_or_another_index(service):
    wait_until(lambda: service.maps.current() is not None)
    contents, made = service.maps.current()
    assert remaining_map(made, contents, contents) is not None
    from dataclasses import replace

    more = torch.cat([contents.ids, contents.ids[-1:] + 1])
    assert remaining_map(made, contents, replace(contents, ids=more)) is None
    assert remaining_map(made, contents, replace(contents, vectors=lambda rows: -contents.vectors(rows))) is None
    assert remaining_map(made, contents, replace(contents, proxies=-contents.proxies)) is None
    none = remaining_map(made, contents, replace(contents, ids=contents.ids[:0]))
    assert len(none.ids) == len(none.points) == 0
