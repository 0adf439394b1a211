"""The verdict on a query: most likely class, votes, potential, and whether it is known."""

import math
from dataclasses import replace

import pytest
import torch

from pfml.search import Hit, ImageIndex, verdict_of
from pfml.search.neighborhood import NEIGHBORS
from pfml.search.verdict import ALPHA
from small_index import MODEL, small_index, unit_vectors
from small_threshold import made_threshold

pytestmark = pytest.mark.usefixtures("one_thread")


def hits(*found):
    """Hits of (class, distance)."""
    return [Hit(k, f"{k}.jpg", name, distance) for k, (name, distance) in enumerate(found)]


def test_the_class_that_attracts_most_is_named_with_its_votes():
    near = hits(("manx", 0.50), ("bengal", 0.51), ("bengal", 0.52), ("bengal", 0.9), ("siamese", 1.2))
    verdict = verdict_of(near)
    pull = [(0.5 / hit.distance) ** ALPHA for hit in near]
    assert (verdict.class_name, verdict.votes, verdict.of) == ("bengal", 3, 5)
    assert verdict.potential == pytest.approx(sum(pull[1:4]) / sum(pull))
    assert verdict.margin == pytest.approx((sum(pull[1:4]) - pull[0]) / sum(pull))
    assert (verdict.score, verdict.is_known) == (None, None)


def test_near_images_outvote_many_far_ones():
    verdict = verdict_of(hits(("bengal", 0.3), ("bengal", 0.3), *[("manx", 0.9)] * 10))
    assert (verdict.class_name, verdict.votes, verdict.of) == ("bengal", 2, 12)
    assert verdict.potential > 0.99


def test_only_the_nearest_vote():
    verdict = verdict_of(hits(*[("bengal", 0.5)] * NEIGHBORS, *[("manx", 0.5)] * 100))
    assert (verdict.class_name, verdict.votes, verdict.of) == ("bengal", NEIGHBORS, NEIGHBORS)


def test_images_without_a_class_do_not_vote():
    verdict = verdict_of(hits(("", 0.1), ("manx", 0.5), ("", 0.5), ("manx", 0.6)))
    assert (verdict.class_name, verdict.votes, verdict.of, verdict.potential) == ("manx", 2, 2, 1.0)


def test_without_any_class_the_distance_decides():
    threshold = made_threshold(value=-5.0, distance=0.3)
    known, unknown = (verdict_of(hits(("", r), ("", 0.9)), threshold=threshold) for r in (0.3, 0.31))
    assert (known.class_name, known.votes, known.of, known.potential) == (None, 0, 0, 0.0)
    assert (known.is_known, unknown.is_known) == (True, False)
    assert known.score == -0.3


def test_where_nothing_is_found_nothing_is_known():
    assert verdict_of([], threshold=made_threshold()).is_known is False
    assert verdict_of([]).is_known is None
    assert verdict_of([]).class_name is None


def test_a_class_has_its_own_threshold_or_the_common_one():
    threshold = made_threshold(value=-0.5, class_values={"manx": -0.2})
    verdicts = {name: verdict_of(hits((name, 0.3)), threshold=threshold) for name in ("manx", "bengal")}
    assert {name: verdict.is_known for name, verdict in verdicts.items()} == {"manx": False, "bengal": True}
    assert verdicts["manx"].score == -0.3
    assert verdict_of(hits(("bengal", 0.5)), threshold=threshold).is_known is True, "the value itself is accepted"
    assert verdict_of(hits(("bengal", math.nextafter(0.5, 1))), threshold=threshold).is_known is False


def test_a_distance_counts_by_the_spread_of_its_class():
    threshold = made_threshold(value=-0.1, score="relative")
    spreads = {"tight": 0.1, "wide": 0.6, "single": math.nan}
    near = {name: hits((name, 0.5), (name, 0.6)) for name in spreads}
    verdicts = {name: verdict_of(found, threshold=threshold, spread_of=spreads.get) for name, found in near.items()}
    assert {name: one.is_known for name, one in verdicts.items()} == {"tight": False, "wide": True, "single": True}
    assert verdicts["tight"].score == pytest.approx(-math.log(0.5 / 0.1))
    assert verdicts["single"].score == pytest.approx(-math.log(0.5 / threshold.scoring.spread))


def test_the_index_knows_the_spread_of_its_classes(tmp_path, monkeypatch):
    index = small_index(tmp_path / "index")
    own = unit_vectors(20)[torch.arange(20) % 4 == 1].double()
    distances = torch.cdist(own, own) + 9 * torch.eye(len(own))
    expected = float(distances.min(dim=1).values.mean())
    assert index.class_spread("class 1") == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr("pfml.search.index_state.mean_nearest_distance", lambda *_, **__: pytest.fail("computed again"))
    assert index.class_spread("class 1") == pytest.approx(expected, rel=1e-5)
    monkeypatch.undo()
    index.add(own[:1].float(), ["copy.jpg"], ["class 1"], model=MODEL)
    assert index.class_spread("class 1") < expected, "an index that has changed is measured again"
    assert math.isnan(ImageIndex.open(index.path).class_spread("no such class"))


def test_a_threshold_is_applied_as_it_was_saved(tmp_path):
    weights = (0.1, 0.2, 0.3, 0.4, 0.5)
    threshold = made_threshold(score="combination", weights=weights, class_values={"a": 1.5})
    threshold.save(tmp_path)
    loaded = type(threshold).load(tmp_path)
    assert loaded == threshold
    near = hits(("a", 0.4), ("b", 0.5), ("a", 0.7))
    assert verdict_of(near, threshold=loaded) == verdict_of(near, threshold=threshold)
    other = replace(threshold, scoring=replace(threshold.scoring, weights=(1.0,) * 5))
    assert verdict_of(near, threshold=other).score != verdict_of(near, threshold=threshold).score
