"""What the images of a run were when it began, so that it is not resumed with other pixels under the same names.

RUN/checkpoints/images.json   a bundle: size, time of change and sha256 of every image file; of pixels, their digest

Files whose size and time are those of the start are taken as unchanged; of the others the content is compared, so that
a copy of the data will do.
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor

from pfml.bundles import read_bundle, write_bundle
from pfml.data import ImageSet, RetrievalData
from pfml.data.decoding import in_threads
from pfml.evaluation.file_state import FileState, packed, unpacked
from pfml.training.run_folder import RunFolder

__all__ = ["refuse_other_pixels", "write_image_states"]

NAME = "images"
#: Files that an error names.
LISTED = 3


def write_image_states(folder: RunFolder, data: RetrievalData, workers: int) -> None:
    """Write what the images of all parts of `data` are now, as the run begins."""
    tensors: dict[str, Tensor] = {}
    pixels: dict[str, str] = {}
    for role, images in _parts(data).items():
        if isinstance(images.images, Tensor):
            pixels[role] = _digest(images.images)
        else:
            states = in_threads(FileState.of, images.images, workers)
            tensors[f"{role}/numbers"], tensors[f"{role}/sha256"] = packed(list(states))
    write_bundle(folder.checkpoints, NAME, tensors, {"pixels": pixels})


def refuse_other_pixels(folder: RunFolder, data: RetrievalData) -> None:
    """Raise ValueError, with the names of the files, unless the images of `data` are those that the run began with.

    A run that an earlier version of pfml began has written nothing to compare with.
    """
    if not (folder.checkpoints / f"{NAME}.json").is_file():
        return
    content, tensors = read_bundle(folder.checkpoints, NAME)
    changed: list[str] = []
    total = 0
    for role, images in _parts(data).items():
        total += len(images)
        changed += _changed(images, role, content["pixels"], tensors)
    if changed:
        more = f" and {len(changed) - LISTED:,} more" if len(changed) > LISTED else ""
        raise ValueError(
            f"the run in {folder.path} must be resumed with the images that it began with, but {len(changed):,} of "
            f"{total:,} images have other content: {', '.join(changed[:LISTED])}{more}; restore them, or start anew"
        )


def _changed(images: ImageSet, role: str, pixels: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    """Names of the images of a part that are not what they were."""
    if isinstance(images.images, Tensor):
        return [] if pixels.get(role) == _digest(images.images) else [f"the {role} images"]
    states = tensors.get(f"{role}/numbers"), tensors.get(f"{role}/sha256")
    if states[0] is None or states[1] is None or len(states[0]) != len(images):
        return [f"the {role} images"]
    names = images.short_names()
    return [names[k] for k, path in enumerate(images.images) if not unpacked(states[0], states[1], k).is_of(path)]


def _parts(data: RetrievalData) -> dict[str, ImageSet]:
    parts = {"train": data.train, "validation": data.validation, "test": data.test, "gallery": data.gallery}
    return {role: images for role, images in parts.items() if images is not None}


def _digest(pixels: Tensor) -> str:
    return hashlib.sha256(pixels.contiguous().numpy().data).hexdigest()
