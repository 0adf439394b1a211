import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from oracle import class_potential
from pfml import PotentialFieldLoss
from pfml.plots.field_slice import (
    ColorScale,
    SphereSlice,
    best_slice,
    measure_field,
    neighboring_classes,
    plot_field_slice,
)
from pfml.plots.theme import DARK, LIGHT, png_of_figure

CLASSES, DIM = 5, 6


def unit_vectors(*shape, seed=0):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=-1)


@pytest.fixture
def slice_of_space():
    return best_slice(unit_vectors(20, DIM))


@pytest.fixture
def scene():
    """Five classes of ten, around directions of their own, and a loss with three proxies each."""
    torch.manual_seed(0)
    loss = PotentialFieldLoss(CLASSES, DIM, proxies_per_class=3, delta=0.3)
    labels = torch.arange(CLASSES).repeat_interleave(10)
    embeddings = F.normalize(torch.eye(DIM)[labels] + 0.6 + 0.1 * unit_vectors(50, DIM).float(), dim=1)
    return loss, embeddings, labels


def test_the_frame_is_orthonormal_and_every_point_of_the_plot_lies_on_the_sphere(slice_of_space):
    frame = slice_of_space.frame
    torch.testing.assert_close(frame @ frame.T, torch.eye(3, dtype=torch.float64))
    coordinates = torch.rand(30, 2, generator=torch.Generator().manual_seed(1)) * 3 - 1.5
    torch.testing.assert_close(slice_of_space.lift(coordinates).norm(dim=1), torch.ones(30, dtype=torch.float64))


def test_project_is_the_inverse_of_lift(slice_of_space):
    coordinates = torch.rand(30, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3 - 1.5
    coordinates[0] = 0.0
    lifted = slice_of_space.lift(coordinates)
    torch.testing.assert_close(slice_of_space.project(lifted), coordinates)
    torch.testing.assert_close(slice_of_space.nearness(lifted), torch.ones(30, dtype=torch.float64))


def test_distances_from_the_center_are_angles(slice_of_space):
    coordinates = torch.tensor([[0.3, 0.4], [-1.2, 0.5]], dtype=torch.float64)
    angles = torch.acos(slice_of_space.lift(coordinates) @ slice_of_space.frame[0])
    torch.testing.assert_close(angles, torch.tensor([0.5, 1.3], dtype=torch.float64))


def test_a_point_off_the_slice_is_moved_to_its_nearest_point_on_it(slice_of_space):
    (point,) = unit_vectors(1, DIM, seed=5)
    nearest = slice_of_space.lift(slice_of_space.project(point[None]))[0]
    coordinates = torch.rand(2000, 2, generator=torch.Generator().manual_seed(1)) * 6 - 3
    assert (slice_of_space.lift(coordinates) @ point).max() <= nearest @ point + 1e-12
    torch.testing.assert_close(slice_of_space.nearness(point[None])[0], nearest @ point)


def test_points_of_a_three_dimensional_subspace_lie_on_their_best_slice():
    points = F.normalize(unit_vectors(12, 3) @ unit_vectors(3, 8, seed=1), dim=1)
    torch.testing.assert_close(best_slice(points).nearness(points), torch.ones(12, dtype=torch.float64))


def test_the_slice_does_not_depend_on_the_order_of_the_points():
    points = unit_vectors(15, DIM)
    torch.testing.assert_close(best_slice(points.flip(0)).frame, best_slice(points).frame)


def test_neighbors_are_the_classes_of_nearest_mean_direction():
    angles = torch.tensor([0.0, 2.0, 0.4, 0.1])
    embeddings = torch.stack([angles.cos(), angles.sin()], dim=1).repeat_interleave(3, 0)
    labels = torch.arange(4).repeat_interleave(3)
    assert neighboring_classes(embeddings, labels, first=0, count=3) == (0, 3, 2)
    assert neighboring_classes(embeddings, labels, first=1, count=2) == (1, 2)


def test_the_field_on_the_grid_is_that_of_the_equations(scene):
    loss, embeddings, labels = scene
    field = measure_field(loss, embeddings, labels, (2, 0, 4), cells=5)
    line = torch.linspace(-field.edge, field.edge, 5, dtype=torch.float64)
    proxies, proxy_labels = loss.proxy_points().flatten(0, 1).double().tolist(), loss.proxy_labels.tolist()
    out_of_reach = 3 * (CLASSES - 1) / 0.3**3
    for row, column in ((0, 0), (1, 3), (4, 2)):
        (point,) = field.slice.lift(torch.stack([line[column], line[row]])[None]).tolist()
        expected = class_potential(2, point, proxies, proxy_labels, delta=0.3) - out_of_reach
        assert field.potential[row, column].item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_the_plot_holds_the_samples_and_proxies_of_its_classes(scene):
    loss, embeddings, labels = scene
    field = measure_field(loss, embeddings, labels, (2, 0, 4), cells=5)
    assert field.sample_labels.unique().tolist() == [0, 2, 4]
    assert field.proxy_labels.tolist() == [2, 2, 2, 0, 0, 0, 4, 4, 4]
    torch.testing.assert_close(field.proxies[3:6], loss.proxy_points()[0].double())
    figure = plot_field_slice(field, {2: "two", 0: "zero", 4: "four"}, LIGHT)
    drawn = [len(one.get_offsets()) for one in figure.axes[0].collections if len(one.get_offsets()) in (3, 10)]
    assert drawn == [10, 10, 10, 3, 3, 3]
    assert [text.get_text() for text in figure.legends[0].get_texts()][:3] == ["two", "zero", "four"]


def test_themes_and_widths_change_the_plot(scene):
    field = measure_field(*scene, (2, 0, 4), cells=9)
    names = {2: "two", 0: "zero", 4: "four"}
    options = ((LIGHT, 200), (DARK, 200), (LIGHT, 210))
    assert len({png_of_figure(plot_field_slice(field, names, theme, width=width)) for theme, width in options}) == 3


def test_the_color_scale_is_odd_growing_and_ends_at_the_peak():
    scale = ColorScale(peak=50.0)
    heights = scale.height(torch.tensor([-50.0, -1.0, 0.0, 1.0, 50.0]))
    torch.testing.assert_close(heights, -heights.flip(0))
    assert (heights.diff() > 0).all()
    assert math.isclose(scale.levels()[-1], heights[-1].item(), rel_tol=0.01)
    assert scale.ticks() == [-50.0, -10.0, 0.0, 10.0, 50.0]
    assert ColorScale(peak=0.0734).ticks() == pytest.approx([-0.07, -0.01, 0.0, 0.01, 0.07])
    assert ColorScale(50.0, faint=0.5).height(torch.tensor(1.0)) < scale.height(torch.tensor(1.0))


def test_a_slice_is_made_of_three_directions():
    assert SphereSlice(torch.eye(3, dtype=torch.float64)).lift(torch.zeros(1, 2)).tolist() == [[1.0, 0.0, 0.0]]


def test_a_cell_on_a_proxy_that_repels_is_drawn_like_the_largest_finite_potential(scene):
    field = measure_field(*scene, (2, 0, 4), cells=9)
    names = {2: "two", 0: "zero", 4: "four"}
    cells = [field.potential.clone(), field.potential.clone()]
    cells[0][3, 4], cells[1][3, 4] = math.inf, field.potential.abs().max()
    plots = [png_of_figure(plot_field_slice(replace(field, potential=each), names, LIGHT)) for each in cells]
    assert plots[0] == plots[1]
