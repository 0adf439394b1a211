"""Image files as they are listed: in the order of `Path`, and in little memory."""

import os
import tracemalloc
from pathlib import Path

import pytest

from pfml.data.readers.folder import image_files, image_paths
from pfml.search.collection import ALL_IMAGES, CollectionUpdate, _Comparison
from pfml.storage.embeddings import CollectionSettings

NAMES = (
    "a/1.png",
    "a/2.jpg",
    "a.jpg",
    "a-b/1.png",
    "a b/1.png",
    "b/a/x.JPG",
    "b/a.png",
    "b/a-/x.png",
    "ä/1.png",
    "Z.png",
)
IMAGES = 5000


@pytest.fixture
def folder(tmp_path):
    for name in (*NAMES, "notes.txt", ".hidden/1.png", "b/.hidden.png", "no images/notes.txt"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).touch()
    return tmp_path / "photos"


def test_images_are_listed_in_the_order_of_their_paths(folder):
    expected = sorted(folder / name for name in NAMES)
    assert image_files([folder]) == expected
    assert list(image_paths([folder])) == [str(path) for path in expected]
    assert image_files([folder / "b", folder / "Z.png"]) == [*sorted((folder / "b").rglob("[!.]*.[pJ]*")), expected[0]]


def test_images_of_the_working_directory_are_named_as_paths_are(folder, monkeypatch):
    monkeypatch.chdir(folder)
    expected = sorted(map(Path, NAMES))
    assert image_files([Path()]) == expected
    assert list(image_paths([Path(".")])) == [str(path) for path in expected]
    assert list(image_paths([Path("b")])) == [str(path) for path in expected if path.parts[0] == "b"]


def test_what_links_lead_to_is_listed_once_and_circles_end(folder):
    (folder / "b" / "circle").symlink_to(folder, target_is_directory=True)
    (folder / "again").symlink_to(folder / "b", target_is_directory=True)
    (folder / "c").symlink_to(folder / "a", target_is_directory=True)
    found = [str(path.relative_to(folder)) for path in image_files([folder])]
    assert "again/a.png" in found  # it comes before b
    assert len(found) == len(NAMES)
    assert found == [str(path) for path in sorted(map(Path, found))]


def test_a_million_images_are_listed_for_embedding_in_less_than_300_mb(tmp_path, monkeypatch):
    names = [f"photo-{k:07d}-of-a-large-collection.jpg" for k in range(IMAGES)]
    monkeypatch.setattr("os.walk", lambda folder, **_: iter([(str(folder), [], names)]))
    settings, roots = CollectionSettings("a model", "ab" * 32, 8, "float32", 4096), [Path("/a/folder/with/photos")]
    monkeypatch.setattr(Path, "exists", lambda _: True)
    monkeypatch.setattr(Path, "is_dir", lambda _: True)
    tracemalloc.start()
    try:
        comparison = _Comparison(tmp_path, settings, roots, ALL_IMAGES, CollectionUpdate())
        pending = list(comparison.pending())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [path for paths, _ in pending for path in paths] == [f"{roots[0]}{os.sep}{name}" for name in names]
    assert peak / IMAGES < 300
