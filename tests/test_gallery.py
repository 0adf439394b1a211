"""The gallery: its screenshots are there, small and shown, its photographs are credited, its folder is what it says."""

import re
from pathlib import Path
from runpy import run_path

import pytest

ROOT = Path(__file__).parents[1]
TOOL = run_path(str(ROOT / "tools" / "gallery.py"))
PAGE = (ROOT / "docs" / "GALLERY.md").read_text(encoding="utf-8")
SHOTS = ROOT / "docs" / "gallery"


def test_every_screenshot_is_made_small_and_shown():
    made = {f"{name}.png" for name in (*TOOL["PAGES"], *TOOL["FILES"])}
    assert {path.name for path in SHOTS.iterdir()} == made
    assert set(re.findall(r"\]\(gallery/([\w-]+\.png)\)", PAGE)) == made
    assert max(path.stat().st_size for path in SHOTS.iterdir()) <= TOOL["LIMIT"]


def test_every_photograph_is_credited_with_its_license():
    for name, photograph in TOOL["PHOTOGRAPHS"].items():
        row = rf"^\| {name}\b.* \| {photograph.author} \| {photograph.license} \| {photograph.package} \|$"
        assert re.search(row, PAGE, re.MULTILINE), f"docs/GALLERY.md must credit {name}"


@pytest.fixture
def folders(tmp_path):
    """Two folders of crops of the photographs that come with scikit-learn, by the same draws."""
    write_folder = TOOL["write_folder"]
    photographs = {name: TOOL["PHOTOGRAPHS"][name] for name in ("flower", "temple")}
    third = {"other": photographs["temple"]}
    settings = {"PHOTOGRAPHS": {**photographs, **third}, "CROPS": 4, "MISLABELED": 3}
    before = {name: write_folder.__globals__[name] for name in settings}
    write_folder.__globals__.update(settings)
    try:
        for name in ("first", "second"):
            assert write_folder(tmp_path / name) == 3
    finally:
        write_folder.__globals__.update(before)
    return tmp_path / "first", tmp_path / "second"


def test_the_folder_has_as_many_wrong_labels_as_it_says_and_none_of_the_stranger(folders):
    crops = sorted((folders[0] / "photos").rglob("*.jpg"))
    assert len(crops) == 2 * 4
    assert {path.parent.name for path in crops} == {"flower", "other"}
    assert sum(path.name.rpartition("-")[0] != path.parent.name for path in crops) == 3
    assert {path.stem for path in (folders[0] / "new").iterdir()} == {"flower", "temple", "other"}


def test_the_folder_is_the_same_each_time(folders):
    first, second = ({path.relative_to(one): path.read_bytes() for path in one.rglob("*.jpg")} for one in folders)
    assert first == second
