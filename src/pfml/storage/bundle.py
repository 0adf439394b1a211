"""A bundle: a folder of files, or one .zip of it, in which `bundle.json` lists every file with its checksum.

A file that is not listed, or is not what is listed, is refused by its name. The names that may be listed are few on
purpose: plain words between slashes, so that none can lead out of the bundle's folder on any system.

Of a .zip that somebody else may have made, only what bundle.json lists is extracted, as plain files, and not a byte
more than it says and the caller allows, whatever the archive claims about itself. All that can be compared without
unpacking is compared before the first byte is written. zipfile's own `extractall` checks none of this.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from pfml.storage.files import DamagedFileError, refuse_zip_bomb, remove_partials, sha256_of
from pfml.storage.manifest import Format, parse_manifest, write_manifest

__all__ = [
    "LARGEST_BUNDLE",
    "LISTING",
    "extract_zip",
    "parse_listing",
    "read_listing",
    "refuse_tampering",
    "require_safe_name",
    "write_listing",
    "write_zip",
]

#: The name of the manifest.
LISTING = "bundle.json"
BUNDLE = Format("pfml bundle", 1, "export the run again with pfml export --to bundle")
MOST_FILES = 10_000
#: Bytes of bundle.json.
LARGEST_LISTING = 2**24
#: Bytes that a .zip may unpack to.
LARGEST_BUNDLE = 16 * 2**30
CHUNK = 2**20
SAFE_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
ENCRYPTED = 0x1
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def write_listing(folder: Path, content: dict[str, Any]) -> None:
    """List every file of `folder` in its bundle.json, beside `content`."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    for name in names:
        require_safe_name(name, folder)
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)} for name in names}
    write_manifest(folder / LISTING, {**content, "files": files}, BUNDLE)


def read_listing(folder: Path, where: Path) -> dict[str, Any]:
    """The content of the bundle.json of `folder`, as `parse_listing` gives it; errors name `where`."""
    path = folder / LISTING
    if not path.is_file():
        raise FileNotFoundError(
            f"{where} must be a bundle, but there is no {LISTING} in it; pfml export --to bundle packs a run"
        )
    if path.stat().st_size > LARGEST_LISTING:
        raise DamagedFileError(f"{path} must have at most {LARGEST_LISTING:,} bytes, got more")
    return parse_listing(path.read_bytes(), where)


def parse_listing(content: bytes, where: Path) -> dict[str, Any]:
    """The content of bundle.json: its checksum, its names and its sizes have been checked, the files not yet."""
    listing = parse_manifest(content, f"{where}: {LISTING}", BUNDLE)
    _require_files(listing.get("files"), where)
    return listing


def refuse_tampering(folder: Path, files: dict[str, Any]) -> None:
    """Raise DamagedFileError by name at a file of `folder` that is missing, changed, a link, or not listed."""
    for name in _names_below(folder):
        if name != LISTING and name not in files:
            raise DamagedFileError(f"{folder / name} is not listed in {LISTING}: it was added later; remove it")
    for name, listed in files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedFileError(f"{path} is listed in {LISTING}, but there is no such file: restore the bundle")
        size = path.stat().st_size
        if size != listed["bytes"]:
            raise DamagedFileError(f"{path} must have {listed['bytes']:,} bytes, got {size:,}: it was changed")
        if (found := sha256_of(path)) != listed["sha256"]:
            raise DamagedFileError(
                f"{path} must have sha256 {listed['sha256'][:12]}..., got {found[:12]}...: it was damaged or changed"
            )


def require_safe_name(name: str, where: Path) -> None:
    """Raise ValueError unless `name` is a path of plain words, relative, that leads nowhere else."""
    if not isinstance(name, str) or not all(SAFE_WORD.fullmatch(word) for word in name.split("/")):
        raise DamagedFileError(
            f"the names of files in {where} must be letters, digits, '_', '-' and '.' between slashes, got {name!r}"
        )


