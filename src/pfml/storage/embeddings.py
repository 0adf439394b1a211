"""An embedded collection: a folder of parts, which may be larger than memory.

embeddings.json      the model, the dimension, the type of the numbers; sealed with a checksum of itself
part-*.npy, .json    vectors and what is known of their images; see `pfml.storage.shard`
lock                 held by those who write

`pfml.search.collection` writes it; here it is read.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from pfml.storage.file_state import FileState, packed, unpacked
from pfml.storage.files import (
    DamagedFileError,
    named_errors,
    read_while_replaced,
    refuse_zip_bomb,
    write_atomically,
)
from pfml.storage.manifest import Format, read_manifest, write_manifest
from pfml.storage.shard import DTYPES, Part, PartSettings, part_names, read_part

__all__ = [
    "EmbeddedImages",
    "open_embeddings",
    "read_embeddings",
    "read_settings",
    "write_embeddings",
    "write_settings",
]

COLLECTION = Format("embedded collection", 2, "embed the images again with pfml embed")
#: Rows of a part that a place counts in; a part has fewer.
ROWS = 2**32


class EmbeddedImages:
    """Vectors of images, read from an embedded collection; made by `open_embeddings`.

    Paths and the states of files are in memory; vectors stay in files, which are mapped while they are used. The
    checksum of a part's vectors is compared when they are first used.
    """

    def __init__(self, folder: Path, settings: PartSettings) -> None:
        self.folder = folder
        self.settings = settings
        self.unreadable: dict[str, str] = {}  #: path -> why
        self._names: list[str] = []
        self._states: list[tuple[Tensor, Tensor]] = []
        self._place: dict[str, int] = {}  # path -> number of the part * ROWS + row
        self._checked: set[str] = set()
        for name in part_names(folder):
            self._take(read_part(folder, name, settings), name)

    def __len__(self) -> int:
        return len(self._place)

    def __repr__(self) -> str:
        kind = f"{self.settings.dtype} in {self.settings.dimension} dimensions"
        return f"EmbeddedImages({str(self.folder)!r}, {len(self):,} images, {kind}, {self.settings.model})"

    def __contains__(self, path: object) -> bool:
        return path in self._place

    @property
    def paths(self) -> list[str]:
        """The paths of all images, in the order of folders and names."""
        return sorted(self._place, key=lambda path: Path(path).parts)

    def file(self, path: str) -> FileState:
        """The state of an image's file when it was embedded; KeyError if the image is not there."""
        number, row = divmod(self._place[path], ROWS)
        return unpacked(*self._states[number], row)

    def vectors(self, paths: Sequence[str]) -> Tensor:
        """The vectors of some images, (len(paths), D), as they are stored; KeyError for an image that is not there."""
        found = torch.empty(len(paths), self.settings.dimension, dtype=DTYPES[self.settings.dtype])
        places = torch.tensor([self._place[path] for path in paths], dtype=torch.int64)
        for number in (places // ROWS).unique().tolist():
            here = places // ROWS == number
            found[here] = self._vectors(number)[1][places[here] % ROWS]
        return found

    def parts(self) -> Iterator[tuple[list[str], Tensor]]:
        """Paths and vectors (n, D), part by part: memory holds what of a part is used. Every image comes once."""
        for number in range(len(self._names)):
            part, vectors = self._vectors(number)
            rows = [row for row, path in enumerate(part.paths) if self._place.get(path) == number * ROWS + row]
            if rows:
                every = len(rows) == len(part.paths)
                yield [part.paths[row] for row in rows], vectors if every else vectors[rows]

    def _take(self, part: Part, name: str) -> None:
        """Take in a part, after all of higher revision."""
        number = len(self._names)
        self._names.append(name)
        self._states.append(packed(part.files))
        for row, path in enumerate(part.paths):
            if path not in self.unreadable:
                self._place.setdefault(path, number * ROWS + row)
        for path, reason in part.unreadable:
            if path not in self._place:
                self.unreadable.setdefault(path, reason)

    def _vectors(self, number: int) -> tuple[Part, Tensor]:
        name = self._names[number]
        try:
            part = read_part(self.folder, name, self.settings)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{self.folder / name}.json must be as it was when these embeddings were opened, but it is gone: "
                f"pfml embed has replaced it; open them again"
            ) from None
        if name not in self._checked:
            part.check(self.folder)
            self._checked.add(name)
        return part, part.vectors(self.folder, self.settings)


def open_embeddings(folder: str | Path) -> EmbeddedImages:
    """The embedded collection in `folder`, which `pfml embed --out FOLDER` wrote, as far as it has come."""
    folder = Path(folder)
    settings = read_settings(folder)
    return read_while_replaced(lambda: EmbeddedImages(folder, settings), lambda: part_names(folder), folder)


def read_settings(folder: Path) -> PartSettings:
    """The settings of the collection in `folder`; a damaged file is refused by name."""
    path = folder / "embeddings.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} must be a folder of embeddings, but there is no embeddings.json; make it with pfml embed"
        )
    content = read_manifest(path, COLLECTION)
    try:
        return PartSettings(**content["settings"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(f"{path} must describe embeddings, got {error!r}") from None


def write_settings(folder: Path, settings: PartSettings) -> None:
    """Make `folder` a collection with these settings.

    Raises:
        FileExistsError: If it is one already; of several processes at the same moment, one makes it.
    """
    write_manifest(folder / "embeddings.json", {"settings": asdict(settings)}, COLLECTION, is_new=True)


def write_embeddings(path: str | Path, names: Sequence[str | Path], embeddings: Tensor) -> None:
    """Write a NumPy archive with the arrays `paths` (N,) and `embeddings` (N, D), float32; no pickle in it."""
    import numpy

    if len(names) != len(embeddings):
        raise ValueError(f"there must be a name for each of {len(embeddings)} embeddings, got {len(names)}")
    path = Path(path)
    refuse_ending(path)
    content = io.BytesIO()
    numpy.savez(content, paths=numpy.array([str(name) for name in names]), embeddings=embeddings.float().cpu().numpy())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content.getvalue())


def refuse_ending(path: Path) -> None:
    """Raise ValueError unless the name is that of a NumPy archive."""
    if path.suffix != ".npz":
        raise ValueError(
            f"embeddings are written to a NumPy archive, so that the name must end in .npz, or to a folder in parts, "
            f"so that it must have no ending or end in /, got {path}"
        )


def read_embeddings(path: str | Path) -> tuple[list[str], Tensor]:
    """Names and embeddings (N, D) of an archive or of a folder, all in memory.

    An archive is what `write_embeddings` wrote. A folder is an embedded collection: its images come in the order of
    folders and names, in the type that is stored. `open_embeddings` reads one that is larger than memory.
    """
    import numpy
    import torch

    path = Path(path)
    if path.is_dir():
        collection = open_embeddings(path)
        return collection.paths, collection.vectors(collection.paths)
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be a NumPy archive or a folder of embeddings, but there is neither")
    # NumPy raises whatever it stumbles over, down to the errors of zlib
    with named_errors(path, "a NumPy archive of paths and embeddings", Exception):
        with zipfile.ZipFile(path) as packed:
            refuse_zip_bomb(path, packed)
        with numpy.load(path, allow_pickle=False) as archive:
            names, points = archive["paths"], archive["embeddings"]
        if names.ndim != 1 or points.ndim != 2 or len(names) != len(points):
            raise ValueError(f"arrays of shapes {names.shape} and {points.shape}")
        return [str(name) for name in names], torch.from_numpy(points)
