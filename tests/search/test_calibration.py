"""Calibration of "unknown": cross-fitting over classes, by loops."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pfml.data.image_set import SeenClassError
from pfml.models.embedder import TrainedOn
from pfml.search import ModelIdentity, Threshold, calibrate, calibrate_points
from pfml.search.calibration import _smallest_accepted, calibrate_known_points
from pfml.search.scores import CANDIDATES
from pfml.search.threshold import Rate
from pfml.storage.files import DamagedFileError
from pfml.storage.manifest import FormatVersionError, digest_of
from small_data import few_glyphs, small_embedder
from small_index import MODEL
from small_threshold import made_threshold

pytestmark = pytest.mark.usefixtures("one_thread")


def clustered(classes=20, copies=12, spread=0.5, dimension=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centers = torch.nn.functional.normalize(torch.randn(classes, dimension, generator=generator))
    labels = torch.arange(classes).repeat_interleave(copies)
    noise = torch.randn(len(labels), dimension, generator=generator) * spread / math.sqrt(dimension)
    return torch.nn.functional.normalize(centers[labels] + noise), labels


def oracle(points, labels, gallery=None, gallery_labels=None):
    """Distance of each query to its nearest image, and class of that; the same when its own class is left out."""
    items, item_labels = (points, labels) if gallery is None else (gallery, gallery_labels)
    items = list(enumerate(zip(items.double().tolist(), item_labels.tolist(), strict=True)))
    genuine, impostor = [], []
    for i, (point, label) in enumerate(zip(points.double().tolist(), labels.tolist(), strict=True)):
        found = [(math.dist(point, item), own) for j, (item, own) in items if gallery is not None or j != i]
        genuine.append(min(found))
        impostor.append(min(pair for pair in found if pair[1] != label))
    return genuine, impostor


def most_attractive(points, labels, i, scoring):
    """The class that attracts point i most when its own class is left out, by Eq. 4 over the 24 nearest."""
    others = [j for j in range(len(labels)) if labels[j] != labels[i]]
    near = sorted(others, key=lambda j: math.dist(points[i], points[j]))[:24]
    pull = dict.fromkeys((labels[j] for j in near), 0.0)
    for j in near:
        pull[labels[j]] += max(math.dist(points[i], points[j]), scoring.delta) ** -scoring.alpha
    return max(pull, key=pull.get)


def first_refused(distances, rate):
    """The smallest distance that would accept more than this share of the distances and a further one."""
    allowed = rate * (len(distances) + 1) + 1e-9
    return min(t for t in distances if sum(d <= t + 1e-9 for d in distances) + 1 > allowed)


def cross_fitted(genuine, impostor, labels, rate, folds=10, seed=0):
    """Which queries are accepted, genuine and impostor, each by the distance that the other folds choose."""
    order = torch.randperm(len(labels.unique()), generator=torch.Generator().manual_seed(seed))
    fold_of = {int(label): k for k, some in enumerate(order.tensor_split(min(folds, len(order)))) for label in some}
    fold = [fold_of[label] for label in labels.tolist()]
    accepted = [], []
    for i in range(len(labels)):
        limit = first_refused([d for (d, _), other in zip(impostor, fold, strict=True) if other != fold[i]], rate)
        for kind, found in zip(accepted, (genuine, impostor), strict=True):
            kind.append(found[i][0] < limit - 1e-9)
    return accepted


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.3])
def test_threshold_and_rates_are_those_of_loops(rate):
    points, labels = clustered(spread=0.8)
    threshold = calibrate_points(points, labels, model=MODEL, false_accept_rate=rate, score="distance")
    genuine, impostor = oracle(points, labels)
    distances = [d for d, _ in impostor]
    around = (-threshold.value - 1e-6, -threshold.value + 1e-6)
    fewer, more = ((sum(d <= t for d in distances) + 1) / (len(distances) + 1) for t in around)
    assert fewer <= rate < more  # the largest distance that keeps the rate on all classes and a further image
    assert threshold.distance == pytest.approx(-threshold.value)
    as_genuine, as_impostor = cross_fitted(genuine, impostor, labels, rate)
    assert threshold.false_accepts.count == sum(as_impostor)
    assert threshold.false_rejects.count == sum(not one for one in as_genuine)
    assert threshold.measured_on == (240, 20), "every class is measured"
    assert threshold.scores["impostor"].tolist() == pytest.approx([-d for d in distances], abs=1e-6)
    assert threshold.scores["genuine"].tolist() == pytest.approx([-d for d, _ in genuine], abs=1e-6)


def test_of_four_classes_each_is_measured_by_what_the_other_three_choose():
    points, labels = clustered(classes=4, copies=15, spread=1.0, dimension=3, seed=3)
    threshold = calibrate_points(points, labels, model=MODEL, false_accept_rate=0.1, score="distance")
    genuine, impostor = oracle(points, labels)
    as_genuine, as_impostor = cross_fitted(genuine, impostor, labels, 0.1, folds=4)
    assert (threshold.false_accepts.count, threshold.false_accepts.total) == (sum(as_impostor), 60)
    assert (threshold.false_rejects.count, threshold.false_rejects.total) == (60 - sum(as_genuine), 60)
    together = [d <= threshold.distance for d, _ in impostor]
    assert as_impostor != together, "on these points it matters that a class has no part in its own threshold"


@pytest.mark.parametrize("rate", [0.05, 0.3])
def test_known_classes_are_left_out_of_the_whole_gallery_in_turn(rate):
    points, labels = clustered(spread=0.9)
    is_query = torch.arange(len(labels)) % 4 == 0
    queries, gallery = (points[is_query], labels[is_query]), (points[~is_query], labels[~is_query])
    threshold = calibrate_known_points(*queries, *gallery, model=MODEL, false_accept_rate=rate, score="distance")
    genuine, impostor = oracle(*queries, *gallery)
    as_genuine, as_impostor = cross_fitted(genuine, impostor, queries[1], rate)
    assert threshold.false_accepts.count == sum(as_impostor)
    assert threshold.false_rejects.count == sum(not one for one in as_genuine)
    assert (threshold.gallery_size, threshold.protocol, threshold.measured_on) == (180, "images", (60, 20))


def test_without_held_out_images_each_is_searched_among_all_others():
    threshold = calibrate_known_points(*clustered(spread=0.7), model=MODEL, false_accept_rate=0.1)
    unseen = calibrate_points(*clustered(spread=0.7), model=MODEL, false_accept_rate=0.1)
    assert (threshold.searched_in, threshold.protocol) == (240, "none")
    assert (unseen.searched_in, unseen.protocol) == (240, "classes")
    assert threshold.false_accepts == unseen.false_accepts


def of_different_spread(pairs=5, wide=15, copies=15, dimension=16, seed=0):
    """Pairs of narrow classes that lie close together, and wide classes that lie apart."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(count, spread):
        return spread * torch.randn(count, dimension, generator=generator) / math.sqrt(dimension)

    centers = torch.nn.functional.normalize(torch.randn(pairs + wide, dimension, generator=generator))
    narrow = centers[:pairs].repeat_interleave(2, 0) + 0.25 * torch.nn.functional.normalize(drawn(2 * pairs, 1.0))
    spreads = torch.tensor([0.03] * (2 * pairs) + [0.8] * wide).repeat_interleave(copies)
    points = torch.cat([narrow, centers[pairs:]]).repeat_interleave(copies, 0)
    points = points + spreads[:, None] * drawn(len(points), 1.0)
    return torch.nn.functional.normalize(points), torch.arange(2 * pairs + wide).repeat_interleave(copies)


