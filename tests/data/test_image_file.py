"""What is opened as an image: named raster formats in regular files, of sizes that a network has a use for."""

import io
import os
import socket
import stat
import struct
import sys
import threading
import zlib
from pathlib import Path

import numpy
import pytest
import torch
from PIL import EpsImagePlugin, Image

pytest.importorskip("fastapi", reason="thumbnails and uploads need the extra serve")

from pfml.data import ImageSet, check_images
from pfml.data.decoding import ImageError, UnreadableImagesError, read_rgb, read_size
from pfml.data.image_file import FORMATS, UPLOAD_FORMATS, TooLargeError, UnknownFormatError, known_formats, opened_image
from pfml.models import create_embedder
from pfml.search.embedding import embed_files
from pfml.serving.images import BadUploadError, Thumbnails, decoded_upload
from pfml.storage.file_state import FileState
from pfml.storage.files import SpecialFileError, open_regular, sha256_of

POSTSCRIPT = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%Page: 1 1\n0 0 9 9 rectfill\nshowpage\n%%EOF\n"
)


def gray_png(width: int, height: int) -> bytes:
    """A whole, black PNG, made without ever having its pixels in memory."""
    pack, left, parts = zlib.compressobj(9), height, []
    while left:
        rows = min(left, 100_000)
        parts.append(pack.compress(bytes((width + 1) * rows)))
        left -= rows
    data = b"".join([*parts, pack.flush()])
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)), (b"IDAT", data), (b"IEND", b""))
    packed = (struct.pack(">I", len(d)) + kind + d + struct.pack(">I", zlib.crc32(kind + d)) for kind, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def within(seconds: float, function, *args):
    """What a call gives or raises, or a failure if it has not ended: a named pipe would be waited for for ever."""
    ended: list = []

    def work():
        try:
            ended.append((function(*args), None))
        except Exception as error:
            ended.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert ended, f"{function.__name__} has not ended within {seconds} s"
    result, error = ended[0]
    if error is not None:
        raise error
    return result


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that appears when a program `gs` is started; one is on the path."""
    marker, program = tmp_path / "started", tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho yes >> {marker}\nexit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    return marker


@pytest.mark.skipif(os.name == "nt", reason="the program is a shell script")
def test_the_marker_shows_that_ghostscript_was_started(ghostscript: Path) -> None:
    with pytest.raises(Exception), Image.open(io.BytesIO(POSTSCRIPT)) as image:  # noqa: B017
        image.load()
    assert ghostscript.exists()


@pytest.mark.skipif(os.name == "nt", reason="the program is a shell script")
def test_postscript_that_is_called_an_image_is_refused_and_ghostscript_never_started(
    tmp_path: Path, ghostscript: Path
) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(POSTSCRIPT)
    for function in (read_rgb, read_size):
        with pytest.raises(UnknownFormatError, match="photo.png: is not an image of a known format .*JPEG, PNG"):
            function(path)
    with pytest.raises(UnreadableImagesError, match="not an image of a known format"):
        check_images(ImageSet.unlabeled([path]))
    with pytest.raises(ImageError):
        Thumbnails().get(0, str(path), "thumbnail")
    with pytest.raises(ImageError):
        create_embedder("convnet", embedding_dim=4).encode([path])
    with pytest.raises(BadUploadError, match="another kind"):
        decoded_upload(POSTSCRIPT, most_pixels=100)
    assert not ghostscript.exists()


def test_formats_are_rasters_and_uploads_may_have_fewer() -> None:
    assert {"EPS", "WMF", "PSD", "FITS", "HDF5", "GRIB", "BUFR"}.isdisjoint(FORMATS)
    assert set(UPLOAD_FORMATS) < set(FORMATS)
    assert set(known_formats()) >= {"JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF", "BMP", "GIF", "TIFF", "JPEG2000", "PPM"])
def test_every_format_of_the_list_is_read(tmp_path: Path, kind: str) -> None:
    if kind not in known_formats():
        pytest.skip(f"this Pillow was built without {kind}")
    path = tmp_path / "image.png"  # the ending says nothing
    Image.new("RGB", (20, 10), (200, 30, 60)).save(path, kind)
    assert read_rgb(path).shape == (3, 10, 20)
    assert read_rgb(path).float().mean((1, 2)).sub(torch.tensor([200.0, 30, 60])).abs().max() < 8


def test_heif_is_read_where_the_plugin_is_there(tmp_path: Path) -> None:
    heif = pytest.importorskip("pillow_heif", reason="HEIC needs the extra heic")
    heif.from_pillow(Image.new("RGB", (64, 32), (200, 30, 60))).save(tmp_path / "photo.heic")
    (tmp_path / "photo.heic").rename(tmp_path / "photo.jpg")
    assert read_rgb(tmp_path / "photo.jpg").shape == (3, 32, 64)
    with pytest.raises(BadUploadError, match="another kind"):
        decoded_upload((tmp_path / "photo.jpg").read_bytes(), most_pixels=10_000)


def test_without_the_plugin_a_photograph_of_a_phone_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    (tmp_path / "photo.heic").write_bytes(b"\x00\x00\x00\x1cftypheic" + bytes(200))
    with pytest.raises(ImageError, match="is a HEIC photograph, .*pip install pillow-heif"):
        read_rgb(tmp_path / "photo.heic")


def test_psd_and_icons_are_not_read_although_pillow_could(tmp_path: Path) -> None:
    Image.new("RGB", (16, 16)).save(tmp_path / "x.png", "ICO")
    with pytest.raises(UnknownFormatError):
        read_rgb(tmp_path / "x.png")


@pytest.mark.parametrize(
    ("width", "height", "reason"),
    [
        (1, 40_000_000, "more than 65,535 on a side"),
        (40_000_000, 1, "more than 65,535 on a side"),
        (10, 65_536, "more than 65,535 on a side"),
        (100, 12_801, "more than 128 times longer than wide"),
        (1, 129, "more than 128 times longer than wide"),
        (30_000, 30_000, "limit"),
    ],
)
def test_what_no_network_has_a_use_for_is_refused_by_its_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, height: int, reason: str
) -> None:
    path = tmp_path / "strip.png"
    content = gray_png(width, min(height, 1000))  # the header alone is looked at
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    path.write_bytes(content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:])
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda image: pytest.fail("its pixels are decoded"))
    for function in (read_rgb, read_size, lambda one: Thumbnails().get(0, str(one), "thumbnail")):
        with pytest.raises(TooLargeError, match=reason):
            function(path)
    with pytest.raises(BadUploadError) as caught:
        decoded_upload(path.read_bytes(), most_pixels=40_000_000)
    assert caught.value.status == 413


@pytest.mark.parametrize("size", [(1, 128), (128, 1), (512, 4)])
def test_long_images_up_to_the_limit_are_read(tmp_path: Path, size: tuple[int, int]) -> None:
    Image.new("RGB", size).save(tmp_path / "long.png")
    assert read_rgb(tmp_path / "long.png").shape == (3, size[1], size[0])


def special_files(folder: Path) -> dict[str, Path]:
    files = {name: folder / f"{name}.png" for name in ("pipe", "zero", "socket", "folder", "loop")}
    os.mkfifo(files["pipe"])
    files["zero"].symlink_to("/dev/zero")
    files["folder"].mkdir()
    files["loop"].symlink_to(files["loop"])
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(files["socket"]))
    return files


WORDS = {
    "pipe": "is a named pipe and must be a regular file",
    "zero": "is a device and must be a regular file",
    "socket": "is a socket and must be a regular file",
    "folder": "is a folder",
    "loop": "symbolic links",
}


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
@pytest.mark.parametrize("kind", WORDS)
def test_a_special_file_is_refused_and_never_waited_for(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket must have a short name
    path = special_files(tmp_path)[kind]
    for function in (read_rgb, read_size, lambda one: Thumbnails().get(0, str(one), "thumbnail")):
        with pytest.raises(ImageError, match=WORDS[kind]):
            within(10, function, path)
    with pytest.raises(OSError, match=WORDS[kind]):
        within(10, FileState.of, path)
    with pytest.raises(OSError, match=WORDS[kind]):
        within(10, sha256_of, path)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
def test_embedding_a_folder_leaves_special_files_out_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = tmp_path / "good.png"
    Image.new("RGB", (40, 40)).save(good)
    paths = [*map(str, special_files(tmp_path).values()), str(good)]
    embedder = create_embedder("convnet", embedding_dim=4)
    found = within(30, lambda: embed_files(embedder, paths, batch_size=4, workers=1))
    assert found.paths == (str(good),)
    reasons = {Path(failure.path).stem: failure.reason for failure in found.failures}
    assert reasons.keys() == WORDS.keys()
    assert all(WORDS[name] in reason for name, reason in reasons.items())


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
def test_a_file_that_becomes_a_pipe_between_the_look_and_the_opening_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regular, pipe = tmp_path / "regular", tmp_path / "pipe"
    regular.write_bytes(b"x")
    os.mkfifo(pipe)
    state = os.stat(regular)
    monkeypatch.setattr(os, "stat", lambda *_, **__: state)
    with pytest.raises(SpecialFileError, match="named pipe"):
        within(10, open_regular, pipe)


def test_a_regular_file_behind_a_link_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with open_regular(tmp_path / "link") as file:
        assert file.read() == b"content"
        assert os.name == "nt" or os.get_blocking(file.fileno())


def test_bytes_are_opened_like_files() -> None:
    out = io.BytesIO()
    pixels = numpy.random.default_rng(0).integers(0, 256, (9, 7, 3), dtype=numpy.uint8)
    Image.fromarray(pixels).save(out, "PNG")
    with opened_image(out.getvalue()) as image:
        assert image.size == (7, 9)
    with pytest.raises(ImageError, match="the image: is empty"), opened_image(b""):
        pass
