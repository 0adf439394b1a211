"""Cars-196: cars of 196 models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pfml.data.image_set import ImageSet, RetrievalData
from pfml.data.readers.benchmark import Benchmark, locate, with_count_remarks
from pfml.data.splits import zero_shot
from pfml.storage.files import named_errors

__all__ = ["CARS", "read_cars"]

CARS = Benchmark(
    "Cars-196", "Krause, Stark, Deng and Fei-Fei, Stanford University",
    train=(8_054, 98), test=(8_131, 98),
)  # fmt: skip

ONE_LIST = ("cars_annos.mat",)
TWO_LISTS = (
    "devkit/cars_meta.mat|cars_meta.mat",
    "devkit/cars_train_annos.mat|cars_train_annos.mat",
    "devkit/cars_test_annos_withlabels.mat|cars_test_annos_withlabels.mat",
)


def read_cars(root: Path) -> RetrievalData:
    """Cars-196: the first 98 models to train on, the other 98 unseen; the official train/test division is ignored.

    Args:
        root: The folder of cars_annos.mat and car_ims/, or of devkit/, cars_train/ and cars_test/ (then the labels of
            the test images, cars_test_annos_withlabels.mat, lie in it or in devkit/), or the folder around
            stanford_cars.
    """
    folder = locate(CARS, root, ONE_LIST, TWO_LISTS, inside="stanford_cars")
    images = _from_one_list(folder) if (folder / ONE_LIST[0]).is_file() else _from_two_lists(folder)
    return with_count_remarks(zero_shot(images, "cars"), CARS)


def _from_one_list(folder: Path) -> ImageSet:
    content = _load(folder / ONE_LIST[0], "annotations", "class_names")
    annotations = content["annotations"]
    paths = [folder / str(path) for path in annotations["relative_im_path"]]
    return _image_set(paths, annotations["class"], content["class_names"], folder / ONE_LIST[0])


def _from_two_lists(folder: Path) -> ImageSet:
    meta, train, test = (
        next(folder / either for either in file.split("|") if (folder / either).is_file()) for file in TWO_LISTS
    )
    paths: list[Path] = []
    classes: list[int] = []
    for file, images in ((train, "cars_train"), (test, "cars_test")):
        annotations = _load(file, "annotations")["annotations"]
        paths += [folder / images / str(name) for name in annotations["fname"]]
        classes += [int(number) for number in annotations["class"]]
    return _image_set(paths, classes, _load(meta, "class_names")["class_names"], train)


def _load(file: Path, *variables: str) -> dict[str, Any]:
    """The variables of a MATLAB file as one-dimensional arrays."""
    import numpy
    from scipy.io import loadmat

    with named_errors(file, "a whole MATLAB file", Exception):  # scipy raises whatever it stumbles over
        content = loadmat(file, squeeze_me=True)
    for variable in variables:
        if variable not in content:
            found = ", ".join(key for key in content if not key.startswith("__"))
            raise ValueError(f"{file} must have the variable {variable}, got {found or 'none'}")
    return {variable: numpy.atleast_1d(content[variable]) for variable in variables}


def _image_set(paths: list[Path], numbers: Any, names: Any, file: Path) -> ImageSet:
    labels = torch.tensor([int(number) - 1 for number in numbers], dtype=torch.int64)
    if len(labels) and not (labels.min() >= 0 and labels.max() < len(names)):
        raise ValueError(
            f"the classes in {file} must lie in [1, {len(names)}], got {labels.min() + 1} to {labels.max() + 1}"
        )
    return ImageSet(tuple(paths), labels, tuple(str(name) for name in names))
