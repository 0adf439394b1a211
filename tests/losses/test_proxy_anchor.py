import math

import pytest
import torch

from pfml import PotentialFieldLoss
from pfml.losses import ProxyAnchorLoss
from pfml.methods import METHODS


def literal(embeddings, labels, proxies, scale, margin):
    """The published equation in Python loops, float64."""
    unit = lambda v: v.double() / v.double().norm()  # noqa: E731
    pull, push, present = 0.0, 0.0, 0
    for c, proxy in enumerate(proxies[:, 0]):
        same = other = 0.0
        for x, label in zip(embeddings, labels.tolist(), strict=True):
            s = float(unit(x) @ unit(proxy))
            if label == c:
                same += math.exp(-scale * (s - margin))
            else:
                other += math.exp(scale * (s + margin))
        present += c in labels.tolist()
        pull, push = pull + math.log1p(same), push + math.log1p(other)
    return pull / max(present, 1) + push / len(proxies)


@pytest.fixture
def batch():
    return torch.randn(12, 8), torch.arange(12) % 4


@pytest.mark.parametrize("scale", [8.0, 32.0])
@pytest.mark.parametrize("margin", [0.1, 0.3])
def test_it_is_the_published_equation(batch, scale, margin):
    loss = ProxyAnchorLoss(5, 8, scale=scale, margin=margin)
    expected = literal(*batch, loss.proxies.detach(), scale, margin)
    assert loss(*batch).item() == pytest.approx(expected, rel=1e-5)


def test_it_equals_pytorch_metric_learning_with_the_same_proxies(batch):
    losses = pytest.importorskip("pytorch_metric_learning.losses", reason="needs the extra methods")
    theirs = losses.ProxyAnchorLoss(5, 8, margin=0.1, alpha=32)
    ours = ProxyAnchorLoss(5, 8)
    with torch.no_grad():
        ours.proxies.copy_(theirs.proxies[:, None])
    embeddings, labels = batch
    embeddings.requires_grad_()
    (ours_gradient,) = torch.autograd.grad(ours(embeddings, labels), embeddings)
    value = theirs(embeddings, labels)
    (their_gradient,) = torch.autograd.grad(value, embeddings)
    assert ours(embeddings, labels).item() == pytest.approx(value.item(), rel=1e-5)
    torch.testing.assert_close(ours_gradient, their_gradient, rtol=1e-4, atol=1e-6)


@pytest.fixture
def suspicious():
    """A loss that trusts not every label, samples near the proxies of their classes, and which labels are wrong."""
    torch.manual_seed(0)
    loss = ProxyAnchorLoss(6, 16, trust=0.3)
    truth = torch.arange(60) % 6
    embeddings = loss.proxy_points()[truth, 0] + 0.1 * torch.randn(60, 16)
    wrong = torch.arange(60) % 10 == 3
    return loss, embeddings, torch.where(wrong, (truth + 1) % 6, truth), wrong


def test_samples_that_do_not_fit_count_nowhere(suspicious):
    loss, embeddings, labels, wrong = suspicious
    assert torch.equal(loss.trusted(embeddings, labels), ~wrong)
    embeddings.requires_grad_()
    loss(embeddings, labels).backward()
    assert (embeddings.grad[wrong] == 0).all()
    assert (embeddings.grad[~wrong] != 0).any(dim=1).all()
    proxies = loss.proxies.grad.clone()

    plain = ProxyAnchorLoss(6, 16)
    plain.load_state_dict(loss.state_dict())
    right = embeddings.detach()[~wrong].requires_grad_()
    expected = plain(right, labels[~wrong])
    expected.backward()
    torch.testing.assert_close(loss(embeddings, labels), expected)
    torch.testing.assert_close(embeddings.grad[~wrong], right.grad)
    torch.testing.assert_close(proxies, plain.proxies.grad)


def test_in_evaluation_and_as_published_every_sample_counts(suspicious):
    loss, embeddings, labels, _ = suspicious
    plain = ProxyAnchorLoss(6, 16)
    plain.load_state_dict(loss.state_dict())
    assert plain.trusted(embeddings, labels).all()
    assert loss(embeddings, labels) < 0.9 * plain(embeddings, labels)
    assert loss.eval()(embeddings, labels) == plain(embeddings, labels)


def test_trust_is_measured_as_by_the_preset_pfml_robust(suspicious):
    loss, embeddings, labels, _ = suspicious
    options = {**METHODS["pfml-robust"].values, "proxies_per_class": 1}
    field = PotentialFieldLoss(6, 16, **options)
    field.proxies.data.copy_(loss.proxies)
    spread = embeddings + 0.5 * torch.randn(60, 16)
    assert 0 < (~field.trusted(spread, labels)).sum() < 60
    assert torch.equal(loss.trusted(spread, labels), field.trusted(spread, labels))


@pytest.mark.parametrize(("trust", "error"), [(1.5, ValueError), (-0.1, ValueError), (True, TypeError)])
def test_trust_is_a_share(trust, error):
    with pytest.raises(error, match="trust must"):
        ProxyAnchorLoss(6, 16, trust=trust)


def test_it_does_not_overflow_in_half_precision():
    loss = ProxyAnchorLoss(3, 4)
    embeddings = torch.eye(4, dtype=torch.float16)[:3].requires_grad_()
    value = loss(embeddings * 100, torch.tensor([0, 1, 2]))
    value.backward()
    assert value.dtype == torch.float32
    assert torch.isfinite(embeddings.grad).all()


def test_autocast_changes_neither_the_value_nor_the_proxies(batch):
    loss = ProxyAnchorLoss(5, 8)
    plain = loss(*batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = loss(*batch)
    assert torch.equal(plain, cast)
    assert loss.proxies.dtype == torch.float32


def test_a_label_out_of_range_is_named(batch):
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 3\), got 3 at index 3"):
        ProxyAnchorLoss(3, 8)(*batch)


def test_the_proxies_have_their_own_group():
    loss = ProxyAnchorLoss(3, 8)
    (group,) = loss.param_groups(lr=0.5, weight_decay=0.25)
    assert group["params"][0] is loss.proxies
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)


def test_proxy_points_lie_on_the_sphere():
    points = ProxyAnchorLoss(3, 8).proxy_points()
    assert points.shape == (3, 1, 8)
    torch.testing.assert_close(points.norm(dim=-1), torch.ones(3, 1))


def test_an_empty_batch_is_finite_and_pushes_nothing():
    loss = ProxyAnchorLoss(3, 8)
    assert loss(torch.empty(0, 8), torch.empty(0, dtype=torch.int64)).item() == 0


@pytest.mark.parametrize("wrong", [{"num_classes": 0}, {"embedding_dim": 0}, {"scale": 0.0}])
def test_bad_sizes_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ProxyAnchorLoss(**{"num_classes": 3, "embedding_dim": 8, **wrong})
