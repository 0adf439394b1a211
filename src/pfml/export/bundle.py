"""Bundles: all that searching with a run needs, in one folder or one .zip file, which one call loads.

bundle.json           every file below with its size and sha256; sealed by its own checksum
model/                the embedder, and its model card
preprocessing.json    the preprocessing of the model, for other programs
loss/                 the proxies and the law of their field, if the run has them
threshold.json        the score below which an image is unknown, if `pfml calibrate` has found it
index/                the images to search among, if `pfml index` has made it
onnx/                 the same model for other programs, if asked for
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from uuid import uuid4

import torch
from torch import Tensor

from pfml.data import ImageSet
from pfml.export.onnx import export_onnx, preprocessing_description
from pfml.models import Embedder, load_embedder
from pfml.models.embedder import EMBEDDER, model_folder
from pfml.runs.saved_loss import LOSS, TrainedField
from pfml.search import Hit, ImageIndex, ModelIdentity, Threshold, Verdict, open_run, verdict_of
from pfml.search.index_folder import IndexFolder
from pfml.search.neighborhood import NEIGHBORS
from pfml.search.threshold import THRESHOLD
from pfml.storage.bundle import LARGEST_BUNDLE, extract_zip, read_listing, refuse_tampering, write_listing, write_zip
from pfml.storage.sealed_tensors import copy_sealed_tensors
from pfml.version import __version__

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["PARTS", "Bundle", "export_bundle", "load_bundle"]

#: What a bundle can hold, in the order of the docstring.
PARTS = ("model", "preprocessing", "loss", "threshold", "index", "onnx")


def export_bundle(run: str | Path, path: str | Path, *, onnx_images: ImageSet | None = None) -> tuple[str, ...]:
    """Export a run to a bundle; returns which of `PARTS` it has.

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
    """A folder beside `path` to build in; it becomes `path`, or the .zip file `path`, unless the block raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f".{path.name}.{uuid4().hex[:12]}.building")
    building.mkdir()
    try:
        yield building
        if path.suffix.lower() == ".zip":
            write_zip(building, path)
        else:
            os.replace(building, path)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _pack_model(model: Path, folder: Path) -> Embedder:
    """Copy the model; returns its embedder, loaded from the copy: the original may be replaced meanwhile."""
    copy_sealed_tensors(model, "model", folder / "model", EMBEDDER)
    embedder = load_embedder(folder / "model")
    if (model / "README.md").is_file():
        shutil.copyfile(model / "README.md", folder / "model" / "README.md")
    description = json.dumps(preprocessing_description(embedder), indent=2)
    (folder / "preprocessing.json").write_text(description + "\n", encoding="utf-8")
    return embedder


def _pack_run(run: Path, identity: ModelIdentity, folder: Path) -> list[str]:
    """Copy proxies, threshold and index, as far as the run has them; returns their names."""
    parts: list[str] = []
    if (run / "loss" / "loss.json").is_file():
        copy_sealed_tensors(run / "loss", "loss", folder / "loss", LOSS)
        parts.append("loss")
    if (run / "threshold.json").is_file():
        copy_sealed_tensors(run, "threshold", folder, THRESHOLD)
        threshold = Threshold.load(folder)
        assert threshold is not None
        threshold.model.require(identity, f"the threshold of {run}")
        parts.append("threshold")
    if (run / "index" / "index.json").is_file():
        IndexFolder(run / "index").copy(folder / "index")
        # opening compares the checksums
        ImageIndex.open(folder / "index").model.require(identity, f"the index of {run}")
        parts.append("index")
    return parts


def _finish(folder: Path, embedder: Embedder, parts: list[str]) -> None:
    """Write the README, and last the manifest, which lists all files."""
    (folder / "README.md").write_text(_readme(parts), encoding="utf-8")
    write_listing(
        folder,
        {
            "written_by": f"pfml {__version__}",
            "backbone": embedder.config.backbone,
            "embedding_dim": embedder.embedding_dim,
            "parts": parts,
        },
    )


def _readme(parts: list[str]) -> str:
    listed = "\n".join(f"- {part}" for part in parts)
    return f"""# A pfml bundle

```python
import pfml

bundle = pfml.load_bundle("this folder, or its .zip")
bundle.encode(["a.jpg"])          # unit vectors
bundle.search(["a.jpg"], k=5)     # the nearest images of the index
bundle.verdicts(["a.jpg"])        # the most likely class of each, and whether it is known
bundle.is_unknown(["a.jpg"])      # whether it is of no class of the index
```

It holds:

