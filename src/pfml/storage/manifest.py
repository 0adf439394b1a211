"""The list of a bundle's files with their checksums: `bundle.json`.

A file that is not listed, or is not what is listed, is refused by its name. The names that a manifest may list are
few on purpose: plain words between slashes, so that none can lead out of the bundle's folder on any system.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from pfml.storage.files import DamagedFileError, sha256_of, write_atomically

__all__ = ["MANIFEST", "parse_manifest", "refuse_tampering", "require_safe_name", "write_manifest"]

MANIFEST = "bundle.json"
KIND = "pfml bundle"
FORMAT_VERSION = 1
MOST_FILES = 10_000
#: of bundle.json
LARGEST_MANIFEST = 2**24
SAFE_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """List every file of `folder` in its bundle.json, beside `content`."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    for name in names:
        require_safe_name(name, folder)
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)} for name in names}
    manifest = {"kind": KIND, "format_version": FORMAT_VERSION, **content, "files": files}
    sealed = {**manifest, "manifest_sha256": _digest(manifest)}
    write_atomically(folder / MANIFEST, (json.dumps(sealed, indent=2) + "\n").encode())


def parse_manifest(content: bytes, where: Path) -> dict[str, Any]:
    """The values of bundle.json: its checksum, its names and its sizes have been checked, the files not yet."""
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{where}: {MANIFEST} must be a whole JSON file, got {error}") from None
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise DamagedFileError(f"{where}: {MANIFEST} must be that of a pfml bundle, got something else")
    if manifest.get("format_version") != FORMAT_VERSION:
        found = manifest.get("format_version")
        raise DamagedFileError(
            f"{where}: {MANIFEST} must have format_version {FORMAT_VERSION}, got {found!r}: "
            f"another version of pfml wrote it"
        )
    if manifest.pop("manifest_sha256", None) != _digest(manifest):
        raise DamagedFileError(
            f"{where}: {MANIFEST} does not match its own checksum: it was damaged or changed after it was written"
        )
    _require_files(manifest.get("files"), where)
    return manifest


def refuse_tampering(folder: Path, files: dict[str, Any]) -> None:
    """Raise DamagedFileError by name at a file of `folder` that is missing, changed, a link, or not listed."""
    for name in _names_below(folder):
        if name != MANIFEST and name not in files:
            raise DamagedFileError(f"{folder / name} is not listed in {MANIFEST}: it was added later; remove it")
    for name, listed in files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedFileError(f"{path} is listed in {MANIFEST}, but there is no such file: restore the bundle")
        size = path.stat().st_size
        if size != listed["bytes"]:
            raise DamagedFileError(f"{path} must have {listed['bytes']:,} bytes, got {size:,}: it was changed")
        if (found := sha256_of(path)) != listed["sha256"]:
            raise DamagedFileError(
                f"{path} must have sha256 {listed['sha256'][:12]}..., got {found[:12]}...: it was damaged or changed"
            )


def require_safe_name(name: str, where: Path) -> None:
    """Raise ValueError unless `name` is a path of plain words, relative, that leads nowhere else."""
    if not isinstance(name, str) or not all(SAFE_PART.fullmatch(part) for part in name.split("/")):
        raise DamagedFileError(
            f"the names of files in {where} must be letters, digits, '_', '-' and '.' between slashes, got {name!r}"
        )


def _require_files(files: Any, where: Path) -> None:
    if not isinstance(files, dict) or not 0 < len(files) <= MOST_FILES:
        raise DamagedFileError(f"{where}: {MANIFEST} must list 1 to {MOST_FILES:,} files with their checksums")
    for name, listed in files.items():
        require_safe_name(name, where)
        size, digest = (listed.get("bytes"), listed.get("sha256")) if isinstance(listed, dict) else (None, None)
        if type(size) is not int or size < 0 or not re.fullmatch(r"[0-9a-f]{64}", str(digest)):
            raise DamagedFileError(f"{where}: {MANIFEST} must give size and sha256 of {name}, got {listed!r}")
    if len({name.lower() for name in files}) != len(files):  # which some file systems take for one
        raise DamagedFileError(f"{where}: {MANIFEST} must list names that differ by more than capital letters")


def _names_below(folder: Path) -> list[str]:
    """All files below `folder`; a link is refused."""
    names: list[str] = []
    for place, folders, files in os.walk(folder, followlinks=False):
        for entry in (*folders, *files):
            path = Path(place) / entry
            if path.is_symlink():
                raise DamagedFileError(f"{path} must be a file or a folder, got a link: a bundle has none")
        names += [(Path(place) / file).relative_to(folder).as_posix() for file in files]
    return names


def _digest(manifest: dict[str, Any]) -> str:
    """The SHA-256 of the manifest's values, however they are laid out."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
