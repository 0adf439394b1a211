import sys
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from pfml.plots.maps import choose_images, plot_glyph_map, project
from pfml.plots.theme import DARK, LIGHT


def test_as_many_images_of_as_many_classes_are_chosen():
    labels = torch.arange(100) % 10
    chosen = choose_images(labels, classes=4, per_class=3)
    assert labels[chosen].unique(return_counts=True)[1].tolist() == [3] * 4
    assert chosen.unique().numel() == 12


def test_the_choice_depends_on_the_seed_alone():
    labels = torch.arange(100) % 10
    first, again, other = (choose_images(labels, classes=4, per_class=3, seed=seed).tolist() for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_small_sets_are_taken_whole():
    assert choose_images(torch.tensor([0, 1, 1]), classes=5, per_class=5).tolist() == [0, 1, 2]


@pytest.fixture(scope="module")
def clusters():
    generator = torch.Generator().manual_seed(0)
    centers = torch.eye(6)[:4].repeat_interleave(10, 0)
    return centers + 0.05 * torch.randn(40, 6, generator=generator), torch.arange(4).repeat_interleave(10)


def test_clusters_stay_together_on_the_map_and_fill_it(clusters):
    points, labels = clusters
    coordinates = project(points, perplexity=8)
    assert coordinates.amin(0).tolist() == [0.0, 0.0]
    assert coordinates.amax(0).tolist() == [1.0, 1.0]
    distances = torch.cdist(coordinates, coordinates).fill_diagonal_(torch.inf)
    assert (labels[distances.argmin(1)] == labels).all()


def test_a_map_depends_on_directions_perplexity_and_nothing_random(clusters):
    points, _ = clusters
    coordinates = project(points, perplexity=8)
    lengths = 2.0 ** torch.arange(-20.0, 20.0)[:, None]
    assert torch.equal(project(points * lengths, perplexity=8), coordinates)
    assert torch.equal(project(points, perplexity=8), coordinates)
    assert not torch.equal(project(points, perplexity=4), coordinates)


@pytest.mark.parametrize("method", ["tsne", "pca"])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_few_points_have_coordinates_too(method, count):
    coordinates = project(torch.eye(6)[:count], method)
    assert coordinates.shape == (count, 2)
    assert coordinates.isfinite().all()
    assert ((coordinates >= 0) & (coordinates <= 1)).all()


def test_one_scale_for_both_axes_and_a_margin_keep_the_shape(clusters):
    points = clusters[0]
    stretched, kept = project(points, "pca"), project(points, "pca", keep_aspect=True, margin=0.1)
    assert kept.amin() == pytest.approx(0.1)
    assert kept.amax() == pytest.approx(0.9)
    assert (kept.amin(0) + kept.amax(0)).tolist() == pytest.approx([1.0, 1.0])
    width = (kept.amax(0) - kept.amin(0)) / 0.8
    assert torch.allclose((kept - kept.amin(0)) / 0.8 / width, stretched)


def test_one_dimension_can_be_projected():
    assert project(torch.tensor([[1.0], [-1.0], [2.0]]), "pca").shape == (3, 2)


def test_glyphs_are_at_their_coordinates_in_the_color_of_their_class():
    tiles = torch.ones(3, 3, 10, 10)
    coordinates = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.5, 0.5]])
    plot = plot_glyph_map(coordinates, torch.tensor([0, 1, 1]), tiles, LIGHT, width=50)
    image = np.asarray(Image.open(BytesIO(plot)).convert("RGB")).astype(int)
    assert image.shape == (100, 100, 3)
    bottom_left, top_right, middle, empty = image[95, 5], image[5, 95], image[50, 50], image[5, 5]
    assert empty.tolist() == [255, 255, 255]
    assert np.abs(top_right - middle).max() < 3
    assert np.abs(bottom_left - middle).max() > 40


def test_a_faint_background_is_not_plotted_and_themes_differ():
    coordinates, labels = (
        torch.rand(4, 2, generator=torch.Generator().manual_seed(0)),
        torch.zeros(4, dtype=torch.int64),
    )
    faint = plot_glyph_map(coordinates, labels, torch.full((4, 3, 8, 8), 0.3), LIGHT, width=40)
    assert set(np.unique(np.asarray(Image.open(BytesIO(faint)).convert("RGB")))) == {255}
    assert plot_glyph_map(coordinates, labels, torch.full((4, 3, 8, 8), 0.3), DARK, width=40) != faint


@pytest.mark.slow  # numba compiles for a minute
def test_umap_keeps_clusters_together_and_is_the_same_each_time(clusters):
    pytest.importorskip("umap", reason="a map by UMAP needs the extra umap")
    points, labels = clusters
    coordinates = project(points, "umap", perplexity=16)
    assert torch.equal(coordinates, project(points, "umap", perplexity=16))
    nearest = torch.cdist(coordinates, coordinates).fill_diagonal_(9).argmin(1)
    assert torch.equal(labels[nearest], labels)
    assert project(points[:4], "umap").shape == (4, 2), "too few for UMAP"


def test_without_its_package_umap_says_what_to_install(clusters, monkeypatch):
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(ImportError, match=r"pfml\[umap\]"):
        project(clusters[0], "umap")
