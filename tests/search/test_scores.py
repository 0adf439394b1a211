"""Scores of "known": those of neighborhoods counted by loops."""

import math

import pytest
import torch

from pfml.search.neighborhood import class_spreads, mean_nearest_distance, nearest_neighborhood
from pfml.search.scores import CANDIDATES, SCORES, Scoring, measured_scores, standard_weights
from small_index import unit_vectors

pytestmark = pytest.mark.usefixtures("one_thread")
LAW = {"delta": 0.4, "alpha": 5.0, "spread": 0.7}


def clusters(classes=5, copies=4, seed=0):
    centers = unit_vectors(classes, seed=seed)
    noise = 0.3 * unit_vectors(classes * copies, seed=seed + 1)
    labels = torch.arange(classes).repeat_interleave(copies)
    return torch.nn.functional.normalize(centers[labels] + noise), labels


def spread_of(points):
    """Mean distance to the nearest other point."""
    return sum(min(math.dist(p, q) for q in points if q is not p) for p in points) / len(points)


def oracle(points, labels, k, *, without_own_class):
    """The scores of each point among the others, by Eq. 4 without its sign."""
    points, labels = points.double().tolist(), labels.tolist()
    rows = []
    for i, point in enumerate(points):
        others = [j for j in range(len(points)) if j != i and not (without_own_class and labels[j] == labels[i])]
        near = sorted(others, key=lambda j: math.dist(point, points[j]))[:k]
        pull = {j: max(math.dist(point, points[j]), LAW["delta"]) ** -LAW["alpha"] for j in near}
        of_class = {c: sum(pull[j] for j in near if labels[j] == c) for c in {labels[j] for j in near}}
        best = max(of_class, key=of_class.get)
        second = max([value for c, value in of_class.items() if c != best] + [min(pull.values())])
        nearest = math.dist(point, points[near[0]])
        own = [points[j] for j in others if labels[j] == labels[near[0]]]
        spread = spread_of(own) if len(own) > 1 else LAW["spread"]
        rows.append(
            [
                -nearest,
                math.log(of_class[best]),
                math.log(of_class[best] / second),
                sum(labels[j] == best for j in near) / len(near),
                -math.log(nearest / spread),
            ]
        )
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("without_own_class", [False, True])
@pytest.mark.parametrize("copies", [2, 4])
@pytest.mark.parametrize("k", [3, 24])
def test_scores_are_those_of_loops_over_the_neighbors(k, copies, without_own_class):
    points, labels = clusters(copies=copies)
    near = nearest_neighborhood(points, labels, None, labels, num_classes=5, without_own_class=without_own_class, k=k)
    expected = oracle(points, labels, k, without_own_class=without_own_class)
    found = measured_scores(near, Scoring("distance", **LAW))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for column, name in enumerate(SCORES):
        assert torch.equal(Scoring(name, **LAW).of(near), found[:, column])
    weights = (0.5, -1.0, 2.0, 0.0, 1.0)
    torch.testing.assert_close(
        Scoring("combination", **LAW, weights=weights).of(near), expected @ torch.tensor(weights).double(),
        atol=1e-4, rtol=1e-4,
    )  # fmt: skip


def test_bounded_memory_finds_the_same_neighbors(monkeypatch):
    points, labels = clusters()
    options = {"num_classes": 5, "without_own_class": True}
    whole = nearest_neighborhood(points, labels, None, labels, **options)
    monkeypatch.setattr("pfml.search.neighborhood.MEMORY", 100)
    tiled = nearest_neighborhood(points, labels, None, labels, **options)
    assert torch.equal(whole.labels, tiled.labels)
    assert torch.equal(whole.spread.isnan(), tiled.spread.isnan())
    law = Scoring("distance", **LAW).law
    attraction = tiled.attraction(law)
    monkeypatch.undo()
    for name in ("labels", "votes", "voters", "potential", "second", "weakest", "total"):
        torch.testing.assert_close(getattr(attraction, name), getattr(whole.attraction(law), name))
    torch.testing.assert_close(whole.distances, tiled.distances)


def test_an_image_without_a_class_takes_no_part_in_the_vote():
    points, labels = clusters(classes=2, copies=3)
    near = nearest_neighborhood(points, labels, None, labels, num_classes=2, without_own_class=False)
    some = type(near)(near.distances, torch.where(near.labels == 0, -1, near.labels), near.spread)
    found = some.attraction(Scoring("distance", **LAW).law)
    assert found.labels.tolist() == [1] * 6
    assert found.voters.tolist() == found.votes.tolist() == [3, 3, 3, 2, 2, 2]


def test_the_spread_of_a_class_without_an_image_is_that_of_the_others():
    points, labels = clusters(classes=2, copies=4)
    spreads, without = class_spreads(points, labels, 3)
    plain = points.double().tolist()
    assert float(spreads[0]) == pytest.approx(spread_of(plain[:4]), rel=1e-5)
    assert spreads[2].isnan()
    for i in range(4):
        rest = [plain[j] for j in range(4) if j != i]
        assert float(without[i]) == pytest.approx(spread_of(rest), rel=1e-5)
    assert mean_nearest_distance(points[:4], most=4) == pytest.approx(float(spreads[0]))
    assert mean_nearest_distance(points[:4], most=1) == pytest.approx(
        min(math.dist(plain[0], q) for q in plain[1:4]), rel=1e-5
    )
    assert math.isnan(mean_nearest_distance(points[:1], most=4))


def test_in_a_combination_all_scores_count_equally():
    random = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.01, 1.0, 50.0]).double()
    genuine, impostor = (torch.randn(n, 3, generator=random).double() * scale for n in (20, 30))
    weights = torch.tensor(standard_weights(genuine, impostor))
    torch.testing.assert_close((torch.cat([genuine, impostor]) * weights).std(dim=0), torch.ones(3).double())
    constant = torch.zeros(5, 1).double()
    assert math.isfinite(standard_weights(constant, constant)[0])


def test_a_score_by_another_name_is_refused():
    with pytest.raises(ValueError, match="a score must be one of distance, .*, got 'entropy'"):
        Scoring("entropy", **LAW)
    with pytest.raises(ValueError, match="must have 5 weights, got 2"):
        Scoring("combination", **LAW, weights=(1.0, 2.0))
    assert CANDIDATES[-1] == "combination"
