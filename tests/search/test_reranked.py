import pytest
import torch

from pfml.evaluation.reranking import Expansion, KReciprocal, expand_queries, k_reciprocal_ranking
from pfml.search.reranked import search_reranked
from small_index import MODEL, small_index, unit_vectors

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def index(tmp_path):
    return small_index(tmp_path / "index", entries=60)


def test_expanded_search_is_a_search_with_expanded_queries_and_tells_true_distances(index):
    queries, gallery = unit_vectors(4, seed=1), unit_vectors(60)
    found = search_reranked(index, 2 * queries, 7, settings=Expansion(3), model=MODEL)
    expected = index.search(expand_queries(queries, gallery, Expansion(3)), 7, model=MODEL)
    for query, hits, others in zip(queries, found, expected, strict=True):
        assert [hit.id for hit in hits] == [hit.id for hit in others]
        distances = [float(torch.dist(query, gallery[hit.id])) for hit in hits]
        assert [hit.distance for hit in hits] == pytest.approx(distances, abs=1e-6)
        assert distances != [hit.distance for hit in others]


def test_re_ranked_hits_are_those_of_the_first_hits(index):
    queries, gallery = unit_vectors(3, seed=2), unit_vectors(60)
    found = search_reranked(index, queries, 9, settings=KReciprocal(6, 3), model=MODEL)
    for query, hits, plain in zip(queries, found, index.search(queries, 60, model=MODEL), strict=True):
        shortlist = [hit.id for hit in plain]
        order = k_reciprocal_ranking(query[None], gallery[shortlist], depth=9, settings=KReciprocal(6, 3))[0]
        assert [hit.id for hit in hits] == [shortlist[position] for position in order.tolist()]
        assert {hit.id: hit.distance for hit in plain}.items() >= {hit.id: hit.distance for hit in hits}.items()


def test_both_keep_to_the_classes_that_are_asked_for(index):
    for settings in (Expansion(3), KReciprocal(6, 3)):
        hits = search_reranked(index, unit_vectors(1), 5, settings=settings, model=MODEL, class_names=["class 2"])[0]
        assert len(hits) == 5
        assert {hit.class_name for hit in hits} == {"class 2"}


def test_an_index_with_a_single_image_still_answers(tmp_path):
    index = small_index(tmp_path / "one", entries=1)
    for settings in (Expansion(3), KReciprocal()):
        assert [hit.id for hit in search_reranked(index, unit_vectors(1), 5, settings=settings, model=MODEL)[0]] == [0]
