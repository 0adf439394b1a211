"""Duplicates: copies that were planted among images of noise are found, and nothing else."""

import pytest
import torch
import torch.nn.functional as F

from pfml.audit.duplicates import find_duplicates, near_pairs
from pfml.audit.measures import image_measures
from pfml.data import ImageSet

COUNT, SIDE = 40, 24


def blurred(pixels):
    return F.avg_pool2d(pixels, 5, stride=1, padding=2, count_include_pad=False)


@pytest.fixture
def images():
    """Different images with random embeddings; the copies: 1 of 0 exactly, 3 of 2 mirrored, 5 of 4 noisy."""
    random = torch.Generator().manual_seed(0)
    pixels = blurred(torch.rand(COUNT, 3, SIDE, SIDE, generator=random) * 255)
    points = torch.randn(COUNT, 16, generator=random)
    pixels[1], points[1] = pixels[0], points[0]
    pixels[3], points[3] = pixels[2].flip(2), points[2] + 0.05
    pixels[5], points[5] = pixels[4] + 4 * torch.randn(3, SIDE, SIDE, generator=random), points[4] + 0.05
    points[7] = points[6]  # two images that a model takes for one
    labels = torch.arange(COUNT) % 4
    labels[1], labels[3], labels[5] = labels[0], labels[2], labels[4] + 1
    return ImageSet(pixels.clamp(0, 255).byte(), labels, tuple("abcd")), F.normalize(points)


def test_exact_and_near_copies_are_found_and_those_across_classes_come_first(images):
    images, points = images
    roles = ("train", "test", *("train",) * (COUNT - 2))
    found = find_duplicates(images, points, image_measures(images).thumbnails, roles)
    assert [group.indices for group in found] == [(4, 5), (0, 1), (2, 3)]
    assert [group.is_exact for group in found] == [False, True, False]
    assert [group.is_across_classes for group in found] == [True, False, False]
    assert [group.is_across_parts for group in found] == [False, True, False]


def test_images_that_look_alike_must_also_be_near_and_the_other_way_round(images):
    images, points = images
    thumbnails = image_measures(images).thumbnails
    assert near_pairs(points, thumbnails) == [(0, 1), (2, 3), (4, 5)], "6 and 7 have other pixels"
    far = points.clone()
    far[5] = -far[4]
    assert near_pairs(far, thumbnails) == [(0, 1), (2, 3)]


def test_the_nearer_two_images_are_the_less_their_thumbnails_must_correlate(images):
    images, points = images
    thumbnails = image_measures(images).thumbnails.clone()
    noise = torch.randn(thumbnails[4].shape, generator=torch.Generator().manual_seed(1))
    thumbnails[5] = thumbnails[4] + 0.55 * thumbnails[4].std() * noise  # correlates by about 0.88
    assert (4, 5) in near_pairs(points, thumbnails)
    usual = torch.cdist(points, points).fill_diagonal_(9).min(dim=1).values.median()
    direction = F.normalize(torch.randn(16, generator=torch.Generator().manual_seed(2)), dim=0)
    direction = F.normalize(direction - (direction @ points[4]) * points[4], dim=0)
    points[5] = F.normalize(points[4] + 0.7 * usual * direction, dim=0)
    assert (4, 5) not in near_pairs(points, thumbnails)


def test_plain_images_are_copies_only_if_they_are_equally_bright():
    pixels = torch.tensor([10, 10, 200])[:, None, None, None].expand(3, 3, 8, 8).byte()
    images = ImageSet(pixels, torch.tensor([0, 1, 1]), ("a", "b"))
    points = torch.eye(3)[[0, 0, 0]]
    found = find_duplicates(images, points, image_measures(images).thumbnails)
    assert [group.indices for group in found] == [(0, 1)]
    assert found[0].is_exact


def test_one_image_has_no_copies():
    images = ImageSet.unlabeled(torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    assert find_duplicates(images, torch.ones(1, 4), image_measures(images).thumbnails) == []
