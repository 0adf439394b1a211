"""Images added and removed by requests: files and entries, all or none, also after a kill."""

import json
import os
import shutil
import signal

import pytest

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")

from api_client import application, ask, got, image_bytes, service_of

from pfml.search import ImageIndex, LockedError, list_images, update_index
from pfml.serving import Limits, create_app
from pfml.serving.added_images import AddedImages, NewImage, file_name
from pfml.serving.gallery import Gallery
from processes import CONTEXT

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "added"


@pytest.fixture
def app(small_run, folder):
    return create_app(service_of(small_run, add_to=folder, limits=Limits(images=4)))


def add(app, *named, class_name="blue", **form):
    files = [("file", (name, content)) for name, content in named]
    return ask(app, "POST", "/api/images", files=files, data={"class_name": class_name, **form})


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def index_of(run):
    return ImageIndex.open(run / "index")


BLUE, RED = image_bytes(), image_bytes((220, 30, 30))


def test_added_images_are_stored_and_found(app, small_run, folder):
    answer = add(app, ("one.png", BLUE), ("two.png", RED))
    assert answer.status_code == 201, answer.text
    one, two = answer.json()["images"]
    assert (one["name"], one["class_name"], one["is_new"]) == ("blue/one.png", "blue", True)
    assert files_in(folder) == ["blue/one.png", "blue/two.png"]
    assert (folder / "blue" / "one.png").read_bytes() == BLUE
    assert got(app, "/api/search", id=one["id"], k=3)["query"]["image"]["name"] == "blue/one.png"
    assert ask(app, "GET", f"/api/images/{two['id']}/jpeg").status_code == 200
    entry = index_of(small_run).entry(two["id"])
    assert (entry.class_name, entry.source) == ("blue", str(folder))
    assert entry.file.is_of(entry.path)
    assert answer.json()["generation"] == index_of(small_run).generation


def test_pfml_index_of_the_folder_finds_nothing_to_do(app, small_run, folder):
    add(app, ("one.png", BLUE))
    add(app, ("loose.png", RED), class_name="")
    index = index_of(small_run)
    update = update_index(index, app.service.gallery.embedder, list_images(folder))
    assert (update.unchanged, update.added, update.removed, update.relabeled) == (2, 0, 0, 0)


def test_the_same_image_of_the_same_name_is_one_entry(app, small_run, folder):
    first = add(app, ("one.png", BLUE)).json()
    before = index_of(small_run).generation
    again = add(app, ("one.png", BLUE), ("one.png", BLUE))
    assert again.status_code == 200
    assert [one["id"] for one in again.json()["images"]] == [first["images"][0]["id"]] * 2
    assert not any(one["is_new"] for one in again.json()["images"])
    assert index_of(small_run).generation == before
    assert files_in(folder) == ["blue/one.png"]


def test_another_image_of_the_same_name_gets_a_name_of_its_own_every_time(app, folder):
    add(app, ("one.png", BLUE))
    names = [add(app, ("one.png", RED)).json()["images"][0]["name"] for _ in range(2)]
    assert names[0] == names[1]
    assert names[0].startswith("blue/one-")
    assert len(files_in(folder)) == 2
    both = add(app, ("both.png", BLUE), ("both.png", RED)).json()["images"]
    assert both[0]["name"] == "blue/both.png"
    assert both[1]["name"].startswith("blue/both-")


def test_the_same_image_in_another_class_is_a_conflict(app, folder):
    add(app, ("one.png", BLUE))
    answer = add(app, ("one.png", BLUE), class_name="green")
    assert answer.status_code == 409
    assert "another class" in answer.json()["error"]
    assert files_in(folder) == ["blue/one.png"]


def test_a_class_that_was_renamed_gets_images_by_its_new_name(app, small_run, folder):
    ask(app, "POST", "/api/edits", json={"kind": "rename", "class_name": "blue", "into": "azure"})
    [image] = add(app, ("one.png", BLUE), class_name="azure").json()["images"]
    assert image["class_name"] == "azure"
    assert files_in(folder) == ["blue/one.png"], "as sources call it"
    ask(app, "POST", "/api/edits", json={"kind": "delete", "class_name": "gray"})
    answer = add(app, ("two.png", BLUE), class_name="gray")
    assert answer.status_code == 409
    assert str(folder) not in answer.text
    assert files_in(folder) == ["blue/one.png"]


