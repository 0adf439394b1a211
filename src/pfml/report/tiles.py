"""Small pictures of images, and sheets of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pfml.data.image_set import ImageSet
from pfml.data.preprocessing import Preprocessing
from pfml.data.sources import ImageSource, open_images
from pfml.report.theme import png_of_image

__all__ = ["image_sheet", "thumbnails"]


def thumbnails(images: ImageSet | ImageSource, indices: Tensor | Sequence[int], *, side: int = 64) -> Tensor:
    """The middle squares of the images at `indices`, (n, 3, side, side), RGB in [0, 1], on the CPU."""
    indices = torch.as_tensor(indices, dtype=torch.int64)
    if len(indices) == 0:
        return torch.empty(0, 3, side, side)
    if isinstance(images, ImageSet):  # only those that are shown need to be read
        images, indices = open_images(images.subset(indices)), torch.arange(len(indices))
    windows = Preprocessing(resize=side, crop=side).windows(indices, images.sizes)
    (crops,) = images.crops([windows])
    return crops.cpu()


def image_sheet(tiles: Tensor, *, zoom: int = 1, gap: int = 4, column_gaps: Sequence[int] = ()) -> bytes:
    """A PNG of rows of tiles, with nothing but the page between them.

    Args:
        tiles: (rows, columns, 3, side, side), RGB in [0, 1].
        zoom: Pixels per pixel of a tile.
        gap: Pixels between tiles.
        column_gaps: Columns before which the gap is four times as wide.
    """
    from PIL import Image

    rows, columns, _, side, _ = tiles.shape
    large = tiles.repeat_interleave(zoom, 3).repeat_interleave(zoom, 4)
    step = side * zoom + gap
    lefts = [step * k + 3 * gap * sum(k >= before for before in column_gaps) for k in range(columns)]
    sheet = torch.full((3, step * rows - gap, lefts[-1] + side * zoom), torch.nan)
    for row in range(rows):
        for column, left in enumerate(lefts):
            top = step * row
            sheet[:, top : top + side * zoom, left : left + side * zoom] = large[row, column]
    pixels = sheet.nan_to_num(0.5).mul(255).round().clamp(0, 255).byte().permute(1, 2, 0).contiguous()
    return png_of_image(Image.fromarray(pixels.numpy()), transparent=sheet[0].isnan().numpy())
