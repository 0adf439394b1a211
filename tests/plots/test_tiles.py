from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from pfml.data import ImageSet, open_images
from pfml.plots.grids import image_sheet, thumbnails


def pixels(png):
    return np.asarray(Image.open(BytesIO(png)).convert("RGBA"))


@pytest.fixture
def flat_images():
    """Four images of one color each, of 8 x 8 pixels."""
    images = (torch.arange(4, dtype=torch.uint8) * 60).view(4, 1, 1, 1).expand(4, 3, 8, 8).contiguous()
    return ImageSet(images, torch.arange(4), ("a", "b", "c", "d"))


def test_thumbnails_come_in_the_asked_order_and_size(flat_images):
    tiles = thumbnails(flat_images, [2, 0, 2], side=5)
    assert tiles.shape == (3, 3, 5, 5)
    torch.testing.assert_close(tiles[:, 0, 2, 2], torch.tensor([120.0, 0.0, 120.0]) / 255)


def test_thumbnails_of_a_source_are_those_of_its_images(flat_images):
    source = open_images(flat_images)
    torch.testing.assert_close(thumbnails(source, torch.tensor([3, 1])), thumbnails(flat_images, [3, 1]))


def test_thumbnails_of_files_are_read_from_them(tmp_path, flat_images):
    paths = tuple(tmp_path / f"{k}.png" for k in range(4))
    for k, path in enumerate(paths):
        Image.new("RGB", (20, 10), (60 * k,) * 3).save(path)
    files = ImageSet(paths, torch.arange(4), flat_images.class_names)
    torch.testing.assert_close(thumbnails(files, [3, 1], side=6), thumbnails(flat_images, [3, 1], side=6))


def test_no_indices_give_no_thumbnails(flat_images):
    assert thumbnails(flat_images, [], side=4).shape == (0, 3, 4, 4)


def test_a_sheet_has_tiles_in_rows_and_the_page_between_them():
    tiles = torch.zeros(2, 3, 3, 4, 4)
    tiles[1, 2] = 1.0
    sheet = pixels(image_sheet(tiles, zoom=2, gap=3))
    assert sheet.shape == (2 * 8 + 3, 3 * 8 + 2 * 3, 4)
    assert (sheet[8:11, :, 3] == 0).all()
    assert (sheet[11:, 22:] == 255).all()
    assert (sheet[:8, :8, :3] == 0).all()


def test_a_column_can_be_set_apart():
    tiles = torch.zeros(1, 3, 3, 4, 4)
    assert (
        pixels(image_sheet(tiles, gap=2, column_gaps=(1,))).shape[1] == pixels(image_sheet(tiles, gap=2)).shape[1] + 6
    )
