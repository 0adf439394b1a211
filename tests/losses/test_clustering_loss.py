"""The facility location loss against its paper in loops, with scikit-learn's NMI."""

import itertools

import pytest
import torch
from sklearn.metrics import normalized_mutual_info_score

from pfml.losses.clustering import ClusteringLoss, greedy_medoids, nmi, refined_medoids

C, D = 6, 5


def score(found, labels):
    return normalized_mutual_info_score(labels, found, average_method="geometric")


def assigned(distances, medoids):
    """The number of the nearest medoid of each sample; of equals the first."""
    return [min(range(len(medoids)), key=lambda k: distances[medoids[k]][i]) for i in range(len(distances))]


def energy(distances, medoids):
    return -sum(min(distances[j][i] for j in medoids) for i in range(len(distances)))


def literal_greedy(distances, labels, gamma):
    medoids = []
    for _ in set(labels):
        values = {
            c: energy(distances, [*medoids, c]) + gamma * (1 - score(assigned(distances, [*medoids, c]), labels))
            for c in range(len(labels))
            if c not in medoids
        }
        medoids.append(max(values, key=values.get))
    return medoids


def literal_refinement(distances, labels, medoids, gamma):
    clusters, medoids = assigned(distances, medoids), list(medoids)
    for number in range(len(medoids)):
        members = [i for i, cluster in enumerate(clusters) if cluster == number]
        values = {}
        for candidate in members:
            moved = [*medoids[:number], candidate, *medoids[number + 1 :]]
            within = -sum(distances[candidate][i] for i in members)
            values[candidate] = within + gamma * (1 - score(assigned(distances, moved), labels))
        medoids[number] = max(values, key=values.get)
    return medoids


def literal(points, labels, gamma, refinements):
    points = torch.nn.functional.normalize(points)
    labels, n = labels.tolist(), len(labels)
    r = [
        [((points[i] - points[j]) ** 2).sum().sqrt() if i != j else points.new_zeros(()) for j in range(n)]
        for i in range(n)
    ]
    plain = [[x.item() for x in row] for row in r]
    medoids = literal_greedy(plain, labels, gamma)
    for _ in range(refinements):
        medoids = literal_refinement(plain, labels, medoids, gamma)
    found = energy(r, medoids) + gamma * (1 - score(assigned(plain, medoids), labels))
    own = 0
    for c in set(labels):
        members = [i for i in range(n) if labels[i] == c]
        own = own - min(sum(r[j][i] for i in members) for j in members)
    return found - own  # before the hinge


def batch(n=12, classes=4, seed=2, dtype=torch.float64, spread=0.8):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    points = (
        torch.randn(n, D, generator=generator, dtype=dtype)
        + spread * torch.randn(C, D, generator=generator, dtype=dtype)[labels]
    )
    return points.requires_grad_(), labels


@pytest.mark.parametrize(("gamma", "refinements"), [(1.0, 5), (4.0, 0), (0.0, 2), (10.0, 3)])
@pytest.mark.parametrize(
    "samples",
    [{"seed": 1}, {"seed": 2}, {"seed": 38, "n": 16, "classes": 2, "spread": 0.0}],
    ids=["one", "another", "a stranger in the middle of a class"],
)
def test_value_and_gradient_are_those_of_the_published_loss(gamma, refinements, samples):
    points, labels = batch(**samples)
    expected = torch.relu(literal(points, labels, gamma, refinements))
    value = ClusteringLoss(C, D, gamma=gamma, refinements=refinements).double()(points, labels)
    assert value.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-12)
    if expected > 0:
        (mine,), (theirs,) = torch.autograd.grad(value, points), torch.autograd.grad(expected, points)
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-10)


def test_the_loss_acts_on_such_batches():
    assert all(ClusteringLoss(C, D).double()(*batch(seed=seed)) > 0 for seed in (1, 2))


def test_medoids_are_those_of_the_published_search():
    for seed in range(5):
        points, labels = batch(n=15, classes=5, seed=seed)
        distances = torch.cdist(points, points).detach()
        membership = torch.nn.functional.one_hot(labels).double()
        medoids = greedy_medoids(distances, membership, 2.0)
        assert medoids.tolist() == literal_greedy(distances.tolist(), labels.tolist(), 2.0)
        refined = refined_medoids(distances, membership, medoids, 2.0)
        assert refined.tolist() == literal_refinement(distances.tolist(), labels.tolist(), medoids.tolist(), 2.0)


@pytest.mark.parametrize("gamma", [0.5, 3.0, 40.0])
def test_refinement_of_any_medoids_is_the_published_one(gamma):
    for seed in range(6):
        points, labels = batch(n=15, classes=5, seed=seed)
        distances = torch.cdist(points, points).detach()
        membership = torch.nn.functional.one_hot(labels).double()
        medoids = torch.randperm(15, generator=torch.Generator().manual_seed(seed))[:5]
        refined = refined_medoids(distances, membership, medoids, gamma)
        assert refined.tolist() == literal_refinement(distances.tolist(), labels.tolist(), medoids.tolist(), gamma)


