import pytest
import torch

from pfml.losses import ProxyAnchorLoss
from pfml.losses.hse import HSELoss, MixedSamples, margin_hse, proxy_anchor_hse

C, D = 5, 6


def literal(loss, embeddings, labels, mixed):
    """The loss of the hybrids in loops."""
    unit = lambda v: v / v.norm()  # noqa: E731
    total, count = 0.0, 0
    for h, parents in zip(mixed.embeddings, mixed.labels.tolist(), strict=True):
        near, far = [], []
        for x, c in zip(embeddings, labels.tolist(), strict=True):
            (near if c in parents else far).append(unit(h) @ unit(x))
        if near and far:
            positive, negative = (torch.exp(max(kind) / loss.temperature) for kind in (near, far))
            total, count = total - torch.log(positive / (positive + negative)), count + 1
    return total / count


def batch():
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randn(n, D, generator=generator, dtype=torch.float64).requires_grad_()  # noqa: E731
    pairs = torch.tensor([[0, 1], [1, 3], [3, 0], [2, 2], [4, 4]])  # of class 4 the batch has no sample
    return draw(8), torch.tensor([0, 0, 1, 1, 1, 3, 3, 2]), MixedSamples(draw(5), pairs, torch.rand(5))


@pytest.mark.parametrize("make", [proxy_anchor_hse, margin_hse])
@pytest.mark.parametrize("options", [{}, {"hybrid_weight": 0.3, "temperature": 0.4}])
def test_value_and_gradients_are_those_of_the_base_loss_and_of_the_hybrids(make, options):
    torch.manual_seed(1)
    loss = make(C, D, **options).double()
    embeddings, labels, mixed = batch()
    torch.manual_seed(2)
    base = loss.base(embeddings, labels)
    expected = base + loss.hybrid_weight * literal(loss, embeddings, labels, mixed)
    learned = [embeddings, mixed.embeddings, *loss.parameters()]
    wanted = torch.autograd.grad(expected, learned)
    torch.manual_seed(2)
    value = loss(embeddings, labels, mixed=mixed)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, learned), wanted)
    torch.testing.assert_close(loss.terms["base"] + loss.hybrid_weight * loss.terms["hybrids"], value.detach())
    assert torch.count_nonzero(wanted[1].abs().sum(dim=1)) == 4  # class 4 has no positive


def test_without_hybrids_it_is_the_base_loss():
    torch.manual_seed(1)
    loss = proxy_anchor_hse(C, D, scale=16.0, margin=0.2).double()
    embeddings, labels, _ = batch()
    plain = ProxyAnchorLoss(C, D, scale=16.0, margin=0.2).double()
    plain.load_state_dict(loss.base.state_dict())
    assert torch.equal(loss(embeddings, labels), plain(embeddings, labels))
    assert "hybrids" not in loss.terms


def test_hybrids_of_one_class_or_of_none_give_nothing_to_learn():
    loss = proxy_anchor_hse(C, D).double()
    embeddings, _, mixed = batch()
    labels = torch.zeros(8, dtype=torch.int64)
    alone = MixedSamples(mixed.embeddings, torch.zeros(5, 2, dtype=torch.int64), mixed.shares)
    none = MixedSamples(mixed.embeddings[:0], mixed.labels[:0], mixed.shares[:0])
    for hybrids in (alone, none):
        value = loss(embeddings, labels, mixed=hybrids)
        (gradient,) = torch.autograd.grad(value - loss(embeddings, labels), mixed.embeddings)
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_a_stored_margin_loss_with_other_values_is_refused():
    stored = margin_hse(C, D, margin=0.3).state_dict()
    with pytest.raises(ValueError, match="margin: stored 0.3, here 0.2"):
        margin_hse(C, D).load_state_dict(stored)


def test_the_options_of_margin_reach_it():
    assert margin_hse(C, D, margin=0.3, beta=1.1).base.options["margin"] == 0.3
    assert margin_hse(C, D, margin=0.3, beta=1.1).base.options["beta"] == 1.1


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="hybrid_weight must be finite"):
        proxy_anchor_hse(C, D, hybrid_weight=-1.0)
    with pytest.raises(ValueError, match="temperature must be positive"):
        margin_hse(C, D, temperature=0.0)
    with pytest.raises(ValueError, match="mixing must be cutmix, mixup, grid or any, got 'cut'"):
        HSELoss(ProxyAnchorLoss(C, D), hybrid_weight=1.0, temperature=0.1, mixing="cut")
