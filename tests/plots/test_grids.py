from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from pfml.data import ImageSet
from pfml.plots.grids import BLUE, GREEN, RED, Retrievals, choose_queries, draw_retrievals, retrieve


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
    assert choose_queries(*points, random=0, worst=1).tolist() == [11]


def test_queries_are_of_different_classes_and_depend_on_the_seed():
    generator = torch.Generator().manual_seed(0)
    embeddings, labels = torch.randn(60, 4, generator=generator), torch.arange(60) % 10
    chosen = {seed: choose_queries(embeddings, labels, random=4, worst=3, seed=seed) for seed in (0, 1)}
    for queries in chosen.values():
        assert len(queries) == 7
        assert len(labels[queries].unique()) == 7
    assert chosen[0][:4].tolist() != chosen[1][:4].tolist()
    assert chosen[0].tolist() == choose_queries(embeddings, labels, random=4, worst=3, seed=0).tolist()


def test_there_are_no_more_queries_than_classes(points):
    assert len(choose_queries(*points, random=5, worst=5)) == 3


def test_a_query_without_a_match_is_not_chosen():
    embeddings, labels = torch.eye(5), torch.tensor([0, 0, 1, 1, 2])
    assert 4 not in choose_queries(embeddings, labels, random=3, worst=3).tolist()


def test_queries_may_be_chosen_by_what_they_find_in_a_gallery(points):
    embeddings, labels = points
    gallery, gallery_labels = embeddings[[0, 4, 11]], torch.tensor([2, 1, 0])
    worst = choose_queries(embeddings, labels, random=0, worst=1, gallery=gallery, gallery_labels=gallery_labels)
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
    sheet = np.asarray(Image.open(BytesIO(draw_retrievals(retrievals, shown, side=32, zoom=2))).convert("RGB"))
    middle = sheet[36]  # a row through the middle of the tiles: frame, black, frame, gap
    for left, color in ((0, BLUE), (72 + 24, GREEN), (72 + 24 + 78, RED)):
        assert np.abs(middle[left + 1] / 255 - color).max() < 0.02
        assert middle[left + 36].max() < 5
    assert np.abs(sheet[5, -5] / 255 - RED).max() < 0.02  # the corner of a wrong one is cut off
    assert sheet[9, 72 + 24 + 72 - 9].max() < 5  # that of a right one is not
