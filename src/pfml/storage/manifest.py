"""The sealed manifest: a JSON file that names its kind and version and carries a checksum of itself.

    {"kind": "image index", "format_version": 2, ..., "manifest_sha256": "..."}

Every format of pfml begins with one, and all are written and read here, so that all of them refuse damage, another kind
and another version in the same words.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfml.storage.files import DamagedFileError, create_atomically, write_atomically

__all__ = ["Format", "FormatVersionError", "digest_of", "parse_manifest", "read_manifest", "sealed", "write_manifest"]

KIND, VERSION, SEAL = "kind", "format_version", "manifest_sha256"


class FormatVersionError(DamagedFileError):
    """A whole file of a version that this code does not read."""


@dataclass(frozen=True)
class Format:
    """A kind of file, and the version of it that this code writes and reads.

    Args:
        kind: What the file is, in words.
        version: Raised with every change that older code cannot read.
        remedy: What to do about a file of another version.
    """

    kind: str
    version: int
    remedy: str


def write_manifest(
    path: Path, content: dict[str, Any], form: Format, *, indent: int | None = 2, is_new: bool = False
) -> None:
    """Write a manifest of the format `form`.

    Args:
        path: The file.
        content: Anything that JSON can hold.
        form: The format.
        indent: Of the lines, for people who read it; None for one long line.
        is_new: Whether a file that is there already is an error (FileExistsError), and not replaced.
    """
    text = (json.dumps(sealed(content, form), indent=indent) + "\n").encode()
    if is_new:
        create_atomically(path, text)
    else:
        write_atomically(path, text)


def read_manifest(path: Path, form: Format) -> dict[str, Any]:
    """The content of a manifest, without kind, version and checksum, which must be right."""
    return parse_manifest(path.read_bytes(), path, form)


def sealed(content: dict[str, Any], form: Format) -> dict[str, Any]:
    """`content` with kind, version and checksum."""
    # as JSON gives it back: tuples are lists, keys are texts
    values = json.loads(json.dumps({KIND: form.kind, VERSION: form.version, **content}))
    return {**values, SEAL: digest_of(values)}


def parse_manifest(text: bytes, where: Path | str, form: Format) -> dict[str, Any]:
    """The content of a manifest that was read from `where`.

    Raises:
        FormatVersionError: If it is whole, and of another version.
        DamagedFileError: If it is no manifest, of another kind, or not what was written.
    """
    try:
        values = json.loads(text)
        is_whole = isinstance(values, dict) and values.pop(SEAL, None) == digest_of(values)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{where} must be a whole JSON file, got one that cannot be read: {error}") from None
    if not isinstance(values, dict) or KIND not in values:
        raise DamagedFileError(f"{where} must be the manifest of {_named(form.kind)}, got one that names no kind")
    kind, version = values.pop(KIND), values.pop(VERSION, None)
    if kind != form.kind:
        raise DamagedFileError(f"{where} must be the manifest of {_named(form.kind)}, got the kind {kind!r}")
    if version != form.version:
        refusal = FormatVersionError if is_whole else DamagedFileError
        damaged = "" if is_whole else "it does not match its own checksum and may be damaged; else "
        raise refusal(
            f"{where} must be {_named(form.kind)} of format version {form.version}, got version {version!r}: {damaged}"
            f"use the pfml that wrote it, or {form.remedy}"
        )
    if not is_whole:
        raise DamagedFileError(
            f"{where} does not match its own checksum: it was damaged or changed after it was written"
        )
    return values


def digest_of(values: dict[str, Any]) -> str:
    """The SHA-256 of values that JSON can hold, however they are laid out."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _named(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