{listed}

What the model has learned from, how good it is, and what it is not good for: `model/README.md`.
`bundle.json` lists every file with its SHA-256; a changed file is refused when the bundle is loaded.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Bundle:
    """All that searching with a run needs; see `load_bundle`.

    Args:
        path: The folder or .zip file.
        embedder: In evaluation mode.
        model: Its identity, which index and threshold must share.
        field: The proxies and the law of their field; None if the run had none.
        threshold: The score below which an image is unknown; None if none was calibrated.
        index: The images to search among; None if none were indexed.
        card: The model card, in Markdown.
        onnx: The same model as an ONNX file; None if the bundle has none.
    """

    path: Path
    embedder: Embedder = dataclasses.field(repr=False)
    model: ModelIdentity
    field: TrainedField | None = dataclasses.field(repr=False)
    threshold: Threshold | None = dataclasses.field(repr=False)
    index: ImageIndex | None
    card: str = dataclasses.field(repr=False)
    onnx: Path | None
    #: Where a .zip file was unpacked: vectors are read from there as long as the bundle is in use.
    _unpacked: TemporaryDirectory[str] | None = dataclasses.field(default=None, repr=False)

    def encode(
        self,
        images: Iterable[str | Path | Image.Image | Tensor],
        *,
        batch_size: int = 64,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Unit vectors (N, D) of images; see `Embedder.encode`."""
        return self.embedder.encode(images, batch_size=batch_size, device=device)

    def search(
        self,
        images: Iterable[str | Path | Image.Image | Tensor],
        k: int = 10,
        *,
        class_names: Sequence[str] | None = None,
        where: str | None = None,
    ) -> list[list[Hit]]:
        """The k nearest images of the index for each image, nearest first.

        Args:
            images: Files, images or pixels.
            k: How many.
            class_names: Search these classes only.
            where: Search the images only that pass this filter (`pfml.search.where`).
        """
        if self.index is None:
            raise ValueError(
                f"{self.path} must have an index to be searched, but has none: run pfml index, then export again"
            )
        return self.index.search(self.encode(images), k, model=self.model, class_names=class_names, where=where)

    def verdicts(self, images: Iterable[str | Path | Image.Image | Tensor]) -> list[Verdict]:
        """For each image its most likely class, and whether it is known, which takes a threshold."""
        found = self.search(images, NEIGHBORS)
        assert self.index is not None  # else the search was refused
        return [verdict_of(hits, threshold=self.threshold, spread_of=self.index.class_spread) for hits in found]

    def is_unknown(self, images: Iterable[str | Path | Image.Image | Tensor]) -> list[bool]:
        """For each image whether it is of no class of the index: the score of its neighbors is below the threshold."""
        if self.threshold is None:
            raise ValueError(
                f"{self.path} must have a threshold to tell what is unknown, but has none: pfml calibrate, then export"
            )
        return [not verdict.is_known for verdict in self.verdicts(images)]


def load_bundle(path: str | Path, *, max_bytes: int = LARGEST_BUNDLE) -> Bundle:
    """The bundle that `pfml export --to bundle` wrote.

    No code is run and nothing is downloaded. A file that was changed, added or removed is refused by name.

    Args:
        path: A folder, or a .zip file, which is unpacked to a temporary folder that is deleted with the bundle.
        max_bytes: What a .zip file may unpack to.

    Raises:
        DamagedFileError: If the bundle is not what was written.
    """
    path = Path(path)
    if path.is_dir():
        return _loaded(path, path, None)
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be a bundle, a folder or a .zip file, but does not exist")
    unpacked = TemporaryDirectory(prefix="pfml-bundle-", ignore_cleanup_errors=True)
    try:
        extract_zip(path, Path(unpacked.name), max_bytes=max_bytes)
        return _loaded(path, Path(unpacked.name), unpacked)
    except BaseException:
        unpacked.cleanup()
        raise


def _loaded(path: Path, folder: Path, unpacked: TemporaryDirectory[str] | None) -> Bundle:
    """The bundle in `folder`, which the caller named `path`."""
    files = read_listing(folder, path)["files"]
    refuse_tampering(folder, files)
    opened = open_run(folder, device="cpu", require_index=False)
    return Bundle(
        path,
        opened.embedder,
        opened.model,
        opened.field(),
        opened.threshold,
        opened.index,
        (folder / "model" / "README.md").read_text(encoding="utf-8") if "model/README.md" in files else "",
        folder / "onnx" / "model.onnx" if "onnx/model.onnx" in files else None,
        unpacked,
    )
