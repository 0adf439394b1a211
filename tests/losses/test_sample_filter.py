"""Samples that do not fit their labels stay out of the field."""

import pytest
import torch

from pfml import PotentialFieldLoss
from pfml.field import PowerLaw
from pfml.losses.checks import deferred_checks
from pfml.losses.sample_filter import fit, trusted
from pfml.superposition import Charges

CLASSES, PER_CLASS, DIM = 6, 3, 16


def make(**options):
    torch.manual_seed(1)
    options = {"proxies_per_class": PER_CLASS, "normalization": "log", "delta": 0.6, "delta_rep": 1.2, **options}
    return PotentialFieldLoss(CLASSES, DIM, **{"alpha": 6.0, **options}).double()


def blobs(loss, per_class=20):
    """Samples around the first proxy of each class."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.arange(CLASSES).repeat_interleave(per_class)
    noise = torch.randn(len(labels), DIM, generator=generator, dtype=torch.float64)
    return loss.proxy_points()[labels, 0] + 0.1 * noise, labels


def with_wrong_labels(labels, share=0.2):
    generator = torch.Generator().manual_seed(3)
    wrong = torch.rand(len(labels), generator=generator) < share
    return torch.where(wrong, (labels + 1) % CLASSES, labels), wrong


def test_fit_is_the_own_strength_over_that_of_the_strongest_other_class():
    generator = torch.Generator().manual_seed(4)
    points = torch.nn.functional.normalize(torch.randn(5, DIM, generator=generator, dtype=torch.float64), dim=1)
    proxies = torch.nn.functional.normalize(
        torch.randn(CLASSES * PER_CLASS, DIM, generator=generator, dtype=torch.float64), dim=1
    )
    labels, proxy_labels = torch.tensor([0, 1, 2, 5, 5]), torch.arange(CLASSES).repeat_interleave(PER_CLASS)
    law = PowerLaw(delta=0.5, alpha=4.0)
    got = fit(Charges(points, labels), Charges(proxies, proxy_labels), CLASSES, law)
    for row, label in enumerate(labels.tolist()):
        strengths = [0.0] * CLASSES
        for proxy, owner in zip(proxies, proxy_labels.tolist(), strict=True):
            strengths[owner] += max((points[row] - proxy).norm().item(), 0.5) ** -4
        own = strengths.pop(label)
        assert got[row].item() == pytest.approx(own / max(strengths), rel=1e-9)


@pytest.mark.parametrize(
    ("fits", "trust", "expected"),
    [
        ([2.0, 0.31, 0.29, 5.0, 3.0], 0.3, [True, True, False, True, True]),  # most fit well: the bound is trust itself
        (
            [0.20, 0.10, 0.07, 0.05, 0.08],
            0.9,
            [True, True, False, False, True],
        ),  # none fits: the bound follows the median
        ([], 0.5, []),
        ([0.001], 1.0, [True]),
    ],
)
def test_the_bound_is_trust_times_the_median_or_one(fits, trust, expected):
    assert trusted(torch.tensor(fits), trust).tolist() == expected


def test_wrong_labels_are_found_and_right_ones_kept():
    loss = make(trust=0.3)
    embeddings, labels = blobs(loss)
    given, wrong = with_wrong_labels(labels)
    kept = loss.trusted(embeddings, given)
    assert not kept[wrong].any()
    assert kept[~wrong].all()


def test_what_is_not_trusted_neither_acts_nor_is_acted_upon():
    loss = make(trust=0.3)
    embeddings, labels = blobs(loss)
    given, wrong = with_wrong_labels(labels)
    embeddings.requires_grad_()
    value = loss(embeddings, given)
    of_embeddings, of_proxies = torch.autograd.grad(value, (embeddings, loss.proxies))
    plain = make()
    rest = embeddings.detach()[~wrong].requires_grad_()
    expected = plain(rest, given[~wrong])
    of_rest, of_plain = torch.autograd.grad(expected, (rest, plain.proxies))
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(of_embeddings[~wrong], of_rest)
    torch.testing.assert_close(of_proxies, of_plain)
    assert of_embeddings[wrong].abs().max() == 0


def test_a_batch_without_samples_is_the_field_of_the_proxies():
    loss, plain = make(trust=0.3), make()
    nothing, labels = torch.empty(0, DIM, dtype=torch.float64, requires_grad=True), torch.empty(0, dtype=torch.int64)
    value = loss(nothing, labels)
    assert value.item() == plain(nothing, labels).item()
    value.backward()
    assert loss.trusted(nothing, labels).tolist() == []


def test_a_wrong_label_whose_check_is_deferred_is_the_affair_of_that_check():
    loss = make(trust=0.3)
    embeddings, labels = blobs(loss)
    labels[7] = CLASSES
    with deferred_checks() as checks:
        assert torch.isfinite(loss(embeddings, labels))
    assert checks[0].is_bad
    with pytest.raises(ValueError, match=rf"labels must lie in \[0, {CLASSES}\), got {CLASSES} at index 7"):
        checks[0].explain()


def test_samples_that_feel_no_class_at_all_are_trusted():
    loss = make(trust=0.3, proxy_space="free", normalize_embeddings=False, normalization="none").float()
    embeddings, labels = blobs(loss)
    assert loss.trusted(1e9 * embeddings.float(), labels).all()


def test_many_proxies_are_looked_at_in_parts(monkeypatch):
    loss = make(trust=0.3)
    embeddings, labels = blobs(loss)
    samples, proxies = loss._charges(embeddings, labels, loss.proxies)
    whole = fit(samples, proxies, CLASSES, loss.field.law)
    monkeypatch.setattr("pfml.losses.sample_filter.PAIRS_AT_ONCE", 7 * CLASSES * PER_CLASS)
    torch.testing.assert_close(fit(samples, proxies, CLASSES, loss.field.law), whole)


def test_evaluation_mode_trusts_every_label():
    loss, plain = make(trust=0.3).eval(), make().eval()
    embeddings, labels = blobs(loss)
    given, _ = with_wrong_labels(labels)
    assert loss(embeddings, given).item() == plain(embeddings, given).item()


def test_nearly_all_samples_are_trusted_at_the_start():
    torch.manual_seed(0)
    loss = PotentialFieldLoss(100, 64, normalization="log", delta=0.6, delta_rep=1.2, alpha=6.0, trust=0.3)
    embeddings, labels = torch.randn(400, 64), torch.arange(400) % 100
    assert loss.trusted(embeddings, labels).float().mean() > 0.95


def test_by_default_every_label_is_trusted():
    loss = make()
    embeddings, labels = blobs(loss)
    given, _ = with_wrong_labels(labels)
    assert loss.trusted(embeddings, given).all()


def test_a_stored_loss_must_trust_as_much():
    loss = make(trust=0.3)
    make(trust=0.3).load_state_dict(loss.state_dict())
    with pytest.raises(ValueError, match=r"trust: stored 0\.3, here none"):
        make().load_state_dict(loss.state_dict())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"trust": -0.1}, ValueError, r"trust must lie in \[0, 1\], got -0\.1"),
        ({"trust": 1.5}, ValueError, r"trust must lie in \[0, 1\], got 1\.5"),
        ({"trust": True}, TypeError, "trust must be a number, got True"),
        ({"trust": 0.3, "proxies_per_class": 0}, ValueError, "trust needs proxies, which tell what fits"),
        (
            {"trust": 0.3, "normalization": "none", "potential": "cpml"},
            ValueError,
            "trust needs an attraction that decays",
        ),
    ],
)
def test_what_trust_cannot_be(options, error, message):
    with pytest.raises(error, match=message):
        make(**options)


def test_of_one_class_alone_every_sample_is_trusted():
    torch.manual_seed(1)
    plain, wary = (PotentialFieldLoss(1, DIM, normalization="log", trust=trust).train() for trust in (0.0, 1.0))
    wary.proxies.data.copy_(plain.proxies.data)
    points, labels = torch.randn(20, DIM), torch.zeros(20, dtype=torch.long)
    assert wary.trusted(points, labels).all()
    assert torch.equal(wary(points, labels), plain(points, labels))
