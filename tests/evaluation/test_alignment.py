"""The distance between proxies and data, against all matchings."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from pfml.evaluation import proxy_alignment
from pfml.evaluation.alignment import matched_distances


def best(proxies, points, power):
    """The least mean of distance^power over all matchings, to the power 1 / power."""
    proxies = [p / p.norm() for p in proxies]
    points = [x / x.norm() for x in points]
    few, many = sorted([proxies, points], key=len)
    costs = [
        sum(float((a - b).norm()) ** power for a, b in zip(few, chosen, strict=True)) / len(few)
        for chosen in itertools.permutations(many, len(few))
    ]
    return min(costs) ** (1 / power)


def scene(counts, num_proxies, seed=0):
    generator = torch.Generator().manual_seed(seed)
    proxies = torch.randn(len(counts), num_proxies, 3, generator=generator, dtype=torch.float64)
    labels = torch.tensor([c for c, count in enumerate(counts) for _ in range(count)])
    labels = labels[torch.randperm(len(labels), generator=generator)]
    return proxies, 5 * torch.randn(len(labels), 3, generator=generator, dtype=torch.float64), labels


@pytest.mark.parametrize("num_proxies", [1, 2, 4])
def test_the_alignment_is_that_of_the_best_matching(num_proxies):
    proxies, embeddings, labels = scene([5, 4, 6], num_proxies)
    alignment = proxy_alignment(proxies, embeddings, labels)
    for name, power in (("paper", 1), ("wasserstein2", 2)):
        expected = [best(proxies[c], embeddings[labels == c], power) for c in range(3)]
        assert getattr(alignment, f"{name}_per_class").tolist() == pytest.approx(expected, rel=1e-6)
        assert getattr(alignment, name) == pytest.approx(sum(expected) / 3, rel=1e-6)
    if num_proxies > 1:
        assert alignment.paper < alignment.wasserstein2


def test_one_proxy_is_matched_with_the_nearest_embedding():
    proxies = torch.tensor([[[2.0, 0.0]]])
    embeddings = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])
    assert proxy_alignment(proxies, embeddings, torch.zeros(2).long()).paper == pytest.approx(math.sqrt(2))


def test_surplus_proxies_and_absent_classes_count_nothing():
    proxies, embeddings, labels = scene([2, 0, 5], 3)
    alignment = proxy_alignment(proxies, embeddings, labels)
    few = best(proxies[0], embeddings[labels == 0], 1)
    many = best(proxies[2], embeddings[labels == 2], 1)
    assert alignment.num_classes == 2
    assert math.isnan(alignment.paper_per_class[1])
    assert alignment.paper == pytest.approx((few + many) / 2, rel=1e-6)


def test_proxies_on_their_samples_have_distance_zero():
    proxies, embeddings, labels = scene([4, 4], 4)
    for c in range(2):
        proxies[c] = 0.1 * embeddings[labels == c][[2, 0, 3, 1]]
    alignment = proxy_alignment(proxies, embeddings, labels)
    assert alignment.paper == pytest.approx(0, abs=1e-6)
    assert alignment.wasserstein2 == pytest.approx(0, abs=1e-6)


def test_bad_input_is_refused():
    proxies, embeddings, labels = scene([3, 3], 2)
    with pytest.raises(ValueError, match="labels must lie in \\[0, 2\\).*got 1 to 2"):
        proxy_alignment(proxies, embeddings, labels + 1)
    with pytest.raises(ValueError, match="proxies must be \\(C, M, D\\)"):
        proxy_alignment(proxies[0], embeddings, labels)
    with pytest.raises(ValueError, match="labels must be \\(6,\\)"):
        proxy_alignment(proxies, embeddings, labels[:2])
    with pytest.raises(ValueError, match="must not be empty"):
        proxy_alignment(proxies, embeddings[:0], labels[:0])
    embeddings[4, 1] = torch.nan
    with pytest.raises(ValueError, match="embeddings must be finite, got NaN or Inf in row 4"):
        proxy_alignment(proxies, embeddings, labels)


def test_matched_distances_are_those_of_the_best_of_all_matchings():
    distances = torch.rand(3, 5, dtype=torch.float64)
    for power in (1, 2):
        sums = [
            sum(float(distances[k, j]) ** power for k, j in enumerate(chosen))
            for chosen in itertools.permutations(range(5), 3)
        ]
        assert matched_distances(distances, power=power).pow(power).sum().item() == pytest.approx(min(sums))
