"""Tensors and what describes them on disk: whole or absent, and proved whole when they are read.

A bundle `name` is a manifest `name.json`, which holds plain values and a checksum of itself, and a safetensors file
that the manifest names with its sha256. The tensors lie in a file of a new name that is complete before the manifest
is renamed into place. So whatever interrupts a save leaves the bundle that was there before. The checksum of a manifest
also says what the tensors that replace its own will be called: beside these and the bundle itself, an interrupted save
leaves one file at most. The next save removes both before it begins. Writers of one folder wait for each other.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor

from pfml.storage.files import (
    DamagedFileError,
    load_tensors,
    refuse_non_finite,
    remove_partials,
    save_tensors,
    write_atomically,
)

__all__ = ["digest_of", "next_tensors", "read_bundle", "write_bundle"]

FORMAT_VERSION = 1
#: How often a reader begins anew when a writer has replaced what it was about to read.
ATTEMPTS = 100
#: Seconds that a writer waits for another one.
PATIENCE = 600.0


def write_bundle(folder: Path, name: str, tensors: dict[str, Tensor], content: dict[str, Any]) -> None:
    """Make `tensors` and `content` (anything that JSON can hold) the bundle `name` of `folder`.

    Raises:
        DamagedFileError: If a tensor has NaN or Inf; the bundle that was there stays.
    """
    refuse_non_finite(tensors, f"what is to be saved as {folder / name}")
    folder.mkdir(parents=True, exist_ok=True)
    with _no_other_writer(folder):
        _write_bundle(folder, name, tensors, content)


def _write_bundle(folder: Path, name: str, tensors: dict[str, Tensor], content: dict[str, Any]) -> None:
    _remove_left_over(folder, name, _named_file(folder / f"{name}.json"))
    file = next_tensors(folder, name)
    sha256 = save_tensors(file, tensors)
    manifest = {
        "format_version": FORMAT_VERSION,
        **content,
        "tensors": {"file": file.name, "sha256": sha256, "bytes": file.stat().st_size},
    }
    sealed = {**manifest, "manifest_sha256": digest_of(manifest)}
    write_atomically(folder / f"{name}.json", (json.dumps(sealed, indent=2) + "\n").encode())
    _remove_left_over(folder, name, file.name)


def read_bundle(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Content and tensors of the bundle `name`; a damaged one is refused by the name of its file.

    A save that replaces the bundle meanwhile does no harm: what is read is one whole state.
    """
    path = folder / f"{name}.json"
    for _ in range(ATTEMPTS):
        before = path.read_bytes()
        try:
            return _read_once(folder, path)
        except (OSError, RuntimeError, DamagedFileError):
            # a file that vanishes while it is being read has many errors; torch's own is a RuntimeError
            if path.read_bytes() == before:
                raise
    raise OSError(f"{path} was replaced {ATTEMPTS} times while it was being read: try again later")


def _read_once(folder: Path, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    manifest = read_manifest(path)
    described = manifest.pop("tensors", None)
    try:
        file, sha256, expected = folder / Path(described["file"]).name, described["sha256"], described["bytes"]
        if not isinstance(sha256, str) or not isinstance(expected, int):
            raise TypeError
    except (KeyError, TypeError):
        raise DamagedFileError(f"{path} must name its tensors, got {described!r}") from None
    if not file.is_file():
        raise FileNotFoundError(f"{path} must have {file.name} beside it, but there is no such file")
    if file.stat().st_size != expected:
        size = file.stat().st_size
        raise DamagedFileError(f"{file} must have {expected:,} bytes, got {size:,}: it was cut short or replaced")
    tensors = load_tensors(file, sha256)
    refuse_non_finite(tensors, file)
    return manifest, tensors


def read_manifest(path: Path) -> dict[str, Any]:
    """The values of a manifest, after comparing its checksum."""
    return parse_manifest(path.read_bytes(), path)


def parse_manifest(content: bytes, path: Path) -> dict[str, Any]:
    """The values of a manifest that was read from `path`, after comparing its checksum."""
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path} must be a whole JSON file, got one that cannot be read: {error}") from None
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise DamagedFileError(
            f"{path} must have format_version {FORMAT_VERSION}, got {version!r}: "
            f"it was damaged, or written by another version of pfml"
        )
    if manifest.pop("manifest_sha256", None) != digest_of(manifest):
        raise DamagedFileError(
            f"{path} does not match its own checksum: it was damaged or changed after it was written"
        )
    return manifest


def next_tensors(folder: Path, name: str) -> Path:
    """Where the tensors of the next save of the bundle `name` will lie."""
    try:
        code = digest_of(read_manifest(folder / f"{name}.json"))
    except (OSError, ValueError):
        code = uuid4().hex  # there is no bundle, or a damaged one, whose tensors may still be wanted
    return folder / f"{name}-{code[:8]}.safetensors"


@contextmanager
def _no_other_writer(folder: Path) -> Iterator[None]:
    """Keep other processes and threads from writing bundles in `folder`: each would remove what the others write.

    Windows, and file systems over a network that cannot lock folders, keep nobody out.
    """
    if os.name == "nt":
        yield
        return
    import fcntl

    descriptor, end = os.open(folder, os.O_RDONLY), time.monotonic() + PATIENCE
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                    break  # there are no locks here
            if time.monotonic() > end:
                raise TimeoutError(f"{folder} has been written by another process for {PATIENCE:g} s: end that one")
            time.sleep(0.01)
        yield
    finally:
        # closing alone would leave it locked as long as a process lives that was forked meanwhile
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _named_file(path: Path) -> str | None:
    """The file of tensors that a manifest names; None if there is no manifest that can be read."""
    try:
        return str(read_manifest(path)["tensors"]["file"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove_left_over(folder: Path, name: str, kept: str | None) -> None:
    """Remove what interrupted saves have left: all tensors but those of the present bundle, and partial files.

    Tensors stay where no manifest says which of them count: a person may still want to rescue them.
    """
    remove_partials(folder, f"{name}[.-]*")
    for stale in folder.glob(f"{name}-????????.safetensors") if kept is not None else ():
        if stale.name != kept:
            stale.unlink(missing_ok=True)


def digest_of(manifest: dict[str, Any]) -> str:
    """The SHA-256 of the manifest's values, however they are laid out."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
