import math

import pytest
import torch

from pfml.hyperbolic import (
    ball_distance,
    clip_lengths,
    exponential_map,
    mobius_addition,
    riemannian_gradient,
    tangent_distances,
)
from pfml.sphere import unit

CURVATURES = (0.1, 1.0, 2.5)


def dot(x, y):
    return sum(a * b for a, b in zip(x, y, strict=True))


def literal_map(v, c):
    length = math.sqrt(dot(v, v))
    return [math.tanh(math.sqrt(c) * length) * one / (math.sqrt(c) * length) for one in v]


def literal_sum(x, y, c):
    xy, x2, y2 = dot(x, y), dot(x, x), dot(y, y)
    divisor = 1 + 2 * c * xy + c * c * x2 * y2
    return [((1 + 2 * c * xy + c * y2) * a + (1 - c * x2) * b) / divisor for a, b in zip(x, y, strict=True)]


def literal_distance(x, y, c):
    difference = literal_sum([-one for one in x], y, c)
    return 2 / math.sqrt(c) * math.atanh(math.sqrt(c * dot(difference, difference)))


def vectors(n=6, dims=5, scale=1.0, seed=0):
    return scale * torch.randn(n, dims, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("c", CURVATURES)
def test_maps_sums_and_distances_are_the_formulas(c):
    v, w = vectors(scale=0.5), vectors(4, scale=0.5, seed=1)
    x, y = exponential_map(v, curvature=c), exponential_map(w, curvature=c)
    matrix = tangent_distances(v, w, curvature=c)
    for i in range(6):
        expected = torch.tensor(literal_map(v[i].tolist(), c), dtype=torch.float64)
        torch.testing.assert_close(x[i], expected, rtol=1e-13, atol=0)
        for j in range(4):
            added = torch.tensor(literal_sum(x[i].tolist(), y[j].tolist(), c), dtype=torch.float64)
            torch.testing.assert_close(mobius_addition(x[i], y[j], curvature=c), added, rtol=1e-12, atol=1e-15)
            distance = literal_distance(x[i].tolist(), y[j].tolist(), c)
            assert ball_distance(x[i], y[j], curvature=c).item() == pytest.approx(distance, rel=1e-11)
            assert matrix[i, j].item() == pytest.approx(distance, rel=1e-11)


def test_the_moebius_sum_cancels_on_the_left_and_does_not_commute():
    x, y = exponential_map(vectors(), curvature=1.0), exponential_map(vectors(seed=1), curvature=1.0)
    total = mobius_addition(x, y, curvature=1.0)
    torch.testing.assert_close(mobius_addition(-x, total, curvature=1.0), y)
    assert (total - mobius_addition(y, x, curvature=1.0)).abs().max() > 0.01
    assert (total.norm(dim=1) < 1).all()


def test_a_point_is_at_twice_the_length_of_its_vector_from_the_origin():
    v = vectors()
    for c in CURVATURES:
        distances = tangent_distances(v, torch.zeros(1, 5, dtype=torch.float64), curvature=c)
        torch.testing.assert_close(distances[:, 0], 2 * v.norm(dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distances_hold_near_the_boundary_where_the_formula_of_the_ball_ends(dtype):
    """Opposite vectors are as far as the sum of their ways, vectors of one direction as the difference."""
    direction = unit(vectors(1)).to(dtype)
    for length in (1.0, 5.0, 10.0, 20.0):
        there, back, further = length * direction, -length * direction, (length + 0.5) * direction
        assert tangent_distances(there, back, curvature=1.0).item() == pytest.approx(4 * length, rel=1e-6)
        assert tangent_distances(there, further, curvature=1.0).item() == pytest.approx(1.0, rel=1e-5)
    assert exponential_map(20 * direction, curvature=1.0).norm().item() == pytest.approx(1.0)


def test_close_points_keep_their_distance_in_float32():
    v = vectors(1, 64).float()
    for step in (1e-2, 1e-4, 1e-6):
        w = v + step * vectors(1, 64, seed=3).float()
        exact = ball_distance(*(exponential_map(one.double(), curvature=0.1) for one in (v, w)), curvature=0.1)
        assert tangent_distances(v, w, curvature=0.1).item() == pytest.approx(exact.item(), rel=1e-3)


def test_coincident_and_zero_vectors_have_distance_0_and_finite_gradients():
    v = vectors(4).float()
    v[1] = v[0]
    v[3] = 0
    v.requires_grad_()
    distances = tangent_distances(v, v, curvature=0.1)
    assert distances.diagonal().tolist() == [0, 0, 0, 0]
    assert distances[0, 1] == 0
    distances.sum().backward()
    assert torch.isfinite(v.grad).all()
    assert v.grad.abs().max() < 100


def test_gradcheck():
    v, w = vectors(3).requires_grad_(), vectors(2, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda *both: tangent_distances(*both, curvature=0.7), (v, w))
    assert torch.autograd.gradcheck(lambda one: exponential_map(one, curvature=0.7), (v,))
    assert torch.autograd.gradcheck(lambda one: clip_lengths(one, 1.5), (v,))
    x, y = (exponential_map(one.detach(), curvature=0.7).requires_grad_() for one in (v[:2], w))
    assert torch.autograd.gradcheck(lambda *both: mobius_addition(*both, curvature=0.7), (x, y))
    assert torch.autograd.gradcheck(lambda *both: ball_distance(*both, curvature=0.7), (x, y))


def test_clipping_shortens_what_is_too_long_and_nothing_else():
    v = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [3e30, 4e30], [3e-30, 4e-30]])
    clipped = clip_lengths(v, 2.0)
    torch.testing.assert_close(clipped, torch.tensor([[1.2, 1.6], [0.3, 0.4], [0.0, 0.0], [1.2, 1.6], [3e-30, 4e-30]]))
    assert clipped.dtype is torch.float32


def test_at_equal_lengths_the_order_is_that_of_cosines():
    v = 2.3 * unit(vectors(40, 8))
    distances = tangent_distances(v, v, curvature=0.1)
    assert torch.equal(distances.argsort(dim=1)[:, 1:], (v @ v.T).argsort(dim=1, descending=True)[:, 1:])


def test_gradients_of_the_metric_are_those_of_the_points_times_the_inverse_metric():
    c, v = 0.6, vectors(3).requires_grad_()
    same = riemannian_gradient(v, curvature=c)
    assert torch.equal(same, v)
    weights = vectors(3, seed=4)
    (plain,) = torch.autograd.grad((exponential_map(v, curvature=c) * weights).sum(), v)
    (scaled,) = torch.autograd.grad((exponential_map(same, curvature=c) * weights).sum(), v)
    squares = exponential_map(v.detach(), curvature=c).square().sum(dim=1, keepdim=True)
    torch.testing.assert_close(scaled, plain * (1 - c * squares) ** 2 / 4)
