"""An embedded collection: a folder of shards, which may be larger than memory.

embeddings.json             the model, the dimension, the type of the numbers; a sealed manifest
shard-RRR-*.safetensors     vectors and what is known of their images; see `pfml.storage.shard`
lock                        held by those who write

The rest of a shard's name is a digest of the paths and of the states of the files: the same images give the same file,
whoever writes them and how often. RRR is the revision: 0 for images that no shard mentioned before, else one more than
that of the shard that did. Of an image that several shards mention, the highest revision counts.

`pfml.search.collection` writes a collection; here it is read.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pfml.storage.file_state import FileState, unpacked
from pfml.storage.files import (
    DamagedFileError,
    named_errors,
    read_while_replaced,
    refuse_zip_bomb,
    write_atomically,
)
from pfml.storage.manifest import Format, read_manifest, write_manifest
from pfml.storage.shard import DTYPES, ShardFile, VectorShard, read_columns, write_shard

__all__ = [
    "CollectionSettings",
    "EmbeddedImages",
    "add_shard",
    "open_embeddings",
    "read_embeddings",
    "read_settings",
    "revision_of",
    "shard_files",
    "shard_of",
    "write_embeddings",
    "write_settings",
]

COLLECTION = Format("embedded collection", 2, "embed the images again with pfml embed")
#: More rows than a shard has: a position is the number of the shard times this, plus the row.
ROWS = 2**32


@dataclass(frozen=True)
class CollectionSettings:
    """What all shards of a collection have in common.

    Args:
        model: The model in words.
        model_digest: 64 hexadecimal digits that name the model.
        dimension: D.
        dtype: A key of `DTYPES`.
        shard_images: Images that are embedded and written together.
    """

    model: str
    model_digest: str
    dimension: int
    dtype: str
    shard_images: int

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name in ("dimension", "shard_images"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {getattr(self, name)!r}")


class EmbeddedImages:
    """Vectors of images, read from an embedded collection; made by `open_embeddings`.

    Paths and the states of files are in memory; vectors stay in files, and are compared with their checksums when they
    are first used.
    """

    def __init__(self, folder: Path, settings: CollectionSettings) -> None:
        self.folder = folder
        self.settings = settings
        self.unreadable: dict[str, str] = {}  #: path -> why
        self._files: list[Path] = []
        self._states: list[tuple[Tensor, Tensor]] = []
        self._good: list[dict[str, tuple[int, ...]]] = []
        self._position: dict[str, int] = {}  # by path
        for file in shard_files(folder):
            self._take(shard_of(file, settings), file)

    def __len__(self) -> int:
        return len(self._position)

    def __repr__(self) -> str:
        kind = f"{self.settings.dtype} in {self.settings.dimension} dimensions"
        return f"EmbeddedImages({str(self.folder)!r}, {len(self):,} images, {kind}, {self.settings.model})"

    def __contains__(self, path: object) -> bool:
        return path in self._position

    @property
    def paths(self) -> list[str]:
        """The paths of all images, in the order of folders and names."""
        return sorted(self._position, key=lambda path: Path(path).parts)

    def file(self, path: str) -> FileState:
        """The state of an image's file when it was embedded; KeyError if the image is not there."""
        number, row = divmod(self._position[path], ROWS)
        return unpacked(*self._states[number], row)

    def vectors(self, paths: Sequence[str]) -> Tensor:
        """The vectors of some images, (len(paths), D), as they are stored; KeyError for an image that is not there."""
        found = torch.empty(len(paths), self.settings.dimension, dtype=DTYPES[self.settings.dtype])
        positions = torch.tensor([self._position[path] for path in paths], dtype=torch.int64)
        for number in (positions // ROWS).unique().tolist():
            here = positions // ROWS == number
            found[here] = self._opened(number).stored("vectors")[positions[here] % ROWS]
        return found

    def shards(self) -> Iterator[tuple[list[str], Tensor]]:
        """Paths and vectors (n, D), shard by shard: memory holds one. Every image comes once."""
        for number in range(len(self._files)):
            file = self._opened(number)
            paths = json.loads(file.tensor("columns").numpy().tobytes())["paths"]
            rows = [row for row, path in enumerate(paths) if self._position.get(path) == number * ROWS + row]
            if rows:
                yield [paths[row] for row in rows], file.stored("vectors")[torch.tensor(rows)]

    def _take(self, shard: VectorShard, file: Path) -> None:
        """Take in a shard, after all of higher revision."""
        number = len(self._files)
        self._files.append(file)
        self._states.append((shard.states, shard.digests))
        self._good.append({})
        for row, path in enumerate(shard.paths):
            if path not in self.unreadable:
                self._position.setdefault(path, number * ROWS + row)
        for path, reason in shard.unreadable:
            if path not in self._position:
                self.unreadable.setdefault(path, reason)

    def _opened(self, number: int) -> ShardFile:
        """The file of a shard, closed when it is no longer used: a collection may have more than can be open."""
        try:
            return ShardFile(self._files[number], good=self._good[number])
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{self._files[number]} must be as it was when these embeddings were opened, but it is gone: "
                f"pfml embed has replaced it; open them again"
            ) from None


