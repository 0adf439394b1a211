"""The audit of labels, against loops, and on clusters with label noise."""

import math

import pytest
import torch

from pfml.audit import audit, detection, precision_recall
from pfml.audit.noise_rate import GROUPS, NEAREST, _center_distances, _Model, _summarized, estimate_noise
from pfml.audit.scores import LabelScores, cleanlab_scores, field_scores, knn_scores, knn_votes
from pfml.data import ImageSet, LabelNoise, corrupt
from pfml.evaluation.class_attraction import ALPHAS, class_attractions, fitted_law, steepness
from pfml.field import ContrastiveLaw, PowerLaw
from pfml.sphere import unit

CLASSES, EACH, DIM = 6, 30, 8
LAW = PowerLaw(delta=0.2, alpha=3.0)


def clusters(*, rate=0.2, spread=0.35, seed=0):
    """Points around the centers of six classes, with label noise: points, images, the true labels."""
    random = torch.Generator().manual_seed(seed)
    true = torch.arange(CLASSES).repeat_interleave(EACH)
    centers = torch.randn(CLASSES, DIM, generator=random)
    points = centers[true] / centers[true].norm(dim=1, keepdim=True)
    points = points + spread * torch.randn(len(true), DIM, generator=random) / math.sqrt(DIM)
    pixels = torch.zeros(len(true), 3, 2, 2, dtype=torch.uint8)
    names = tuple(f"image-{k}" for k in range(len(true)))
    clean = ImageSet(pixels, true, tuple("abcdef"), names)
    images, _ = corrupt(clean, LabelNoise(rate=rate, seed=seed))
    return points / points.norm(dim=1, keepdim=True), images, true


def attractions_by_loops(points, labels, proxies, law):
    """-Psi_att of Eq. 4 at each point, of all others and of the proxies."""
    result = torch.zeros(len(points), CLASSES, dtype=torch.float64)
    for i, here in enumerate(points.double()):
        for j, there in enumerate(points.double()):
            if i != j:
                result[i, labels[j]] += max(float((here - there).norm()), law.delta) ** -law.alpha
        for c in range(CLASSES):
            for proxy in proxies[c].double():
                result[i, c] += max(float((here - proxy).norm()), law.delta) ** -law.alpha
    return result


def test_attractions_are_those_of_all_others_and_of_the_proxies():
    points, images, _ = clusters()
    chosen = torch.arange(0, 180, 12)
    points, labels = points[chosen], images.labels[chosen]
    proxies = torch.nn.functional.normalize(
        torch.randn(CLASSES, 2, DIM, generator=torch.Generator().manual_seed(1)), dim=2
    )
    expected = attractions_by_loops(points, labels, proxies, LAW)
    found = class_attractions(points, labels, CLASSES, law=LAW, proxies=proxies)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


def test_attractions_do_not_depend_on_how_many_fit_into_memory(monkeypatch):
    points, images, _ = clusters()
    whole = class_attractions(points, images.labels, CLASSES, law=LAW)
    monkeypatch.setattr("pfml.evaluation.class_attraction.DISTANCES_AT_ONCE", 500)
    torch.testing.assert_close(class_attractions(points, images.labels, CLASSES, law=LAW), whole, rtol=1e-12, atol=0)


def test_a_law_that_does_not_decay_is_refused():
    points, images, _ = clusters()
    with pytest.raises(ValueError, match="must decay"):
        class_attractions(points, images.labels, CLASSES, law=ContrastiveLaw())


def test_the_score_is_the_log_ratio_of_the_best_other_class_and_the_own():
    attractions = torch.tensor([[8.0, 2.0, 1.0], [8.0, 2.0, 1.0], [3.0, 0.0, 1.0]], dtype=torch.float64)
    scores = field_scores(attractions, torch.tensor([0, 2, 1]))
    assert scores.suggested.tolist() == [1, 0, 0]
    assert scores.score.tolist() == pytest.approx([math.log(2 / 8), math.log(8), -math.inf])


def test_the_fitted_law_overrules_the_fewest_labels():
    points, images, _ = clusters()
    law = fitted_law(points, images.labels, CLASSES)
    nearest_distances = (torch.cdist(points, points) + 9 * torch.eye(len(points))).min(dim=1).values
    assert law.delta == pytest.approx(float(nearest_distances.median()), rel=1e-3)

    def overruled(alpha):
        pull = class_attractions(points, images.labels, CLASSES, law=PowerLaw(delta=law.delta, alpha=alpha))
        return int((pull.argmax(dim=1) != images.labels).sum())

    assert overruled(law.alpha) == min(map(overruled, ALPHAS))


