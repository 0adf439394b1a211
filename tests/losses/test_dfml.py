"""DFML with Proxy Anchor against its public definition, put together from Proxy Anchor and norms."""

import pytest
import torch

from pfml.losses import FactorizedProxyAnchorLoss, ProxyAnchorLoss

C, D = 5, 6


def make(**options):
    torch.manual_seed(1)
    return FactorizedProxyAnchorLoss(C, D, **options)


def batch(n=9, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    embeddings, routed = (torch.randn(n, D, generator=generator, dtype=dtype).requires_grad_() for _ in range(2))
    distance = torch.rand(n, generator=generator, dtype=dtype).requires_grad_()
    return (embeddings, torch.arange(n) % (C - 1)), {"routed": routed, "distance": distance}


def literal(loss, embeddings, labels, routed, distance):
    anchor = ProxyAnchorLoss(C, D, scale=loss.scale, margin=loss.margin).double()
    anchor.proxies = loss.proxies
    total = anchor(embeddings, labels) + loss.routed_weight * anchor(routed, labels)
    for z, y, d in zip(embeddings, routed, distance, strict=True):
        apart = (y / y.norm() - (z / z.norm()).detach()).square().sum().sqrt()
        total = total + loss.alignment_weight * apart + loss.routing_weight * d
    return total


@pytest.mark.parametrize("options", [{}, {"routed_weight": 2.0, "alignment_weight": 1.0, "routing_weight": 0.3}])
def test_value_and_gradients_are_those_of_the_published_loss(options):
    loss, (inputs, others) = make(**options).double(), batch()
    value, expected = loss(*inputs, **others), literal(loss, *inputs, **others)
    assert value.item() == pytest.approx(expected.item(), rel=1e-11)
    learned = [inputs[0], *others.values(), loss.proxies]
    for mine, theirs in zip(torch.autograd.grad(value, learned), torch.autograd.grad(expected, learned), strict=True):
        assert mine.abs().max() > 0
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-11)


def test_weights_are_those_of_the_authors_code():
    """0.5 for the routed stream; half of 0.1 of the distance of embeddings, half of 1e-5 of that of blocks."""
    loss = make()
    assert (loss.routed_weight, loss.alignment_weight, loss.routing_weight) == (0.5, 0.5 * 0.1, 0.5 * 1e-5)
    assert (loss.scale, loss.margin) == (32, 0.1)


def test_terms_are_told_before_their_weights():
    loss, (inputs, others) = make(), batch(dtype=torch.float32)
    value = loss(*inputs, **others)
    terms = loss.terms
    assert not any(term.requires_grad for term in terms.values())
    weighed = terms["whole"] + 0.5 * terms["routed"] + 0.05 * terms["alignment"] + 5e-6 * terms["routing"]
    torch.testing.assert_close(value, weighed)


def test_equal_streams_are_finite():
    loss, ((embeddings, labels), others) = make().double(), batch()
    others["routed"] = embeddings.detach().clone().requires_grad_()
    loss(embeddings, labels, **others).backward()
    assert torch.isfinite(others["routed"].grad).all()


def test_an_empty_batch_has_loss_zero():
    others = {"routed": torch.empty(0, D), "distance": torch.empty(0)}
    assert make()(torch.empty(0, D), torch.empty(0, dtype=torch.int64), **others).item() == 0


def test_autocast_changes_nothing():
    loss, (inputs, others) = make(), batch(dtype=torch.float32)
    plain = loss(*inputs, **others)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss(*inputs, **others), plain)


@pytest.mark.parametrize("wrong", [{"scale": 0.0}, {"routed_weight": -1.0}, {"routing_weight": float("inf")}])
def test_bad_options_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make(**wrong)
