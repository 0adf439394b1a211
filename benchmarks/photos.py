"""JPEG files as photographs have them, for benchmarks of what reads images: of CUB, or out of thin air."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

__all__ = ["SIZE", "class_folders", "photographs"]

#: Width and height: those of most images of CUB-200-2011, and of ImageNet.
SIZE = (500, 375)
QUALITY = 90
#: Images of noise that are drawn; further files repeat them.
DISTINCT = 200


def photographs(folder: Path, count: int, root: Path | None = None) -> list[Path]:
    """Paths of `count` JPEG files in `folder`, of `SIZE`; files that are there already stay.

    Args:
        folder: Where they go.
        count: How many.
        root: CUB-200-2011, whose images are scaled to `SIZE`; None for noise of all scales, which has as many bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{k:06d}.jpg" for k in range(count)]
    sources = [] if root is None else sorted((root / "images").rglob("*.[jw]*"))
    if root is not None and not sources:
        raise FileNotFoundError(f"{root} must hold CUB-200-2011, but there is no image in {root / 'images'}")
    for k, path in enumerate(paths):
        if path.exists():
            continue
        if not sources and k >= DISTINCT:  # another file with the same pixels: readers ignore what follows the image
            path.write_bytes(paths[k % DISTINCT].read_bytes() + k.to_bytes(8))
            continue
        image = _noise(k) if not sources else _scaled(sources[k * len(sources) // count])
        image.save(path, quality=QUALITY)
    return paths


def class_folders(folder: Path, paths: Sequence[Path], classes: int) -> Path:
    """`folder` with a folder for each of so many classes, in which the files are links."""
    for k, path in enumerate(paths):
        link = folder / f"class {k * classes // len(paths):03d}" / path.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.hardlink_to(path)
    return folder


def _scaled(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB").resize(SIZE, Image.Resampling.BICUBIC)


def _noise(seed: int) -> Image.Image:
    """Noise whose power falls with the frequency, as in photographs; a file of it has about as many bytes."""
    random, (width, height) = np.random.default_rng(seed), SIZE
    pixels = np.zeros((height, width, 3), np.float32)
    side = 4
    while side <= width:
        coarse = Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8))
        pixels += np.asarray(coarse.resize(SIZE, Image.Resampling.BICUBIC), np.float32) * (4 / side) ** 0.4
        side *= 2
    low, high = pixels.min(), pixels.max()
    return Image.fromarray(((pixels - low) / (high - low) * 255).astype(np.uint8))