def open_embeddings(folder: str | Path) -> EmbeddedImages:
    """The embedded collection in `folder`, which `pfml embed --out FOLDER` wrote, as far as it has come."""
    folder = Path(folder)
    settings = read_settings(folder)
    # a writer may replace a shard after its name was read
    return read_while_replaced(lambda: EmbeddedImages(folder, settings), lambda: shard_files(folder), folder)


def read_settings(folder: Path) -> CollectionSettings:
    """The settings of the collection in `folder`; a damaged file is refused by name."""
    path = folder / "embeddings.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} must be a folder of embeddings, but there is no embeddings.json; make it with pfml embed"
        )
    content = read_manifest(path, COLLECTION)
    try:
        return CollectionSettings(**content["settings"])
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(f"{path} must describe embeddings, got {error!r}") from None


def write_settings(folder: Path, settings: CollectionSettings) -> None:
    """Make `folder` a collection with these settings.

    Raises:
        FileExistsError: If it is one already; of several processes at the same moment, one makes it.
    """
    write_manifest(folder / "embeddings.json", {"settings": asdict(settings)}, COLLECTION, is_new=True)


def shard_files(folder: Path) -> list[Path]:
    """The shards of a collection, the highest revision first."""
    files = sorted(folder.glob("shard-*-*.safetensors"))
    return sorted(files, key=revision_of, reverse=True)


def revision_of(file: Path) -> int:
    """The revision of a shard, by its name."""
    digits = file.name.split("-")[1]
    return int(digits) if digits.isdecimal() else 0


def shard_of(file: Path, settings: CollectionSettings) -> VectorShard:
    """The shard of a collection in a file; its vectors stay there, and are compared when they are used."""
    shard = read_columns(file, dimension=settings.dimension, dtype=settings.dtype)
    assert shard.origin is not None
    found = shard.origin.manifest["model_digest"]
    if found != settings.model_digest:
        raise ValueError(
            f"{file} must have vectors of the model {settings.model_digest[:12]}, got {str(found)[:12]}: "
            f"remove it, and embed again"
        )
    if file.stem != (name := _name(shard, revision_of(file))):
        raise DamagedFileError(f"{file} must be named for its content, {name}: it was renamed, or replaced by another")
    return shard


def add_shard(folder: Path, settings: CollectionSettings, shard: VectorShard, revision: int) -> None:
    """Write a shard to a collection."""
    assert isinstance(shard.vectors, Tensor)
    if tuple(shard.vectors.shape) != (len(shard.paths), settings.dimension):
        raise ValueError(
            f"vectors must have shape ({len(shard.paths)}, {settings.dimension}), got {tuple(shard.vectors.shape)}"
        )
    stored = replace(shard, vectors=shard.vectors.to("cpu", DTYPES[settings.dtype]))
    path = folder / f"{_name(shard, revision)}.safetensors"
    write_shard(path, stored, model_digest=settings.model_digest)


def _name(shard: VectorShard, revision: int) -> str:
    digest = hashlib.sha256(json.dumps([revision, shard.mentioned(), len(shard)]).encode())
    digest.update(shard.states.numpy().tobytes())
    digest.update(shard.digests.numpy().tobytes())
    return f"shard-{revision:03d}-{digest.hexdigest()[:16]}"


def write_embeddings(path: str | Path, names: Sequence[str | Path], embeddings: Tensor) -> None:
    """Write a NumPy file (.npz) with the arrays `paths` (N,) and `embeddings` (N, D), float32; no pickle in it."""
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
    """Raise ValueError unless the name is that of a NumPy file (.npz)."""
    if path.suffix != ".npz":
        raise ValueError(
            f"embeddings are written to a NumPy file, so that the name must end in .npz, or to a folder of shards, "
            f"so that it must have no ending or end in /, got {path}"
        )


def read_embeddings(path: str | Path) -> tuple[list[str], Tensor]:
    """Names and embeddings (N, D) of a NumPy file or of a folder, all in memory.

    The file is what `write_embeddings` wrote. A folder is an embedded collection: its images come in the order of
    folders and names, in the type that is stored. `open_embeddings` reads one that is larger than memory.
    """
    import numpy

    path = Path(path)
    if path.is_dir():
        collection = open_embeddings(path)
        return collection.paths, collection.vectors(collection.paths)
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be a NumPy file (.npz) or a folder of embeddings, but there is neither")
    # NumPy raises whatever it stumbles over, down to the errors of zlib
    with named_errors(path, "a NumPy file of paths and embeddings", Exception):
        with zipfile.ZipFile(path) as packed:
            refuse_zip_bomb(path, packed)
        with numpy.load(path, allow_pickle=False) as archive:
            names, points = archive["paths"], archive["embeddings"]
        if names.ndim != 1 or points.ndim != 2 or len(names) != len(points):
            raise ValueError(f"arrays of shapes {names.shape} and {points.shape}")
        return [str(name) for name in names], torch.from_numpy(points)