def test_of_equally_near_medoids_the_first_has_a_sample():
    """Distances are 1 or 2, so that ties are everywhere: each choice is a best one, whichever of equal ones it is."""
    labels, gamma = [0, 0, 0, 1, 1, 1, 2, 2, 2], 5.0
    membership = torch.nn.functional.one_hot(torch.tensor(labels)).double()
    for seed in range(20):
        above = torch.randint(1, 3, (9, 9), generator=torch.Generator().manual_seed(seed)).triu(1).double()
        distances = above + above.T
        plain, chosen = distances.tolist(), []
        for medoid in greedy_medoids(distances, membership, gamma).tolist():
            values = {
                c: energy(plain, [*chosen, c]) + gamma * (1 - score(assigned(plain, [*chosen, c]), labels))
                for c in range(9)
                if c not in chosen
            }
            assert values[medoid] == pytest.approx(max(values.values()), abs=1e-9)
            chosen.append(medoid)
        clusters = assigned(plain, chosen)
        refined = refined_medoids(distances, membership, torch.tensor(chosen), gamma).tolist()
        for number, medoid in enumerate(refined):
            members = [i for i in range(9) if clusters[i] == number]
            values = {}
            for candidate in members:
                moved = [*refined[:number], candidate, *chosen[number + 1 :]]
                within = sum(plain[candidate][i] for i in members)
                values[candidate] = gamma * (1 - score(assigned(plain, moved), labels)) - within
            assert values[medoid] == pytest.approx(max(values.values()), abs=1e-9)


def test_labels_that_beat_whatever_the_search_finds_have_loss_zero():
    points, labels = batch(seed=123, spread=1.5)
    assert literal(points, labels, 1.0, 0) < -0.5
    value = ClusteringLoss(C, D, gamma=1.0, refinements=0).double()(points, labels)
    value.backward()
    assert value.item() == 0
    assert (points.grad == 0).all()


def test_nmi_is_that_of_scikit_learn():
    for first, second in itertools.product([[0, 0, 0, 0], [0, 1, 1, 2], [0, 1, 2, 3], [1, 1, 0, 0]], repeat=2):
        hot = [torch.nn.functional.one_hot(torch.tensor(each), 4).double() for each in (first, second)]
        assert nmi(*hot).item() == pytest.approx(score(first, second), abs=1e-9)


def test_classes_far_apart_have_loss_zero_and_clusters_that_are_their_own():
    labels = torch.arange(12) % 3
    points = (torch.eye(D)[labels] * 10 + 0.01 * torch.randn(12, D)).requires_grad_()
    loss = ClusteringLoss(C, D)
    value = loss(points, labels)
    value.backward()
    assert value.item() == pytest.approx(0, abs=1e-5)
    assert loss.terms["nmi"].item() == pytest.approx(1)


@pytest.mark.parametrize("labels", [[], [3], [1, 1, 1]])
def test_without_another_class_there_is_nothing_to_learn(labels):
    points = torch.randn(len(labels), D, requires_grad=True)
    value = ClusteringLoss(C, D)(points, torch.tensor(labels, dtype=torch.int64))
    value.backward()
    assert value.item() == pytest.approx(0, abs=1e-6)
    assert (points.grad == 0).all()


def test_equal_points_are_finite():
    points = torch.ones(6, D, requires_grad=True)
    with pytest.warns(UserWarning, match="coincide"):
        value = ClusteringLoss(C, D)(points, torch.arange(6) % 3)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(points.grad).all()


def test_training_points_with_it_clusters_them():
    torch.manual_seed(0)
    labels = torch.arange(16) % 4
    points = torch.randn(16, 3).requires_grad_()
    loss, optimizer = ClusteringLoss(4, 3, gamma=8.0), torch.optim.Adam([points], lr=0.03)
    first = loss(points, labels)
    for _ in range(250):
        optimizer.zero_grad()
        loss(points, labels).backward()
        optimizer.step()
    assert loss(points, labels) < 0.2 * first
    assert loss.terms["nmi"] > 0.9


def test_half_precision_and_autocast_are_computed_in_single_precision():
    loss, (points, labels) = ClusteringLoss(C, D), batch(dtype=torch.float32)
    plain = loss(points, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss(points, labels), plain)
    assert loss(points.half() * 100, labels).dtype == torch.float32


def test_bad_input_is_named():
    points, labels = batch()
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 6\), got 9 at index 2"):
        ClusteringLoss(C, D)(points, labels.index_fill(0, torch.tensor([2]), 9))
    for wrong in ({"gamma": -1.0}, {"refinements": -1}, {"num_classes": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ClusteringLoss(**{"num_classes": 3, "embedding_dim": 8, **wrong})
