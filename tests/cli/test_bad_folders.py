"""Folders as people have them: each, divided in each way, gives a plan, or one sentence that says what to do."""

import os

import pytest
import yaml

from pfml.cli import main
from pfml.data import load_data
from pfml.runs.config import DataConfig
from small_index import write_images

SPLITS = ("classes", "images", "none")
#: What makes a command a matter of a second.
FAST = ("--model.backbone=convnet", "--model.embedding_dim=8", "--epochs=1", "--device=cpu")
TWO_FOLDERS = r"must have at least 2 folders with images \(.*\), one per class, got "
ONE_CLASS_TRAINS = "training must have at least 2 classes to tell apart, got 1"
MOST_BROKEN = "images cannot be read; restore these files"


def draw(root, classes, images):
    return write_images(root, [f"{name}/{k}.png" for name in classes for k in range(images)], size=16)


def spoil(root, *names):
    for name in names:
        (root / name).write_bytes(b"no image")


def renamed(root, old, new):
    os.rename(os.fsencode(root / old), os.path.join(os.fsencode(root), new))


def one_class(root):
    draw(root, "a", 5)


def two_classes(root):
    draw(root, "ab", 3)


def one_image_of_each_class(root):
    draw(root, "abcdef", 1)


def two_images_of_each_class(root):
    draw(root, "abcdef", 2)


def one_class_of_several_images(root):
    draw(root, "a", 5)
    draw(root, "bcd", 1)


def all_broken(root):
    draw(root, "abcdef", 3)
    spoil(root, *(f"{name}/{k}.png" for name in "abcdef" for k in range(3)))


def some_broken(root):
    draw(root, "abcdef", 4)
    spoil(root, *(f"a/{k}.png" for k in range(4)), "b/0.png")


def one_of_two_classes_broken(root):
    draw(root, "ab", 3)
    spoil(root, *(f"a/{k}.png" for k in range(3)))


def names_that_are_no_text(root):
    draw(root, "abcd", 3)
    renamed(root, "a", b"\xff\xfe")
    renamed(root, "b", b"caf\xe9")
    renamed(root / "c", "0.png", b"\xe9.png")


def names_that_print_alike(root):
    draw(root, "abcd", 3)
    renamed(root, "a", b"\xff")
    renamed(root, "b", rb"\xff")


def empty(root):
    root.mkdir(parents=True)


def empty_classes(root):
    for name in "abcd":
        (root / name).mkdir(parents=True)


def a_file(root):
    root.write_text("hello")


def loose_images(root):
    write_images(root, ("1.png", "2.png"), size=16)


def nested(root):
    write_images(root, [f"{name}/deep/{k}/er.png" for name in "abcdef" for k in range(3)], size=16)


def classes_one_folder_deeper(root):
    draw(root / "photos", "abcdef", 3)


def links_to_classes(root):
    draw(root.parent / "elsewhere", "abcdef", 3)
    root.mkdir()
    for name in "abcdef":
        (root / name).symlink_to(root.parent / "elsewhere" / name, target_is_directory=True)
    (root / "a" / "around").symlink_to(root, target_is_directory=True)


def links_to_nothing(root):
    draw(root, "abcdef", 3)
    (root / "a" / "gone.png").symlink_to("/nowhere/gone.png")
    (root / "gone").symlink_to("/nowhere")


def train_and_test_of_other_classes(root):
    draw(root / "train", "abc", 3)
    draw(root / "test", "def", 3)


def train_and_test_of_the_same_classes(root):
    draw(root / "train", "abc", 3)
    draw(root / "test", "abc", 2)


def train_and_test_of_one_class(root):
    draw(root / "train", "a", 3)
    draw(root / "test", "a", 2)