def test_equal_embeddings_are_no_obstacle():
    points, images, _ = clusters()
    found = audit(points[:1].expand(len(points), DIM), images)
    assert found.scores.score.isfinite().all()


def test_mislabeled_images_are_found_and_relabeled():
    points, images, true = clusters()
    found = audit(points, images, true_labels=true, compare=["k-NN disagreement"])
    assert found.detections["field"].average_precision > 0.97
    assert found.detections["field"].suggestion_accuracy > 0.97
    mislabeled = (true != images.labels).nonzero()[:, 0]
    listed = found.listed()
    assert set(mislabeled.tolist()) <= set(listed.tolist())
    assert len(listed) <= len(mislabeled) + 2
    assert found.noise_rate == pytest.approx(0.2, abs=0.03)


def test_clean_labels_have_no_suspects():
    points, images, true = clusters(rate=0.0, spread=0.9)
    found = audit(points, images, true_labels=true)
    assert found.noise_rate == 0
    assert len(found.listed()) == 0
    assert found.detections == {}
    assert len(found.ranked(3)) == 3


def test_a_higher_threshold_lists_fewer_and_surer_labels():
    points, images, true = clusters(spread=0.8)
    found = audit(points, images, true_labels=true)
    many, few = found.listed(0.3), found.listed(0.99)
    assert 0 < len(few) < len(many)
    assert many[: len(few)].tolist() == few.tolist()
    with pytest.raises(ValueError, match="threshold must lie in"):
        found.listed(0)


def test_the_evidence_is_the_nearest_distances_and_their_part_of_the_attraction():
    points, images, _ = clusters()
    found = audit(points, images)
    (suspect,) = found.suspects(found.ranked(1), neighbors=4)
    distances = torch.cdist(points[suspect.index : suspect.index + 1].double(), points.double())[0]
    distances[suspect.index] = math.inf
    expected = distances.argsort()[:4].tolist()
    assert [one.index for one in suspect.neighbors] == expected
    assert [one.image for one in suspect.neighbors] == [f"image-{k}" for k in expected]
    assert [one.label for one in suspect.neighbors] == [images.class_names[images.labels[k]] for k in expected]
    assert [one.distance for one in suspect.neighbors] == pytest.approx(distances[expected].tolist(), rel=1e-5)
    strengths = distances.clamp(min=found.law.delta) ** -found.law.alpha
    assert suspect.neighbors[0].share == pytest.approx(float(strengths[expected[0]] / strengths.sum()), rel=1e-4)
    by_class = [float(strengths[images.labels == c].sum() / strengths.sum()) for c in range(CLASSES)]
    given, suggested = (images.class_names.index(name) for name in (suspect.given, suspect.suggested))
    assert suspect.given == images.class_names[images.labels[suspect.index]]
    assert suspect.given_share == pytest.approx(by_class[given], rel=1e-4)
    assert suspect.suggested_share == pytest.approx(by_class[suggested], rel=1e-4)
    assert suspect.score == pytest.approx(math.log(by_class[suggested] / by_class[given]), rel=1e-4)


def test_proxies_are_charges_too():
    points, images, _ = clusters()
    proxies = torch.zeros(CLASSES, 1, DIM)
    proxies[3, 0] = points[0]
    without, with_proxies = audit(points, images, law=LAW), audit(points, images, law=LAW, proxies=proxies)
    gained = with_proxies.attractions[0] - without.attractions[0]
    assert float(gained[3]) == pytest.approx(0.2**-3, rel=1e-6)


def with_a_lone_image(points, images):
    """The same with a class of its own for the first image."""
    labels = images.labels.clone()
    labels[0] = CLASSES
    return points, ImageSet(images.images, labels, (*images.class_names, "alone"), images.sources)


