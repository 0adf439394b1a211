"""A bundle as one .zip file, and the way out of one that somebody else may have made.

Only what the manifest lists is extracted, to names that cannot lead out of the folder, as plain files, and not a byte
more than the manifest says and the caller allows, whatever the archive claims about itself. All that can be compared
without unpacking is compared before the first byte is written.
"""

from __future__ import annotations

import glob
import os
import stat
import zipfile
import zlib
from pathlib import Path
from typing import IO
from uuid import uuid4

from pfml.storage.files import DamagedFileError, refuse_zip_bomb, remove_partials
from pfml.storage.manifest import LARGEST_MANIFEST, MANIFEST, MOST_FILES, parse_manifest, require_safe_name

__all__ = ["LARGEST", "extract_archive", "write_archive"]

#: bytes that an archive may unpack to
LARGEST = 16 * 2**30
CHUNK = 2**20
ENCRYPTED = 0x1
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def write_archive(folder: Path, path: Path) -> None:
    """Put all files of `folder` into the archive `path`, which is whole or absent; equal files give equal bytes."""
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


def extract_archive(path: Path, folder: Path, *, max_bytes: int = LARGEST) -> None:
    """Unpack a bundle into the empty `folder`.

    Args:
        path: The archive; nothing in it is trusted.
        folder: Where to; it exists.
        max_bytes: What it may unpack to.

    Raises:
        DamagedFileError: If it is no bundle, or has an entry that no bundle has; the entry is named.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = _entries(archive, path)
            manifest = _read_manifest(archive, entries, path)
            files = parse_manifest(manifest, path)["files"]
            for name in entries:
                if name != MANIFEST and name not in files:
                    raise DamagedFileError(f"{path}: {name} is not listed in {MANIFEST}: it was added later")
            total = len(manifest) + sum(listed["bytes"] for listed in files.values())
            if total > max_bytes:
                raise DamagedFileError(
                    f"{path} must unpack to at most {max_bytes:,} bytes, got {total:,}; "
                    f"if you trust it, allow more with max_bytes"
                )
            for name, listed in files.items():
                if name not in entries:
                    raise DamagedFileError(f"{path}: {name} is listed in {MANIFEST}, but is not in the archive")
                if (size := entries[name].file_size) != listed["bytes"]:
                    raise DamagedFileError(
                        f"{path}: {name} must have {listed['bytes']:,} bytes, got {size:,}: it was changed"
                    )
            refuse_zip_bomb(path, archive)
            (folder / MANIFEST).write_bytes(manifest)  # from here on, there is something to write
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


def _read_manifest(archive: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo], path: Path) -> bytes:
    if MANIFEST not in entries:
        raise DamagedFileError(f"{path} must be a bundle with {MANIFEST} at its top, but there is none")
    with archive.open(entries[MANIFEST]) as file:
        content = file.read(LARGEST_MANIFEST + 1)
    if len(content) > LARGEST_MANIFEST:
        raise DamagedFileError(f"{path}: {MANIFEST} must have at most {LARGEST_MANIFEST:,} bytes, got more")
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
