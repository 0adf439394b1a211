"""The ladder on images whose classes differ in some features and whose images differ in others."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from unittest import mock

import pytest
import torch

from pfml.data import ImageSet, RetrievalData
from pfml.evaluation import evaluate
from pfml.ladder.crossfit import Gain
from pfml.ladder.heads import ClosedForm
from pfml.ladder.ladder import Candidate, Features, Rung, View, best_of, climb
from pfml.methods import LossConfig
from pfml.models import create_embedder

pytestmark = pytest.mark.usefixtures("one_thread")


def squares(classes, each, seed, distraction):
    """Plain images whose green and blue are those of the class, while red is anything."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(each)
    colors = 0.3 + 0.4 * torch.rand(classes, 3, generator=random)[labels]
    colors[:, 0] = 0.5 + distraction * (torch.rand(len(labels), generator=random) - 0.5)
    pixels = colors[:, :, None, None] + 0.02 * torch.randn(len(labels), 3, 32, 32, generator=random)
    names = tuple(f"{seed}-{k}" for k in range(classes))
    return ImageSet((255 * pixels.clamp(0, 1)).to(torch.uint8), labels, names)


@pytest.fixture(scope="module")
def backbone():
    torch.manual_seed(0)
    return create_embedder("convnet", embedding_dim=None)


@pytest.fixture(scope="module")
def distracted():
    return RetrievalData("squares", squares(16, 6, 1, 0.9), squares(10, 6, 2, 0.9))


def field(points, labels):
    return LossConfig("pfml-log", {"proxies_per_class": 1, "proxy_init": "kmeans", "alpha": 6.0})


def test_heads_weaken_what_varies_within_classes_and_the_model_does_what_was_measured(backbone, distracted):
    found = climb(backbone, distracted, field, effort="seconds")
    assert [rung.name for rung in found.rungs] == ["pretrained", "views", "closed form"]
    assert found.chosen is found.rungs[2]
    assert sum(gain.mean - 2 * gain.error for gain in found.chosen.over_last.values()) > 0
    assert found.chosen.candidate.head is not None
    assert found.after.map_at_r > found.before.map_at_r + 0.05
    measured = evaluate(found.embedder, distracted)
    assert measured.map_at_r == pytest.approx(found.after.map_at_r, abs=1e-6)
    assert evaluate(backbone, distracted).map_at_r == pytest.approx(found.before.map_at_r, abs=1e-6)
    assert found.embedder.trained_on.class_names == distracted.train.class_names
    assert found.embedder.config.pooling == found.chosen.candidate.pooling


def test_minutes_train_a_head_and_keep_it_only_if_it_is_better(backbone, distracted):
    found = climb(backbone, distracted, field, effort="minutes", head_steps=8)
    assert [rung.name for rung in found.rungs] == ["pretrained", "views", "closed form", "trained head"]
    assert found.chosen is [rung for rung in found.rungs if rung.is_better][-1]
    assert evaluate(found.embedder, distracted).map_at_r == pytest.approx(found.after.map_at_r, abs=1e-6)


def test_labels_that_mean_nothing_leave_the_backbone_as_it_is(backbone, distracted):
    mixed = distracted.train.labels[torch.randperm(96, generator=torch.Generator().manual_seed(0))]
    found = climb(
        backbone, replace(distracted, train=distracted.train.with_labels(mixed)), field, effort="minutes", head_steps=8
    )
    assert not found.chosen.candidate.learns
    assert found.embedder.trained_on is None
    assert found.embedder.head.linear is None


def test_too_few_classes_to_validate_leave_the_backbone_as_it_is(backbone):
    data = RetrievalData("squares", squares(3, 6, 1, 0.9), squares(3, 6, 2, 0.9))
    found = climb(backbone, data, field)
    assert [rung.name for rung in found.rungs] == ["pretrained"]
    assert found.embedder.head.linear is None


def test_the_same_images_and_seed_give_the_same_ladder(backbone, distracted):
    first, again = (climb(backbone, distracted, field, effort="minutes", seed=3, head_steps=4) for _ in range(2))
    assert [rung.as_dict() | {"seconds": 0} for rung in first.rungs] == [
        rung.as_dict() | {"seconds": 0} for rung in again.rungs
    ]
    assert torch.equal(first.embedder.head.linear.weight, again.embedder.head.linear.weight)


def test_what_is_no_backbone_or_no_effort_is_refused(backbone, distracted):
    with pytest.raises(ValueError, match="seconds, minutes, hours, got 'days'"):
        climb(backbone, distracted, field, effort="days")
    with pytest.raises(ValueError, match="without a linear layer"):
        climb(create_embedder("convnet", embedding_dim=4), distracted, field)


def test_views_are_larger_crops_and_the_mean_of_an_image_and_its_mirror_image(backbone, distracted):
    features = Features(backbone, distracted)
    assert features.base == Candidate(View(32), "avg")
    assert features.views() == [Candidate(View(41, True), "gem"), Candidate(View(32), "gem")]
    assert features.views(is_quick=True) == [Candidate(View(32), "gem")]
    from pfml.evaluation import embed
    from pfml.models.backbone_table import with_image_size

    larger = replace(features.backbone.config, image_size=41)
    assert features.of(View(41))["avg"].shape == (96, features.backbone.head.num_features)
    expected = create_embedder(
        "convnet", embedding_dim=None, pooling="gem", image_size=larger.image_size, flip_test=True
    )
    expected.load_state_dict(backbone.state_dict())
    assert expected.preprocessing == with_image_size(backbone.preprocessing, 41)
    points = embed(expected, distracted.train, features=True)
    assert torch.allclose(features.of(View(41, True))["gem"], points, atol=1e-5)
    assert not torch.allclose(features.of(View(41))["gem"], points, atol=1e-5)