@pytest.mark.parametrize("proxies", [None, torch.eye(CLASSES + 1, DIM)[:, None]])
def test_an_image_that_is_alone_in_its_class_is_not_judged_by_any_way_to_score(proxies):
    points, images = with_a_lone_image(*clusters()[:2])
    found = audit(points, images, proxies=proxies, compare=["k-NN disagreement"])
    assert found.unjudged.tolist() == [0], "its own proxies have learned from it alone, and are no evidence"
    everyone = found.ranked(len(images)).tolist()
    assert sorted(everyone) == list(range(1, len(images)))
    assert all(math.isfinite(one.score) for one in found.suspects(found.ranked(len(images))))
    assert 0 not in found.listed(0.01).tolist()
    assert found.compared["k-NN disagreement"].score[0] == -torch.inf
    [(image, given, nearest)] = found.unjudged_names()
    assert (image, given) == ("image-0", "alone")
    assert nearest in "abcdef"


def test_every_image_of_larger_classes_is_judged():
    points, images, _ = clusters()
    assert not len(audit(points, images).unjudged)


def test_suspects_are_the_listed_images_or_else_those_at_which_another_class_is_stronger():
    points, images, _ = clusters()
    found = audit(points, images)
    assert found.suspicious(0.5).tolist() == found.listed(0.5).tolist()
    assert 0 < len(found.suspicious(0.5)) < len(images)
    points, images, _ = clusters(rate=0.0)
    found = audit(points, images)
    assert not found.noise_rate
    assert found.suspicious(0.5).tolist() == found.ranked(int((found.scores.score > 0).sum())).tolist()


def test_votes_are_the_shares_of_the_nearest_distances():
    points, images, _ = clusters()
    votes = knn_votes(points, images.labels, CLASSES, 7)
    distances = torch.cdist(points, points) + 9 * torch.eye(len(points))
    for k in (0, 77, 179):
        near = images.labels[distances[k].argsort()[:7]]
        assert votes[k].tolist() == pytest.approx([float((near == c).sum()) / 7 for c in range(CLASSES)])
    scores = knn_scores(votes, images.labels)
    assert float(scores.score[0]) == pytest.approx(1 - float(votes[0, images.labels[0]]), abs=2e-3)


def test_cleanlab_ranks_by_its_own_quality():
    rank = pytest.importorskip("cleanlab.rank", reason="compared with cleanlab, of the extra audit")
    points, images, true = clusters()
    votes = knn_votes(points, images.labels, CLASSES, 10)
    scores = cleanlab_scores(votes, images.labels)
    smooth = (votes + 1e-3) / (votes + 1e-3).sum(dim=1, keepdim=True)
    quality = rank.get_self_confidence_for_each_label(images.labels.numpy(), smooth.numpy())
    assert scores.score.tolist() == pytest.approx((1 - quality).tolist())
    assert detection(scores, images.labels, true).average_precision > 0.9


def test_quality_is_what_its_definition_says():
    labels, true = torch.tensor([0, 0, 0, 0, 0]), torch.tensor([1, 0, 2, 0, 0])
    scores = LabelScores(torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0]), torch.tensor([1, 1, 1, 1, 1]))
    quality = detection(scores, labels, true)
    assert quality.precision_at_noisy == 0.5
    assert quality.average_precision == pytest.approx((1 + 2 / 3) / 2)
    assert quality.recall_at_90 == 0.5
    assert quality.suggestion_accuracy == 0.5
    precision, recall = precision_recall(scores.score, labels != true)
    assert precision.tolist() == pytest.approx([1, 1 / 2, 2 / 3, 1 / 2, 2 / 5])
    assert recall.tolist() == [0.5, 0.5, 1, 1, 1]
    with pytest.raises(ValueError, match="must be known to be mislabeled"):
        detection(scores, labels, labels)


def scored(points, images):
    """What `estimate_noise` takes: scores, attractions, points, labels and law."""
    law = fitted_law(points, images.labels, images.num_classes)
    attractions = class_attractions(points, images.labels, images.num_classes, law=law)
    return field_scores(attractions, images.labels).score, attractions, points, images.labels, law


