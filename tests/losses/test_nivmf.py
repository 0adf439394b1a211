import math

import pytest
import torch
from clusters import check_three_clusters
from loops import proxy_anchor
from scipy.special import ive

from pfml.losses import nivmf
from pfml.losses.nivmf import ProxyAnchorNivMFLoss, log_normalizer, vmf_samples

C, D = 4, 6


def slope(k, dim):
    """A(k) of this module, as a fraction."""
    return k / ((dim - 1) / 2 + math.sqrt(k * k + ((dim + 1) / 2) ** 2))


def integral(k, dim, steps=2000):
    """log C(k) - log C(0), by Simpson's rule."""
    at = [slope(k * i / steps, dim) for i in range(steps + 1)]
    return -k / steps / 3 * (at[0] + at[-1] + 4 * sum(at[1:-1:2]) + 2 * sum(at[2:-1:2]))


class Normalizer(torch.autograd.Function):
    """log C as a number and its slope, by the two functions above."""

    @staticmethod
    def forward(ctx, k):
        ctx.slope = -slope(k.item(), D)
        return k.new_tensor(integral(k.item(), D))

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.slope


def literal(embeddings, labels, loss, draws):
    """The published loss in loops over scalars, given the draws of each embedding."""
    total, temperature = 0.0, abs(loss.temperature)
    for x, y in enumerate(labels.tolist()):
        scores = []
        for c in range(C):
            length = loss.proxies[c, 0].norm()
            k = [max(value, torch.tensor(0.1, dtype=torch.float64)) for value in loss.concentrations[c]]
            v = [k[d] * loss.proxies[c, 0, d] / length for d in range(D)]
            size = sum(one * one for one in v).sqrt()
            likelihood = 0.0
            for draw in draws[:, x]:
                inner = sum(draw[d] * v[d] for d in range(D))
                log_density = Normalizer.apply(size) - size.log() + sum(one.log() for one in k) + inner
                likelihood = likelihood + torch.exp(log_density / temperature) / len(draws)
            scores.append(torch.log(likelihood))
        total = total - scores[y] + torch.log(sum(torch.exp(score) for score in scores))
    anchor = proxy_anchor(embeddings, labels, loss.proxies[:, 0], scale=loss.scale, margin=loss.margin)
    return total / len(labels) + loss.anchor_weight * anchor


def make(**options):
    torch.manual_seed(1)
    usual = {"concentration": 2.0, "temperature": 0.7, "length_scale": 3.0, "num_samples": 3}
    loss = ProxyAnchorNivMFLoss(C, D, **{**usual, **options}).double()
    with torch.no_grad():
        loss.concentrations.add_(torch.randn(C, D))
        loss.concentrations[0, 0] = -1.0  # below the least
    return loss


def batch():
    embeddings = torch.randn(7, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return embeddings.requires_grad_(), torch.tensor([0, 0, 1, 1, 1, 3, 3])


@pytest.mark.parametrize(
    "options",
    [{}, {"anchor_weight": 0.2, "scale": 8.0, "margin": 0.3, "num_samples": 1}, {"temperature": 0.3}],
    ids=["usual", "one draw", "colder"],
)
def test_value_and_gradients_are_those_of_the_published_loss(options):
    loss, (embeddings, labels) = make(**options), batch()
    with torch.no_grad():
        loss.temperature.neg_()  # its size counts
    learned = [embeddings, *loss.parameters()]
    torch.manual_seed(7)
    value = loss(embeddings, labels)
    torch.manual_seed(7)
    lengths = embeddings.square().sum(dim=1).sqrt()
    draws = vmf_samples(embeddings / lengths[:, None], loss.length_scale * lengths, loss.num_samples)
    expected = literal(embeddings, labels, loss, draws)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=0)
    wanted, got = torch.autograd.grad(expected, learned), torch.autograd.grad(value, learned)
    assert all(one.abs().max() > 0 for one in got)
    assert got[1 + [name for name, _ in loss.named_parameters()].index("concentrations")][0, 0] == 0
    torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-10)
    parts = loss.terms["likelihood"] + loss.anchor_weight * (loss.terms["pull"] + loss.terms["push"])
    torch.testing.assert_close(parts, value.detach())


@pytest.mark.parametrize("dim", [2, 3, 16, 128, 512])
def test_the_normalizer_is_that_of_bessel_functions(dim):
    """log C(k) = (D / 2 - 1) log k - log I(k) + constant; its slope is that of the integral above."""
    order, lengths = dim / 2 - 1, torch.tensor([0.5, 2.0, 18.0, 60.0, 200.0], dtype=torch.float64)
    exact = [order * math.log(k) - math.log(ive(order, k)) - k for k in lengths.tolist() if ive(order, k) > 0]
    k = lengths[-len(exact) :].requires_grad_()
    ours = log_normalizer(k, dim)
    differences = torch.diff(ours.detach()), torch.diff(torch.tensor(exact, dtype=torch.float64))
    torch.testing.assert_close(*differences, rtol=0.2 / dim if dim < 64 else 2e-3, atol=1e-4)
    (slopes,) = torch.autograd.grad(ours.sum(), k)
    assert slopes.tolist() == pytest.approx([-slope(one, dim) for one in k.tolist()], rel=1e-9)
    assert ours.tolist() == pytest.approx([integral(one, dim) for one in k.tolist()], rel=1e-6)


