"""Query expansion and k-reciprocal re-ranking against loops that follow the papers word by word."""

from __future__ import annotations

import pytest
import torch

from pfml.evaluation import reranking as module
from pfml.evaluation import retrieval_metrics
from pfml.evaluation.reranking import (
    Expansion,
    KReciprocal,
    expand_queries,
    expanded_ranking,
    k_reciprocal_ranking,
    ranking_scores,
    reranked_metrics,
)


def clusters(classes=6, each=8, spread=0.5, dims=5, seed=0):
    """Unit vectors around a direction for each class, and their labels."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(each)
    centers = torch.randn(classes, dims, generator=random)
    points = centers[labels] + spread * torch.randn(len(labels), dims, generator=random)
    return torch.nn.functional.normalize(points, dim=1), labels


def by_the_paper(points, settings):
    """The Jaccard distance of all pairs of points, with sets and loops."""
    n = len(points)
    squared = (2 - 2 * points.double() @ points.double().T).clamp_min(0)
    squared.fill_diagonal_(-1)
    order = squared.argsort(dim=1).tolist()
    squared.fill_diagonal_(0)

    def reciprocal(p, k):
        return {g for g in order[p][: k + 1] if p in order[g][: k + 1]}

    rows = torch.zeros(n, n, dtype=torch.float64)
    for p in range(n):
        whole = reciprocal(p, settings.k1)
        expanded = set(whole)
        for q in whole:
            other = reciprocal(q, round(settings.k1 / 2))
            if len(whole & other) > 2 / 3 * len(other):
                expanded |= other
        for g in expanded:
            rows[p, g] = torch.exp(-squared[p, g])
        rows[p] /= rows[p].sum()
    rows = torch.stack([rows[order[p][: settings.k2]].mean(0) for p in range(n)])
    smaller = torch.stack([torch.minimum(rows[p], rows).sum(1) for p in range(n)])
    larger = torch.stack([torch.maximum(rows[p], rows).sum(1) for p in range(n)])
    return 1 - smaller / larger, squared


@pytest.mark.parametrize("settings", [KReciprocal(), KReciprocal(7, 3, 0.5), KReciprocal(4, 1, 0.0)])
@pytest.mark.parametrize("with_gallery", [False, True])
def test_the_ranking_is_the_papers(settings, with_gallery, monkeypatch):
    points, _ = clusters()
    queries, gallery = (points[:9], points[9:]) if with_gallery else (points, None)
    monkeypatch.setattr(module, "COMPARED_AT_ONCE", 20_000)  # several parts
    found = k_reciprocal_ranking(queries, gallery, depth=30, settings=settings)
    every = points if gallery is None else torch.cat([queries, gallery])
    jaccard, squared = by_the_paper(every, settings)
    first = 0 if gallery is None else len(queries)
    weight = settings.distance_weight
    for row, ranked in enumerate(found):
        other = squared[row, first:] / squared[row, first:].max()
        distance = (1 - weight) * jaccard[row, first:] + weight * other
        if gallery is None:
            assert row not in ranked
            distance[row] = torch.inf
        torch.testing.assert_close(distance[ranked], distance.sort().values[:30], atol=1e-6, rtol=0)


def test_reranking_finds_more_of_a_class_that_is_drawn_out():
    points, labels = clusters(classes=8, each=12, spread=0.75, dims=8, seed=2)
    before = retrieval_metrics(points, labels).map_at_r
    after = reranked_metrics(points, labels, settings=KReciprocal(10, 4)).map_at_r
    assert after > before + 0.02


def test_expanded_queries_are_weighted_means():
    points, _ = clusters()
    queries, gallery = points[::3], points[1::3]
    for settings in (Expansion(k=3, alpha=2.0), Expansion(k=2, alpha=0.0)):
        found = expand_queries(queries, gallery, settings)
        for query, expanded in zip(queries, found, strict=True):
            similarity = gallery @ query
            nearest = similarity.argsort(descending=True)[: settings.k]
            mean = query + sum(similarity[k].clamp_min(0) ** settings.alpha * gallery[k] for k in nearest)
            torch.testing.assert_close(expanded, mean / mean.norm(), atol=1e-6, rtol=0)


def test_queries_among_each_other_are_not_their_own_neighbors():
    points = torch.eye(4)[:3] + 0.1
    expanded = expand_queries(points, settings=Expansion(k=1, alpha=0.0))
    assert not torch.allclose(expanded, torch.nn.functional.normalize(points, dim=1), atol=1e-3)
    assert torch.allclose(expand_queries(points[:1]), torch.nn.functional.normalize(points[:1], dim=1))


@pytest.mark.parametrize("with_gallery", [False, True])
def test_metrics_of_a_ranking_by_distance_are_those_of_the_distances(with_gallery):
    points, labels = clusters(spread=0.9)
    labels[0] = 99  # without a match
    queries, own = points[::2], labels[::2]
    gallery, others = (points[1::2], labels[1::2]) if with_gallery else (None, None)
    expected = retrieval_metrics(queries, own, gallery=gallery, gallery_labels=others)
    by_distance = KReciprocal(1, 1, distance_weight=1.0)
    found = reranked_metrics(queries, own, gallery, others, settings=by_distance)
    assert found.as_dict() == pytest.approx(expected.as_dict())
    # an expansion by nothing but neighbors of no weight
    unchanged = reranked_metrics(queries, own, gallery, others, settings=Expansion(1, alpha=200.0))
    assert unchanged.as_dict() == pytest.approx(expected.as_dict(), abs=0.06)


def test_expanded_queries_find_more_of_a_class_and_never_themselves():
    points, labels = clusters(classes=8, each=12, spread=0.75, dims=8, seed=2)
    ranking = expanded_ranking(points, depth=20)
    assert not bool((ranking == torch.arange(len(points))[:, None]).any())
    before = retrieval_metrics(points, labels).map_at_r
    assert reranked_metrics(points, labels, settings=Expansion(4, 1.0)).map_at_r > before + 0.01


def test_what_cannot_be_ranked_is_refused():
    points, labels = clusters(classes=2, each=3)
    with pytest.raises(ValueError, match=r"depth must lie in \[1, 5\]"):
        k_reciprocal_ranking(points, depth=6)
    with pytest.raises(ValueError, match="must reach the 2 matches"):
        ranking_scores(torch.zeros(6, 1, dtype=torch.int64), labels)
    with pytest.raises(ValueError, match="1 <= k2 <= k1"):
        KReciprocal(3, 4)
    with pytest.raises(ValueError, match="distance_weight"):
        KReciprocal(distance_weight=2)
    with pytest.raises(ValueError, match="k >= 1"):
        Expansion(0)
