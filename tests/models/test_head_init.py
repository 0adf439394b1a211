"""Heads that start from features, against numpy's own linear algebra."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pfml.models.head import Head
from pfml.models.head_init import ClosedFormHeads, initialize_head

FEATURES, DIM, CLASSES = 12, 5, 4


@pytest.fixture
def examples() -> tuple[Tensor, Tensor]:
    """Features of classes that lie off the center and are wide in some directions."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (200,), generator=generator)
    centers = 3 + torch.randn(CLASSES, FEATURES, generator=generator)
    widths = torch.linspace(0.1, 4, FEATURES)
    return centers[labels] + widths * torch.randn(200, FEATURES, generator=generator), labels


def started(start: str, features: Tensor, labels: Tensor, **options: bool) -> Head:
    torch.manual_seed(1)
    head = Head(FEATURES, DIM, **options)
    initialize_head(head, start, features, labels)
    return head


def similarities(points: np.ndarray) -> np.ndarray:
    """Cosines between all pairs: what a head decides, whatever the signs of its rows."""
    points = points / np.linalg.norm(points, axis=1, keepdims=True)
    return points @ points.T


def test_random_leaves_the_layer_alone(examples):
    head = started("random", *examples)
    torch.manual_seed(1)
    assert torch.equal(head.linear.weight, Head(FEATURES, DIM).linear.weight)


def test_principal_is_what_singular_vectors_say(examples):
    features, labels = examples
    centered = features.double().numpy() - features.double().numpy().mean(0)
    kept = centered @ np.linalg.svd(centered, full_matrices=False)[2][:DIM].T
    with torch.no_grad():
        found = started("principal", features, labels)(features[:, :, None, None]).numpy()
    np.testing.assert_allclose(found @ found.T, similarities(kept), atol=1e-5)


def test_whitened_weakens_the_directions_within_classes_by_the_fourth_root(examples):
    features, labels = examples
    x, y = features.double().numpy(), labels.numpy()
    within = sum(np.cov(x[y == c].T, bias=True) * (y == c).sum() for c in range(CLASSES)) / len(x)
    root = within + np.trace(within) / FEATURES * np.eye(FEATURES)
    values, vectors = np.linalg.eigh(root)
    seen = (x - x.mean(0)) @ vectors @ np.diag(values**-0.25) @ vectors.T
    kept = seen @ np.linalg.svd(seen, full_matrices=False)[2][:DIM].T
    with torch.no_grad():
        found = started("whitened", features, labels)(features[:, :, None, None]).numpy()
    np.testing.assert_allclose(found @ found.T, similarities(kept), atol=1e-5)


@pytest.mark.parametrize("start", ["principal", "whitened"])
def test_the_layer_is_centered_and_as_large_as_a_random_one(examples, start):
    head, usual = started(start, *examples), [Head(FEATURES, DIM).linear.weight.norm() ** 2 for _ in range(300)]
    torch.testing.assert_close(head.linear.weight.norm() ** 2, torch.stack(usual).mean(), rtol=0.05, atol=0)
    torch.testing.assert_close(head.linear(examples[0]).mean(0), torch.zeros(DIM), atol=1e-4, rtol=0)


def test_only_whitened_looks_at_labels(examples):
    features, labels = examples
    other = labels.roll(1)
    for start, same in (("principal", True), ("whitened", False)):
        first, second = (started(start, features, each).linear.weight for each in (labels, other))
        assert torch.equal(first, second) is same


def test_a_layer_without_bias_keeps_its_directions(examples):
    with_bias, without = started("whitened", *examples), started("whitened", *examples, bias=False)
    assert without.linear.bias is None
    torch.testing.assert_close(with_bias.linear.weight, without.linear.weight)


@pytest.mark.parametrize("start", ["principal", "whitened"])
def test_features_that_are_all_alike_leave_finite_numbers(start):
    head = started(start, torch.ones(6, FEATURES), torch.arange(6) % CLASSES)
    assert all(torch.isfinite(each).all() for each in head.parameters())


def test_a_class_without_images_does_no_harm(examples):
    features, labels = examples
    assert torch.isfinite(started("whitened", features, labels + 3 * (labels == CLASSES - 1)).linear.weight).all()


def test_heads_that_cannot_start_so_are_refused(examples):
    with pytest.raises(ValueError, match=r"needs a head with a linear layer: set model\.embedding_dim"):
        initialize_head(Head(FEATURES, None), "whitened", *examples)
    with pytest.raises(ValueError, match=r"model\.embedding_dim must be <= 12, got 13"):
        initialize_head(Head(FEATURES, 13), "principal", *examples)
    with pytest.raises(ValueError, match="head_start must be one of .*, got 'pca'"):
        initialize_head(Head(FEATURES, DIM), "pca", *examples)


@pytest.mark.parametrize("count", [200, 9])
def test_one_decomposition_gives_heads_of_any_strength_and_dimension(examples, count):
    features, labels = examples[0][:count], examples[1][:count]
    x, y = features.double().numpy(), labels.numpy()
    present = np.unique(y)
    within = sum(np.cov(x[y == c].T, bias=True) * (y == c).sum() for c in present) / len(x)
    values, vectors = np.linalg.eigh(within + np.trace(within) / FEATURES * np.eye(FEATURES))
    heads = ClosedFormHeads(features, labels)
    new = np.random.default_rng(0).normal(size=(6, FEATURES))
    for strength in (0.0, 0.3, 1.0):
        seen = (x - x.mean(0)) @ vectors @ np.diag(values ** (-strength / 2)) @ vectors.T
        directions = np.linalg.svd(seen, full_matrices=True)[2]
        for dimension in (3, 7, FEATURES, None):
            weight, bias = heads.weight_and_bias(strength, dimension)
            kept = directions[:dimension]
            expected = (new - x.mean(0)) @ vectors @ np.diag(values ** (-strength / 2)) @ vectors.T @ kept.T
            found = (torch.from_numpy(new) @ weight.T + bias).numpy()
            assert found.shape == (6, dimension or FEATURES)
            np.testing.assert_allclose(similarities(found), similarities(expected), atol=1e-8)


def test_more_dimensions_than_images_keep_what_the_images_span(examples):
    features, labels = examples[0][:4], examples[1][:4]
    weight, bias = ClosedFormHeads(features, labels).weight_and_bias(0.5, 8)
    assert torch.linalg.matrix_rank(weight) == 8
    found = features.double() @ weight.T + bias
    whole = features.double() @ ClosedFormHeads(features, labels).weight_and_bias(0.5)[0].T
    torch.testing.assert_close(
        torch.cdist(found, found) / torch.cdist(found, found).max(),
        torch.cdist(whole, whole) / torch.cdist(whole, whole).max(),
    )
