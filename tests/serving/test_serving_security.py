"""Security of the server: access, uploads, and headers of responses."""

import asyncio
import io
import os
import socket
import struct
import zlib

import httpx
import numpy
import pytest
import torch
from PIL import Image

pytest.importorskip("fastapi", reason="pfml serve needs the extra serve")

from api_client import BASE, application, ask, image_bytes, service_of, upload

from pfml.cli import main
from pfml.search import list_images, update_index
from pfml.serving import Access, create_app
from pfml.serving.images import BadUploadError, Thumbnails, decoded_upload
from pfml.serving.service import Uploads

pytestmark = pytest.mark.usefixtures("one_thread")
TOKEN = "a token of enough letters"
BEARER = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def app(made_run):
    return application(made_run, upload_bytes=100_000, upload_pixels=10_000)


@pytest.fixture(scope="module")
def closed(made_run):
    return application(made_run, Access("0.0.0.0", TOKEN))


def png_of_size(width, height):
    """The start of a PNG that claims to be of this size."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"\0" * 64)
    parts = (struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in (header, data))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def animation(format):  # noqa: A002
    out = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "green", "blue")]
    frames[0].save(out, format, save_all=True, append_images=frames[1:])
    return out.getvalue()


def noise_jpeg():
    pixels = numpy.random.default_rng(0).integers(0, 256, (90, 90, 3), dtype=numpy.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG")
    return out.getvalue()


BAD_UPLOADS = {
    "empty": (b"", 400, "empty"),
    "text": (b"no image at all", 415, "another kind"),
    "html": (b"<html><script>alert(1)</script>", 415, "another kind"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'></svg>", 415, "another kind"),
    "postscript, whose decoder is not tried": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        415,
        "another kind",
    ),
    "too many pixels": (image_bytes(size=(101, 100)), 413, "101 x 100"),
    "a decompression bomb": (png_of_size(60_000, 60_000), 413, "pixels"),
    "a strip": (png_of_size(1, 9_000), 413, "times longer than wide"),
    "too many rows": (png_of_size(1, 40_000_000), 413, "on a side"),
    "truncated jpeg": (noise_jpeg()[:2000], 422, "damaged"),
    "truncated png": (png_of_size(90, 90), 422, "damaged"),
    "animated gif": (animation("GIF"), 415, "animation"),
    "animated webp": (animation("WEBP"), 415, "animation"),
    "several pages": (animation("TIFF"), 415, "several pages"),
    "too many bytes": (b"\xff" * 100_001, 413, "at most 100,000 bytes"),
    "far too many bytes": (b"\xff" * 300_000, 413, "at most"),
}


@pytest.mark.parametrize(("content", "status", "word"), BAD_UPLOADS.values(), ids=BAD_UPLOADS)
def test_a_bad_upload_is_refused_with_a_reason(app, content, status, word):
    answer = upload(app, content)
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    assert word in answer.json()["error"]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_every_usual_format_is_taken(app, kind):
    assert upload(app, image_bytes(format=kind)).status_code == 200


def test_an_upload_at_the_limits_is_taken(app):
    assert upload(app, image_bytes(size=(100, 100))).status_code == 200


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16"])
def test_every_mode_becomes_rgb(mode):
    out = io.BytesIO()
    Image.new(mode, (5, 4)).save(out, "TIFF")
    assert decoded_upload(out.getvalue(), most_pixels=100).shape == (3, 4, 5)


def test_floating_point_pixels_are_refused():
    out = io.BytesIO()
    Image.new("F", (5, 4)).save(out, "TIFF")
    with pytest.raises(BadUploadError, match="floating-point"):
        decoded_upload(out.getvalue(), most_pixels=100)


def photograph(size=(800, 600), **options):
    """A smooth image that loses little at half its size."""
    y, x = numpy.mgrid[: size[1], : size[0]] / 97.0
    waves = numpy.stack([numpy.sin(x), numpy.cos(y), numpy.sin(x + y)], axis=2)
    out = io.BytesIO()
    Image.fromarray((127 + 120 * waves).astype(numpy.uint8)).save(out, "JPEG", quality=95, **options)
    return out.getvalue()


@pytest.mark.parametrize("progressive", [False, True])
def test_a_large_jpeg_is_decoded_at_a_fraction_and_an_ordinary_one_at_its_full_size(progressive):
    content = photograph(progressive=progressive)
    whole = decoded_upload(content, most_pixels=480_000)
    assert whole.shape == (3, 600, 800)
    assert torch.equal(decoded_upload(content, most_pixels=480_000, decoded_pixels=480_000), whole)
    half = decoded_upload(content, most_pixels=480_000, decoded_pixels=479_999, short_side=299)
    assert half.shape == (3, 300, 400)
    expected = torch.nn.functional.avg_pool2d(whole.float()[None], 2)[0]
    assert (half.float() - expected).abs().mean() < 2
    assert decoded_upload(content, most_pixels=480_000, decoded_pixels=30_000, short_side=60).shape == (3, 75, 100)


def test_what_cannot_be_decoded_at_a_fraction_has_a_lower_limit():
    large = image_bytes(size=(300, 200))
    assert decoded_upload(large, most_pixels=100_000, decoded_pixels=60_000).shape == (3, 200, 300)
    for content in (large, image_bytes(size=(300, 200), format="WEBP", lossless=True)):
        with pytest.raises(BadUploadError, match=r"at most 59,999 pixels, got 300 x 200: a JPEG may have 100,000"):
            decoded_upload(content, most_pixels=100_000, decoded_pixels=59_999)
    with pytest.raises(BadUploadError, match="at most 20,000 pixels"):  # the network needs more than an eighth
        decoded_upload(photograph(), most_pixels=480_000, decoded_pixels=20_000, short_side=200)


def test_a_small_file_of_40_megapixels_is_refused_before_it_takes_time_or_memory(made_run):
    app = application(made_run)
    content = bytearray(image_bytes(size=(8, 8), format="WEBP", lossless=True))
    content[21:25] = struct.pack("<I", 6323 | 6323 << 14)  # width and height, less one, as a VP8L has them
    answer = upload(app, bytes(content))
    assert answer.status_code == 413
    assert "a WEBP must have at most 16,000,000 pixels, got 6324 x 6324" in answer.json()["error"]


def test_a_progressive_jpeg_of_very_many_scans_is_refused():
    content = photograph((200, 100), progressive=True)
    start = content.rindex(b"\xff\xda")
    scan, end = content[start:-2], content[-2:]
    assert decoded_upload(content, most_pixels=20_000).shape == (3, 100, 200)
    with pytest.raises(BadUploadError, match="must come in fewer scans, got 1") as caught:
        decoded_upload(content[:start] + 100 * scan + end, most_pixels=20_000)
    assert caught.value.status == 413
    # bytes after the end of the image, such as the video of a phone, are no scan
    assert decoded_upload(content + 100 * scan, most_pixels=20_000).shape == (3, 100, 200)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
def test_an_indexed_file_that_became_huge_or_special_is_a_404(small_run, tmp_path):
    file = tmp_path / "one" / "a.png"
    file.parent.mkdir()
    file.write_bytes(image_bytes())
    service = service_of(small_run)
    update_index(service.gallery.index, service.gallery.embedder, list_images(tmp_path / "one"))
    image = service.gallery.index.find(str(file)).id
    app = create_app(service, Access())
    path = f"/api/images/{image}/jpeg"
    file.write_bytes(png_of_size(30_000, 30_000))
    assert ask(app, "GET", path).status_code == 404
    file.unlink()
    os.mkfifo(file)
    answer = ask(app, "GET", path, timeout=10)
    assert answer.status_code == 404
    assert "cannot be read" in answer.json()["error"]
    file.unlink()
    file.symlink_to("/dev/zero")
    assert ask(app, "GET", path).status_code == 404
    file.unlink()
    file.write_bytes(image_bytes())
    assert ask(app, "GET", path).status_code == 200


def test_a_body_without_a_length_is_counted_while_it_arrives(app):
    sent = 0

    async def endless():
        nonlocal sent
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
        while True:
            sent += 50_000
            yield b"\0" * 50_000
            await asyncio.sleep(0)

    headers = {"content-type": "multipart/form-data; boundary=x"}
    answer = ask(app, "POST", "/api/search", content=endless(), headers=headers)
    assert answer.status_code == 413
    assert "at most" in answer.json()["error"]
    assert sent <= 300_000


def test_other_bodies_are_small(app):
    answer = ask(app, "PUT", "/api/audit/x", json={"decision": "relabel", "label": "x" * 70_000})
    assert answer.status_code == 413


def test_a_form_without_a_file_is_refused(app):
    assert ask(app, "POST", "/api/search", data={"k": "3"}).status_code == 422
    headers = {"content-type": "multipart/form-data"}
    assert ask(app, "POST", "/api/search", content=b"no form", headers=headers).status_code in (400, 422)


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "192.168.0.7", "", "[::1", "localhost.evil"]
)
def test_another_host_is_refused(app, host):
    answer = ask(app, "GET", "/api/status", headers={"host": host})
    assert answer.status_code == 421
    assert "Host" in answer.json()["error"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9", "[::1]:8000", "LOCALHOST:8000"])
def test_this_machine_by_any_name_is_served(app, host):
    assert ask(app, "GET", "/api/status", headers={"host": host}).status_code == 200


def test_a_server_on_a_network_answers_to_addresses_and_to_given_names(made_run):
    app = application(made_run, Access("0.0.0.0", TOKEN, ("birds.example",)))
    hosts = {"10.1.2.3:8000": 200, "Birds.example:8000": 200, socket.gethostname(): 200, "evil.example": 421}
    for host, status in hosts.items():
        assert ask(app, "GET", "/api/status", headers={**BEARER, "host": host}).status_code == status


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),
        ({"origin": BASE}, True),
        ({"origin": "https://evil.example"}, False),
        ({"origin": "null"}, False),
        ({"origin": "http://127.0.0.1:9999"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-origin"}, True),
    ],
)
def test_changes_must_come_from_the_page_of_the_server(app, headers, allowed):
    answer = ask(app, "DELETE", "/api/audit/none", headers=headers)
    assert answer.status_code == (404 if allowed else 403)
    sent = ask(app, "POST", "/api/search", files={"file": ("x", image_bytes())}, headers=headers)
    assert sent.status_code == (200 if allowed else 403)


def test_every_response_has_the_security_headers(app):
    for path in ("/", "/api/status", "/api/nothing", "/page/api.js", "/api/images/1/jpeg"):
        headers = ask(app, "GET", path).headers
        assert "default-src 'self'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert "access-control-allow-origin" not in headers
    assert ask(app, "GET", "/", headers={"host": "evil.example"}).headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize(
    "path", ["/page/../app.py", "/page/%2e%2e/app.py", "/page/..%2fapp.py", "/page//etc/passwd", "/page/%00", "/%00"]
)
def test_the_page_folder_is_not_left(app, path):
    assert ask(app, "GET", path).status_code == 404


def test_without_a_token_nothing_is_served(closed):
    for path in ("/api/status", "/api/images/1/jpeg", "/api/openapi.json", "/page/api.js", "/api/docs"):
        answer = ask(closed, "GET", path)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    assert ask(closed, "PUT", "/api/audit/x", json={}).status_code == 401
    page = ask(closed, "GET", "/")
    assert (page.status_code, page.headers["location"]) == (303, "/login")
    assert "Token" in ask(closed, "GET", "/login").text


@pytest.mark.parametrize("header", [f"Bearer {TOKEN}x", "Bearer ", f"Basic {TOKEN}", "Bearer é".encode(), TOKEN])
def test_a_wrong_token_is_refused(closed, header):
    assert ask(closed, "GET", "/api/status", headers={"authorization": header}).status_code == 401


def test_the_token_is_a_bearer_or_a_cookie_that_the_login_gives(closed):
    assert ask(closed, "GET", "/api/status", headers=BEARER).status_code == 200

    async def visit():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=closed), base_url=BASE) as client:
            wrong = await client.post("/login", data={"token": "wrong"})
            right = await client.post("/login", data={"token": TOKEN})
            return wrong, right, await client.get("/api/status"), await client.get("/login")

    wrong, right, status, login = asyncio.run(visit())
    assert wrong.status_code == 401
    assert "set-cookie" not in wrong.headers
    assert "not the token of the server" in wrong.text
    assert (right.status_code, right.headers["location"]) == (303, "/")
    assert {"HttpOnly", "SameSite=strict"} <= set(right.headers["set-cookie"].split("; "))
    assert TOKEN not in right.headers["set-cookie"]
    assert status.status_code == 200
    assert login.headers["location"] == "/"


def test_a_session_ends_with_its_server(made_run, closed):
    cookie = ask(closed, "POST", "/login", data={"token": TOKEN}).headers["set-cookie"].split(";")[0]
    other = application(made_run, Access("0.0.0.0", TOKEN))
    assert ask(closed, "GET", "/api/status", headers={"cookie": cookie}).status_code == 200
    assert ask(other, "GET", "/api/status", headers={"cookie": cookie}).status_code == 401


def test_a_token_is_not_shown():
    assert TOKEN not in repr(Access("0.0.0.0", TOKEN))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org"])
def test_binding_elsewhere_needs_a_token(host, tmp_path):
    with pytest.raises(ValueError, match="--token"):
        Access(host)
    with pytest.raises(SystemExit, match="give --token"):
        main(["serve", str(tmp_path), "--host", host])


def test_a_short_token_is_refused():
    with pytest.raises(ValueError, match="at least 16 characters, got 5"):
        Access("0.0.0.0", "short")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--port", "70000"), "--port must lie in"),
        (("--map-points", "0"), "--map-points must be at least 1"),
        (("--upload-megabytes", "0"), "upload_bytes must be at least 1"),
        (("--decoded-megapixels", "0"), "decoded_pixels must be at least 1"),
        (("--index", "nowhere"), "pfml index"),
    ],
)
def test_the_command_refuses_bad_options(made_run, options, message):
    with pytest.raises(SystemExit, match=message):
        main(["serve", str(made_run), *options])


def test_the_cache_of_thumbnails_is_bounded(tmp_path):
    for number in range(20):
        Image.effect_noise((200, 200), 80).save(tmp_path / f"{number}.png")
    held = Thumbnails(most_bytes=100_000)
    first = [held.get(number, str(tmp_path / f"{number}.png"), "thumbnail") for number in range(20)]
    assert sum(map(len, first)) > 100_000 >= held.held_bytes > 50_000
    (tmp_path / "19.png").unlink()
    assert held.get(19, str(tmp_path / "19.png"), "thumbnail") == first[19], "the newest is held"
    assert max(Image.open(io.BytesIO(first[0])).size) <= 224


def test_the_cache_of_uploads_is_bounded():
    held = Uploads(most=2)
    names = [held.add(number) for number in range(3)]
    assert [held.get(name) for name in names[1:]] == [1, 2]
    with pytest.raises(KeyError, match="send the image again"):
        held.get(names[0])
