import math

import pytest
import torch

from pfml.evaluation import query_scores
from pfml.evaluation.nearest_neighbors import directions
from pfml.ladder.crossfit import CrossFitted, Gain, cross_fit, divisions


def images(classes=8, each=6, dims=5, seed=0):
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(each)
    centers = torch.randn(classes, dims, generator=random)
    return centers[labels] + 0.7 * torch.randn(len(labels), dims, generator=random), labels


def same(features):
    """A candidate that learns nothing."""
    return lambda fitted: {"same": features.__getitem__}


@pytest.mark.parametrize(("classes", "parts"), [(4, 2), (11, 2), (12, 3), (40, 4)])
def test_each_class_is_judged_once_in_each_repetition_and_never_fitted_to_then(classes, parts):
    labels = torch.arange(classes).repeat(3)
    found = divisions(labels, "classes", repeats=2)
    assert len(found) == 2 * parts
    for part in found:
        assert not set(labels[part.fitted].tolist()) & set(labels[part.judged].tolist())
        assert len(part.fitted) + len(part.judged) == len(labels)
        assert not part.is_searched_in_fitted
    assert torch.equal(
        torch.cat([part.judged for part in found]).sort().values, torch.arange(len(labels)).repeat(2).sort().values
    )


def test_by_images_every_class_is_in_both_parts():
    labels = torch.tensor([0] * 9 + [1] * 4 + [2] * 2 + [3])
    found = divisions(labels, "images", repeats=2)
    judged = torch.cat([part.judged for part in found])
    assert torch.bincount(judged, minlength=16).tolist() == [2] * 15 + [0]
    for part in found:
        assert part.is_searched_in_fitted
        assert set(labels[part.judged].tolist()) <= set(labels[part.fitted].tolist())
        assert not set(part.fitted.tolist()) & set(part.judged.tolist())


def test_divisions_depend_on_the_seed_alone():
    labels = torch.arange(9).repeat(3)
    one, again, other = (divisions(labels, "classes", seed=seed)[0].judged for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_scores_are_those_of_each_part():
    features, labels = images()
    parts = divisions(labels, "classes", repeats=1)
    result = cross_fit(labels, same(features), parts)["same"]
    for part in parts:
        scores = query_scores(directions(features[part.judged], "x"), labels[part.judged])
        assert torch.equal(result.scores["recall_at_1"][part.judged], (scores.first_rank == 1).double())
        assert torch.equal(result.scores["map_at_r"][part.judged], scores.average_precision_at_r)
    assert result.mean("map_at_r") == pytest.approx(float(result.scores["map_at_r"].mean()))


def test_a_candidate_never_sees_what_it_is_judged_on():
    features, labels = images()
    seen = []

    def watched(fitted):
        seen.append(set(fitted.tolist()))
        return {"watched": features.__getitem__}

    for protocol in ("classes", "images"):
        seen.clear()
        parts = divisions(labels, protocol)
        cross_fit(labels, watched, parts)
        assert len(seen) == len(parts)
        for rows, part in zip(seen, parts, strict=True):
            assert not rows & set(part.judged.tolist())


def test_the_error_of_a_gain_is_that_of_the_mean_over_classes():
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 3])
    before = CrossFitted({"map_at_r": torch.zeros(7, dtype=torch.float64)}, labels)
    differences = torch.tensor([0.1, 0.1, 0.3, 0.3, -0.1, -0.1, math.nan], dtype=torch.float64)
    gain = Gain.between(before, CrossFitted({"map_at_r": differences}, labels), "map_at_r")
    assert gain.mean == pytest.approx(0.1)
    assert gain.error == pytest.approx(torch.tensor([0.1, 0.3, -0.1]).std().item() / math.sqrt(3))
    assert gain.interval == pytest.approx((0.1 - 1.96 * gain.error, 0.1 + 1.96 * gain.error))


def test_too_little_to_divide_is_refused():
    with pytest.raises(ValueError, match="4 classes or more"):
        divisions(torch.tensor([0, 0, 1, 1, 2, 2]), "classes")
    with pytest.raises(ValueError, match="two images or more"):
        divisions(torch.arange(5), "images")
    with pytest.raises(ValueError, match="classes or images"):
        divisions(torch.arange(5), "folds")


def test_of_known_classes_the_error_is_that_of_the_mean_over_images():
    labels = torch.tensor([0, 0, 1, 1])
    before = CrossFitted({"map_at_r": torch.zeros(4, dtype=torch.float64)}, labels)
    differences = torch.tensor([0.1, 0.3, -0.1, 0.2], dtype=torch.float64)
    gain = Gain.between(before, CrossFitted({"map_at_r": differences}, labels), "map_at_r", protocol="images")
    assert gain.error == pytest.approx(differences.std().item() / 2)