def test_without_a_folder_the_answer_says_what_to_start_with(small_run):
    answer = add(application(small_run), ("one.png", BLUE))
    assert answer.status_code == 409
    assert "pfml serve --add-to FOLDER" in answer.json()["error"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("../../etc/passwd", "passwd.png"),
        ("C:\\images\\bird.PNG", "bird.PNG"),
        ("/abs/bird.jpg", "bird.jpg"),
        (".hidden.png", "hidden.png"),
        ("..", "image.png"),
        ("", "image.png"),
        (None, "image.png"),
        ("a\nb\0c.png", "a_b_c.png"),
        ("bird.exe", "bird.exe.png"),
        ("x" * 400 + ".png", "x" * 150 + ".png"),
        ("caf\u0065\u0301.png", "caf\u00e9.png"),
    ],
)
def test_a_file_name_never_leaves_the_folder(given, expected):
    assert file_name(given, BLUE) == expected


@pytest.mark.parametrize("name", ["../x", "a/b", "a\\b", ".", "..", ".git", " a", "a\n", "x" * 201, "\u00e9" * 130])
def test_a_class_that_is_no_folder_is_refused(app, folder, name):
    answer = add(app, ("one.png", BLUE), class_name=name)
    assert answer.status_code == 422
    assert files_in(folder) == []


