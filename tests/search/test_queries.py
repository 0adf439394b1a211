"""Queries of several images: by their mean or the nearest of them, and away from negatives."""

import pytest
import torch

from pfml.search import Query, search_queries
from pfml.search.queries import UNLIKE_WEIGHT
from small_index import MODEL, small_index, unit_vectors


@pytest.fixture
def index(tmp_path):
    return small_index(tmp_path / "index", entries=60)


def every_distance(index, point):
    ids = [entry.id for entry in index.entries()]
    return dict(zip(ids, (index.vectors(ids).double() - point.double()).norm(dim=1).tolist(), strict=True))


def test_the_mean_of_several_images_is_one_point(index):
    like = 3 * unit_vectors(3, seed=4)  # normalized before their mean is taken
    mean = torch.nn.functional.normalize(torch.nn.functional.normalize(like).mean(dim=0), dim=0)
    [hits] = search_queries(index, [Query(like)], 5, model=MODEL)
    distances = every_distance(index, mean)
    assert [hit.id for hit in hits] == sorted(distances, key=distances.get)[:5]
    assert hits[0].distance == pytest.approx(distances[hits[0].id], abs=1e-6)


def test_any_takes_the_distance_to_the_nearest_of_them(index):
    like = unit_vectors(3, seed=4)
    [hits] = search_queries(index, [Query(like, combine="any")], 12, model=MODEL)
    every = [every_distance(index, point) for point in like]
    nearest = {id_: min(one[id_] for one in every) for id_ in every[0]}
    assert [hit.id for hit in hits] == sorted(nearest, key=nearest.get)[:12]
    assert [hit.distance for hit in hits] == pytest.approx(sorted(nearest.values())[:12], abs=1e-6)
    assert len({hit.id for hit in hits}) == 12


@pytest.mark.parametrize("combine", ["mean", "any"])
def test_negatives_move_a_query_by_rocchios_rule(index, combine):
    like, unlike = unit_vectors(2, seed=4), unit_vectors(3, seed=5)
    points = Query(like, unlike, combine).points()
    start = like if combine == "any" else like.mean(dim=0, keepdim=True)
    expected = torch.nn.functional.normalize(start - UNLIKE_WEIGHT * unlike.mean(dim=0))
    torch.testing.assert_close(points, expected)
    far = (points - unlike.mean(dim=0)).norm(dim=1)
    assert bool((far > (torch.nn.functional.normalize(start) - unlike.mean(dim=0)).norm(dim=1)).all())


def test_images_of_the_index_do_not_find_themselves(index):
    query = Query.of_ids(index, [3, 4], [5])
    [hits] = search_queries(index, [query], 60, model=MODEL)
    assert {hit.id for hit in hits} == set(range(60)) - {3, 4, 5}
    assert len(search_queries(index, [query], 57, model=MODEL)[0]) == 57
    with pytest.raises(KeyError, match="no entry 999"):
        Query.of_ids(index, [999])


def test_several_queries_are_searched_together_each_with_its_own_exclusions(index):
    queries = [Query.of_ids(index, [3]), Query(unit_vectors(2, seed=1), combine="any"), Query.of_ids(index, [4, 9])]
    together = search_queries(index, queries, 7, model=MODEL)
    assert together == [search_queries(index, [one], 7, model=MODEL)[0] for one in queries]
    assert search_queries(index, [], 7, model=MODEL) == []


def test_a_query_is_filtered(index):
    index.set_metadata([f"{k}.jpg" for k in range(10)], [{"price": float(k)} for k in range(10)])
    [hits] = search_queries(index, [Query.of_ids(index, [3])], 60, model=MODEL, where="price < 5")
    assert {hit.path for hit in hits} == {"0.jpg", "1.jpg", "2.jpg", "4.jpg"}


def test_what_cannot_be_a_query_is_refused():
    with pytest.raises(ValueError, match="an image at least"):
        Query(torch.empty(0, 8))
    with pytest.raises(ValueError, match="combine must be one of mean, any, got 'max'"):
        Query(unit_vectors(1), combine="max")
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    with pytest.raises(ValueError, match="must not cancel each other"):
        Query(opposite).points()
    assert Query(unit_vectors(1)).is_plain
    assert not Query(unit_vectors(1), unit_vectors(1)).is_plain
