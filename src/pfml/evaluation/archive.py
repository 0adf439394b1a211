"""Embeddings as a file that other programs read, and the way back, also from a folder of parts."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from pfml.evaluation.collection import open_embeddings
from pfml.files import named_errors, refuse_zip_bomb, write_atomically

__all__ = ["read_embeddings", "write_embeddings"]


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