#: Folder -> by split, the sentence that it ends with; None where it trains.
CASES = {
    one_class: (TWO_FOLDERS + "1",) * 3,
    two_classes: (ONE_CLASS_TRAINS + " with 1 other kept unseen.*--data.split images", None, None),
    one_image_of_each_class: ("no test image has another", "got one image of each class: add images, or", None),
    two_images_of_each_class: (None, None, None),
    one_class_of_several_images: (None, None, None),
    all_broken: ("18 of 18 " + MOST_BROKEN,) * 3,
    some_broken: (None, None, None),
    one_of_two_classes_broken: (ONE_CLASS_TRAINS, ONE_CLASS_TRAINS + ": add class", ONE_CLASS_TRAINS + ": add class"),
    names_that_are_no_text: (None, None, None),
    names_that_print_alike: (r"names that differ in print, got \\xff twice",) * 3,
    empty: (TWO_FOLDERS + "0$",) * 3,
    empty_classes: (TWO_FOLDERS + "0$",) * 3,
    a_file: ("got the file .*folder, which does not end in .csv",) * 3,
    loose_images: (r"images lie loose in it \(2\), in no class folder: sort them",) * 3,
    nested: (None, None, None),
    classes_one_folder_deeper: ("if the 6 folders in .*photos are the classes, give that one$",) * 3,
    links_to_classes: (None, None, None),
    links_to_nothing: (None, None, None),
    train_and_test_of_other_classes: (None, "must train, but d, e, f do not: set data.split classes", None),
    train_and_test_of_the_same_classes: ("must be unseen, but a, b, c are also.*set data.split images$", None, None),
    train_and_test_of_one_class: ("must be unseen, but a is also", ONE_CLASS_TRAINS, ONE_CLASS_TRAINS),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_any_folder_gives_a_plan_or_one_sentence(case, split, tmp_path, capsys):
    root = tmp_path / "folder"
    case(root)
    command = ["train", f"--data={root}", f"--data.split={split}", *FAST, "--print_config"]
    message = CASES[case][SPLITS.index(split)]
    if message is None:
        main(command)
        assert yaml.safe_load(capsys.readouterr().out)["data"]["split"] == split
        return
    with pytest.raises(SystemExit, match=message) as ended:
        main(command)
    said = str(ended.value)
    assert "Traceback" not in said + capsys.readouterr().err
    assert "\n" not in said or MOST_BROKEN in said, "only broken files are listed, one a line"


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "case", [some_broken, names_that_are_no_text, one_class_of_several_images], ids=lambda case: case.__name__
)
def test_what_gets_a_plan_trains(case, split, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pfml.pages.run.write_run_page", lambda *_, **__: "report.html")
    case(tmp_path / "folder")
    main(["train", f"--data={tmp_path / 'folder'}", f"--data.split={split}", *FAST, f"--out={tmp_path / 'run'}"])
    assert (tmp_path / "run" / "model" / "README.md").is_file()
    said = capsys.readouterr().out
    if case is some_broken:
        assert "5 of 24 images cannot be read and are left out" in said
        assert ("no training image" if split == "images" else "no image") + " of the class a can be read" in said


@pytest.mark.slow
def test_ten_thousand_classes_are_listed_and_divided(tmp_path):
    for number in range(10_000):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        for name in ("0.png", "1.png"):
            (folder / name).touch()
    data = load_data(str(tmp_path), split="images")
    assert (len(data.train), len(data.test), data.train.num_classes) == (10_000, 10_000, 10_000)


def test_a_folder_whose_own_path_is_no_text_is_refused_before_anything_is_read(tmp_path):
    draw(tmp_path / "photos", "abcd", 2)
    renamed(tmp_path, "photos", b"caf\xe9")
    photos = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    with pytest.raises(SystemExit, match=r"stores the path of its images as UTF-8: rename .*caf\\xe9, or link to it"):
        main(["train", "--data", photos, "--out", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
    (tmp_path / "link").symlink_to(photos)
    assert DataConfig(str(tmp_path / "link")).name.endswith("link")
