"""The screen by integers: its bound holds for any vectors, and the metrics are the same with it and without it."""

import os
import subprocess
import sys

import pytest
import torch

from pfml.evaluation import ranks, screening
from pfml.evaluation.screening import LARGEST_OF_PAIRS, Screen, largest_integer, listed_products

DIMS = 160


#: What this processor adds exactly: 7 bits on all of them, 8 with VNNI.
LARGEST = sorted({LARGEST_OF_PAIRS, largest_integer()} - {0})


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
@pytest.mark.parametrize("largest", LARGEST)
def test_no_pair_above_its_threshold_is_below_the_least_product(vectors, apart, largest):
    items = vectors()
    queries = torch.nn.functional.normalize(normal(50, 3)) if apart else items
    screen = Screen(queries, items, largest)
    rows, columns = slice(10, 50), slice(100, 300)
    products = screen.products(rows, columns, torch.empty(40, 200, dtype=torch.int32))
    similarities = queries[rows].double() @ items[columns].double().T
    thresholds = similarities.quantile(torch.linspace(0, 1, 9, dtype=torch.float64), dim=1)
    for threshold in thresholds:
        least = screen.least(threshold.float(), rows, columns)
        missed = (similarities >= threshold[:, None]) & (products < least[:, None])
        assert not missed.any()


@pytest.mark.parametrize("largest", LARGEST)
def test_it_leaves_out_nearly_all_pairs_of_ordinary_embeddings(largest):
    points = VECTORS["normal"]()
    screen = Screen(points, points, largest)
    whole = slice(0, 300)
    products = screen.products(whole, whole, torch.empty(300, 300, dtype=torch.int32))
    least = screen.least(torch.full((300,), 0.3), whole, whole)
    listed = (products >= least[:, None]).sum()
    assert listed <= (320 if largest > LARGEST_OF_PAIRS else 400)  # each with itself, and hardly another


def test_products_of_very_many_dimensions_do_not_fit_into_the_integers(monkeypatch):
    monkeypatch.setattr(screening, "largest_integer", lambda: screening.LARGEST)
    assert screening.MOST_DIMS * screening.LARGEST**2 < 2**31 <= (screening.MOST_DIMS + 1) * screening.LARGEST**2
    assert screening.pays(torch.empty(1, screening.MOST_DIMS))
    assert not screening.pays(torch.empty(1, screening.MOST_DIMS + 1))


def test_listed_products_are_those_of_the_pairs():
    left, right = normal(40), normal(30, 4)
    rows, columns = (torch.rand(40, 30, generator=torch.Generator().manual_seed(5)) < 0.1).nonzero().unbind(1)
    expected = (left[rows].double() * right[columns].double()).sum(dim=1)
    torch.testing.assert_close(listed_products(left, right, rows, columns).double(), expected, rtol=1e-5, atol=1e-5)
    nothing = torch.empty(0, dtype=torch.int64)
    assert listed_products(left, right, nothing, nothing).shape == (0,)


@pytest.fixture(params=LARGEST)
def screens(monkeypatch, request):
    """A list of the screens that are used from now on, whatever this machine has."""
    used = []

    class Watched(Screen):
        def __init__(self, *arguments):
            super().__init__(*arguments, request.param)
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
    screen = Screen(points, points, LARGEST[0])
    assert screen.promising
    screen.tried, screen.wasted = 2, 2
    assert not screen.promising
    screen.forget()
    assert screen.promising


@pytest.fixture
def capabilities(monkeypatch):
    """What the processor has: a dictionary to change."""
    has = {}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has, raising=False)
    largest_integer.cache_clear()
    yield has
    largest_integer.cache_clear()


@pytest.mark.parametrize(("names", "largest"), [(["avx2"], LARGEST_OF_PAIRS), (["sse4_2"], 0), ([], 0)])
def test_integers_are_as_large_as_the_processor_adds_exactly(capabilities, names, largest):
    capabilities.update(dict.fromkeys(names, True))
    assert largest_integer() == largest
    assert screening.pays(torch.zeros(1, 512)) is (largest > 0)
    assert not screening.pays(torch.zeros(1, 64))


@pytest.mark.parametrize("name", ["avx512_vnni", "avx_vnni", "amx_int8"])
def test_8_bits_are_used_only_if_their_products_are_exact(capabilities, monkeypatch, name):
    capabilities.update({"avx2": True, name: True})
    exact = {127, 63}
    monkeypatch.setattr(screening, "_adds_exactly", lambda largest: largest in exact)
    assert largest_integer() == 127
    exact.remove(127)
    largest_integer.cache_clear()
    assert largest_integer() == 63
    exact.clear()
    largest_integer.cache_clear()
    assert largest_integer() == 0


def test_a_library_that_is_told_to_use_older_instructions_is_found_out():
    script = "from pfml.evaluation.screening import largest_integer; print(largest_integer())"
    answer = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}, capture_output=True, text=True
    )
    assert answer.stdout.strip() in ("0", "63"), answer.stderr


@pytest.mark.usefixtures("capabilities")
def test_without_a_list_of_capabilities_all_is_computed_as_floats(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert not screening.pays(torch.zeros(1, 512))