def test_512_dimensions_have_the_parabola_of_the_published_code():
    k = torch.tensor([5.0, 20.0, 60.0, 120.0])
    parabola = -0.0002662 * k - 0.0009685 * k**2
    torch.testing.assert_close(log_normalizer(k, 512), parabola, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("dim", "k"), [(2, 1.5), (3, 0.0), (3, 4.0), (16, 0.5), (16, 30.0), (512, 18.0), (512, 4000.0)]
)
def test_draws_have_the_mean_and_spread_of_their_distribution(dim, k):
    torch.manual_seed(0)
    count = 20000 if dim < 100 else 4000
    direction = torch.nn.functional.normalize(torch.randn(dim, dtype=torch.float64), dim=0)
    drawn = vmf_samples(direction[None], torch.tensor([k]), count)[:, 0]
    torch.testing.assert_close(drawn.norm(dim=1), torch.ones(count, dtype=torch.float64))
    order, cosines = dim / 2 - 1, drawn @ direction
    if k == 0:
        mean = 0.0
    elif ive(order, k) > 0:
        mean = ive(order + 1, k) / ive(order, k)
    else:
        mean = slope(k, dim)  # Bessel functions underflow
    variance = 1 - mean**2 - (dim - 1) * mean / k if k else 1 / dim
    assert cosines.mean().item() == pytest.approx(mean, abs=4 * math.sqrt(variance / count))
    assert cosines.var().item() == pytest.approx(variance, rel=0.1)
    across = drawn - cosines[:, None] * direction
    assert across.mean(dim=0).norm().item() < 4 * math.sqrt((1 - mean**2) / count)
    other = torch.nn.functional.normalize(torch.randn(dim, dtype=torch.float64), dim=0)
    other = torch.nn.functional.normalize(other - (other @ direction) * direction, dim=0)
    share = (1 - (mean**2 + variance)) / (dim - 1)  # of each direction across
    assert (across @ other).var().item() == pytest.approx(share, rel=0.1)


def test_gradients_of_draws_are_those_of_their_means():
    """A step of the concentration, or of the direction, moves the mean draw as it should."""
    torch.manual_seed(0)
    direction = torch.nn.functional.normalize(torch.randn(1, 64, dtype=torch.float64)).requires_grad_()
    k = torch.tensor([40.0], dtype=torch.float64, requires_grad=True)
    cosine = (vmf_samples(direction, k, 4000)[:, 0] @ direction[0].detach()).mean()
    by_k, by_direction = torch.autograd.grad(cosine, [k, direction])
    expected = (slope(40.5, 64) - slope(39.5, 64)) / 1.0
    assert by_k.item() == pytest.approx(expected, rel=0.05)
    assert (by_direction[0] @ direction[0]).item() == pytest.approx(slope(40.0, 64), rel=0.05)


def test_candidates_that_are_rejected_do_not_count(monkeypatch):
    """With one candidate nothing is rejected, and the mean cosine is that of the envelope."""
    monkeypatch.setattr(nivmf, "TRIES", 1)
    torch.manual_seed(0)
    direction = torch.nn.functional.one_hot(torch.tensor([0]), 16).double()
    cosine = vmf_samples(direction, torch.tensor([30.0]), 20000)[:, 0, 0].mean().item()
    assert abs(cosine - ive(8, 30.0) / ive(7, 30.0)) > 0.005


def test_proxies_start_at_the_means_of_their_classes():
    loss, (embeddings, labels) = make(), batch()
    before = loss.proxies.detach().clone()
    assert not loss.proxies_ready
    with pytest.warns(UserWarning, match="1 of 4 classes have no samples"):
        loss.initialize_proxies(embeddings, labels)
    assert loss.proxies_ready
    points = embeddings.detach() / embeddings.detach().norm(dim=1, keepdim=True)
    for c in (0, 1, 3):
        mean = sum(point for point, label in zip(points, labels.tolist(), strict=True) if label == c)
        torch.testing.assert_close(loss.proxies[c, 0].detach(), loss.concentration * mean / mean.norm())
    assert torch.equal(loss.proxies[2], before[2])


def test_longer_embeddings_are_surer():
    torch.manual_seed(0)
    loss = ProxyAnchorNivMFLoss(2, 8, concentration=4.0, temperature=1.0, length_scale=1.0, num_samples=200)
    with torch.no_grad():
        loss.proxies[1] = -loss.proxies[0]
    point = torch.nn.functional.normalize(loss.proxies[:1, 0].detach())
    apart = [
        float(scores[0, 0] - scores[0, 1])
        for scores in (loss.log_likelihoods(length * point).detach() for length in (0.0, 2.0, 20.0, 1e20))
    ]
    assert apart == sorted(apart)
    assert abs(apart[0]) < 1
    assert apart[-1] == pytest.approx(8.0, rel=0.01)  # x.v = 4 and -4


def test_three_groups_have_their_rates():
    groups = make(concentration_lr=0.3, temperature_lr=0.01).param_groups(lr=0.05, weight_decay=0.1)
    assert [group["lr"] for group in groups] == [0.05, 0.3, 0.01]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]
    assert sum(len(group["params"]) for group in groups) == len(list(make().parameters()))


def test_three_clusters_are_told_apart():
    torch.manual_seed(0)
    check_three_clusters(ProxyAnchorNivMFLoss(3, 8, length_scale=10.0, temperature=0.5), falls_to=0.3, steps=60)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"anchor_weight": -1.0}, "anchor_weight must be finite and not negative"),
        ({"num_samples": 0}, "num_samples must be an integer >= 1"),
        ({"concentration": 0.0}, "concentration must be positive"),
        ({"length_scale": math.inf}, "length_scale must be positive and finite"),
        ({"temperature": math.nan}, "temperature must be positive"),
        ({"concentration_lr": 0.0}, "concentration_lr must be positive"),
        ({"temperature_lr": -1.0}, "temperature_lr must be positive"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ProxyAnchorNivMFLoss(C, D, **options)
    with pytest.raises(ValueError, match="embedding_dim must be an integer >= 2, got 1"):
        ProxyAnchorNivMFLoss(C, 1)
