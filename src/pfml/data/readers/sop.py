"""Stanford Online Products: photographs of 22,634 things for sale."""

from __future__ import annotations

from pathlib import Path

import torch

from pfml.data.image_set import ImageSet, RetrievalData
from pfml.data.readers.benchmark import Benchmark, locate, rows, with_count_remarks

__all__ = ["SOP", "read_sop"]

SOP = Benchmark(
    "Stanford Online Products", "Song, Xiang, Jegelka and Savarese, Stanford University",
    train=(59_551, 11_318), test=(60_502, 11_316), recall_at=(1, 10, 100, 1000),
)  # fmt: skip

COLUMNS = ("image_id", "class_id", "super_class_id", "path")


def read_sop(root: Path) -> RetrievalData:
    """Stanford Online Products, with its own division into training and unseen products.

    Args:
        root: The folder of Ebay_train.txt, Ebay_test.txt and the folders of images, or the folder around
            Stanford_Online_Products.
    """
    folder = locate(SOP, root, ("Ebay_train.txt", "Ebay_test.txt"), inside="Stanford_Online_Products")
    train, test = (_image_set(folder, folder / file) for file in ("Ebay_train.txt", "Ebay_test.txt"))
    return with_count_remarks(RetrievalData("sop", train, test, recall_at=SOP.recall_at), SOP)


def _image_set(folder: Path, file: Path) -> ImageSet:
    listed = [(path, int(number)) for _, number, _, path in rows(file, COLUMNS, header_lines=1)]
    kind_of = {number: path.split("/")[0].removesuffix("_final") for path, number in listed}
    position = {number: k for k, number in enumerate(sorted(kind_of))}
    labels = torch.tensor([position[number] for _, number in listed], dtype=torch.int64)
    names = tuple(f"{kind_of[number]}/{number}" for number in position)
    return ImageSet(tuple(folder / path for path, _ in listed), labels, names)