def test_the_first_usable_model_is_there_before_any_image_is_embedded(backbone, distracted, monkeypatch):
    monkeypatch.setattr(Features, "of", mock.Mock(side_effect=InterruptedError))
    kept = []
    with pytest.raises(InterruptedError):
        climb(backbone, distracted, field, keep=kept.append)
    (first,) = kept
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(first(images), deepcopy(backbone).eval()(images))


def test_each_better_rung_gives_a_usable_model(backbone, distracted):
    kept = []
    found = climb(backbone, distracted, field, effort="minutes", head_steps=4, keep=kept.append)
    assert kept[0].head.linear is None
    assert len(kept) >= 2
    assert kept[-1] is found.embedder


def known(data):
    """Half of the images of every class, searched among the others."""
    train, test = (data.train.subset(torch.arange(start, len(data.train), 2)) for start in (0, 1))
    return RetrievalData("squares", train, test, gallery=train, protocol="images")


def test_known_classes_are_validated_by_images_and_searched_among_the_training_images(backbone, distracted):
    data = known(replace(distracted, train=squares(8, 24, 1, 0.9)))
    found = climb(backbone, data, field, effort="seconds")
    assert found.chosen.candidate.head is not None
    assert found.after.num_queries == 96
    assert evaluate(found.embedder, data).map_at_r == pytest.approx(found.after.map_at_r, abs=1e-6)


def test_where_nothing_is_held_out_validation_alone_says_how_good_it_is(backbone):
    images = squares(8, 24, 1, 0.9)
    data = RetrievalData("squares", images, images.of_classes([]), protocol="none")
    found = climb(backbone, data, field, effort="seconds")
    assert found.before is None
    assert found.after is None
    assert found.chosen.gains["map_at_r"].mean > 0
    assert found.embedder.trained_on.class_names == images.class_names


def rung(name, recall, precision, error=0.01, head=True):
    over_last = {"recall_at_1": Gain(recall, error), "map_at_r": Gain(precision, error)}
    candidate = Candidate(View(32), "avg", ClosedForm(0.5, None) if head else None)
    return Rung(name, candidate, {}, over_last, {} if name == "pretrained" else over_last)


def test_what_is_fitted_must_be_better_by_two_standard_errors_and_lose_no_recall():
    base = rung("pretrained", 0.0, 0.0, 0.0)
    assert best_of([base, rung("a", 0.01, 0.01)]) is base
    assert best_of([base, rung("a", 0.03, 0.03)]).name == "a"
    assert best_of([base, rung("a", -0.03, 0.2)]) is base  # however much MAP@R it gains
    assert best_of([base, rung("a", 0.03, 0.03), rung("b", 0.04, 0.04)]).name == "b"
    assert best_of([base, rung("a", 0.04, 0.04), rung("b", 0.0, 0.01)]).name == "a"
    assert best_of([base]) is base


def test_a_view_is_kept_unless_validation_speaks_against_it():
    base = rung("pretrained", 0.0, 0.0, 0.0)
    assert best_of([base, rung("view", -0.01, 0.005, head=False)]).name == "view"
    assert best_of([base, rung("view", -0.03, 0.005, head=False)]) is base
    assert best_of([base, rung("view", 0.0, 0.0, 0.0, head=False)]) is base  # no difference at all: the cheaper one


def test_a_rung_prints_the_interval_of_the_report_and_why_it_is_not_kept():
    assert str(rung("a", 0.03, 0.03)).endswith("R@1 +3.0 (95 %: +1.0 to +5.0), MAP@R +3.0 (95 %: +1.0 to +5.0): kept")
    assert str(rung("a", 0.01, 0.01)).endswith(": not kept, since it is not surely better")
    assert str(rung("a", -0.03, 0.2)).endswith(": not kept, since it loses more than 0.5 R@1")
    assert str(rung("view", -0.03, 0.005, head=False)).endswith(": not kept, since validation speaks against it")
    assert "95 %" not in str(rung("a", 0.01, 0.01, math.inf))


def test_hours_fine_tune_on_each_part_and_on_all_if_that_is_better(backbone, distracted):
    trained = []

    def perfect(positions, name, embedder, embeddings):
        """An embedder that sees the color of the class alone."""
        trained.append((len(positions), name))
        assert len(embeddings) == len(positions)
        embedder.backbone = GreenAndBlue()
        return embedder

    found = climb(backbone, distracted, field, effort="hours", head_steps=4, fine_tune=perfect)
    assert [each.name for each in found.rungs][-1] == "fine-tuned"
    assert sum(count for count, _ in trained[:-1]) == 96 * (len(trained) - 2)  # each part is left out once
    assert trained[-1] == (96, "all")
    assert found.chosen.candidate.is_fine_tuned
    assert found.after.map_at_r == pytest.approx(evaluate(found.embedder, distracted).map_at_r, abs=1e-6)


class GreenAndBlue(torch.nn.Module):
    """Feature maps of two colors."""

    num_features, num_prefix_tokens = 96, 0

    def forward(self, images):
        maps = torch.zeros(len(images), 96, *images.shape[2:])
        maps[:, :2] = images[:, 1:]
        maps[:, 2] = 0.3
        return maps


def test_a_candidate_is_read_as_it_was_written():
    for candidate in (
        Candidate(View(32), "avg"),
        Candidate(View(41, True), "gem", ClosedForm(0.5, 64), is_trained=True, is_fine_tuned=True),
    ):
        assert Candidate.of(candidate.as_dict()) == candidate
