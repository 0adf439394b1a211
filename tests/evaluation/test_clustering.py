"""k-means and NMI."""

from __future__ import annotations

import pytest
import torch

from pfml.evaluation import clustering, kmeans, normalized_mutual_information


def blobs(num_points, num_blobs, spread, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_points) % num_blobs
    centers = torch.randn(num_blobs, 16, generator=generator)
    return centers[labels] + spread * torch.randn(num_points, 16, generator=generator), labels


@pytest.mark.parametrize(("first", "second"), [(5, 5), (3, 40), (1, 6), (6, 1)])
def test_nmi_is_that_of_scikit_learn(first, second):
    metrics = pytest.importorskip("sklearn.metrics", reason="compared with scikit-learn")
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(first, (200,), generator=generator)
    b = (a + torch.randint(second, (200,), generator=generator)) % max(second, 1)
    expected = metrics.normalized_mutual_info_score(a.numpy(), b.numpy())
    assert normalized_mutual_information(a, b) == pytest.approx(expected, abs=1e-12)


def test_nmi_does_not_depend_on_names():
    a = torch.tensor([0, 0, 1, 1, 2])
    assert normalized_mutual_information(a, torch.tensor([7, 7, -3, -3, 90])) == pytest.approx(1.0)
    assert normalized_mutual_information(torch.zeros(4).long(), torch.zeros(4).long()) == 1.0
    with pytest.raises(ValueError, match="got \\(5,\\) and \\(4,\\)"):
        normalized_mutual_information(a, a[:4])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_clusters_that_lie_apart_are_found(device):
    points, labels = blobs(200, 8, spread=0.05)
    clusters = kmeans(points.to(device), 8)
    assert normalized_mutual_information(labels, clusters.cpu()) == pytest.approx(1.0)


def test_kmeans_ends_where_every_point_is_at_its_nearest_mean():
    points, _ = blobs(300, 6, spread=1.0)
    clusters = kmeans(points, 6, iterations=200)
    means = torch.stack([points[clusters == c].mean(0) for c in range(6)])
    assert torch.equal(torch.cdist(points, means).argmin(1), clusters)


def test_more_iterations_do_not_make_the_clusters_worse():
    points, _ = blobs(400, 10, spread=1.5)

    def inertia(iterations):
        clusters = kmeans(points, 10, iterations=iterations)
        means = torch.stack([points[clusters == c].mean(0) for c in range(10)])
        return (points - means[clusters]).square().sum().item()

    assert inertia(30) < inertia(1)


def test_the_clusters_depend_on_the_seed_and_on_nothing_else(monkeypatch):
    points, _ = blobs(300, 12, spread=2.0)
    before = torch.get_rng_state()
    expected = kmeans(points, 12, seed=1)
    assert not torch.equal(kmeans(points, 12, seed=2), expected)
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setitem(clustering.AT_ONCE, "cpu", 50)
    assert normalized_mutual_information(kmeans(points, 12, seed=1), expected) == pytest.approx(1.0)


def test_many_clusters_are_seeded_in_rounds(monkeypatch):
    monkeypatch.setattr(clustering, "ROUNDS", 4)
    points, labels = blobs(400, 40, spread=0.01)
    assert normalized_mutual_information(labels, kmeans(points, 40)) > 0.9


def test_as_many_clusters_as_distinct_points_and_more_are_possible():
    points = torch.eye(5).repeat(2, 1)
    assert len(kmeans(points, 5).unique()) == 5
    assert kmeans(points, 8).max() < 8
    assert sorted(kmeans(torch.eye(6), 6).tolist()) == list(range(6))
    for number in (0, 11):
        with pytest.raises(ValueError, match=f"num_clusters must lie in \\[1, 10\\].*got {number}"):
            kmeans(points, number)