def write_zip(folder: Path, path: Path) -> None:
    """Put all files of `folder` into the .zip file `path`, which is whole or absent; equal files give equal bytes."""
    remove_partials(path.parent, f"{glob.escape(path.name)}.*")  # left by a kill
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:12]}.partial")
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    try:
        # weights do not get smaller by compression
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            for file in files:
                entry = zipfile.ZipInfo(file.relative_to(folder).as_posix())  # of 1980, at any time
                entry.external_attr = (stat.S_IFREG | 0o644) << 16
                with archive.open(entry, "w", force_zip64=True) as target, open(file, "rb") as source:
                    while chunk := source.read(CHUNK):
                        target.write(chunk)
        with open(temporary, "r+b") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def extract_zip(path: Path, folder: Path, *, max_bytes: int = LARGEST_BUNDLE) -> None:
    """Unpack a bundle into the empty `folder`.

    Args:
        path: The .zip file; nothing in it is trusted.
        folder: Where to; it exists.
        max_bytes: What it may unpack to.

    Raises:
        DamagedFileError: If it is no bundle, or has an entry that no bundle has; the entry is named.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = _entries(archive, path)
            listing = _read_listing(archive, entries, path)
            files = parse_listing(listing, path)["files"]
            for name in entries:
                if name != LISTING and name not in files:
                    raise DamagedFileError(f"{path}: {name} is not listed in {LISTING}: it was added later")
            total = len(listing) + sum(listed["bytes"] for listed in files.values())
            if total > max_bytes:
                raise DamagedFileError(
                    f"{path} must unpack to at most {max_bytes:,} bytes, got {total:,}; "
                    f"if you trust it, allow more with max_bytes"
                )
            for name, listed in files.items():
                if name not in entries:
                    raise DamagedFileError(f"{path}: {name} is listed in {LISTING}, but is not in the archive")
                if (size := entries[name].file_size) != listed["bytes"]:
                    raise DamagedFileError(
                        f"{path}: {name} must have {listed['bytes']:,} bytes, got {size:,}: it was changed"
                    )
            refuse_zip_bomb(path, archive)
            (folder / LISTING).write_bytes(listing)  # from here on, there is something to write
            for name, listed in files.items():
                _extract(archive, entries[name], folder / name, listed["bytes"], path)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, UnicodeDecodeError) as error:
        raise DamagedFileError(f"{path} must be a whole .zip archive, got one that cannot be read: {error}") from None


def _entries(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    """The files of the archive by name, after refusing what a bundle never has."""
    found: dict[str, zipfile.ZipInfo] = {}
    if len(archive.infolist()) > 2 * MOST_FILES:
        raise DamagedFileError(f"{path} must have at most {2 * MOST_FILES:,} entries, got {len(archive.infolist()):,}")
    for entry in archive.infolist():
        # as it was written: the module cuts a name off at a zero byte
        name = entry.orig_filename
        require_safe_name(name.removesuffix("/"), path)
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if kind not in (0, stat.S_IFDIR if entry.is_dir() else stat.S_IFREG):
            raise DamagedFileError(f"{path}: {name} must be a plain file, got a link or a device: a bundle has none")
        if entry.flag_bits & ENCRYPTED or entry.compress_type not in METHODS:
            raise DamagedFileError(f"{path}: {name} must be stored or deflated, and not encrypted")
        if name in found:
            raise DamagedFileError(f"{path}: {name} must be in the archive once, got it twice")
        if not entry.is_dir():
            found[name] = entry
    return found


def _read_listing(archive: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo], path: Path) -> bytes:
    if LISTING not in entries:
        raise DamagedFileError(f"{path} must be a bundle with {LISTING} at its top, but there is none")
    with archive.open(entries[LISTING]) as file:
        content = file.read(LARGEST_LISTING + 1)
    if len(content) > LARGEST_LISTING:
        raise DamagedFileError(f"{path}: {LISTING} must have at most {LARGEST_LISTING:,} bytes, got more")
    return content


def _extract(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path, size: int, path: Path) -> None:
    """Write one entry, which must have `size` bytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(entry) as source, open(target, "xb") as file:
        if (written := _copied(source, file, size)) != size:
            more = "more" if written > size else f"{written:,}"
            raise DamagedFileError(f"{path}: {entry.filename} must have {size:,} bytes, got {more}: it was changed")


def _copied(source: IO[bytes], target: IO[bytes], size: int) -> int:
    """How many bytes were there to copy; of more than `size`, one more is read and none is written."""
    done = 0
    while chunk := source.read(min(CHUNK, size + 1 - done)):
        done += len(chunk)
        if done > size:
            break
        target.write(chunk)
    return done


def _require_files(files: Any, where: Path) -> None:
    if not isinstance(files, dict) or not 0 < len(files) <= MOST_FILES:
        raise DamagedFileError(f"{where}: {LISTING} must list 1 to {MOST_FILES:,} files with their checksums")
    for name, listed in files.items():
        require_safe_name(name, where)
        size, digest = (listed.get("bytes"), listed.get("sha256")) if isinstance(listed, dict) else (None, None)
        if type(size) is not int or size < 0 or not re.fullmatch(r"[0-9a-f]{64}", str(digest)):
            raise DamagedFileError(f"{where}: {LISTING} must give size and sha256 of {name}, got {listed!r}")
    if len({name.lower() for name in files}) != len(files):  # which some file systems take for one
        raise DamagedFileError(f"{where}: {LISTING} must list names that differ by more than capital letters")


def _names_below(folder: Path) -> list[str]:
    """All files below `folder`; a link is refused."""
    names: list[str] = []
    for parent, folders, files in os.walk(folder, followlinks=False):
        for entry in (*folders, *files):
            path = Path(parent) / entry
            if path.is_symlink():
                raise DamagedFileError(f"{path} must be a file or a folder, got a link: a bundle has none")
        names += [(Path(parent) / file).relative_to(folder).as_posix() for file in files]
    return names
