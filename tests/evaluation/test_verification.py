"""Errors of verification against every pair, one by one."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from pfml.evaluation import verification as module
from pfml.evaluation.verification import verification_metrics


def points(classes, each, spread=0.6, dims=6, seed=0):
    """Unit vectors around a direction for each class, and their labels."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(classes).repeat_interleave(each)
    centers = torch.randn(classes, dims, generator=random)
    found = centers[labels] + spread * torch.randn(len(labels), dims, generator=random)
    return torch.nn.functional.normalize(found, dim=1), labels


def every_pair(queries, labels, items=None, item_labels=None):
    """Similarities of all genuine pairs and of all impostors."""
    if items is None:
        pairs = itertools.combinations(range(len(queries)), 2)
        items, item_labels = queries, labels
    else:
        pairs = itertools.product(range(len(queries)), range(len(items)))
    found = {True: [], False: []}
    for i, j in pairs:
        found[bool(labels[i] == item_labels[j])].append(float(queries[i] @ items[j]))
    return found[True], found[False]


def rates_at(threshold, genuine, impostors):
    """False match rate and false non-match rate when `threshold` and above are accepted."""
    accepted = sum(each >= threshold for each in impostors) / len(impostors)
    return accepted, sum(each < threshold for each in genuine) / len(genuine)


def lowest_fnmr(rate, genuine, impostors):
    """By trying every threshold that makes a difference."""
    tried = [rates_at(threshold, genuine, impostors) for threshold in [*genuine, *impostors, 2.0]]
    return min(fnmr for fmr, fnmr in tried if fmr <= rate)


@pytest.mark.parametrize("with_gallery", [False, True])
def test_rates_are_those_of_every_pair(with_gallery):
    queries, labels = points(7, 5)
    items, item_labels = points(7, 3, seed=1) if with_gallery else (None, None)
    result = verification_metrics(queries, labels, gallery=items, gallery_labels=item_labels, rates=(0.1, 0.02, 0.005))
    genuine, impostors = every_pair(queries, labels, items, item_labels)
    assert (result.genuine, result.impostors) == (len(genuine), len(impostors))
    for rate, estimate in result.fnmr_at.items():
        assert estimate.value == pytest.approx(lowest_fnmr(rate, genuine, impostors), abs=1e-12)
        fmr, fnmr = rates_at(1 - result.threshold_at[rate] ** 2 / 2 - 1e-6, genuine, impostors)
        assert fmr <= rate + 1 / len(impostors)
        assert fnmr <= estimate.value
    wins = [(one > other) + 0.5 * (one == other) for one in genuine for other in impostors]
    assert result.auroc == pytest.approx(sum(wins) / len(wins), abs=2 / len(genuine))
    fmr, fnmr = zip(*[rates_at(each, genuine, impostors) for each in sorted(genuine)], strict=True)
    gaps = [abs(a - b) for a, b in zip(fmr, fnmr, strict=True)]
    best = gaps.index(min(gaps))
    assert result.eer.value == pytest.approx((fmr[best] + fnmr[best]) / 2, abs=min(gaps) / 2 + 1 / len(genuine))


def test_the_curve_is_a_curve_of_possible_errors():
    queries, labels = points(7, 5)
    genuine, impostors = every_pair(queries, labels)
    curve = verification_metrics(queries, labels).curve
    assert bool((curve.diff(dim=0)[:, 0] >= 0).all())
    assert bool((curve.diff(dim=0)[:, 1] <= 0).all())
    for fmr, fnmr in curve[::7].tolist():
        assert fnmr == pytest.approx(lowest_fnmr(fmr + 1e-12, genuine, impostors), abs=1e-9)


def test_tiles_and_groups_do_not_change_the_rates(monkeypatch):
    queries, labels = points(9, 4, seed=3)
    whole = verification_metrics(queries, labels, rates=(0.05,), groups=1)
    monkeypatch.setattr(module, "PAIRS_AT_ONCE", {"cpu": 7})
    parts = verification_metrics(queries, labels, rates=(0.05,), groups=9)
    assert parts.eer.value == whole.eer.value
    assert parts.fnmr_at[0.05].value == whole.fnmr_at[0.05].value
    assert (parts.genuine, parts.impostors) == (whole.genuine, whole.impostors)
    assert torch.equal(parts.curve, whole.curve)


def test_the_interval_is_the_jackknife_over_groups_of_classes():
    queries, labels = points(5, 6, spread=1.0, seed=4)
    result = verification_metrics(queries, labels, rates=(0.1,), groups=5)
    left = []
    for out in range(5):
        kept = labels != out
        left.append(lowest_fnmr(0.1, *every_pair(queries[kept], labels[kept])))
    mean = sum(left) / 5
    error = math.sqrt(4 / 5 * sum((each - mean) ** 2 for each in left))
    low, high = result.fnmr_at[0.1].interval
    value = result.fnmr_at[0.1].value
    # thresholds are those of all genuine pairs, of which a part is left: to one pair
    assert low == pytest.approx(max(value - 1.96 * error, 0), abs=0.03)
    assert high == pytest.approx(min(value + 1.96 * error, 1), abs=0.03)
    assert verification_metrics(queries[labels < 2], labels[labels < 2], rates=(0.1,)).eer.interval is None


