"""The ladder on images whose classes differ in some features and whose images differ in others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pfml.data import ImageSet, RetrievalData
from pfml.evaluation import evaluate
from pfml.ladder.ladder import Candidate, climb
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
    assert [rung.name for rung in found.rungs] == ["pretrained", "closed form"]
    assert found.chosen is found.rungs[1]
    assert found.chosen.proof > 0
    assert found.chosen.candidate.head is not None
    assert found.after.map_at_r > found.before.map_at_r + 0.05
    measured = evaluate(found.embedder, distracted)
    assert measured.map_at_r == pytest.approx(found.after.map_at_r, abs=1e-6)
    assert evaluate(backbone, distracted).map_at_r == pytest.approx(found.before.map_at_r, abs=1e-6)
    assert found.embedder.trained_on.class_names == distracted.train.class_names
    assert found.embedder.config.pooling == found.chosen.candidate.pooling


def test_minutes_train_a_head_and_keep_it_only_if_it_is_better(backbone, distracted):
    found = climb(backbone, distracted, field, effort="minutes", head_steps=8)
    assert [rung.name for rung in found.rungs] == ["pretrained", "closed form", "trained head"]
    assert found.chosen.proof == max(rung.proof for rung in found.rungs)
    assert evaluate(found.embedder, distracted).map_at_r == pytest.approx(found.after.map_at_r, abs=1e-6)


def test_labels_that_mean_nothing_leave_the_backbone_as_it_is(backbone, distracted):
    mixed = distracted.train.labels[torch.randperm(96, generator=torch.Generator().manual_seed(0))]
    found = climb(
        backbone, replace(distracted, train=distracted.train.with_labels(mixed)), field, effort="minutes", head_steps=8
    )
    assert found.chosen.candidate == Candidate("avg")
    assert found.after.as_dict() == found.before.as_dict()
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
    with pytest.raises(ValueError, match="seconds, minutes, got 'days'"):
        climb(backbone, distracted, field, effort="days")
    with pytest.raises(ValueError, match="without a linear layer"):
        climb(create_embedder("convnet", embedding_dim=4), distracted, field)
