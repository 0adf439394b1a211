"""Accuracy on known classes against loops over queries and images."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from pfml.evaluation.class_attraction import fitted_law, most_attractive
from pfml.evaluation.classification import Accuracy, Classification, classification_metrics, majority
from pfml.field import PowerLaw

LAW = PowerLaw(delta=0.3, alpha=4.0)


def clusters(classes, each, *, spread=0.9, dims=5, seed=0):
    """Vectors around a direction for each class, shuffled, and their labels."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(each)[torch.randperm(classes * each, generator=random)]
    centers = torch.randn(classes, dims, generator=torch.Generator().manual_seed(99))
    points = centers[labels] + spread * torch.randn(len(labels), dims, generator=random)
    return points * torch.rand(len(labels), 1, generator=random).add(0.1), labels


def unit(vector):
    norm = math.sqrt(sum(x * x for x in vector))
    return [x / norm for x in vector]


def predictions_by_loops(queries, gallery, labels, proxies, k):
    """Predictor -> the class of each query."""
    items, labels = [unit(row) for row in gallery.double().tolist()], labels.tolist()
    stars = [(unit(row), j) for j, own in enumerate(proxies.double().tolist()) for row in own]
    found = {name: [] for name in ("nearest", "k_nearest", "class_mean", "class_potential", "proxy")}
    for query in (unit(row) for row in queries.double().tolist()):
        order = sorted(range(len(items)), key=lambda i: (math.dist(query, items[i]), i))
        found["nearest"].append(labels[order[0]])
        near = [labels[i] for i in order[:k]]
        votes = Counter(near)
        found["k_nearest"].append(next(label for label in near if votes[label] == max(votes.values())))
        means = {}
        for label in set(labels):
            own = [item for item, its in zip(items, labels, strict=True) if its == label]
            means[label] = unit([sum(column) for column in zip(*own, strict=True)])
        found["class_mean"].append(min(means, key=lambda label: math.dist(query, means[label])))
        pull = Counter()
        for item, label in [*zip(items, labels, strict=True), *stars]:
            pull[label] += max(math.dist(query, item), LAW.delta) ** -LAW.alpha
        found["class_potential"].append(max(pull, key=lambda label: (pull[label], -label)))
        found["proxy"].append(min(stars, key=lambda star: math.dist(query, star[0]))[1])
    return found


@pytest.mark.parametrize("k", [1, 4, 10, 1000])
def test_every_predictor_is_the_one_of_loops(k):
    queries, truth = clusters(5, 8, seed=1)
    gallery, labels = clusters(5, 6, seed=2)
    proxies = torch.randn(5, 2, 5, generator=torch.Generator().manual_seed(3))
    found = classification_metrics(queries, truth, gallery, labels, proxies=proxies, law=LAW, k=k)
    expected = predictions_by_loops(queries, gallery, labels, proxies, k)
    assert found.k == min(k, len(gallery))
    assert set(found.accuracy) == set(expected)
    for name, classes in expected.items():
        right = sum(one == other for one, other in zip(classes, truth.tolist(), strict=True))
        assert found.accuracy[name] == Accuracy(right, len(truth)), name
    assert found.confusions == Counter(zip(truth.tolist(), expected["k_nearest"], strict=True))
    assert 0.3 < found.accuracy["nearest"].value < 0.95, "else the test could not tell predictors apart"


def test_equally_frequent_classes_are_decided_by_the_nearest():
    neighbors = torch.tensor([[2, 1, 1, 2, 0], [0, 1, 1, 2, 2], [3, 3, 3, 1, 1], [4, 1, 2, 3, 0]])
    assert majority(neighbors).tolist() == [2, 1, 3, 4]


def test_the_law_fits_the_gallery_unless_given_and_proxies_are_optional():
    (queries, truth), (gallery, labels) = clusters(4, 30, seed=1), clusters(4, 10, seed=2)
    found = classification_metrics(queries, truth, gallery, labels)
    assert "proxy" not in found.accuracy
    assert found == classification_metrics(queries, truth, gallery, labels, proxies=torch.empty(4, 0, 5))
    items = torch.nn.functional.normalize(gallery)
    where = torch.nn.functional.normalize(queries)
    fitted = most_attractive(where, items, labels, 4, law=fitted_law(items, labels, 4))
    assert found.accuracy["class_potential"].correct == int((fitted == truth).sum())
    flat = classification_metrics(queries, truth, gallery, labels, law=PowerLaw(delta=1.9, alpha=0.5))
    assert flat.accuracy["class_potential"] != found.accuracy["class_potential"]


