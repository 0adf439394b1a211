"""Tensors and what describes them on disk: whole or absent, and proved whole when they are read.

`name.json`                 a sealed manifest, which names the tensors' file with its sha256
`name-1a2b3c4d.safetensors` the tensors

The tensors lie in a file of a new name that is complete before the manifest is renamed into place. So whatever
interrupts a save leaves the state that was there before. The checksum of a manifest also says what the tensors that
replace its own will be called: beside these and the present state, an interrupted save leaves one file at most. The
next save removes both before it begins. Writers of one folder wait for each other.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor

from pfml.storage.files import (
    DamagedFileError,
    load_tensors,
    read_while_replaced,
    refuse_non_finite,
    remove_partials,
    save_tensors,
    sha256_of,
)
from pfml.storage.lock import locked_folder
from pfml.storage.manifest import Format, digest_of, parse_manifest, read_manifest, write_manifest

__all__ = ["copy_file", "copy_sealed_tensors", "next_tensors", "read_sealed_tensors", "write_sealed_tensors"]

#: Seconds that a writer waits for another one.
PATIENCE = 600.0


def write_sealed_tensors(
    folder: Path, name: str, tensors: dict[str, Tensor], content: dict[str, Any], form: Format
) -> None:
    """Write `tensors` and `content` (anything that JSON can hold) as `name` to `folder`, replacing what is there.

    Raises:
        DamagedFileError: If a tensor has NaN or Inf; what was there stays.
    """
    refuse_non_finite(tensors, f"what is to be saved as {folder / name}")
    folder.mkdir(parents=True, exist_ok=True)
    # each writer would remove what the others write; where nothing can be locked, nobody is kept out
    with locked_folder(folder, wait=PATIENCE) as held:
        if held is False:
            raise TimeoutError(f"{folder} has been written by another process for {PATIENCE:g} s: end that one")
        _remove_left_over(folder, name, _named_file(folder / f"{name}.json", form))
        file = next_tensors(folder, name, form)
        sha256 = save_tensors(file, tensors)
        described = {"file": file.name, "sha256": sha256, "bytes": file.stat().st_size}
        write_manifest(folder / f"{name}.json", {**content, "tensors": described}, form)
        _remove_left_over(folder, name, file.name)


def read_sealed_tensors(folder: Path, name: str, form: Format) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Content and tensors of `name`; a damaged file is refused by name.

    A save that replaces them meanwhile does no harm: what is read is one whole state.
    """
    path = folder / f"{name}.json"
    return read_while_replaced(lambda: _read(folder, path, form), path.read_bytes, path)


def _read(folder: Path, path: Path, form: Format) -> tuple[dict[str, Any], dict[str, Tensor]]:
    manifest = read_manifest(path, form)
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


def copy_sealed_tensors(folder: Path, name: str, target: Path, form: Format) -> dict[str, Any]:
    """Copy `name` from `folder` to `target`; the content of the manifest.

    The manifest is read once, so that the copy is of one state, whoever writes meanwhile.
    """
    text = (folder / f"{name}.json").read_bytes()
    content = parse_manifest(text, folder / f"{name}.json", form)
    target.mkdir(parents=True, exist_ok=True)
    file = folder / Path(content["tensors"]["file"]).name
    copy_file(file, target)
    if sha256_of(target / file.name) != content["tensors"]["sha256"]:
        raise DamagedFileError(
            f"{file} is not what {name}.json says: it was damaged or changed; restore it from a copy"
        )
    (target / f"{name}.json").write_bytes(text)
    return content


def copy_file(file: Path, folder: Path) -> None:
    """Copy a file that a manifest names, and that another process may have replaced since, into `folder`."""
    try:
        shutil.copyfile(file, folder / file.name)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{file} must be there to be copied, and is not: "
            f"if another process has changed it in this moment, try again"
        ) from None


def next_tensors(folder: Path, name: str, form: Format) -> Path:
    """Where the tensors of the next save of `name` will lie."""
    try:
        code = digest_of(read_manifest(folder / f"{name}.json", form))
    except (OSError, ValueError):
        code = uuid4().hex  # there is none, or a damaged one, whose tensors may still be wanted
    return folder / f"{name}-{code[:8]}.safetensors"


def _named_file(path: Path, form: Format) -> str | None:
    """The file of tensors that a manifest names; None if there is no manifest that can be read."""
    try:
        return str(read_manifest(path, form)["tensors"]["file"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove_left_over(folder: Path, name: str, kept: str | None) -> None:
    """Remove what interrupted saves have left: all tensors but those of the present state, and partial files.

    Tensors stay where no manifest says which of them count: a person may still want to rescue them.
    """
    remove_partials(folder, f"{name}[.-]*")
    for stale in folder.glob(f"{name}-????????.safetensors") if kept is not None else ():
        if stale.name != kept:
            stale.unlink(missing_ok=True)
