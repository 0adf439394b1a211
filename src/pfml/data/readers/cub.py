"""CUB-200-2011: birds of 200 species."""

from __future__ import annotations

from pathlib import Path

import torch

from pfml.data.image_set import ImageSet, RetrievalData
from pfml.data.readers.benchmark import Benchmark, locate, rows, with_count_remarks
from pfml.data.splits import zero_shot

__all__ = ["CUB", "read_cub"]

CUB = Benchmark(
    "CUB-200-2011", "Wah, Branson, Welinder, Perona and Belongie, California Institute of Technology",
    train=(5_864, 100), test=(5_924, 100),
)  # fmt: skip


def read_cub(root: Path) -> RetrievalData:
    """CUB-200-2011: the first 100 species to train on, the other 100 unseen; bounding boxes are not used.

    Args:
        root: The folder of images.txt, image_class_labels.txt, classes.txt and images/, or the folder around
            CUB_200_2011.
    """
    lists = ("images.txt", "image_class_labels.txt", "classes.txt")
    folder = locate(CUB, root, lists, inside="CUB_200_2011")
    names = dict(rows(folder / "classes.txt", ("class id", "path")))
    position = {number: k for k, number in enumerate(sorted(names, key=int))}
    class_of = dict(rows(folder / "image_class_labels.txt", ("image id", "class id")))
    paths, labels = [], []
    for image, path in rows(folder / "images.txt", ("image id", "path")):
        if class_of.get(image) not in position:
            raise ValueError(
                f"image {image} of {folder / 'images.txt'} must have a class of classes.txt in image_class_labels.txt, "
                f"got {class_of.get(image, 'no line')}"
            )
        paths.append(folder / "images" / path)
        labels.append(position[class_of[image]])
    images = ImageSet(
        tuple(paths), torch.tensor(labels, dtype=torch.int64), tuple(names[number] for number in position)
    )
    return with_count_remarks(zero_shot(images, "cub"), CUB)
