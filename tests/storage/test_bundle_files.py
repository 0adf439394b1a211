"""Archives that somebody else has made: none may write outside of its folder, or more than it is allowed."""

import hashlib
import json
import stat
import struct
import zipfile

import pytest

from pfml.export import export_bundle, load_bundle
from pfml.storage.bundle import extract_zip
from pfml.storage.files import DamagedFileError
from pfml.storage.manifest import digest_of
from small_runs import save_model

CONTENT = b"some text"


def sealed(contents, **changes):
    """A manifest that is right about itself."""
    listed = {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in contents.items()}
    manifest = {"kind": "pfml bundle", "format_version": 1, "files": listed, **changes}
    return json.dumps({**manifest, "manifest_sha256": digest_of(manifest)}).encode()


def archive_of(path, entries, manifest=None):
    """An archive of (name or ZipInfo, data) pairs."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries:
            archive.writestr(name, data)
        if manifest is not None:
            archive.writestr("bundle.json", manifest)
    return path


def assert_refused(tmp_path, entries, manifest, match, **options):
    path = archive_of(tmp_path / "evil.zip", entries, manifest)
    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    with pytest.raises(DamagedFileError, match=match) as caught:
        extract_zip(path, target, **options)
    outside = [file for file in tmp_path.rglob("*") if file.is_file() and target not in file.parents]
    assert outside == [path]
    return caught


def test_an_honest_archive_is_unpacked(tmp_path):
    path = archive_of(tmp_path / "fine.zip", [("a/b.txt", CONTENT)], sealed({"a/b.txt": CONTENT}))
    (tmp_path / "target").mkdir()
    extract_zip(path, tmp_path / "target")
    assert (tmp_path / "target" / "a" / "b.txt").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "name",
    [
        "../evil.txt",
        "a/../../evil.txt",
        "/evil.txt",
        "//server/evil.txt",
        "C:/evil.txt",
        "C:evil.txt",
        "..\\evil.txt",
        "a\\..\\..\\evil.txt",
        ".hidden",
        "a//b",
        "./a",
        "a/./b",
        "a\nb",
        "na\u0457ve",
        "a b",
        "x" * 200,
    ],
)
def test_names_that_lead_elsewhere_are_refused_by_name(name, tmp_path):
    assert_refused(tmp_path, [(name, CONTENT)], sealed({name: CONTENT}), "names of files in .* must be letters")
    assert not (tmp_path / "evil.txt").exists()


def test_a_name_that_only_the_manifest_has_is_refused(tmp_path):
    assert_refused(tmp_path, [], sealed({"../evil.txt": CONTENT}), r"must be letters.*'\.\./evil\.txt'")


def test_a_zero_byte_does_not_hide_the_rest_of_a_name(tmp_path):
    path = archive_of(tmp_path / "x.zip", [("aXb", CONTENT)], sealed({"a": CONTENT}))
    path.write_bytes(path.read_bytes().replace(b"aXb", b"a\0b"))
    (tmp_path / "target").mkdir()
    with pytest.raises(DamagedFileError, match="must be letters"):
        extract_zip(path, tmp_path / "target")


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO])
def test_links_and_devices_are_refused_by_name(kind, tmp_path):
    entry = zipfile.ZipInfo("link")
    entry.create_system = 3
    entry.external_attr = (kind | 0o777) << 16
    assert_refused(
        tmp_path, [(entry, b"/etc/passwd")], sealed({"link": b"/etc/passwd"}), "link must be a plain file, got a"
    )


def test_a_file_twice_is_refused_by_name(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate"):
        assert_refused(
            tmp_path, [("a", CONTENT), ("a", b"other")], sealed({"a": CONTENT}), "a must be in the archive once"
        )


def test_names_that_some_systems_take_for_one_are_refused(tmp_path):
    files = {"a": CONTENT, "A": b"other"}
    assert_refused(tmp_path, files.items(), sealed(files), "differ by more than capital letters")


def test_an_entry_that_is_not_listed_and_one_that_is_missing_are_refused_by_name(tmp_path):
    assert_refused(tmp_path, [("a", CONTENT), ("extra", b"")], sealed({"a": CONTENT}), "extra is not listed")


def test_an_entry_that_is_missing_is_refused_by_name(tmp_path):
    assert_refused(
        tmp_path, [("a", CONTENT)], sealed({"a": CONTENT, "b": b""}), "b is listed in bundle.json, but is not in"
    )


def test_more_than_the_limit_is_refused_before_anything_is_unpacked(tmp_path):
    data = bytes(10_000)
    assert_refused(
        tmp_path, [("a", data)], sealed({"a": data}), "must unpack to at most 9,000 bytes, got", max_bytes=9_000
    )
    assert not list((tmp_path / "deep" / "target").iterdir())


def test_a_bomb_is_stopped_at_the_size_that_the_manifest_gives(tmp_path):
    bomb = zipfile.ZipInfo("a")
    bomb.compress_type = zipfile.ZIP_DEFLATED
    assert_refused(
        tmp_path, [(bomb, bytes(50_000_000))], sealed({"a": bytes(100)}), "a must have 100 bytes, got 50,000"
    )
    assert sum(file.stat().st_size for file in (tmp_path / "deep").rglob("*") if file.is_file()) < 10_000


def test_an_archive_that_unpacks_to_hundreds_of_times_its_size_is_refused_before_anything_is_written(tmp_path):
    bomb = zipfile.ZipInfo("a")
    bomb.compress_type = zipfile.ZIP_DEFLATED
    data = bytes(30_000_000)
    assert_refused(tmp_path, [(bomb, data)], sealed({"a": data}), "must unpack to at most 100 times its .* got 30,000")
    assert not list((tmp_path / "deep" / "target").iterdir())


def test_an_archive_that_was_packed_again_with_compression_is_taken(tmp_path):
    text = zipfile.ZipInfo("a")
    text.compress_type = zipfile.ZIP_DEFLATED
    data = b"a line that comes again and again\n" * 100_000
    path = archive_of(tmp_path / "fine.zip", [(text, data)], sealed({"a": data}))
    (tmp_path / "target").mkdir()
    extract_zip(path, tmp_path / "target")
    assert (tmp_path / "target" / "a").read_bytes() == data


def test_what_is_wrong_with_the_last_file_is_said_before_the_first_is_written(tmp_path):
    files = {"a": CONTENT, "b": b"promised"}
    assert_refused(tmp_path, [("a", CONTENT), ("b", b"other")], sealed(files), "b must have 8 bytes, got 5")
    assert not list((tmp_path / "deep" / "target").iterdir())


def test_a_header_that_lies_about_its_size_is_refused(tmp_path):
    path = archive_of(tmp_path / "x.zip", [("a", bytes(1000))], sealed({"a": bytes(1000)}))
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\x01\x02")
    content[at + 24 : at + 28] = struct.pack("<I", 10)  # the uncompressed size in the central directory
    path.write_bytes(content)
    (tmp_path / "target").mkdir()
    with pytest.raises(DamagedFileError):
        extract_zip(path, tmp_path / "target")


def test_a_huge_manifest_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("pfml.storage.bundle.LARGEST_LISTING", 1000)
    assert_refused(tmp_path, [], b" " * 1001, "bundle.json must have at most 1,000 bytes, got more")


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_other_compressions_are_refused_by_name(method, tmp_path):
    entry = zipfile.ZipInfo("a")
    entry.compress_type = method
    assert_refused(tmp_path, [(entry, CONTENT)], sealed({"a": CONTENT}), "a must be stored or deflated")


@pytest.mark.parametrize(
    "listed",
    [{"bytes": -1, "sha256": "0" * 64}, {"bytes": True, "sha256": "0" * 64}, {"bytes": 1, "sha256": "x"}, [], None],
)
def test_a_manifest_that_does_not_give_size_and_checksum_is_refused(listed, tmp_path):
    assert_refused(tmp_path, [("a", CONTENT)], sealed({}, files={"a": listed}), "must give size and sha256 of a")


def test_what_is_no_archive_or_has_no_manifest_is_refused(tmp_path):
    assert_refused(tmp_path, [("a", CONTENT)], None, "bundle.json at its top, but there is none")
    (tmp_path / "text.zip").write_text("no archive")
    with pytest.raises(DamagedFileError, match=r"must be a whole \.zip archive"):
        load_bundle(tmp_path / "text.zip")


def test_changed_and_cut_archives_are_refused_and_leave_no_folder(tmp_path, monkeypatch):
    save_model(tmp_path / "model")
    path = tmp_path / "bundle.zip"
    export_bundle(tmp_path / "model", path)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    whole = path.read_bytes()
    for at in (len(whole) // 3, len(whole) // 2):
        changed = bytearray(whole)
        changed[at] ^= 1
        path.write_bytes(changed)
        with pytest.raises(DamagedFileError):
            load_bundle(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DamagedFileError, match=r"must be a whole \.zip archive"):
        load_bundle(path)
    path.write_bytes(whole)
    with pytest.raises(DamagedFileError, match="must unpack to at most 1,000 bytes"):
        load_bundle(path, max_bytes=1000)
    assert not list((tmp_path / "temporary").iterdir())
    assert load_bundle(path).embedder.embedding_dim == 8
