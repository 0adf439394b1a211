"""Retrieval metrics against a literal oracle: Python loops over items sorted by (similarity, index)."""

from __future__ import annotations

from functools import cmp_to_key

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfml.evaluation import nearest, query_scores, ranks, retrieval_metrics
from pfml.evaluation.nearest_neighbors import directions

CPU = "cpu"
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


def ranked(query, gallery, exclude):
    """Gallery indices from the most to the least similar; equal ones (to 1e-13) by index."""
    similarity = [float((query.double() * item.double()).sum()) for item in gallery]

    def before(i, j):
        difference = similarity[j] - similarity[i]
        return difference if abs(difference) > 1e-13 else i - j

    return sorted((j for j in range(len(gallery)) if j != exclude), key=cmp_to_key(before))


def oracle(embeddings, labels, gallery=None, gallery_labels=None, recall_at=(1, 2, 4, 8)):
    """Metrics by the book."""
    queries = directions(embeddings, "embeddings")
    items = queries if gallery is None else directions(gallery, "gallery")
    item_labels = (labels if gallery is None else gallery_labels).tolist()
    sums = {f"recall_at_{k}": 0.0 for k in recall_at} | {"precision_at_1": 0.0, "r_precision": 0.0, "map_at_r": 0.0}
    counted = 0
    for i, label in enumerate(labels.tolist()):
        order = ranked(queries[i], items, i if gallery is None else None)
        relevant = [item_labels[j] == label for j in order]
        total = sum(relevant)
        if total == 0:
            continue
        counted += 1
        for k in recall_at:
            sums[f"recall_at_{k}"] += any(relevant[:k])
        sums["precision_at_1"] += relevant[0]
        sums["r_precision"] += sum(relevant[:total]) / total
        sums["map_at_r"] += sum(sum(relevant[: r + 1]) / (r + 1) for r in range(total) if relevant[r]) / total
    means = {name: value / counted for name, value in sums.items()}
    return means | {"num_queries": len(labels), "num_without_match": len(labels) - counted}