def pairs_of_classes(*, rate, apart, seed=0):
    """Points of six pairs of similar classes, and labels of which some are those of the other class of the pair."""
    random = torch.Generator().manual_seed(seed)
    true = torch.arange(12).repeat_interleave(EACH)
    centers = torch.randn(6, 16, generator=random).repeat_interleave(2, dim=0)
    centers = unit(unit(centers) + apart * unit(torch.randn(12, 16, generator=random)))
    points = unit(centers[true] + 0.6 * torch.randn(len(true), 16, generator=random) / 4)
    moved = torch.randperm(len(true), generator=random)[: round(rate * len(true))]
    given = true.clone()
    given[moved] = true[moved] ^ 1
    images = ImageSet(torch.zeros(len(true), 3, 2, 2, dtype=torch.uint8), given, tuple("abcdefghijkl"))
    return points, images, true


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.35])
@pytest.mark.parametrize("spread", [0.35, 0.6])
def test_the_noise_rate_is_estimated_with_an_interval(rate, spread):
    points, images, true = clusters(rate=rate, spread=spread)
    wrong = images.labels != true
    estimate = estimate_noise(*scored(points, images))
    low, high = estimate.interval
    assert estimate.rate == pytest.approx(rate, abs=0.04)
    assert low <= rate <= high
    assert low <= estimate.rate <= high
    assert high - low < 0.25
    listed = estimate.probability >= 0.5
    assert float(wrong[listed].double().mean()) > 0.85
    assert float(listed[wrong].double().mean()) > 0.8


@pytest.mark.parametrize("rate", [0.1, 0.2])
def test_confusions_of_similar_classes_are_noise_too(rate):
    points, images, true = pairs_of_classes(rate=rate, apart=0.6)
    wrong = images.labels != true
    found = audit(points, images, true_labels=true)
    assert found.noise_rate == pytest.approx(rate, abs=0.04)
    assert found.noise_interval[0] <= rate <= found.noise_interval[1]
    listed = found.listed()
    assert float(wrong[listed].double().mean()) > 0.8
    assert len(listed) > 0.6 * int(wrong.sum())


def test_similar_classes_without_noise_have_a_rate_of_0():
    points, images, _ = pairs_of_classes(rate=0.0, apart=0.4)
    found = audit(points, images)
    assert int((found.scores.score > 0).sum()) > 10, "some images are nearer to the other class"
    assert found.noise_rate == 0.0
    assert not len(found.listed())


def test_the_likelihood_is_that_of_the_loops():
    points, images, _ = clusters(spread=0.8)
    _, attractions, _, labels, law = scored(points, images)
    distances = _center_distances(points, labels)
    b, e, g, rate = 9.0, 0.8, 2.0, 0.15
    numbers = torch.tensor([math.log(b), math.log(e), math.log(g), math.log(rate / (1 - rate))], dtype=torch.float64)
    model = _Model.of(attractions, labels, distances, law.alpha)
    found, mislabeled = model.log_likelihoods(numbers).exp(), model.mislabeled(numbers)
    for i in (0, 50, 179):
        x = [math.log(float(attractions[i].max() / pull)) / law.alpha for pull in attractions[i]]
        right = [math.exp(-((b * each) ** e)) for each in x]
        right = [each / sum(right) for each in right]
        k = int(labels[i])
        noise = 0.0
        for c in range(CLASSES):
            reached = [0.0 if other == c else math.exp(-g * float(distances[c, other])) for other in range(CLASSES)]
            noise += right[c] * reached[k] / sum(reached)
        whole = (1 - rate) * right[k] + rate * noise
        assert float(found[i]) == pytest.approx(whole)
        assert float(mislabeled[i]) == pytest.approx(1 - (1 - rate) * right[k] / whole)


def test_class_centers_do_not_move_to_where_noise_comes_from():
    points, _, true = clusters(rate=0.0, spread=0.3)
    clean = _center_distances(points, true)
    noisy = true.clone()
    noisy[(true == 0).nonzero()[:8, 0]] = 1
    moved = _center_distances(points, noisy)
    assert float(moved[0, 1]) == pytest.approx(float(clean[0, 1]), rel=0.1)
    assert moved.diagonal().isinf().all()


def test_many_classes_are_summed_in_groups():
    random = torch.Generator().manual_seed(0)
    distances = torch.rand(400, 400, generator=random, dtype=torch.float64) + 0.5
    distances.fill_diagonal_(torch.inf)
    around, sizes = _summarized(distances)
    assert around.shape == (400, NEAREST + GROUPS)
    assert float(sizes.sum()) == 399
    for g in (0.0, 3.0):
        exact = (-g * distances.fill_diagonal_(1e9 if g else 0.0)).exp().sum(dim=1) - (0 if g else 1)
        assert ((sizes * (-g * around).exp()).sum(dim=1) / exact).tolist() == pytest.approx([1.0] * 400, rel=1e-3)