def test_fewer_thresholds_than_genuine_pairs_change_little(monkeypatch):
    queries, labels = points(6, 20, seed=5)
    exact = verification_metrics(queries, labels, rates=(0.01,))
    monkeypatch.setattr(module, "MOST_THRESHOLDS", 100)
    coarse = verification_metrics(queries, labels, rates=(0.01,))
    assert coarse.genuine == exact.genuine
    assert exact.fnmr_at[0.01].value <= coarse.fnmr_at[0.01].value <= exact.fnmr_at[0.01].value + 0.011


def test_rates_that_the_pairs_cannot_show_are_left_out():
    queries, labels = points(3, 3)
    assert set(verification_metrics(queries, labels).fnmr_at) == set()
    assert set(verification_metrics(queries, labels, rates=(0.1, 0.001)).fnmr_at) == {0.1}


def test_perfect_and_hopeless_embeddings():
    labels = torch.arange(4).repeat_interleave(5)
    perfect = torch.eye(4)[labels]
    assert verification_metrics(perfect, labels, rates=(0.01,)).eer.value == 0
    assert verification_metrics(perfect, labels, rates=(0.01,)).fnmr_at[0.01].value == 0
    assert verification_metrics(perfect, labels).auroc == 1
    same = torch.ones(20, 4)
    assert verification_metrics(same, labels, rates=(0.01,)).fnmr_at[0.01].value == 1


def test_what_cannot_be_verified_is_refused():
    with pytest.raises(ValueError, match="two images of one class"):
        verification_metrics(torch.eye(3), torch.arange(3))
    with pytest.raises(ValueError, match="images of two classes"):
        verification_metrics(torch.eye(3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="between 0 and 1"):
        verification_metrics(torch.eye(3), torch.tensor([0, 0, 1]), rates=(1.0,))


def test_the_interval_of_the_curve_is_that_of_its_rates():
    queries, labels = points(8, 6, spread=1.0, seed=4)
    curve = verification_metrics(queries, labels, rates=()).curve
    rates = [rate for rate in curve[::9, 0].tolist() if 0 < rate < 1]
    # each point again, as a rate that is reported
    result = verification_metrics(queries, labels, rates=rates)
    at = {fmr: tuple(ends) for fmr, ends in zip(curve[:, 0].tolist(), result.curve_interval.tolist(), strict=True)}
    assert len(rates) > 5
    for rate, estimate in result.fnmr_at.items():
        assert at[rate] == pytest.approx(estimate.interval, abs=1e-9)
    assert result.as_dict()["curve_interval"] == result.curve_interval.tolist()
    few = verification_metrics(queries[labels < 2], labels[labels < 2])
    assert few.curve_interval is None
    assert few.as_dict()["curve_interval"] is None


def test_a_sample_estimates_the_rates_of_all_pairs():
    queries, labels = points(60, 30, spread=1.0, seed=6)
    exact = verification_metrics(queries, labels, rates=(0.05,))
    assert exact.images == 1800
    some = [verification_metrics(queries, labels, rates=(0.05,), most_images=600, seed=seed) for seed in range(8)]
    assert all(550 <= each.images <= 600 for each in some)
    assert len({each.eer.value for each in some}) == 8, "a seed of its own is a sample of its own"
    for name in ("eer", "auroc"):
        of_each = [getattr(each, name) for each in some]
        values = [each if name == "auroc" else each.value for each in of_each]
        whole = exact.auroc if name == "auroc" else exact.eer.value
        assert sum(values) / 8 == pytest.approx(whole, abs=0.02)
    assert verification_metrics(queries, labels, most_images=1800).genuine == exact.genuine


@pytest.mark.parametrize(
    ("classes", "each", "most", "kept_classes", "kept_each"),
    [
        (500, 4, 200, 50, 4),  # whole classes, since they are small
        (10, 200, 400, 10, 40),  # every class, since they are large
        (100, 40, 400, 20, 20),  # fewer classes and fewer images of each
    ],
)
def test_a_sample_has_classes_with_enough_images(classes, each, most, kept_classes, kept_each):
    labels = torch.arange(classes).repeat(each)
    kept = module._sample(labels, most, seed=0)
    counts = torch.bincount(labels[kept])
    assert counts[counts > 0].tolist() == [kept_each] * kept_classes


def test_a_sample_takes_the_same_classes_of_queries_and_gallery():
    queries, labels = points(40, 5, seed=7)
    items, item_labels = points(40, 5, seed=8)
    result = verification_metrics(queries, labels, items, item_labels, most_images=100)
    assert result.images == 100
    assert result.genuine == 10 * 5 * 5
    assert result.impostors == 10 * 9 * 5 * 5
