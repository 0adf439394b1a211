"""The threshold of "unknown"."""

import math

import pytest
import torch

from pfml.data.image_set import SeenClassError
from pfml.models.embedder import TrainedOn
from pfml.search import ModelIdentity, Threshold, calibrate, calibrate_points
from pfml.search.threshold import calibrate_known_points
from pfml.storage.files import DamagedFileError
from small_data import few_glyphs, small_embedder
from small_index import MODEL

pytestmark = pytest.mark.usefixtures("one_thread")


def clustered(classes=20, copies=12, spread=0.5, dimension=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    centers = torch.nn.functional.normalize(torch.randn(classes, dimension, generator=generator))
    labels = torch.arange(classes).repeat_interleave(copies)
    noise = torch.randn(len(labels), dimension, generator=generator) * spread / math.sqrt(dimension)
    return torch.nn.functional.normalize(centers[labels] + noise), labels


def oracle(points, labels):
    """Genuine and impostor distance of each point, by loops; None for a point that is alone in its class."""
    points, labels = points.double().tolist(), labels.tolist()
    genuine, impostor = [], []
    for i in range(len(points)):
        own, other = [], []
        for j in range(len(points)):
            if i != j:
                distance = math.dist(points[i], points[j])
                (own if labels[i] == labels[j] else other).append(distance)
        genuine.append(min(own) if own else None)
        impostor.append(min(other))
    return genuine, impostor


def halves(points, labels):
    """As `calibrate_points` divides the classes 0, 1, ... with seed 0."""
    order = torch.randperm(len(labels.unique()), generator=torch.Generator().manual_seed(0))
    first = torch.isin(labels, order[: len(order) // 2])
    return (points[first], labels[first]), (points[~first], labels[~first])


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.3])
def test_threshold_and_rates_are_those_of_counting_pairs(rate):
    points, labels = clustered()
    threshold = calibrate_points(points, labels, model=MODEL, false_accept_rate=rate)
    choosing, measuring = halves(points, labels)
    _, impostor = oracle(*choosing)
    around = (threshold.distance - 1e-7, threshold.distance + 1e-7)
    fewer, more = (sum(d <= t for d in impostor) / len(impostor) for t in around)
    assert fewer <= rate < more  # the largest distance that keeps the rate
    genuine, impostor = oracle(*measuring)
    assert threshold.false_accepts.count == sum(d <= threshold.distance for d in impostor)
    assert threshold.false_rejects.count == sum(d > threshold.distance for d in genuine)
    wrong = [i <= threshold.distance and i < g for g, i in zip(genuine, impostor, strict=True)]
    assert threshold.wrong_classes.count == sum(wrong)
    assert (threshold.chosen_on, threshold.measured_on) == ((120, 10), (120, 10))
    assert threshold.distances["impostor"].tolist() == pytest.approx(impostor, abs=1e-6)


def gallery_oracle(points, labels, gallery, gallery_labels):
    """Distance of each query to the nearest image of its class, and to the nearest when its class is left out."""
    items = list(zip(gallery.double().tolist(), gallery_labels.tolist(), strict=True))
    genuine, impostor = [], []
    for point, label in zip(points.double().tolist(), labels.tolist(), strict=True):
        genuine.append(min((math.dist(point, item) for item, own in items if own == label), default=None))
        impostor.append(min(math.dist(point, item) for item, own in items if own != label))
    return genuine, impostor


@pytest.mark.parametrize("rate", [0.05, 0.3])
def test_known_classes_are_left_out_of_the_whole_gallery_in_turn(rate):
    points, labels = clustered(spread=0.7)
    is_query = torch.arange(len(labels)) % 4 == 0
    queries, gallery = (points[is_query], labels[is_query]), (points[~is_query], labels[~is_query])
    threshold = calibrate_known_points(*queries, *gallery, model=MODEL, false_accept_rate=rate)
    choosing, measuring = halves(*queries)
    _, impostor = gallery_oracle(*choosing, *gallery)
    around = (threshold.distance - 1e-7, threshold.distance + 1e-7)
    fewer, more = (sum(d <= t for d in impostor) / len(impostor) for t in around)
    assert fewer <= rate < more
    genuine, impostor = gallery_oracle(*measuring, *gallery)
    assert threshold.false_accepts.count == sum(d <= threshold.distance for d in impostor)
    assert threshold.false_rejects.count == sum(d > threshold.distance for d in genuine)
    wrong = [i <= threshold.distance and i < g for g, i in zip(genuine, impostor, strict=True)]
    assert threshold.wrong_classes.count == sum(wrong)
    assert (threshold.gallery_size, threshold.protocol) == (180, "images")
    assert (threshold.chosen_on, threshold.measured_on) == ((30, 10), (30, 10))


def test_without_held_out_images_each_is_searched_among_all_others():
    points, labels = clustered(spread=0.7)
    threshold = calibrate_known_points(points, labels, model=MODEL, false_accept_rate=0.1)
    genuine, impostor = oracle(points, labels)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    measured = [k for k, label in enumerate(labels.tolist()) if label in order[10:].tolist()]
    # an image that chose the distance may be the nearest stranger of one that measures it
    fewer, more = (sum(impostor[k] <= threshold.distance + gap for k in measured) for gap in (-1e-7, 1e-7))
    assert fewer <= threshold.false_accepts.count <= more <= fewer + 1
    assert threshold.false_rejects.count == sum(genuine[k] > threshold.distance for k in measured)
    assert (threshold.searched_in, threshold.protocol) == (240, "none")


def test_a_threshold_of_known_classes_is_loaded_as_one(tmp_path):
    threshold = calibrate_known_points(*clustered(), model=MODEL, false_accept_rate=0.1)
    threshold.save(tmp_path)
    loaded = Threshold.load(tmp_path)
    assert loaded == threshold
    assert loaded.protocol == "none"
    unseen = calibrate_points(*clustered(), model=MODEL, false_accept_rate=0.1)
    assert (unseen.protocol, unseen.searched_in) == ("classes", 120)


def test_images_that_are_alone_in_their_class_are_impostors_only():
    points, labels = clustered(classes=8, copies=30)
    alone, more = clustered(classes=10, copies=1, seed=4)
    threshold = calibrate_points(
        torch.cat([points, alone]), torch.cat([labels, more + 8]), model=MODEL, false_accept_rate=0.2
    )
    singles = threshold.false_accepts.total - threshold.false_rejects.total
    assert 0 < singles <= 10


def test_memory_does_not_change_the_threshold(monkeypatch):
    points, labels = clustered()
    whole = calibrate_points(points, labels, model=MODEL, false_accept_rate=0.1)
    monkeypatch.setattr("pfml.search.threshold.MEMORY", 5000)
    assert calibrate_points(points, labels, model=MODEL, false_accept_rate=0.1) == whole


def test_the_seed_divides_the_classes():
    points, labels = clustered()
    distances = {
        calibrate_points(points, labels, model=MODEL, false_accept_rate=0.1, seed=s).distance for s in range(3)
    }
    assert len(distances) == 3


def test_the_measured_rate_is_near_the_asked_one_when_there_are_many_classes():
    points, labels = clustered(classes=400, copies=5, spread=0.8)
    threshold = calibrate_points(points, labels, model=MODEL, false_accept_rate=0.1)
    assert threshold.false_accepts.low < 0.1 < threshold.false_accepts.high
    assert threshold.false_accepts.value == pytest.approx(0.1, abs=0.03)


def test_an_interval_holds_its_rate_and_is_never_empty():
    points, labels = clustered(spread=0.05)
    threshold = calibrate_points(points, labels, model=MODEL, false_accept_rate=0.01)
    rate = threshold.false_rejects
    assert (rate.count, rate.low) == (0, 0.0)
    assert rate.high >= 1 - 0.025 ** (1 / rate.total) - 1e-12  # Clopper and Pearson for no event


def test_too_few_images_or_classes_for_a_rate_are_refused():
    points, labels = clustered()
    with pytest.raises(ValueError, match=r"at least 1,000 images .* got 120 and 120"):
        calibrate_points(points, labels, model=MODEL, false_accept_rate=0.001)
    with pytest.raises(ValueError, match=r"the rate \(--false-accept-rate\) must be 0.00834 or more"):
        calibrate_points(points, labels, model=MODEL, false_accept_rate=0.001)
    assert calibrate_points(points, labels, model=MODEL, false_accept_rate=0.00834).false_accept_rate == 0.00834
    with pytest.raises(ValueError, match="at least 4 classes.*got 3"):
        calibrate_points(*clustered(classes=3), model=MODEL)
    for rate in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="false_accept_rate must lie between 0 and 1"):
            calibrate_points(points, labels, model=MODEL, false_accept_rate=rate)


