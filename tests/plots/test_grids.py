from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from pfml.data import ImageSet, open_images
from pfml.evaluation import query_scores
from pfml.evaluation.nearest_neighbors import directions
from pfml.plots.grids import (
    BLUE,
    GREEN,
    RED,
    Retrievals,
    choose_queries,
    image_grid,
    plot_retrievals,
    retrieve,
    thumbnails,
)


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


def test_a_grid_has_tiles_in_rows_and_is_transparent_between_them():
    tiles = torch.zeros(2, 3, 3, 4, 4)
    tiles[1, 2] = 1.0
    grid = pixels(image_grid(tiles, zoom=2, gap=3))
    assert grid.shape == (2 * 8 + 3, 3 * 8 + 2 * 3, 4)
    assert (grid[8:11, :, 3] == 0).all()
    assert (grid[11:, 22:] == 255).all()
    assert (grid[:8, :8, :3] == 0).all()


def test_a_column_can_be_set_apart():
    tiles = torch.zeros(1, 3, 3, 4, 4)
    assert pixels(image_grid(tiles, gap=2, column_gaps=(1,))).shape[1] == pixels(image_grid(tiles, gap=2)).shape[1] + 6


def chosen_queries(embeddings, labels, gallery=None, gallery_labels=None, **counts):
    scores = query_scores(directions(embeddings, "embeddings"), labels, gallery, gallery_labels)
    return choose_queries(scores, labels, **counts)


@pytest.fixture
def points():
    """Three classes of four on a circle: two tight ones, and one whose last member is inside of the first class."""
    angles = torch.tensor([0.0, 0.1, 0.2, 0.3, 2.0, 2.1, 2.2, 2.3, 4.0, 4.1, 4.2, 0.15])
    return torch.stack([angles.cos(), angles.sin()], dim=1), torch.arange(3).repeat_interleave(4)


def test_neighbors_are_the_nearest_others_and_are_marked_right_or_wrong(points):
    found = retrieve(*points, torch.tensor([11, 4]), k=3)
    assert found.neighbors.tolist()[1] == [5, 6, 7]
    assert set(found.neighbors.tolist()[0][:2]) == {1, 2}
    assert found.correct.tolist() == [[False] * 3, [True] * 3]


def test_an_image_does_not_find_itself_among_equal_ones():
    embeddings = torch.tensor([[1.0, 0.0]] * 5)
    found = retrieve(embeddings, torch.arange(5), torch.arange(5), k=3)
    assert all(query not in row for query, row in enumerate(found.neighbors.tolist()))
    assert found.neighbors.shape == (5, 3)


def test_a_gallery_is_searched_instead(points):
    embeddings, labels = points
    gallery, gallery_labels = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([0, 1])
    found = retrieve(embeddings, labels, torch.tensor([0]), k=2, gallery=gallery, gallery_labels=gallery_labels)
    assert found.neighbors.tolist() == [[1, 0]]
    assert found.correct.tolist() == [[False, True]]


def test_the_worst_queries_are_those_of_least_average_precision(points):
    assert chosen_queries(*points, worst=1).tolist() == [11]


def test_the_best_queries_are_those_of_highest_average_precision(points):
    assert points[1][chosen_queries(*points, best=1)].tolist() == [1]
    assert len(chosen_queries(*points, best=9)) == 3
    # all find nothing but their class: those with more matches go first
    tight, labels = torch.eye(4)[[0, 0, 1, 1, 1, 2, 2]], torch.tensor([0, 0, 1, 1, 1, 2, 2])
    assert labels[chosen_queries(tight, labels, best=3)].tolist() == [1, 0, 2]


def test_queries_are_of_different_classes_and_depend_on_the_seed():
    generator = torch.Generator().manual_seed(0)
    embeddings, labels = torch.randn(60, 4, generator=generator), torch.arange(60) % 10
    chosen = {seed: chosen_queries(embeddings, labels, random=4, worst=3, seed=seed) for seed in (0, 1)}
    for queries in chosen.values():
        assert len(queries) == 7
        assert len(labels[queries].unique()) == 7
    assert chosen[0][:4].tolist() != chosen[1][:4].tolist()
    assert chosen[0].tolist() == chosen_queries(embeddings, labels, random=4, worst=3, seed=0).tolist()


def test_there_are_no_more_queries_than_classes(points):
    assert len(chosen_queries(*points, random=5, worst=5)) == 3


def test_a_query_without_a_match_is_not_chosen():
    embeddings, labels = torch.eye(5), torch.tensor([0, 0, 1, 1, 2])
    assert 4 not in chosen_queries(embeddings, labels, random=3, worst=3).tolist()


def test_queries_may_be_chosen_by_what_they_find_in_a_gallery(points):
    embeddings, labels = points
    gallery, gallery_labels = embeddings[[0, 4, 11]], torch.tensor([2, 1, 0])
    worst = chosen_queries(embeddings, labels, worst=1, gallery=gallery, gallery_labels=gallery_labels)
    assert labels[worst].tolist() != [1]


@pytest.mark.parametrize("as_files", [False, True])
def test_frames_tell_right_from_wrong(tmp_path, as_files):
    images = torch.zeros(3, 3, 32, 32, dtype=torch.uint8)
    if as_files:
        paths = tuple(tmp_path / f"{k}.png" for k in range(3))
        for path in paths:
            Image.new("RGB", (40, 32)).save(path)
        images = paths
    shown = ImageSet(images, torch.tensor([0, 0, 1]), ("a", "b"))
    retrievals = Retrievals(torch.tensor([0]), torch.tensor([[1, 2]]), torch.tensor([[True, False]]))
    grid = np.asarray(Image.open(BytesIO(plot_retrievals(retrievals, shown, side=32, zoom=2))).convert("RGB"))
    middle = grid[36]  # a row through the middle of the tiles: frame, black, frame, gap
    for left, color in ((0, BLUE), (72 + 24, GREEN), (72 + 24 + 78, RED)):
        assert np.abs(middle[left + 1] / 255 - color).max() < 0.02
        assert middle[left + 36].max() < 5
    assert np.abs(grid[5, -5] / 255 - RED).max() < 0.02  # the corner of a wrong one is cut off
    assert grid[9, 72 + 24 + 72 - 9].max() < 5  # that of a right one is not