def crowd(num_points, num_classes, dims=8, spread=0.7, seed=0):
    """Embeddings around class centers, classes of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(num_points, generator=generator).square() * num_classes).long()
    centers = torch.randn(num_classes, dims, generator=generator)
    return centers[labels] + spread * torch.randn(num_points, dims, generator=generator), labels


def assert_equal(metrics, expected):
    assert metrics.as_dict() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("spread", [0.1, 0.7, 3.0])
def test_metrics_are_those_of_the_oracle(spread, device):
    embeddings, labels = crowd(90, 9, spread=spread)
    metrics = retrieval_metrics(embeddings.to(device), labels.to(device), recall_at=(1, 3, 10))
    assert_equal(metrics, oracle(embeddings, labels, recall_at=(1, 3, 10)))


@pytest.mark.parametrize("device", [CPU, GPU])
def test_queries_are_searched_in_the_gallery_and_only_there(device):
    embeddings, labels = crowd(60, 6, spread=1.0)
    gallery, gallery_labels = crowd(90, 6, spread=1.0, seed=1)
    gallery[:5], gallery_labels[:5] = embeddings[:5], labels[:5]
    metrics = retrieval_metrics(
        embeddings.to(device), labels.to(device), gallery=gallery.to(device), gallery_labels=gallery_labels.to(device)
    )
    assert_equal(metrics, oracle(embeddings, labels, gallery, gallery_labels))


@pytest.mark.parametrize("device", [CPU, GPU])
def test_among_duplicates_the_lower_index_is_nearer_and_only_the_query_itself_is_left_out(device):
    distinct, _ = crowd(12, 4, dims=16)
    generator = torch.Generator().manual_seed(3)
    embeddings = distinct[torch.randint(12, (60,), generator=generator)]
    labels = torch.randint(5, (60,), generator=generator)
    metrics = retrieval_metrics(embeddings.to(device), labels.to(device))
    assert_equal(metrics, oracle(embeddings, labels))


def test_a_tie_goes_to_the_lower_index():
    embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    gallery = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    labels, own_first, own_last = torch.tensor([0, 1, 2]), torch.tensor([0, 3]), torch.tensor([3, 0])
    assert retrieval_metrics(embeddings, labels, gallery=gallery, gallery_labels=own_first).recall[1] == 1.0
    assert retrieval_metrics(embeddings, labels, gallery=gallery, gallery_labels=own_last).recall[1] == 0.0


@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-5])
def test_a_collapsed_model_gets_the_metrics_of_the_oracle(noise):
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.ones(80, 16) + noise * torch.randn(80, 16, generator=generator)
    labels = torch.randint(6, (80,), generator=generator)
    assert_equal(retrieval_metrics(embeddings, labels), oracle(embeddings, labels))


@pytest.mark.parametrize(("dims", "ones"), [(160, 1.0), (100, 0.98), (4096, 1.0)])
def test_components_that_round_alike_get_the_metrics_of_the_oracle(dims, ones):
    """Their errors add up, to more than those of components of all sizes."""
    generator = torch.Generator().manual_seed(0)
    embeddings = (torch.rand(150, dims, generator=generator) < ones).float()
    labels = torch.arange(150) % (2 if ones == 1 else 20)
    assert_equal(retrieval_metrics(embeddings, labels), oracle(embeddings, labels))


def test_one_class_is_found_perfectly():
    embeddings, _ = crowd(20, 3)
    metrics = retrieval_metrics(embeddings, torch.zeros(20, dtype=torch.int64))
    assert (metrics.recall[1], metrics.r_precision, metrics.map_at_r) == (1.0, 1.0, 1.0)


def test_a_query_without_a_match_is_counted_but_in_no_mean():
    embeddings, labels = crowd(60, 5)
    labels[[3, 17]] = torch.tensor([100, 101])
    metrics = retrieval_metrics(embeddings, labels)
    assert metrics.num_without_match == 2
    assert metrics.num_queries == 60
    assert_equal(metrics, oracle(embeddings, labels))


@pytest.mark.parametrize("tile_pairs", [4, 50, 4_000, 2**22])
@pytest.mark.parametrize("with_gallery", [False, True])
def test_the_memory_budget_does_not_change_the_result(tile_pairs, with_gallery):
    embeddings, labels = crowd(300 if tile_pairs > 50 else 40, 12, spread=1.0)
    embeddings[10:14] = embeddings[2]
    gallery = {"gallery": embeddings[8:], "gallery_labels": labels[8:]} if with_gallery else {}
    assert retrieval_metrics(embeddings, labels, **gallery, tile_pairs=tile_pairs) == retrieval_metrics(
        embeddings, labels, **gallery
    )


def test_the_memory_budget_bounds_the_tiles(monkeypatch):
    largest = 0
    count = ranks.RankCounter.count

    def watched(self, tile, *args, **kwargs):
        nonlocal largest
        largest = max(largest, *(buffer.numel() for buffer in tile.buffers.values()))
        count(self, tile, *args, **kwargs)

    monkeypatch.setattr(ranks.RankCounter, "count", watched)
    embeddings, labels = crowd(100, 5)
    retrieval_metrics(embeddings, labels, tile_pairs=100)
    assert largest == 100


@pytest.mark.parametrize("matches_at_once", [4, 40, 500])
def test_chunks_of_queries_do_not_change_the_scores(matches_at_once):
    embeddings, labels = crowd(90, 12, spread=1.0)
    embeddings[50:60] = embeddings[2]
    queries = directions(embeddings, "embeddings")
    expected = query_scores(queries, labels)
    scores = query_scores(queries, labels, matches_at_once=matches_at_once)
    for name in ("num_matches", "first_rank", "r_precision", "average_precision_at_r"):
        torch.testing.assert_close(getattr(scores, name), getattr(expected, name), rtol=0, atol=1e-15, equal_nan=True)


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize(("num_points", "num_classes", "dims"), [(1_500, 300, 64), (700, 8, 32)])
def test_metrics_are_those_of_pytorch_metric_learning(num_points, num_classes, dims, device):
    distances = pytest.importorskip("pytorch_metric_learning.distances", reason="needs the extra methods")
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
    from pytorch_metric_learning.utils.inference import CustomKNN

    embeddings, labels = crowd(num_points, num_classes, dims=dims, spread=1.2)
    assert (torch.bincount(labels) == 1).any() == (num_classes == 300)  # a class of one member, too
    calculator = AccuracyCalculator(
        include=("precision_at_1", "r_precision", "mean_average_precision_at_r"),
        k="max_bin_count",
        device=torch.device(device),
        knn_func=CustomKNN(distances.CosineSimilarity()),
        kmeans_func=len,
    )
    theirs = calculator.get_accuracy(embeddings, labels)
    ours = retrieval_metrics(embeddings.to(device), labels.to(device))
    assert ours.precision_at_1 == pytest.approx(theirs["precision_at_1"], abs=1e-6)
    assert ours.r_precision == pytest.approx(theirs["r_precision"], abs=1e-6)
    assert ours.map_at_r == pytest.approx(theirs["mean_average_precision_at_r"], abs=1e-6)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    num_points=st.integers(2, 30),
    num_classes=st.integers(1, 6),
    levels=st.integers(1, 3),
    tile_pairs=st.sampled_from([4, 64, 2**20]),
    num_items=st.integers(0, 20),
)
def test_any_small_set_with_many_ties_is_ranked_like_the_oracle(
    seed, num_points, num_classes, levels, tile_pairs, num_items
):
    generator = torch.Generator().manual_seed(seed)
    points = torch.randint(-levels, levels + 1, (num_points + num_items, 3), generator=generator).float()
    labels = torch.randint(num_classes, (num_points + num_items,), generator=generator)
    labels[-1] = labels[0]  # so that there is a match
    embeddings, gallery = points.split([num_points, num_items])
    labels, gallery_labels = labels.split([num_points, num_items])
    given = {"gallery": gallery, "gallery_labels": gallery_labels} if num_items else {}
    metrics = retrieval_metrics(embeddings, labels, **given, tile_pairs=tile_pairs)
    assert_equal(metrics, oracle(embeddings, labels, **given))


@pytest.mark.parametrize(("height", "width"), [(1, 1), (7, 9), (128, 1024), (300, 2048), (1_000, 1_031)])
def test_booleans_are_counted_and_found_eight_at_a_time(height, width):
    generator = torch.Generator().manual_seed(0)
    for rate in (0.01, 1.0):
        mask = torch.rand(height, width, generator=generator) < rate
        assert torch.equal(ranks._count_true(mask, 0), mask.sum(0))
        assert torch.equal(ranks._count_true(mask, 1), mask.sum(1))
        assert torch.equal(torch.stack(ranks._where(mask), 1), mask.nonzero())


def test_lengths_and_dtypes_of_embeddings_do_not_matter():
    embeddings, labels = crowd(80, 6)
    embeddings = directions(embeddings, "embeddings").half().float()
    scale = torch.logspace(-3, 3, 80)[:, None]
    expected = retrieval_metrics(embeddings, labels)
    assert retrieval_metrics(embeddings * scale, labels.int()).recall == expected.recall
    assert retrieval_metrics(embeddings.half(), labels) == expected
    assert retrieval_metrics(embeddings.double().requires_grad_(), labels) == expected


def test_nmi_is_there_if_asked_for_and_seeded():
    embeddings, labels = crowd(200, 6, spread=1.5)
    without = retrieval_metrics(embeddings, labels)
    assert without.nmi is None
    assert "nmi" not in without.as_dict()
    values = [retrieval_metrics(embeddings, labels, nmi=True, seed=seed).nmi for seed in (0, 0, 1, 2, 3)]
    assert values[0] == values[1]
    assert len(set(values)) > 1
    assert all(0 < value < 1 for value in values)


def test_the_keys_of_the_dictionary_are_in_a_fixed_order():
    embeddings, labels = crowd(50, 3)
    metrics = retrieval_metrics(embeddings, labels, recall_at=(10, 1), nmi=True)
    assert list(metrics.as_dict()) == [
        "recall_at_1",
        "recall_at_10",
        "precision_at_1",
        "r_precision",
        "map_at_r",
        "nmi",
        "num_queries",
        "num_without_match",
    ]


def test_bad_input_is_refused_by_a_sentence():
    embeddings, labels = crowd(30, 3)
    broken = embeddings.clone()
    broken[7, 2], broken[11, 0] = torch.nan, torch.inf
    with pytest.raises(ValueError, match="embeddings must be finite, got NaN or Inf in row 7, 11"):
        retrieval_metrics(broken, labels)
    with pytest.raises(ValueError, match="labels must be .*got \\(29,\\) for \\(30, 8\\)"):
        retrieval_metrics(embeddings, labels[:-1])
    with pytest.raises(TypeError, match="labels must be integers, got torch.float32"):
        retrieval_metrics(embeddings, labels.float())
    with pytest.raises(ValueError, match="got gallery without gallery_labels"):
        retrieval_metrics(embeddings, labels, gallery=embeddings)
    with pytest.raises(ValueError, match="gallery must have 8 dimensions"):
        retrieval_metrics(embeddings, labels, gallery=embeddings[:, :4], gallery_labels=labels)
    with pytest.raises(ValueError, match="recall_at must be positive"):
        retrieval_metrics(embeddings, labels, recall_at=(0, 1))
    with pytest.raises(ValueError, match="none of the 30 queries has a match"):
        retrieval_metrics(embeddings, torch.arange(30))


@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("memory", [None, 1, 2_000])
@pytest.mark.parametrize("with_gallery", [False, True])
def test_the_nearest_are_those_of_the_oracle(with_gallery, memory, device):
    embeddings, _ = crowd(70, 5)
    gallery = crowd(90, 5, seed=1)[0] if with_gallery else None
    similarities, indices = nearest(
        embeddings.to(device), None if gallery is None else gallery.to(device), 9, memory=memory
    )
    queries = directions(embeddings, "embeddings")
    items = queries if gallery is None else directions(gallery, "gallery")
    expected = [ranked(query, items, None if with_gallery else i)[:9] for i, query in enumerate(queries)]
    assert indices.tolist() == expected
    torch.testing.assert_close(similarities.cpu(), (queries @ items.T).gather(1, torch.tensor(expected)))


def test_a_duplicate_is_a_neighbor_and_the_query_itself_is_not():
    embeddings = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [2.0, 0.0]])
    assert nearest(embeddings, None, 2)[1][[0, 2, 3]].tolist() == [[2, 3], [0, 3], [0, 2]]
    assert nearest(embeddings, None, 3)[1][1].tolist() == [0, 2, 3]


def test_nearest_refuses_more_neighbors_than_there_are():
    with pytest.raises(ValueError, match="k must lie in \\[1, 4\\].*got 5"):
        nearest(torch.eye(5), None, 5)
    assert nearest(torch.eye(5), torch.eye(5), 5)[1].shape == (5, 5)
    with pytest.raises(ValueError, match="gallery must be finite, got NaN or Inf in row 1"):
        nearest(torch.eye(2), torch.tensor([[1.0, 0.0], [torch.nan, 0.0]]), 1)