def test_a_saved_threshold_is_the_same_and_a_damaged_one_is_refused(tmp_path):
    threshold = calibrate_points(*clustered(), model=MODEL, false_accept_rate=0.1, data="clusters")
    file = threshold.save(tmp_path)
    loaded = Threshold.load(tmp_path)
    assert loaded == threshold
    assert torch.equal(loaded.distances["genuine"], threshold.distances["genuine"])
    assert Threshold.load(tmp_path / "elsewhere") is None
    content = file.read_text()
    file.write_text(content.replace('"distance": 0.', '"distance": 1.'))
    with pytest.raises(DamagedFileError, match="threshold.json"):
        Threshold.load(tmp_path)
    file.write_text(content)
    [tensors] = tmp_path.glob("threshold-*.safetensors")
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\xff")
    with pytest.raises(DamagedFileError, match=tensors.name):
        Threshold.load(tmp_path)


def test_what_lies_beyond_the_distance_is_unknown_and_what_lies_at_it_is_not():
    threshold = calibrate_points(*clustered(), model=MODEL, false_accept_rate=0.1)
    assert not threshold.is_unknown(threshold.distance)
    assert threshold.is_unknown(math.nextafter(threshold.distance, 2))


def test_classes_that_the_model_was_trained_on_are_refused():
    embedder, images = small_embedder(), few_glyphs().test
    threshold = calibrate(embedder, images, false_accept_rate=0.1, batch_size=50)
    assert threshold.model == ModelIdentity.of(embedder)
    assert sum(half[1] for half in (threshold.chosen_on, threshold.measured_on)) == images.num_classes
    embedder.trained_on = TrainedOn("letters", images.class_names[:1])
    with pytest.raises(SeenClassError, match="calibration classes must be unseen"):
        calibrate(embedder, images, false_accept_rate=0.1)