def test_classes_of_different_spread_need_more_than_the_distance():
    points, labels = of_different_spread()
    plain, chosen = (
        calibrate_points(points, labels, model=MODEL, false_accept_rate=0.05, score=score)
        for score in ("distance", "auto")
    )
    assert plain.false_rejects.value > 0.5, "wide classes are farther than narrow classes are from each other"
    assert chosen.scoring.name == "relative"
    assert chosen.false_rejects.value < 0.3
    assert chosen.false_accepts.value < plain.false_accepts.value
    assert chosen.compared["distance"] < chosen.compared[chosen.scoring.name]


def test_auto_takes_the_combination_unless_another_score_is_clearly_better(monkeypatch):
    points, labels = clustered(spread=0.9)
    options = {"model": MODEL, "false_accept_rate": 0.1}
    assert calibrate_points(points, labels, **options).scoring.name == "combination"
    named = calibrate_points(points, labels, **options, score="margin")
    assert (named.scoring.name, named.scoring.weights) == ("margin", ())
    assert set(named.compared) == set(CANDIDATES)
    monkeypatch.setattr("pfml.search.calibration.CLEARLY_MORE", 0.0)
    best = calibrate_points(points, labels, **options)
    assert best.compared[best.scoring.name] == max(best.compared.values())
    with pytest.raises(ValueError, match="score must be one of auto, distance, .*, got 'best'"):
        calibrate_points(points, labels, **options, score="best")