def test_the_steepness_of_a_law_is_its_exponent():
    assert steepness(PowerLaw(delta=0.5, alpha=12.0)) == pytest.approx(12.0)
    assert steepness(PowerLaw(delta=1.0, alpha=3.0)) == pytest.approx(3.0)


def test_clean_labels_have_a_noise_rate_of_0():
    points, images, _ = clusters(rate=0.0, spread=1.2)
    values = scored(points, images)
    assert int((values[0] > 0).sum()) > 0, "some images are nearer to another class"
    estimate = estimate_noise(*values)
    assert estimate.rate == estimate.interval[0] == 0.0
    assert estimate.interval[1] < 0.03
    assert float(estimate.probability.max()) == float(estimate.lower_precision.max()) == 0.0


def test_what_is_not_judged_has_no_probability():
    points, images, _ = clusters(spread=0.8)
    scores, *rest = scored(points, images)
    scores = scores.clone()
    lost = int(scores.argmax())
    scores[lost] = -torch.inf
    estimate = estimate_noise(scores, *rest)
    assert float(estimate.probability[lost]) == float(estimate.lower_precision[lost]) == 0
    assert float(estimate.probability[int(scores.argmax())]) > 0.9


def test_classes_without_images_change_nothing():
    points, images, _ = clusters(spread=0.6)
    found = audit(points, images)
    more = ImageSet(images.images, images.labels, (*images.class_names, "g", "h"), images.sources)
    again = audit(points, more)
    assert again.noise_rate == pytest.approx(found.noise_rate)
    torch.testing.assert_close(again.confidence, found.confidence)


def test_of_few_images_no_rate_is_estimated():
    labels = torch.tensor([0, 1] * 4 + [0])
    estimate = estimate_noise(torch.ones(9), torch.ones(9, 2), unit(torch.ones(9, 3)), labels, LAW)
    assert (estimate.rate, estimate.interval) == (0.0, (0.0, 1.0))


def test_the_sure_list_is_the_longest_whose_lower_precision_is_enough():
    points, images, true = clusters(spread=0.6)
    found = audit(points, images)
    sure, more = found.sure(0.95).tolist(), found.sure(0.5).tolist()
    assert 0 < len(sure) < len(more)
    assert more[: len(sure)] == sure
    assert float((images.labels != true)[sure].double().mean()) >= 0.95
    last = found.ranked(len(images))[len(sure) :]
    assert (found.lower_precision[last] < 0.95).all()
    with pytest.raises(ValueError, match="precision must lie in"):
        found.sure(0)


def test_all_parts_are_charges_and_those_asked_for_are_judged():
    points, images, true = clusters()
    roles = ("train",) * 100 + ("test",) * 80
    everything, tested = (audit(points, images, true_labels=true, roles=roles, parts=p) for p in ((), ("test",)))
    torch.testing.assert_close(tested.scores.score[100:], everything.scores.score[100:])
    assert {one.part for one in everything.suspects(everything.ranked(180))} == {"train", "test"}
    assert sorted(tested.ranked(180).tolist()) == list(range(100, 180))
    assert not len(tested.unjudged)
    assert tested.detections["field"].average_precision > 0.97
    with pytest.raises(ValueError, match="there must be images in the part 'gallery', got images in train, test"):
        audit(points, images, roles=roles, parts=("gallery",))
    with pytest.raises(ValueError, match="roles must name the part of 180 images, got 1"):
        audit(points, images, roles=("train",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embeddings": torch.zeros(3, DIM)}, "embeddings must be"),
        ({"k": 0}, "k must be at least 1"),
        ({"compare": ["knn disagreement"]}, "compare must be of"),
    ],
)
def test_bad_input_is_refused(change, message):
    points, images, _ = clusters()
    arguments = {"embeddings": points, "images": images, **change}
    with pytest.raises(ValueError, match=message):
        audit(arguments.pop("embeddings"), arguments.pop("images"), **arguments)


def test_one_class_cannot_be_audited():
    points, images, _ = clusters()
    with pytest.raises(ValueError, match="two images of different classes"):
        audit(points, images.with_labels(torch.zeros_like(images.labels)))
