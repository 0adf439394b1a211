"""How well `pfml audit FOLDER` finds label noise and copies: folders of classes of CUB, the untrained backbone.

    python research/audit_folders.py --root CUB_200_2011 --cache FOLDER --out results/audit.jsonl
    python research/audit_folders.py --table results/audit.jsonl

Folders are drawn from classes 101 to 200; --choose takes classes 1 to 100, by which rules were chosen. In each folder a
part of the labels is changed, and copies of some images are added, some of them to another class. All images pass
through the backbone once; their embeddings and the copies are kept in the cache.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from pfml.data import ImageSet, load_data
from pfml.evaluation import embed
from pfml.models import create_embedder
from pfml.storage.files import load_tensors, save_tensors

#: Classes, images of each and label noise of the folders.
FOLDERS = ((20, 20, 0.12), (20, 40, 0.12), (40, 20, 0.12), (40, 40, 0.12), (30, 30, 0.0), (30, 30, 0.05), (30, 30, 0.2))
CLASSES, IMAGES = 40, 40
#: Images of which there are copies.
COPIED = 120


def recompressed(source: Path, target: Path) -> None:
    """A copy as a JPEG of low quality."""
    with Image.open(source) as image:
        image.convert("RGB").save(target, quality=50)


def resized(source: Path, target: Path) -> None:
    """A copy of 60 % of the size."""
    with Image.open(source) as image:
        size = round(0.6 * image.width), round(0.6 * image.height)
        image.convert("RGB").resize(size, Image.Resampling.BICUBIC).save(target, quality=85)


def cropped(source: Path, target: Path) -> None:
    """A copy without a margin of 4 %."""
    with Image.open(source) as image:
        across, down = round(0.04 * image.width), round(0.04 * image.height)
        image.convert("RGB").crop((across, down, image.width - across, image.height - down)).save(target, quality=85)


COPIES = {"exact": shutil.copyfile, "recompressed": recompressed, "resized": resized, "cropped": cropped}


def embedded(options: argparse.Namespace) -> tuple[ImageSet, Tensor, dict[str, tuple[ImageSet, Tensor]]]:
    """The images with their embeddings, and kind of copy -> the copies of the first images with theirs."""
    data = load_data("cub", options.root)
    every = data.train if options.choose else data.test
    random = torch.Generator().manual_seed(0)
    classes = torch.randperm(every.num_classes, generator=random)[:CLASSES].sort().values.tolist()
    images = every.of_classes(classes)
    few = [(images.labels == c).nonzero()[:IMAGES, 0] for c in range(CLASSES)]
    images = images.subset(torch.cat(few))
    folder = options.cache / ("choose" if options.choose else "measure")
    folder.mkdir(parents=True, exist_ok=True)
    copied = torch.randperm(len(images), generator=random)[:COPIED]
    copies = {}
    for kind, copy in COPIES.items():
        paths = tuple(folder / f"{kind}-{k}.jpg" for k in copied.tolist())
        for k, path in zip(copied.tolist(), paths, strict=True):
            if not path.is_file():
                copy(images.images[k], path)
        copies[kind] = ImageSet(paths, images.labels[copied], images.class_names)
    if not (folder / "points.safetensors").is_file():
        model = create_embedder("efficientnet_lite0", embedding_dim=None)
        points = {"images": embed(model, images), **{kind: embed(model, some) for kind, some in copies.items()}}
        save_tensors(folder / "points.safetensors", points | {"copied": copied})
    points = load_tensors(folder / "points.safetensors")
    return images, points["images"], {kind: (some, points[kind]) for kind, some in copies.items()}


def main() -> None:
    """Parse and do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--cache", type=Path, default=Path("/tmp/audit"))
    parser.add_argument("--choose", action="store_true")
    options = parser.parse_args()
    embedded(options)


if __name__ == "__main__":
    main()
