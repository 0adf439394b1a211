"""A bundle in use: one call loads model, proxies, threshold and index, after comparing every checksum."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pfml.models import Embedder, load_embedder
from pfml.search import Hit, ImageIndex, ModelIdentity, Threshold
from pfml.storage.files import DamagedFileError
from pfml.storage.manifest import LARGEST_MANIFEST, MANIFEST, parse_manifest, refuse_tampering
from pfml.storage.zip_archive import LARGEST, extract_archive
from pfml.training.saved_loss import TrainedField, load_field

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Bundle", "load_bundle"]


@dataclasses.dataclass(frozen=True, eq=False)
class Bundle:
    """All that searching with a run takes; see `load_bundle`.

    Args:
        path: The folder or archive.
        embedder: In evaluation mode.
        model: Which one it is, as index and threshold name it.
        field: The proxies and the law of their field; None if the run had none.
        threshold: The distance from which an image is unknown; None if none was calibrated.
        index: The images to search among; None if none were indexed.
        card: The model card, in Markdown.
        onnx: The same model as an ONNX file; None if it was not packed.
    """

    path: Path
    embedder: Embedder = dataclasses.field(repr=False)
    model: ModelIdentity
    field: TrainedField | None = dataclasses.field(repr=False)
    threshold: Threshold | None = dataclasses.field(repr=False)
    index: ImageIndex | None
    card: str = dataclasses.field(repr=False)
    onnx: Path | None
    #: where an archive was unpacked: vectors are read from there, until the bundle is no longer used
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
    ) -> list[list[Hit]]:
        """The k nearest images of the index for each image, nearest first; `class_names` restricts them to classes."""
        if self.index is None:
            raise ValueError(f"{self.path} must have an index to be searched, and has none: pfml index, then export")
        return self.index.search(self.encode(images), k, model=self.model, class_names=class_names)

    def is_unknown(self, images: Iterable[str | Path | Image.Image | Tensor]) -> list[bool]:
        """For each image whether it is of no class of the index: its nearest neighbor is beyond the threshold."""
        if self.threshold is None:
            raise ValueError(
                f"{self.path} must have a threshold to tell what is unknown, and has none: pfml calibrate, then export"
            )
        threshold = self.threshold
        return [not hits or threshold.is_unknown(hits[0].distance) for hits in self.search(images, 1)]


def load_bundle(path: str | Path, *, max_bytes: int = LARGEST) -> Bundle:
    """The bundle that `pfml export --to bundle` wrote.

    No code is run and nothing is downloaded. A file that was changed, added or removed is refused by name.

    Args:
        path: A folder, or a .zip archive, which is unpacked to a temporary folder that ends with the bundle.
        max_bytes: What an archive may unpack to.

    Raises:
        DamagedFileError: If the bundle is not what was written.
    """
    path = Path(path)
    if path.is_dir():
        return _loaded(path, path, None)
    if not path.is_file():
        raise FileNotFoundError(f"{path} must be a bundle, a folder or a .zip file, but there is neither")
    unpacked = TemporaryDirectory(prefix="pfml-bundle-", ignore_cleanup_errors=True)
    try:
        extract_archive(path, Path(unpacked.name), max_bytes=max_bytes)
        return _loaded(path, Path(unpacked.name), unpacked)
    except BaseException:
        unpacked.cleanup()
        raise


def _loaded(path: Path, folder: Path, unpacked: TemporaryDirectory[str] | None) -> Bundle:
    """The bundle in `folder`, which was given as `path`."""
    listing = folder / MANIFEST
    if not listing.is_file():
        raise FileNotFoundError(
            f"{path} must be a bundle, but there is no {MANIFEST} in it; pfml export --to bundle packs a run"
        )
    if listing.stat().st_size > LARGEST_MANIFEST:
        raise DamagedFileError(f"{listing} must have at most {LARGEST_MANIFEST:,} bytes, got more")
    manifest = parse_manifest(listing.read_bytes(), path)
    files = manifest["files"]
    refuse_tampering(folder, files)
    embedder = load_embedder(folder / "model")
    identity = ModelIdentity.of(embedder)
    index = ImageIndex.open(folder / "index") if "index/index.json" in files else None
    threshold = Threshold.load(folder) if "threshold.json" in files else None
    if index is not None:
        index.model.require(identity, f"the index of {path}")
    if threshold is not None:
        threshold.model.require(identity, f"the threshold of {path}")
    return Bundle(
        path,
        embedder,
        identity,
        load_field(folder) if "loss/loss.json" in files else None,
        threshold,
        index,
        (folder / "model" / "README.md").read_text(encoding="utf-8") if "model/README.md" in files else "",
        folder / "onnx" / "model.onnx" if "onnx/model.onnx" in files else None,
        unpacked,
    )
