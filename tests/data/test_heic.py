"""HEIC photographs: read where pillow-heif is installed, and named with what to install where it is not."""

import sys

import pytest
import torch
from PIL import Image

from pfml.data import load_data, without_unreadable
from pfml.data.decoding import ImageError, UnreadableImagesError, check_images, read_rgb, read_size
from pfml.data.image_set import ImageSet
from pfml.search import list_images
from small_index import write_images

SENTENCE = "is a HEIC photograph, which needs a package: pip install pillow-heif"
#: What is needed of a file to be recognized.
HEAD = b"\x00\x00\x00\x1cftypheic\x00\x00\x00\x00mif1heicmiaf" + bytes(200)


@pytest.fixture
def no_reader(monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)


def heic(path, color=(200, 30, 90), size=(56, 40)):
    """A photograph of one color."""
    pillow_heif = pytest.importorskip("pillow_heif", reason="HEIC needs the extra heic")
    path.parent.mkdir(parents=True, exist_ok=True)
    pillow_heif.from_pillow(Image.new("RGB", size, color)).save(path, quality=90)
    return path


@pytest.mark.parametrize("name", ["photo.heic", "PHOTO.HEIF", "photo.hif", "by another name.jpg"])
def test_a_photograph_is_read_by_what_is_in_it(tmp_path, name):
    path = heic(tmp_path / "saved.heic").rename(tmp_path / name)
    image = read_rgb(path)
    assert image.shape == (3, 40, 56)
    assert read_size(path) == (40, 56)
    torch.testing.assert_close(image[:, 20, 20].int(), torch.tensor([200, 30, 90], dtype=torch.int32), atol=6, rtol=0)
    assert check_images(ImageSet.unlabeled([path])).tolist() == [[40, 56]]


def test_a_damaged_photograph_is_an_image_that_cannot_be_read(tmp_path):
    path = heic(tmp_path / "photo.heic")
    path.write_bytes(path.read_bytes()[:-60])
    with pytest.raises(ImageError, match="photo.heic: "):
        read_rgb(path)


def test_photographs_are_listed_with_the_other_images_of_a_folder(tmp_path):
    write_images(tmp_path, ["a/1.png", "b/2.png"])
    heic(tmp_path / "a" / "2.HEIC")
    heic(tmp_path / "b" / "3.heif")
    assert len(list_images(tmp_path).paths) == 4
    data = without_unreadable(load_data(str(tmp_path)))
    assert (len(data.train), len(data.test)) == (2, 2)


def test_pillow_itself_is_not_changed(tmp_path):
    read_rgb(heic(tmp_path / "photo.heic"))
    if "HEIF" not in Image.OPEN:
        with pytest.raises(OSError, match="cannot identify"):
            Image.open(tmp_path / "photo.heic")


def test_without_the_package_the_sentence_says_what_to_install(tmp_path, no_reader):
    (tmp_path / "photo.heic").write_bytes(HEAD)
    for read in (read_rgb, read_size):
        with pytest.raises(ImageError) as caught:
            read(tmp_path / "photo.heic")
        assert caught.value.reason == SENTENCE


def test_without_the_package_photographs_of_a_folder_are_left_out_and_named(tmp_path, no_reader):
    folder = write_images(tmp_path / "photos", [f"{name}/{k}.png" for name in "abcd" for k in range(3)], size=12)
    (folder / "b" / "IMG_1.HEIC").write_bytes(HEAD)
    assert without_unreadable(load_data(str(folder))).remarks == (
        f"1 of 13 images cannot be read and is left out: {folder / 'b' / 'IMG_1.HEIC'}: {SENTENCE}",
    )


def test_a_folder_of_photographs_alone_is_refused_with_what_to_install(tmp_path, no_reader):
    for name in "abcd":
        (tmp_path / name).mkdir()
        (tmp_path / name / "IMG_1.HEIC").write_bytes(HEAD)
    with pytest.raises(UnreadableImagesError, match="4 of 4 images cannot be read(?s:.*)pip install pillow-heif"):
        without_unreadable(load_data(str(tmp_path)))
