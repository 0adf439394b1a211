"""Reliability tests 27 and 28: pictures and archives that somebody else has made."""

import hashlib
import json
import stat
import zipfile

import numpy
import pytest
import torch
from PIL import Image

from pfml.data import ImageSet
from pfml.data.decoding import ImageError, UnreadableImagesError, check_images, read_rgb
from pfml.data.image_source import open_images
from pfml.storage.bundle import extract_zip
from pfml.storage.files import DamagedFileError
from pfml.storage.manifest import digest_of


def picture(size=40, channels=3):
    values = numpy.random.default_rng(size).integers(0, 256, (size, size, channels), dtype=numpy.uint8)
    return Image.fromarray(values[..., 0] if channels == 1 else values)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def scrambled(path):
    content = bytearray(path.read_bytes())
    content[60:200] = bytes(140)
    path.write_bytes(content)


def bomb(path):
    """A PNG of 14,000 x 14,000 white pixels in a few hundred kilobytes."""
    Image.new("1", (14_000, 14_000)).save(path)


#: What may be in place of an image.
BROKEN = {"empty": lambda path: path.write_bytes(b""), "truncated": cut, "corrupt": scrambled, "bomb": bomb}


@pytest.mark.parametrize("broken", BROKEN)
def test_27_an_image_that_cannot_be_read_is_an_error_with_its_path_and_never_another_image(tmp_path, broken):
    paths = [tmp_path / f"{k}.png" for k in range(4)]
    for path in paths:
        picture().save(path)
    BROKEN[broken](paths[2])
    with pytest.raises(ImageError) as caught:
        read_rgb(paths[2])
    assert str(paths[2]) in str(caught.value)
    images = ImageSet(tuple(paths), torch.zeros(4, dtype=torch.int64), ("only",))
    for opened in (check_images, open_images, lambda images: open_images(images, storage="files", workers=0)):
        with pytest.raises(UnreadableImagesError, match="1 of 4 images cannot be read") as listed:
            opened(images)
        assert str(paths[2]) in str(listed.value)
        assert str(paths[1]) not in str(listed.value)


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "1", "CMYK", "I;16"])
def test_27_an_image_that_is_not_rgb_becomes_rgb_or_is_named(tmp_path, mode):
    path = tmp_path / ("image.tiff" if mode == "CMYK" else "image.png")
    if mode == "I;16":
        values = numpy.arange(1600, dtype=numpy.uint16).reshape(40, 40) * 40
        Image.fromarray(values).save(path)
    else:
        picture().convert(mode).save(path)
    image = read_rgb(path)
    assert image.shape == (3, 40, 40)
    assert image.dtype == torch.uint8
    assert image.float().std() > 20  # pixels, not a plain area


CONTENT = b"some text"


def sealed(contents):
    listed = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents.items()}
    manifest = {"kind": "pfml bundle", "format_version": 1, "files": listed}
    return json.dumps({**manifest, "manifest_sha256": digest_of(manifest)}).encode()


def symlink():
    entry = zipfile.ZipInfo("link")
    entry.create_system = 3
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    return entry


def deflated(name):
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry


#: Entry, its data, and the contents that the manifest promises.
HOSTILE = {
    "parent folder": ("../evil.txt", CONTENT, {"../evil.txt": CONTENT}),
    "absolute path": ("/tmp/evil.txt", CONTENT, {"/tmp/evil.txt": CONTENT}),
    "backslashes": ("..\\evil.txt", CONTENT, {"..\\evil.txt": CONTENT}),
    "symbolic link": (symlink(), b"/etc/passwd", {"link": b"/etc/passwd"}),
    "zip bomb": (deflated("a"), bytes(50_000_000), {"a": bytes(100)}),
    "huge but honest": (deflated("a"), bytes(2_000_000), {"a": bytes(2_000_000)}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_28_a_hostile_archive_is_refused_and_writes_nothing_outside_its_folder(tmp_path, case):
    name, data, promised = HOSTILE[case]
    path, target = tmp_path / "evil.zip", tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, data)
        archive.writestr("bundle.json", sealed(promised))
    with pytest.raises(DamagedFileError, match=r"evil\.zip"):
        extract_zip(path, target, max_bytes=1_000_000)
    assert [file for file in tmp_path.rglob("*") if file.is_file() and target not in file.parents] == [path]
    assert sum(file.stat().st_size for file in target.rglob("*") if file.is_file()) < 10_000


def test_28_an_archive_with_a_wrong_checksum_is_refused_by_the_name_of_the_file(tmp_path):
    from pfml.export import load_bundle

    path = tmp_path / "bundle.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model/model.json", b"other text")
        archive.writestr("bundle.json", sealed({"model/model.json": b"some text!"}))
    with pytest.raises(DamagedFileError, match=r"model/model\.json must have sha256"):
        load_bundle(path)