def test_classes_that_the_gallery_lacks_are_counted_and_left_out():
    (queries, truth), (gallery, labels) = clusters(4, 6, seed=1), clusters(4, 5, seed=2)
    whole = classification_metrics(queries[truth != 3], truth[truth != 3], gallery[labels != 3], labels[labels != 3])
    found = classification_metrics(queries, truth, gallery[labels != 3], labels[labels != 3])
    assert found.accuracy == whole.accuracy
    assert (found.num_queries, found.num_without_class) == (24, 6)
    with pytest.raises(ValueError, match="some query must be of a class of the gallery"):
        classification_metrics(queries[truth == 3], truth[truth == 3], gallery[labels != 3], labels[labels != 3])


def test_labels_need_not_be_dense():
    (queries, truth), (gallery, labels) = clusters(4, 6, seed=1), clusters(4, 5, seed=2)
    dense = classification_metrics(queries, truth, gallery, labels)
    spread = classification_metrics(queries, truth * 7 + 2, gallery, labels * 7 + 2)
    assert spread.accuracy == dense.accuracy
    assert spread.confusions == {(7 * a + 2, 7 * b + 2): count for (a, b), count in dense.confusions.items()}


def test_confusions_give_classes_mistakes_and_a_matrix():
    found = Classification({}, {(0, 0): 5, (0, 2): 1, (2, 0): 3, (2, 2): 2, (7, 7): 4, (9, 7): 1}, 10, 16, 0)
    assert found.of_class == {0: Accuracy(5, 6), 2: Accuracy(2, 5), 7: Accuracy(4, 4), 9: Accuracy(0, 1)}
    assert found.mistakes == [((2, 0), 3), ((0, 2), 1), ((9, 7), 1)]
    assert found.most_confused(2) == [0, 2]
    assert found.most_confused(10) == [0, 2, 7, 9]
    assert found.matrix([0, 2, 9]).tolist() == [[5, 1, 0], [3, 2, 0], [0, 0, 0]]


def test_the_interval_is_that_of_wilson():
    low, high = Accuracy(9, 10).interval
    for end in (low, high):  # where the normal test of that share just does not reject
        assert abs(0.9 - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / 10), abs=1e-9)
    assert Accuracy(0, 5).interval[0] == 0.0
    assert Accuracy(5, 5).interval[1] == 1.0
    assert Accuracy(5, 5).interval[0] < 0.7


def test_ten_thousand_classes_need_no_square_of_them(monkeypatch):
    """The confusions are counted pairs, and no predictor makes a tensor of all queries times all classes."""
    monkeypatch.setattr("pfml.evaluation.class_attraction.DISTANCES_AT_ONCE", 2**20)
    classes = 10_000
    random = torch.Generator().manual_seed(0)
    gallery, labels = torch.randn(classes, 8, generator=random), torch.arange(classes)
    picked = torch.randint(classes, (300,), generator=random)
    found = classification_metrics(gallery[picked], picked, gallery, labels, law=LAW)
    assert found.accuracy["nearest"].value == 1.0
    assert sum(found.confusions.values()) == 300
    assert len(found.confusions) <= 300


def test_wrong_shapes_are_refused_in_a_sentence():
    (queries, truth), (gallery, labels) = clusters(4, 6, seed=1), clusters(4, 5, seed=2)
    with pytest.raises(ValueError, match="gallery_labels must be"):
        classification_metrics(queries, truth, gallery, labels[:-1])
    with pytest.raises(ValueError, match="proxies must be"):
        classification_metrics(queries, truth, gallery, labels, proxies=torch.randn(3, 2, 5))
    with pytest.raises(ValueError, match="k must be at least 1"):
        classification_metrics(queries, truth, gallery, labels, k=0)