def test_a_class_that_many_impostors_are_like_has_its_own_threshold():
    points, labels = clustered(classes=8, copies=30, spread=0.9, dimension=4)
    names = [f"class {k}" for k in range(8)]
    options = {"model": MODEL, "false_accept_rate": 0.1, "score": "distance"}
    threshold = calibrate_points(points, labels, **options, class_names=names)
    _, impostor = oracle(points, labels)
    plain = points.double().tolist(), labels.tolist()
    like = [most_attractive(*plain, i, threshold.scoring) for i in range(len(labels))]
    expected = {}
    for k, name in enumerate(names):
        own = [d for (d, _), likely in zip(impostor, like, strict=True) if likely == k]
        if math.floor(0.1 * (len(own) + 1)) - 1 >= 2:
            expected[name] = first_refused(own, 0.1)
    assert 0 < len(expected) < 8, "some classes have too few impostors and keep the common threshold"
    assert threshold.class_values.keys() == expected.keys()
    for name, distance in expected.items():
        assert threshold.is_known(-distance + 1e-6, name)
        assert not threshold.is_known(-distance - 1e-6, name)
    common = calibrate_points(points, labels, **options)
    assert common.class_values == {}
    assert common.value == threshold.value


@pytest.mark.parametrize(("impostors", "rate"), [(19, 0.1), (59, 0.05), (14, 0.2)])
def test_a_further_impostor_is_accepted_at_the_asked_rate_however_few_there_are(impostors, rate):
    scores = torch.randn(4000, impostors + 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    accepted = [float(row[-1]) >= _smallest_accepted(row[:-1], rate) for row in scores]
    assert sum(accepted) / len(accepted) == pytest.approx(rate, abs=3 * math.sqrt(rate / len(accepted)))


def test_an_impostor_by_a_wrong_label_makes_the_threshold_strict_and_a_correction_undoes_it():
    points, labels = clustered(classes=10, copies=20, spread=0.3)
    wrong = labels.clone()
    wrong[::10] = (wrong[::10] + 1) % 10
    options = {"model": MODEL, "false_accept_rate": 0.02, "score": "distance"}
    noisy, corrected = (calibrate_points(points, given, **options) for given in (wrong, labels))
    assert noisy.false_rejects.value > 0.5 > corrected.false_rejects.value


def test_images_that_are_alone_in_their_class_are_impostors_only():
    points, labels = clustered(classes=8, copies=30)
    alone, more = clustered(classes=10, copies=1, seed=4)
    threshold = calibrate_points(
        torch.cat([points, alone]), torch.cat([labels, more + 8]), model=MODEL, false_accept_rate=0.2
    )
    assert threshold.false_accepts.total - threshold.false_rejects.total == 10


def test_memory_does_not_change_the_threshold(monkeypatch):
    points, labels = clustered()
    whole = calibrate_points(points, labels, model=MODEL, false_accept_rate=0.1)
    monkeypatch.setattr("pfml.search.neighborhood.MEMORY", 5000)
    tiled = calibrate_points(points, labels, model=MODEL, false_accept_rate=0.1)
    assert tiled.value == pytest.approx(whole.value, rel=1e-4)
    assert tiled.false_rejects == whole.false_rejects


def test_the_seed_divides_the_classes_and_leaves_the_threshold_as_it_is():
    points, labels = clustered(classes=40, copies=5, spread=1.0)
    found = [calibrate_points(points, labels, model=MODEL, false_accept_rate=0.1, seed=s) for s in range(8)]
    assert len({one.value for one in found}) == 1
    assert len({one.false_accepts.count for one in found}) > 1


def test_the_measured_rate_is_near_the_asked_one_when_there_are_many_classes():
    points, labels = clustered(classes=400, copies=5, spread=0.8)
    threshold = calibrate_points(points, labels, model=MODEL, false_accept_rate=0.1)
    assert threshold.false_accepts.low < 0.1 < threshold.false_accepts.high
    assert threshold.false_accepts.value == pytest.approx(0.1, abs=0.03)
    assert not threshold.misses_rate


@pytest.mark.parametrize(
    ("rate", "misses"),
    [
        (Rate(10, 1000, 0.005, 0.02), False),
        (Rate(14, 1000, 0.005, 0.03), False),
        (Rate(16, 1000, 0.005, 0.03), True),
        (Rate(13, 1000, 0.011, 0.015), True),
        (Rate(1, 1000, 0.0, 0.005), True),
    ],
)
def test_a_rate_that_is_not_the_asked_one_is_missed(rate, misses):
    assert made_threshold(rate=0.01, false_accepts=rate).misses_rate is misses


def test_an_interval_holds_its_rate_and_is_never_empty():
    points, labels = clustered(spread=0.05)
    threshold = calibrate_points(points, labels, model=MODEL, false_accept_rate=0.01)
    rate = threshold.false_rejects
    assert (rate.count, rate.low) == (0, 0.0)
    assert rate.high >= 1 - 0.025 ** (1 / rate.total) - 1e-12  # Clopper and Pearson for no event


def test_too_few_images_or_classes_for_a_rate_are_refused():
    points, labels = clustered()
    with pytest.raises(ValueError, match="at least 1,000 images, got 216 besides those of the classes left out"):
        calibrate_points(points, labels, model=MODEL, false_accept_rate=0.001)
    with pytest.raises(ValueError, match=r"the rate \(--false-accept-rate\) must be 0.00463 or more"):
        calibrate_points(points, labels, model=MODEL, false_accept_rate=0.001)
    assert calibrate_points(points, labels, model=MODEL, false_accept_rate=0.00463).false_accept_rate == 0.00463
    with pytest.raises(ValueError, match="at least 4 classes.*got 3"):
        calibrate_points(*clustered(classes=3), model=MODEL)
    for rate in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="false_accept_rate must lie between 0 and 1"):
            calibrate_points(points, labels, model=MODEL, false_accept_rate=rate)


