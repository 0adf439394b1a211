"""The images that a run started with, so that it is resumed with the same ones: RUN/checkpoints/images.json."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor

from pfml.data import ImageSet, RetrievalData
from pfml.data.dataset_images import DatasetImages
from pfml.data.decoding import in_threads
from pfml.runs.folder import RunFolder
from pfml.storage.file_state import FileState, packed, unpacked
from pfml.storage.manifest import Format
from pfml.storage.sealed_tensors import read_sealed_tensors, write_sealed_tensors

__all__ = ["require_same_images", "write_image_states"]

NAME = "images"
IMAGE_STATES = Format("states of training images", 1, "start a new run")
#: Files that an error names.
LISTED = 3


def write_image_states(folder: RunFolder, data: RetrievalData, workers: int) -> None:
    """Write the size, time and checksum of every image of `data`, as the run starts."""
    tensors: dict[str, Tensor] = {}
    pixels: dict[str, str] = {}
    for role, images in data.parts.items():
        if not isinstance(images.images, tuple):
            pixels[role] = _digest(images.images)
        else:
            states = in_threads(FileState.of, images.images, workers)
            tensors[f"{role}/numbers"], tensors[f"{role}/sha256"] = packed(list(states))
    write_sealed_tensors(folder.checkpoints, NAME, tensors, {"pixels": pixels}, IMAGE_STATES)


def require_same_images(folder: RunFolder, data: RetrievalData) -> None:
    """Raise ValueError, with the names of the files, unless the images of `data` are those that the run started with.

    A run that was interrupted before it wrote them has nothing to compare with.
    """
    if not (folder.checkpoints / f"{NAME}.json").is_file():
        return
    content, tensors = read_sealed_tensors(folder.checkpoints, NAME, IMAGE_STATES)
    changed: list[str] = []
    total = 0
    for role, images in data.parts.items():
        total += len(images)
        changed += _changed(images, role, content["pixels"], tensors)
    if changed:
        more = f" and {len(changed) - LISTED:,} more" if len(changed) > LISTED else ""
        raise ValueError(
            f"the run in {folder.path} must be resumed with the images that it started with, but {len(changed):,} of "
            f"{total:,} images have other content: {', '.join(changed[:LISTED])}{more}: restore them or start a new run"
        )


def _changed(images: ImageSet, role: str, pixels: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    """Names of the images of a role that have changed."""
    if not isinstance(images.images, tuple):
        return [] if pixels.get(role) == _digest(images.images) else [f"the {role} images"]
    states = tensors.get(f"{role}/numbers"), tensors.get(f"{role}/sha256")
    if states[0] is None or states[1] is None or len(states[0]) != len(images):
        return [f"the {role} images"]
    names = images.short_names()
    return [names[k] for k, path in enumerate(images.images) if not unpacked(states[0], states[1], k).is_of(path)]


def _digest(pixels: Tensor | DatasetImages) -> str:
    if isinstance(pixels, DatasetImages):
        return pixels.fingerprint()
    return hashlib.sha256(pixels.contiguous().numpy().data).hexdigest()
