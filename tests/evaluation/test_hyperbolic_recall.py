import pytest
import torch

from pfml.evaluation import hyperbolic_recall_at_1, retrieval_metrics
from pfml.hyperbolic import ball_distance, exponential_map


def literal(vectors, labels, c, radius):
    points = [exponential_map(x * min(1.0, radius / x.norm().item()), curvature=c) for x in vectors]
    found = 0
    for i, x in enumerate(points):
        others = [j for j in range(len(points)) if j != i]
        nearest = min(others, key=lambda j: ball_distance(x, points[j], curvature=c).item())
        found += labels[nearest] == labels[i]
    return int(found) / len(points)


def draw(scale):
    generator = torch.Generator().manual_seed(4)
    labels = torch.arange(40) % 8
    centers = torch.randn(8, 4, generator=generator)
    return scale * (centers[labels] + 0.7 * torch.randn(40, 4, generator=generator)), labels


@pytest.mark.parametrize(("c", "radius"), [(0.1, 2.3), (1.0, 1.0)])
def test_it_is_the_share_of_queries_whose_nearest_by_distance_in_the_ball_is_of_their_class(c, radius, monkeypatch):
    vectors, labels = draw(1.0)
    expected = literal(vectors, labels, c, radius)
    assert hyperbolic_recall_at_1(vectors, labels, curvature=c, clip_radius=radius) == expected
    monkeypatch.setattr("pfml.evaluation.hyperbolic.PAIRS_AT_ONCE", 100)
    assert hyperbolic_recall_at_1(vectors, labels, curvature=c, clip_radius=radius) == expected
    assert 0.2 < expected < 0.95


def test_clipped_vectors_are_ranked_as_by_cosines_and_short_ones_are_not():
    for scale, equal in ((1000.0, True), (0.3, False)):
        vectors, labels = draw(scale)
        assert (hyperbolic_recall_at_1(vectors, labels) == retrieval_metrics(vectors, labels).recall[1]) is equal


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="labels"):
        hyperbolic_recall_at_1(torch.randn(4, 3), torch.arange(3))
    with pytest.raises(ValueError, match="N >= 2"):
        hyperbolic_recall_at_1(torch.randn(1, 3), torch.arange(1))
