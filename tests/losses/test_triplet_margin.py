"""Triplets of a batch, against frequencies and sums in plain Python."""

import math
from collections import Counter

import pytest
import torch
from literal_triplets import literal_margin, rows

from pfml.losses.triplet_margin import (
    Triplets,
    distance_weighted_triplets,
    log_inverse_density,
    margin_loss,
    within_class_triplets,
)
from pfml.sphere import unit


def literal_shares(points, labels, anchor, cutoff):
    """How often each sample is the anchor's negative: in proportion to r^(2 - D) (1 - r^2 / 4)^((3 - D) / 2)."""
    dim, weights = len(points[0]), []
    for point, label in zip(points, labels, strict=True):
        r = max(math.dist(points[anchor], point), cutoff)
        density = r ** (dim - 2) * (1 - r * r / 4) ** ((dim - 3) / 2)
        weights.append(0.0 if label == labels[anchor] else 1 / density)
    return [weight / sum(weights) for weight in weights]


def points_of(n, dim, dtype=torch.float64):
    return unit(torch.randn(n, dim, generator=torch.Generator().manual_seed(3), dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("cutoff", [0.5, 1.3])
def test_negatives_are_drawn_against_the_density_of_distances(cutoff):
    points, labels = points_of(7, 6), torch.tensor([0, 0, 1, 1, 1, 2, 3])
    torch.manual_seed(0)
    draws = 3000
    drawn = [rows(distance_weighted_triplets(points, labels, cutoff=cutoff)) for _ in range(draws)]
    for anchor in range(5):
        counts = Counter(batch[anchor][2] for batch in drawn)
        for sample, share in enumerate(literal_shares(points.tolist(), labels.tolist(), anchor, cutoff)):
            assert counts[sample] / draws == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / draws) + 1e-3)
    assert Counter(batch[0][1] for batch in drawn) == {1: draws}
    assert Counter(batch[3][1] for batch in drawn)[2] / draws == pytest.approx(0.5, abs=0.04)
    assert all(batch[row][0] == row for batch in drawn for row in range(7))


def test_a_sample_without_positives_or_negatives_is_no_anchor():
    points = points_of(4, 3)
    assert distance_weighted_triplets(points, torch.tensor([0, 0, 1, 2])).exist.tolist() == [True, True, False, False]
    assert not distance_weighted_triplets(points, torch.zeros(4, dtype=torch.int64)).exist.any()


def test_draws_are_the_same_in_any_dtype():
    points, labels = points_of(30, 8), torch.arange(30) % 6
    drawn = []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(1)
        drawn.append(rows(distance_weighted_triplets(points.to(dtype), labels)))
    assert drawn[0] == drawn[1]


def test_opposite_points_have_a_finite_weight():
    weights = log_inverse_density(torch.tensor([0.5, 1.0, 2.0]), 128)
    assert torch.isfinite(weights).all()
    assert weights[0] > weights[1]
    points = torch.tensor([[1.0, 0, 0, 0], [1, 0, 0, 0], [-1, 0, 0, 0]])
    assert distance_weighted_triplets(points, torch.tensor([0, 0, 1])).negatives.tolist()[:2] == [2, 2]


def test_switched_anchors_repel_a_positive():
    points, labels = points_of(20, 4), torch.arange(20) // 2
    torch.manual_seed(0)
    drawn = [row for _ in range(200) for row in rows(distance_weighted_triplets(points, labels, switched=0.3))]
    switched = [row for row in drawn if row[0] == row[1]]
    assert len(switched) / len(drawn) == pytest.approx(0.3, abs=0.03)
    assert all(n != a and labels[a] == labels[n] for a, _, n, _ in switched)
    assert all(labels[a] == labels[p] != labels[n] for a, p, n, _ in drawn if a != p)


def test_triplets_within_a_class_draw_each_class_alike_with_replacement():
    labels = torch.tensor([4, 4, 4, 1, 7, 7])
    torch.manual_seed(0)
    drawn = [triplet for _ in range(1000) for triplet in rows(within_class_triplets(labels))]
    assert all(labels[a] == labels[p] == labels[n] and exists for a, p, n, exists in drawn)
    of_class = Counter(int(labels[a]) for a, *_ in drawn)
    for label in (4, 1, 7):
        assert of_class[label] / len(drawn) == pytest.approx(1 / 3, abs=0.025)
    combinations = Counter((a, p, n) for a, p, n, _ in drawn if labels[a] == 7)
    assert len(combinations) == 8
    assert all(count / of_class[7] == pytest.approx(1 / 8, abs=0.04) for count in combinations.values())


@pytest.mark.parametrize("margin", [0.2, 0.0])
def test_value_and_gradients_of_the_margin_loss_are_those_of_plain_sums(margin):
    points, labels = points_of(12, 5).requires_grad_(), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 4])
    beta = torch.linspace(0.3, 1.6, 12, dtype=torch.float64).requires_grad_()
    torch.manual_seed(4)
    triplets = distance_weighted_triplets(points, labels)
    expected = literal_margin(points, range(12), rows(triplets), beta, margin)
    value = margin_loss(points, triplets, beta, margin=margin)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    theirs = torch.autograd.grad(expected, [points, beta])
    for mine, reference in zip(torch.autograd.grad(value, [points, beta]), theirs, strict=True):
        assert mine.abs().max() > 0
        torch.testing.assert_close(mine, reference)


def test_triplets_that_do_not_act_do_not_count():
    points = torch.eye(3)[[0, 0, 1]].requires_grad_()
    index = torch.arange(2)
    triplets = Triplets(index, 1 - index, torch.tensor([2, 2]), torch.tensor([True, True]))
    assert margin_loss(points, triplets, torch.full((3,), 1.0), margin=0.2).item() == 0  # 0 and 1.41 apart
    value = margin_loss(points, triplets, torch.tensor([1.3, 1.0, 1.0]), margin=0.2)  # one negative is 0.086 too near
    assert value.item() == pytest.approx(1.5 - math.sqrt(2), abs=1e-6)


def test_coincident_points_have_finite_gradients():
    points = torch.ones(4, 3).requires_grad_()
    triplets = distance_weighted_triplets(unit(points), torch.tensor([0, 0, 1, 1]))
    margin_loss(unit(points), triplets, torch.full((4,), 1.2), margin=0.2).backward()
    assert torch.isfinite(points.grad).all()
