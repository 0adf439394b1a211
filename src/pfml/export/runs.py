"""What an export takes from a run: its model, its folder, and a few images of its data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pfml.data import ImageSet, load_data
from pfml.data.decoding import ImageError, UnreadableImagesError, read_rgb
from pfml.data.readers.folder import image_files
from pfml.runs.config_files import read_config

__all__ = ["few_images", "model_folder", "run_folder"]

FEW = 8


def model_folder(run: Path) -> Path:
    """The folder of the saved embedder: `run` itself, or the model in it."""
    for folder in (run, run / "model"):
        if (folder / "model.json").is_file():
            return folder
    raise FileNotFoundError(f"{run} must be a run that has ended, or a saved model, but there is no model.json in it")


def run_folder(run: Path) -> Path | None:
    """The run that a folder is, or that a model's folder lies in; None for a model on its own."""
    resolved = run.resolve()  # so that "." has a parent
    folders = (run, resolved.parent) if (run / "model.json").is_file() else (run,)
    return next((folder for folder in folders if (folder / "config.yaml").is_file()), None)


def few_images(run: Path, places: Sequence[Path] | None = None, *, count: int = FEW) -> ImageSet:
    """A few images to check an export on, spread over those of `places`, or over the test images of the run's data.

    Args:
        run: Folder of a run, or of its model.
        places: Image files, or folders of them; None for the data that the run's configuration names.
        count: At most so many; fewer where some of these cannot be read.
    """
    if places:
        images = ImageSet.unlabeled(image_files(places))
    else:
        folder = run_folder(run)
        if folder is None:
            raise ValueError(f"{run} does not say its data: name images to check the export on with --images")
        data = read_config(folder / "config.yaml").data
        images = load_data(data.name, data.root).test
    return _readable(images.subset(torch.linspace(0, len(images) - 1, min(count, len(images))).round().long()))


def _readable(images: ImageSet) -> ImageSet:
    """`images` without files that cannot be read, which training has left out as well; an error if these are all."""
    if isinstance(images.images, Tensor):
        return images
    failures, good = [], []
    for place, path in enumerate(images.images):
        try:
            read_rgb(path)
            good.append(place)
        except ImageError as error:
            failures.append(error)
    if not good:
        raise UnreadableImagesError(failures, len(failures))
    return images.subset(torch.tensor(good))
