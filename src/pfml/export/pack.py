"""A run packed into a bundle: all that searching with it takes, in one folder or one .zip file.

bundle.json           every file below with its sha256; sealed
model/                the embedder, and its model card
preprocessing.json    the way of an image into the model, for other programs
loss/                 the proxies and the law of their field, if the run has them
threshold.json        the distance from which an image is unknown, if `pfml calibrate` has found it
index/                the images to search among, if `pfml index` has made it
onnx/                 the same model for other programs, if asked for
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from pfml.data import ImageSet
from pfml.export.onnx import export_onnx
from pfml.export.preprocessing import preprocessing_description
from pfml.export.runs import model_folder
from pfml.models import Embedder, load_embedder
from pfml.search import ImageIndex, ModelIdentity, Threshold
from pfml.storage.bundle import parse_manifest
from pfml.storage.files import DamagedFileError, sha256_of
from pfml.storage.manifest import write_manifest
from pfml.storage.zip_archive import write_archive

__all__ = ["PARTS", "export_bundle"]

#: what a bundle may have, in the order of the docstring
PARTS = ("model", "preprocessing", "loss", "threshold", "index", "onnx")


def export_bundle(run: str | Path, path: str | Path, *, onnx_images: ImageSet | None = None) -> tuple[str, ...]:
    """Pack a run into a bundle; which of `PARTS` it has.

    Args:
        run: Folder of a run that has ended, or of a saved model; index and threshold are taken from it too.
        path: A folder, or a file whose name ends in .zip; must not exist.
        onnx_images: Images to check an ONNX file on, which is then packed too; None for none.

    Raises:
        OtherModelError: If index or threshold were made with another model than the run has now.
    """
    run, path = Path(run), Path(path)
    if path.exists():
        raise FileExistsError(f"{path} must not exist yet, and does: remove it, or choose another name with --out")
    model = model_folder(run)
    with _building(path) as folder:
        embedder = _pack_model(model, folder)
        parts = ["model", "preprocessing", *_pack_run(run, ModelIdentity.of(embedder), folder)]
        if onnx_images is not None:
            export_onnx(embedder, folder / "onnx" / "model.onnx", onnx_images)
            parts.append("onnx")
        _finish(folder, embedder, parts)
    return tuple(parts)


@contextmanager
def _building(path: Path) -> Iterator[Path]:
    """A folder beside `path` to build in; it becomes `path`, or the archive `path`, unless the block raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f".{path.name}.{uuid4().hex[:12]}.building")
    building.mkdir()
    try:
        yield building
        if path.suffix.lower() == ".zip":
            write_archive(building, path)
        else:
            os.replace(building, path)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _pack_model(model: Path, folder: Path) -> Embedder:
    """The embedder that is packed. It is loaded from the copy: the original may be replaced meanwhile."""
    _copy_sealed(model, "model", folder / "model")
    embedder = load_embedder(folder / "model")
    if (model / "README.md").is_file():
        shutil.copyfile(model / "README.md", folder / "model" / "README.md")
    description = json.dumps(preprocessing_description(embedder), indent=2)
    (folder / "preprocessing.json").write_text(description + "\n", encoding="utf-8")
    return embedder


def _pack_run(run: Path, identity: ModelIdentity, folder: Path) -> list[str]:
    """Proxies, threshold and index, as far as the run has them."""
    parts: list[str] = []
    if (run / "loss" / "loss.json").is_file():
        _copy_sealed(run / "loss", "loss", folder / "loss")
        parts.append("loss")
    if (run / "threshold.json").is_file():
        _copy_sealed(run, "threshold", folder)
        threshold = Threshold.load(folder)
        assert threshold is not None
        threshold.model.require(identity, f"the threshold of {run}")
        parts.append("threshold")
    if (run / "index" / "index.json").is_file():
        manifest = _copy_sealed(run / "index", "index", folder / "index")
        for segment in manifest["segments"]:
            _copy(run / "index" / Path(segment["file"]).name, folder / "index")
        ImageIndex.open(folder / "index").model.require(identity, f"the index of {run}")  # opened: every sum compared
        parts.append("index")
    return parts


def _finish(folder: Path, embedder: Embedder, parts: list[str]) -> None:
    """The README and the manifest, which closes the bundle."""
    from pfml.version import __version__

    (folder / "README.md").write_text(_readme(parts), encoding="utf-8")
    write_manifest(
        folder,
        {
            "written_by": f"pfml {__version__}",
            "backbone": embedder.config.backbone,
            "embedding_dim": embedder.embedding_dim,
            "parts": parts,
        },
    )


def _copy_sealed(folder: Path, name: str, target: Path) -> dict[str, Any]:
    """Copy the manifest `name`.json (`pfml.storage.bundle`) and the tensors that it names; its values.

    It is read once, so that the copy is of one state, whoever writes meanwhile.
    """
    content = (folder / f"{name}.json").read_bytes()
    manifest = parse_manifest(content, folder / f"{name}.json")
    target.mkdir(parents=True, exist_ok=True)
    file = folder / Path(manifest["tensors"]["file"]).name
    _copy(file, target)
    if sha256_of(target / file.name) != manifest["tensors"]["sha256"]:
        raise DamagedFileError(
            f"{file} is not what {name}.json says: it was damaged or changed; restore it from a copy"
        )
    (target / f"{name}.json").write_bytes(content)
    return manifest


def _copy(file: Path, target: Path) -> None:
    try:
        shutil.copyfile(file, target / file.name)
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{file} must be there to be packed, and is not: "
            f"if another process has changed it in this moment, export again"
        ) from None


def _readme(parts: list[str]) -> str:
    listed = "\n".join(f"- {part}" for part in parts)
    return f"""# A pfml bundle

```python
import pfml

bundle = pfml.load_bundle("this folder, or its .zip")
bundle.encode(["a.jpg"])          # unit vectors
bundle.search(["a.jpg"], k=5)     # the nearest images of the index
bundle.is_unknown(["a.jpg"])      # whether the nearest is too far to be of its class
```

It holds:

{listed}

What the model has learned from, how good it is, and what it is not good for: `model/README.md`.
`bundle.json` lists every file with its SHA-256; a changed file is refused when the bundle is loaded.
"""
