"""The screen by integers: its bound holds for any vectors, and the metrics are the same with it and without it."""

import pytest
import torch

from pfml.evaluation import ranks, screening
from pfml.evaluation.screening import Screen, listed_products

DIMS = 160


def exact_products_of_integers():
    """Whether this processor's product of extreme integers is right: without VNNI, sums of two may be cut off."""
    extremes = torch.tensor([-127, 127], dtype=torch.int8).repeat(8, DIMS // 2)
    return torch.equal(torch._int_mm(extremes, extremes.T).long(), extremes.long() @ extremes.long().T)


pytestmark = pytest.mark.skipif(
    not exact_products_of_integers(), reason="this processor has no exact product of 8-bit integers"
)


def normal(points, seed=0):
    return torch.randn(points, DIMS, generator=torch.Generator().manual_seed(seed))


def clustered(points, classes, spread):
    labels = torch.randperm(points, generator=torch.Generator().manual_seed(1)) % classes
    return torch.nn.functional.normalize(normal(classes)[labels] + spread * normal(points, 2)), labels


def one_hot(points):
    return torch.eye(DIMS)[torch.arange(points) % DIMS]


VECTORS = {
    "normal": lambda: torch.nn.functional.normalize(normal(300)),
    "one coordinate each": lambda: one_hot(300),
    "some with one coordinate": lambda: torch.cat([torch.nn.functional.normalize(normal(290)), one_hot(10)]),
    "all alike": lambda: torch.nn.functional.normalize(normal(1)).repeat(300, 1),
    "nearly alike": lambda: torch.nn.functional.normalize(normal(1) + 1e-4 * normal(300)),
    "zero": lambda: torch.zeros(300, DIMS),
}


@pytest.mark.parametrize("vectors", VECTORS.values(), ids=VECTORS)
@pytest.mark.parametrize("apart", [False, True])
def test_no_pair_above_its_threshold_is_below_the_least_product(vectors, apart):
    items = vectors()
    queries = torch.nn.functional.normalize(normal(50, 3)) if apart else items
    screen = Screen(queries, items)
    rows, columns = slice(10, 50), slice(100, 300)
    products = screen.products(rows, columns, torch.empty(40, 200, dtype=torch.int32))
    similarities = queries[rows].double() @ items[columns].double().T
    thresholds = similarities.quantile(torch.linspace(0, 1, 9, dtype=torch.float64), dim=1)
    for threshold in thresholds:
        least = screen.least(threshold.float(), rows, columns)
        missed = (similarities >= threshold[:, None]) & (products < least[:, None])
        assert not missed.any()


def test_it_leaves_out_nearly_all_pairs_of_ordinary_embeddings():
    points = VECTORS["normal"]()
    screen = Screen(points, points)
    whole = slice(0, 300)
    products = screen.products(whole, whole, torch.empty(300, 300, dtype=torch.int32))
    least = screen.least(torch.full((300,), 0.3), whole, whole)
    assert (products >= least[:, None]).sum() <= 320  # each with itself, and hardly another


def test_listed_products_are_those_of_the_pairs():
    left, right = normal(40), normal(30, 4)
    rows, columns = (torch.rand(40, 30, generator=torch.Generator().manual_seed(5)) < 0.1).nonzero().unbind(1)
    expected = (left[rows].double() * right[columns].double()).sum(dim=1)
    torch.testing.assert_close(listed_products(left, right, rows, columns).double(), expected, rtol=1e-5, atol=1e-5)
    nothing = torch.empty(0, dtype=torch.int64)
    assert listed_products(left, right, nothing, nothing).shape == (0,)


@pytest.fixture
def screens(monkeypatch):
    """A list of the screens that are used from now on, whatever this machine has."""
    used = []

    class Watched(Screen):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.products_computed = 0
            used.append(self)

        def products(self, *arguments):
            self.products_computed += 1
            return super().products(*arguments)

    monkeypatch.setattr(ranks, "Screen", Watched)
    return used


@pytest.mark.parametrize("gallery", [False, True])
@pytest.mark.parametrize(
    ("points", "classes", "spread"), [(1_500, 200, 0.5), (1_500, 200, 2.0), (1_500, 10, 4.0), (700, 300, 0.0)]
)
def test_scores_are_the_same_to_the_bit_with_it_and_without_it(monkeypatch, screens, points, classes, spread, gallery):
    embeddings, labels = clustered(points, classes, spread)
    searched = (
        (embeddings[: points // 3], labels[: points // 3], embeddings, labels) if gallery else (embeddings, labels)
    )
    found = []
    for screened in (False, True):
        monkeypatch.setattr(ranks, "pays", lambda points, screened=screened: screened)
        found.append(ranks.query_scores(*searched, tile_pairs=4_096))
    assert len(screens) == 1
    assert screens[0].products_computed > 1
    for name in ("num_matches", "first_rank", "r_precision", "average_precision_at_r"):
        torch.testing.assert_close(*(getattr(scores, name) for scores in found), rtol=0, atol=0, equal_nan=True)


def test_a_screen_that_lists_too_many_pairs_is_given_up_until_thresholds_change():
    points = VECTORS["normal"]()
    screen = Screen(points, points)
    assert screen.promising
    screen.tried, screen.wasted = 2, 2
    assert not screen.promising
    screen.forget()
    assert screen.promising


@pytest.mark.parametrize(
    ("has", "dims", "expected"),
    [({"avx512_vnni": True}, 512, True), ({}, 512, False), ({"avx512_vnni": True}, 64, False)],
)
def test_it_is_used_where_the_processor_has_the_instructions_and_vectors_are_long(monkeypatch, has, dims, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has, raising=False)
    assert screening.pays(torch.zeros(1, dims)) is expected


def test_without_a_list_of_capabilities_all_is_computed_as_floats(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert not screening.pays(torch.zeros(1, 512))