def test_a_saved_threshold_is_the_same_and_a_damaged_one_is_refused(tmp_path):
    names = [f"class {k}" for k in range(20)]
    threshold = calibrate_points(*clustered(), model=MODEL, class_names=names, false_accept_rate=0.2, data="clusters")
    assert threshold.class_values
    file = threshold.save(tmp_path)
    loaded = Threshold.load(tmp_path)
    assert loaded == threshold
    assert torch.equal(loaded.scores["genuine"], threshold.scores["genuine"])
    assert Threshold.load(tmp_path / "elsewhere") is None
    content = file.read_text()
    file.write_text(content.replace('"distance": 0.', '"distance": 1.'))
    with pytest.raises(DamagedFileError, match=r"threshold\.json"):
        Threshold.load(tmp_path)
    file.write_text(content)
    [tensors] = tmp_path.glob("threshold-*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\xff")
    with pytest.raises(DamagedFileError, match=tensors.name):
        Threshold.load(tmp_path)


def test_a_distance_of_an_older_pfml_is_refused_with_the_advice_to_calibrate_again(tmp_path):
    old = {"kind": "distance threshold", "format_version": 1, "distance": 0.5}
    (tmp_path / "threshold.json").write_text(json.dumps({**old, "manifest_sha256": digest_of(old)}))
    with pytest.raises(
        FormatVersionError, match=r"of format version 2, got version 1: .* calibrate again with pfml calibrate"
    ):
        Threshold.load(Path(tmp_path))


def test_values_that_are_no_numbers_are_refused():
    threshold = made_threshold(value=0.5)
    assert threshold.is_known(math.nan, "a") is False
    for change in ({"value": math.nan}, {"class_values": {"a": math.inf}}):
        with pytest.raises(ValueError, match="must be a finite number"):
            replace(threshold, **change)
    with pytest.raises(ValueError, match=r"must lie in \[0, 2\], got 3"):
        replace(threshold, distance=3)


def test_classes_that_the_model_was_trained_on_are_refused():
    embedder, images = small_embedder(), few_glyphs().test
    threshold = calibrate(embedder, images, false_accept_rate=0.1, batch_size=50)
    assert threshold.model == ModelIdentity.of(embedder)
    assert threshold.measured_on[1] == images.num_classes
    assert set(threshold.class_values) <= set(images.class_names)
    embedder.trained_on = TrainedOn("letters", images.class_names[:1])
    with pytest.raises(SeenClassError, match="calibration classes must be unseen"):
        calibrate(embedder, images, false_accept_rate=0.1)
