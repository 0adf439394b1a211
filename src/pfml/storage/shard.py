"""A part of an embedded collection: the vectors of some images, and beside them what is known of these images.

part-RRR-DIGEST.npy     (n, D) float32 or float16, a plain NumPy array
part-RRR-DIGEST.json    row by row: paths, and size, time and SHA-256 of each file; then what could not be read, and
                        the SHA-256 of the array; sealed with a checksum of itself

A part exists from the moment that its JSON file is renamed into place, and never changes. DIGEST is made of the paths
and the states of the files, so that the same images give the same two files, whoever writes them and how often. RRR is
the revision: 0 for images that no part mentioned before, else one more than that of the part that did. Of an image that
several parts mention, the highest revision counts.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pfml.storage.file_state import FileState
from pfml.storage.files import DamagedFileError, sha256_of, write_atomically
from pfml.storage.manifest import Format, read_manifest, write_manifest

__all__ = ["DTYPES", "Part", "PartSettings", "part_names", "read_part", "remove_part", "write_part"]

SHARD = Format("vector shard", 2, "embed the images again with pfml embed")

#: How vectors may be stored.
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True)
class PartSettings:
    """What all parts of a collection have in common.

    Args:
        model: The model in words.
        model_digest: 64 hexadecimal digits that name the model.
        dimension: D.
        dtype: A key of `DTYPES`.
        part_images: Images that are embedded and written together.
    """

    model: str
    model_digest: str
    dimension: int
    dtype: str
    part_images: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name in ("dimension", "part_images"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {getattr(self, name)!r}")

    def of_part(self) -> dict[str, Any]:
        """What a part must agree on with its collection."""
        return {"model_digest": self.model_digest, "dimension": self.dimension, "dtype": self.dtype}


@dataclass(frozen=True, eq=False)
class Part:
    """What is known of the images of a part.

    Args:
        revision: See the module.
        paths: Of the images, absolute, row by row.
        files: The state of each file when it was embedded.
        unreadable: Paths that could not be read, and why.
        sha256: Of the array's file; "" before it is written.
    """

    revision: int
    paths: tuple[str, ...]
    files: tuple[FileState, ...]
    unreadable: tuple[tuple[str, str], ...]
    sha256: str = ""

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.files):
            raise ValueError(f"files must be {len(self.paths)}, one per path, got {len(self.files)}")

    @property
    def name(self) -> str:
        """What the part's files are called, without an ending."""
        states = [(file.size, file.modified, file.sha256) for file in self.files]
        content = json.dumps([self.paths, states, [path for path, _ in self.unreadable]])
        return f"part-{self.revision:03d}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"

    def mentioned(self) -> tuple[str, ...]:
        """All paths of which the part says something."""
        return (*self.paths, *(path for path, _ in self.unreadable))

    def check(self, folder: Path) -> None:
        """Raise DamagedFileError unless the array is, byte by byte, what was written."""
        path = folder / f"{self.name}.npy"
        if not path.is_file():
            raise DamagedFileError(f"{path} must lie beside its .json, but there is no such file")
        if (found := sha256_of(path)) != self.sha256:
            size = path.stat().st_size
            raise DamagedFileError(
                f"{path} must have sha256 {self.sha256[:12]}..., got {found[:12]}... ({size:,} bytes): "
                f"it was damaged or changed after it was written; pfml embed writes it anew"
            )

    def vectors(self, folder: Path, settings: PartSettings) -> Tensor:
        """(n, D), mapped from the file: what is not used stays on disk, and changes to it stay in memory."""
        import numpy

        path = folder / f"{self.name}.npy"
        try:
            found = torch.from_numpy(numpy.load(path, mmap_mode="c", allow_pickle=False))
        except (ValueError, TypeError, EOFError) as error:
            raise DamagedFileError(f"{path} must be a NumPy array, got one that cannot be read: {error}") from None
        expected = (len(self.paths), settings.dimension)
        if tuple(found.shape) != expected or found.dtype != DTYPES[settings.dtype]:
            raise DamagedFileError(
                f"{path} must hold {settings.dtype} of shape {expected}, got {found.dtype} of {tuple(found.shape)}"
            )
        return found


def write_part(folder: Path, settings: PartSettings, part: Part, vectors: Tensor) -> None:
    """Write a part: the array first, and the JSON file that makes it count last."""
    import numpy

    if tuple(vectors.shape) != (len(part.paths), settings.dimension):
        raise ValueError(
            f"vectors must have shape ({len(part.paths)}, {settings.dimension}), got {tuple(vectors.shape)}"
        )
    content = io.BytesIO()
    numpy.save(content, vectors.to("cpu", DTYPES[settings.dtype]).numpy(), allow_pickle=False)
    array = content.getvalue()
    write_atomically(folder / f"{part.name}.npy", array)
    columns = {name: [getattr(file, name) for file in part.files] for name in ("size", "modified", "sha256")}
    described = {
        **settings.of_part(),
        "revision": part.revision,
        "images": {"path": part.paths, **columns},
        "unreadable": part.unreadable,
        "array_sha256": hashlib.sha256(array).hexdigest(),
    }
    write_manifest(folder / f"{part.name}.json", described, SHARD, indent=None)


def read_part(folder: Path, name: str, settings: PartSettings) -> Part:
    """What is known of a part, after comparing the checksum of its JSON file; the array is not looked at."""
    path = folder / f"{name}.json"
    manifest = read_manifest(path, SHARD)
    try:
        images = manifest["images"]
        columns = zip(images["size"], images["modified"], images["sha256"], strict=True)
        part = Part(
            int(manifest["revision"]),
            tuple(map(str, images["path"])),
            tuple(FileState(int(size), int(modified), str(sha256)) for size, modified, sha256 in columns),
            tuple((str(image), str(reason)) for image, reason in manifest["unreadable"]),
            str(manifest["array_sha256"]),
        )
        found = {key: manifest[key] for key in settings.of_part()}
        if part.name != name:
            raise ValueError(f"the contents of {part.name}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFileError(f"{path} must describe a part of embeddings, got {error!r}") from None
    if found != settings.of_part():
        raise ValueError(f"{path} must belong to {settings.of_part()}, got {found}: remove it, and embed again")
    return part


def remove_part(folder: Path, name: str) -> None:
    """Remove a part, whatever is left of it: what makes it count first."""
    (folder / f"{name}.json").unlink(missing_ok=True)
    (folder / f"{name}.npy").unlink(missing_ok=True)


def part_names(folder: Path) -> list[str]:
    """The names of all parts that exist, the highest revision first."""
    names = sorted(path.stem for path in folder.glob("part-*-*.json"))
    return sorted(names, key=_revision, reverse=True)


def _revision(name: str) -> int:
    digits = name.split("-")[1]
    return int(digits) if digits.isdecimal() else 0
