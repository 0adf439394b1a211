"""A model on disk: tensors, a manifest that proves them whole, and a card for people."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import Tensor

from pfml.files import DamagedFileError, load_tensors, refuse_non_finite, save_tensors, write_atomically

__all__ = ["read_bundle", "write_bundle"]

FORMAT_VERSION = 1
TENSORS, MANIFEST, CARD = "model.safetensors", "model.json", "README.md"


def write_bundle(folder: Path, tensors: dict[str, Tensor], description: dict[str, Any]) -> None:
    """Write tensors and what describes them; the manifest comes last, so that it never promises too much."""
    refuse_non_finite(tensors, "the model that is to be saved")
    folder.mkdir(parents=True, exist_ok=True)
    sha256 = save_tensors(folder / TENSORS, tensors)
    manifest = {
        "format_version": FORMAT_VERSION,
        **description,
        "tensors": {"file": TENSORS, "sha256": sha256, "bytes": (folder / TENSORS).stat().st_size},
    }
    manifest["manifest_sha256"] = _digest(manifest)
    write_atomically(folder / CARD, _card(description).encode())
    write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())


def read_bundle(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], Path]:
    """What describes a model, its tensors, and the file of the tensors; a damaged bundle is refused by name."""
    folder = _bundle_folder(folder)
    manifest = _read_manifest(folder / MANIFEST)
    path = folder / TENSORS
    if not path.is_file():
        raise FileNotFoundError(f"{folder} must have {TENSORS} beside its {MANIFEST}, but there is no such file")
    size, expected = path.stat().st_size, manifest["tensors"]["bytes"]
    if size != expected:
        raise DamagedFileError(f"{path} must have {expected:,} bytes, got {size:,}: it was cut short or replaced")
    tensors = load_tensors(path, manifest["tensors"]["sha256"])
    refuse_non_finite(tensors, path)
    return manifest, tensors, path


def _bundle_folder(folder: Path) -> Path:
    """`folder` itself, or the model of a run in it."""
    for candidate in (folder, folder / "model"):
        if (candidate / MANIFEST).is_file():
            return candidate
    raise FileNotFoundError(
        f"{folder} must be a saved model or a run with one in {folder / 'model'}, but there is no {MANIFEST} in either"
    )


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError as error:
        raise DamagedFileError(f"{path} must be a whole JSON file, got one that cannot be read: {error}") from None
    version = manifest.get("format_version") if isinstance(manifest, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} must have format_version {FORMAT_VERSION}, got {version!r}: "
            f"it was written by another version of pfml"
        )
    if manifest.pop("manifest_sha256", None) != _digest(manifest):
        raise DamagedFileError(
            f"{path} does not match its own checksum: it was damaged or changed after it was written"
        )
    return manifest


def _digest(manifest: dict[str, Any]) -> str:
    """The SHA-256 of the manifest's values, however they are laid out."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _card(description: dict[str, Any]) -> str:
    """A model card in Markdown."""
    model, images, learned = description["embedder"], description["preprocessing"], description["trained_on"]
    dimension = model["embedding_dim"] or "as many as the backbone has features"
    trained = "not recorded" if learned is None else f"{learned['dataset']}, {len(learned['class_names']):,} classes"
    values = f"{images['channel_order']} in 0 to {images['value_scale']:g}, mean {images['mean']}, std {images['std']}"
    return f"""# An image embedder

It turns an image into a point on the unit sphere; images of one class lie close to each other, also of classes that it
was not trained on.

| | |
|---|---|
| backbone | {model["backbone"]} |
| dimensions | {dimension} |
| pooling | {model["pooling"]}, LayerNorm: {model["layer_norm"]} |
| trained on | {trained} |
| images | RGB, short side {images["resize"]}, centre crop {images["crop"]}, {images["interpolation"]} |
| normalisation, inside the model | {values} |

```python
from pfml.models import load_embedder

embedder = load_embedder("this folder")
points = embedder.encode(["a.jpg", "b.jpg"])  # (2, D)
similarity = points @ points.T
```

`{TENSORS}` holds the weights, `{MANIFEST}` the rest, with a checksum of both.
"""
