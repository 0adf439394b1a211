import pytest
import torch

from pfml.losses import ProxyAnchorLoss
from pfml.losses.hse import HSELoss, margin_hse, proxy_anchor_hse

C, D = 5, 6


def literal(loss, embeddings, labels, mixed, partner_labels):
    """The loss of the hybrids in loops."""
    unit = lambda v: v / v.norm()  # noqa: E731
    total, count = 0.0, 0
    for h, *parents in zip(mixed, labels.tolist(), partner_labels.tolist(), strict=True):
        near, far = [], []
        for x, c in zip(embeddings, labels.tolist(), strict=True):
            (near if c in parents else far).append(unit(h) @ unit(x))
        positive, negative = (torch.exp(max(kind) / loss.temperature) for kind in (near, far))
        total, count = total - torch.log(positive / (positive + negative)), count + 1
    return total / count


def batch():
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(8, D, generator=generator, dtype=torch.float64).requires_grad_()  # noqa: E731
    hybrids = {"mixed": draw(), "partner_labels": torch.tensor([1, 1, 0, 3, 2, 0, 1, 3]), "shares": torch.rand(8)}
    return draw(), torch.tensor([0, 0, 1, 1, 1, 3, 3, 2]), hybrids


@pytest.mark.parametrize("make", [proxy_anchor_hse, margin_hse])
@pytest.mark.parametrize("options", [{}, {"hybrid_weight": 0.3, "temperature": 0.4}])
def test_value_and_gradients_are_those_of_the_base_loss_and_of_the_hybrids(make, options):
    torch.manual_seed(1)
    loss = make(C, D, **options).double()
    embeddings, labels, hybrids = batch()
    torch.manual_seed(2)
    base = loss.base(embeddings, labels)
    hybrid = literal(loss, embeddings, labels, hybrids["mixed"], hybrids["partner_labels"])
    learned = [embeddings, hybrids["mixed"], *loss.parameters()]
    wanted = torch.autograd.grad(base + loss.hybrid_weight * hybrid, learned)
    torch.manual_seed(2)
    value = loss(embeddings, labels, **hybrids)
    torch.testing.assert_close(value, base + loss.hybrid_weight * hybrid)
    torch.testing.assert_close(torch.autograd.grad(value, learned), wanted)
    torch.testing.assert_close(loss.terms["base"] + loss.hybrid_weight * loss.terms["hybrids"], value.detach())


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
    embeddings, labels, hybrids = batch()
    same = torch.zeros_like(labels)
    alone = loss(embeddings, same, **{**hybrids, "partner_labels": same}) - loss(embeddings, same)
    nothing = {name: rows[:0] for name, rows in hybrids.items()}
    none = loss(embeddings[:0], labels[:0], **nothing) - loss(embeddings[:0], labels[:0])
    for value in (alone, none):
        (gradient,) = torch.autograd.grad(value, hybrids["mixed"])
        assert value == 0
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
