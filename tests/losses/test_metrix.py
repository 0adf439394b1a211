import pytest
import torch
from clusters import check_three_clusters
from loops import kept_pairs, multi_similarity, proxy_anchor

from pfml.losses import metrix
from pfml.losses.metrix import MultiSimilarityMetrixLoss, ProxyAnchorMetrixLoss, drawn_share, mixed_cosines

C, D, SHARE = 5, 6, 0.3  # one class has no sample


def cosine_of_mix(anchor, x, y):
    unit = lambda v: v / v.norm()  # noqa: E731
    return unit(anchor) @ unit(SHARE * unit(x) + (1 - SHARE) * unit(y))


def literal_proxy_anchor(loss, embeddings, labels):
    """Proxy Anchor, and the same over mixed embeddings, in loops."""
    classes, proxies = labels.tolist(), loss.proxies[:, 0]
    pull, push = 0.0, 0.0
    for c in set(classes):
        near, far = 1.0, 1.0
        for x, own in zip(embeddings, classes, strict=True):
            for y, other in zip(embeddings, classes, strict=True):
                if own == c and other != c:
                    s = cosine_of_mix(proxies[c], x, y)
                    near = near + SHARE * torch.exp(-loss.scale * (s - loss.margin))
                    far = far + (1 - SHARE) * torch.exp(loss.scale * (s + loss.margin))
        pull, push = pull + torch.log(near), push + torch.log(far)
    mixed = pull / len(set(classes)) + push / C
    return proxy_anchor(embeddings, labels, proxies, scale=loss.scale, margin=loss.margin) + loss.mix_weight * mixed


def literal_multi_similarity(loss, embeddings, labels):
    """Multi-similarity, and the same over mixed embeddings, in loops."""
    points = [x / x.norm() for x in embeddings]
    pairs = kept_pairs(embeddings, labels, loss.epsilon)
    shapes = {"alpha": loss.alpha, "beta": loss.beta, "base": loss.base}
    total = sum(multi_similarity(lambda i, j: points[i] @ points[j], pairs, **shapes))
    for a, (positives, negatives) in enumerate(pairs):
        near, far = torch.ones((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
        for p in positives:
            for n in negatives:
                s = cosine_of_mix(points[a], points[p], points[n])
                near = near + SHARE * torch.exp(-loss.alpha * (s - loss.base))
                far = far + (1 - SHARE) * torch.exp(loss.beta * (s - loss.base))
        total = total + loss.mix_weight * (torch.log(near) / loss.alpha + torch.log(far) / loss.beta)
    return total / len(labels)


LOSSES = [(ProxyAnchorMetrixLoss, literal_proxy_anchor), (MultiSimilarityMetrixLoss, literal_multi_similarity)]


@pytest.fixture
def fixed_share(monkeypatch):
    """Records what the draw is asked for."""
    asked = []
    monkeypatch.setattr(metrix, "drawn_share", lambda concentration: asked.append(concentration) or SHARE)
    return asked


def make(kind, **options):
    torch.manual_seed(1)
    return kind(C, D, **options).double()


def batch():
    embeddings = torch.randn(8, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return embeddings.requires_grad_(), torch.tensor([0, 0, 0, 1, 1, 3, 3, 2])


@pytest.mark.parametrize(("kind", "literal"), LOSSES)
@pytest.mark.parametrize("mix_weight", [0.4, 1.5])
def test_value_and_gradients_are_those_of_the_published_loss(kind, literal, mix_weight, fixed_share):
    loss, (embeddings, labels) = make(kind, mix_weight=mix_weight), batch()
    expected, learned = literal(loss, embeddings, labels), [embeddings, *loss.parameters()]
    value = loss(embeddings, labels)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, learned), torch.autograd.grad(expected, learned))
    terms = loss.terms
    torch.testing.assert_close(terms["pull"] + terms["push"] + mix_weight * terms["mixed"], value.detach())


def test_options_of_the_base_losses_matter(fixed_share):
    embeddings, labels = batch()
    anchor = make(ProxyAnchorMetrixLoss, scale=8.0, margin=0.3)
    torch.testing.assert_close(anchor(embeddings, labels), literal_proxy_anchor(anchor, embeddings, labels))
    multi = make(MultiSimilarityMetrixLoss, alpha=4.0, beta=20.0, base=0.2, epsilon=0.5)
    torch.testing.assert_close(multi(embeddings, labels), literal_multi_similarity(multi, embeddings, labels))


@pytest.mark.parametrize(("kind", "literal"), LOSSES)
def test_in_evaluation_mode_or_without_weight_nothing_is_mixed(kind, literal, fixed_share):
    embeddings, labels = batch()
    plain = make(kind, mix_weight=0.0)
    value = plain(embeddings, labels)
    torch.testing.assert_close(value, literal(plain, embeddings, labels))
    assert torch.equal(make(kind).eval()(embeddings, labels), value)
    assert fixed_share == []
    make(kind, concentration=0.7)(embeddings, labels)
    assert fixed_share == [0.7]


def test_shares_are_of_a_beta_distribution():
    torch.manual_seed(0)
    drawn = torch.tensor([drawn_share(2.0) for _ in range(2000)])
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.02)
    assert drawn.var().item() == pytest.approx(1 / 20, rel=0.1)
    assert 0 < drawn_share(1e-4) < 1


def test_points_that_mix_to_zero_have_no_gradient():
    between = torch.tensor([-1.0, 1.0], requires_grad=True)
    cosines = mixed_cosines(torch.tensor([0.3, 0.3]), torch.tensor([-0.3, 0.3]), between, 0.5)
    cosines.sum().backward()
    torch.testing.assert_close(cosines.detach(), torch.tensor([0.0, 0.3]))
    assert between.grad[0] == 0
    assert torch.isfinite(between.grad).all()


def test_a_batch_of_one_class_has_the_gradient_of_the_base_loss(fixed_share):
    embeddings, _ = batch()
    labels = torch.full((8,), 2)
    for kind, _ in LOSSES:
        values = [make(kind, mix_weight=weight)(embeddings, labels) for weight in (0.0, 1.0)]
        gradients = [torch.autograd.grad(value, embeddings)[0] for value in values]
        assert torch.isfinite(gradients[1]).all()
        torch.testing.assert_close(*gradients)


def test_three_clusters_are_told_apart():
    torch.manual_seed(0)
    check_three_clusters(ProxyAnchorMetrixLoss(3, 8), falls_to=0.7)


@pytest.mark.parametrize("kind", [kind for kind, _ in LOSSES])
def test_bad_options_are_refused(kind):
    with pytest.raises(ValueError, match="mix_weight must be finite and not negative"):
        kind(C, D, mix_weight=-0.1)
    with pytest.raises(ValueError, match="concentration must be positive"):
        kind(C, D, concentration=0.0)
    with pytest.raises(ValueError, match="num_classes must be an integer"):
        kind(0, D)
    with pytest.raises(ValueError, match="beta must be positive"):
        MultiSimilarityMetrixLoss(C, D, beta=0.0)