def test_links_out_of_the_folder_are_not_followed(app, folder, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    folder.mkdir(exist_ok=True)
    (folder / "blue").symlink_to(outside)
    assert add(app, ("one.png", BLUE)).status_code == 409
    (folder / "red").mkdir()
    (folder / "red" / "one.png").symlink_to(outside / "one.png")
    [image] = add(app, ("one.png", RED), class_name="red").json()["images"]
    assert image["name"].startswith("red/one-")
    assert files_in(outside) == []


def test_all_images_are_added_or_none(app, small_run, folder):
    before = index_of(small_run).generation
    assert add(app, ("one.png", BLUE), ("two.png", b"no image")).status_code == 415
    assert add(app, *[(f"{k}.png", BLUE) for k in range(5)]).status_code == 413
    assert files_in(folder) == []
    assert index_of(small_run).generation == before


def test_an_error_of_the_index_leaves_no_file(app, small_run, folder, monkeypatch):
    monkeypatch.setattr(ImageIndex, "_commit", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        add(app, ("one.png", BLUE), ("two.png", RED))
    monkeypatch.undo()
    assert list(folder.iterdir()) == []
    assert add(app, ("two.png", RED)).status_code == 201
    assert files_in(folder) == ["blue/two.png"]


def test_a_disk_that_refuses_is_named_without_its_path(app, folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pfml.serving.added_images.create_atomically", full)
    answer = add(app, ("one.png", BLUE))
    assert answer.status_code == 507
    assert "blue/one.png in the folder of added images" in answer.json()["error"]
    assert str(folder) not in answer.text


def test_a_removed_image_is_gone_with_its_file(app, small_run, folder):
    one, two = add(app, ("one.png", BLUE), ("two.png", RED)).json()["images"]
    answer = ask(app, "DELETE", f"/api/images/{one['id']}")
    assert answer.json() == {"id": one["id"], "name": "blue/one.png", "is_file_deleted": True, "edit": None}
    assert files_in(folder) == ["blue/two.png"]
    assert ask(app, "DELETE", f"/api/images/{one['id']}").status_code == 404
    assert ask(app, "GET", f"/api/images/{one['id']}").status_code == 404
    assert index_of(small_run).entry(two["id"]).class_name == "blue"


def test_an_image_of_another_source_is_left_out_and_keeps_its_file(app, small_run):
    path = index_of(small_run).entry(3).path
    answer = ask(app, "DELETE", "/api/images/3").json()
    assert answer["is_file_deleted"] is False
    assert os.path.exists(path)
    assert index_of(small_run).find(path) is None
    assert ask(app, "DELETE", f"/api/edits/{answer['edit']}").status_code == 200
    assert index_of(small_run).find(path) is not None


def test_a_writer_waits_for_another_one(app, monkeypatch):
    real, tried = app.service.gallery.index.writing, []

    def writing():
        tried.append(1)
        if len(tried) < 4:
            raise LockedError("another process writes")
        return real()

    monkeypatch.setattr(app.service.gallery.index, "writing", writing)
    assert add(app, ("one.png", BLUE)).status_code == 201
    assert len(tried) >= 4


def test_a_writer_that_takes_too_long_is_a_503(app, small_run, monkeypatch):
    monkeypatch.setattr(Gallery.writing.__wrapped__, "__defaults__", (0.0,))
    with index_of(small_run).writing():
        answer = add(app, ("one.png", BLUE))
    assert answer.status_code == 503
    assert answer.headers["retry-after"]


def killed_while(doing, run, folder, when):
    """Add or remove in a process that kills itself before or after the commit of the index."""
    gallery = Gallery.open(run, device="cpu")
    commit = ImageIndex._commit

    def committed(index, *arguments):
        if when == "after":
            commit(index, *arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    ImageIndex._commit = committed
    images = AddedImages(folder, gallery)
    if doing == "add":
        vectors = gallery.index.vectors([3, 4])
        images.add([NewImage("one.png", "blue", BLUE, vectors[0]), NewImage("two.png", "blue", RED, vectors[1])])
    else:
        images.remove(gallery.index.find(folder / "blue" / "old.png"))


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal")
@pytest.mark.parametrize(
    ("doing", "when"), [("add", "before"), ("add", "after"), ("remove", "before"), ("remove", "after")]
)
def test_no_file_is_left_without_an_entry_after_a_kill(small_run, folder, doing, when):
    app = create_app(service_of(small_run, add_to=folder))
    assert add(app, ("old.png", BLUE)).status_code == 201
    (folder / "blue" / "of-a-user.png").write_bytes(BLUE)
    process = CONTEXT.Process(target=killed_while, args=(doing, small_run, folder, when))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    create_app(service_of(small_run, add_to=folder))
    left = {"add": ["old", "one", "two"] if when == "after" else ["old"], "remove": [] if when == "after" else ["old"]}
    index = index_of(small_run)
    expected = [f"blue/{name}.png" for name in left[doing]]
    assert files_in(folder) == sorted([*expected, "blue/of-a-user.png"])
    assert sorted(entry.path for entry in index.entries() if entry.source == str(folder)) == [
        str(folder / name) for name in expected
    ]


def test_a_journal_never_deletes_what_somebody_else_has_put_there(small_run, folder):
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "blue").mkdir(parents=True)
    (folder / "blue" / "one.png").write_bytes(RED)
    (folder / ".journal-0.json").write_text('[["blue/one.png", "%s"], ["blue/gone.png", "0"]]' % ("0" * 64))
    (folder / ".journal-1.json").write_text("{")
    service_of(small_run, add_to=folder)
    assert files_in(folder) == [".journal-1.json", "blue/one.png"]


def test_metadata_is_added_filters_and_is_replaced(app, small_run):
    known = {"price": 3, "day": "2024-05-01", "colors": ["blue", "dark"]}
    [image] = add(app, ("one.png", BLUE), metadata=json.dumps(known)).json()["images"]
    assert image["metadata"] == {"price": 3.0, "day": "2024-05-01", "colors": ["blue", "dark"]}
    assert index_of(small_run).columns["day"] == "date"
    found = ask(
        app, "GET", "/api/search", params={"id": 3, "where": "day > 2024-01-01 and colors contains dark"}
    ).json()
    assert [hit["id"] for hit in found["hits"]] == [image["id"]]
    [again] = add(app, ("one.png", BLUE), metadata='{"price": 4}').json()["images"]
    assert (again["id"], again["is_new"], again["metadata"]) == (image["id"], False, {"price": 4.0})
    [same] = add(app, ("one.png", BLUE)).json()["images"]
    assert same["metadata"] == {"price": 4.0}, "nothing was said of it"


@pytest.mark.parametrize(
    ("metadata", "status", "error"),
    [
        ("{", 422, "metadata: Expecting"),
        ("[1]", 422, "must be a JSON object"),
        ('{"price": {"eur": 1}}', 422, "metadata: price must be a text, a number, a date or a list of texts"),
        ('{"price": 1e999}', 422, "must be finite"),
        ('{"class": "red"}', 409, "must not be called 'class'"),
    ],
)
def test_metadata_that_no_column_can_hold_is_refused_and_leaves_no_file(app, folder, metadata, status, error):
    answer = add(app, ("one.png", BLUE), metadata=metadata)
    assert (answer.status_code, error in answer.json()["error"]) == (status, True), answer.text
    assert files_in(folder) == []
    add(app, ("two.png", RED), metadata='{"price": 2}')
    answer = add(app, ("three.png", RED), metadata='{"price": "much"}')
    assert answer.status_code == 409
    assert files_in(folder) == ["blue/two.png"]
