"""Oracles: each loss as its formula, in loops over samples, pairs and triplets, in float64."""

import math
from itertools import permutations

import pytest
import torch
from torch import nn

from pfml.losses import ProxyAnchorLoss, baselines
from pfml.losses.checks import deferred_checks
from pfml.losses.wrapped import PROXY_LENGTH, Parts, WrappedLoss, wrapped

C, D = 3, 5
LABELS = [0, 0, 1, 1, 2, 2, 2, 0]


def unit(points):
    return points / points.norm(dim=-1, keepdim=True)


def mean(values):
    return torch.stack(values).mean() if values else torch.tensor(0.0, dtype=torch.float64)


def positive(values):
    return [value for value in values if value > 0]


def pairs():
    """Ordered pairs of mates, and of others."""
    ordered = list(permutations(range(len(LABELS)), 2))
    return [(a, b) for a, b in ordered if LABELS[a] == LABELS[b]], [
        (a, b) for a, b in ordered if LABELS[a] != LABELS[b]
    ]


def triplets():
    mates, others = pairs()
    return [(a, p, n) for a, p in mates for b, n in others if a == b]


def contrastive(x, loss):
    mates, others = pairs()
    near = positive([(x[a] - x[b]).norm() - 0.1 for a, b in mates])
    far = positive([1.2 - (x[a] - x[b]).norm() for a, b in others])
    return mean(near) + mean(far)


def triplet(x, loss):
    return mean(positive([(x[a] - x[p]).norm() - (x[a] - x[n]).norm() + 0.1 for a, p, n in triplets()]))


def semihard(x, loss):
    distances = [((x[a] - x[p]).norm(), (x[a] - x[n]).norm()) for a, p, n in triplets()]
    return mean([ap - an + 0.3 for ap, an in distances if ap < an <= ap + 0.3 and ap - an + 0.3 > 0])


def n_pair(x, loss):
    first = {0: (0, 1), 1: (2, 3), 2: (4, 5)}
    values = []
    for c, (anchor, own) in first.items():
        logits = torch.stack([x[anchor] @ x[mate] / 0.07 for _, mate in first.values()])
        values.append(logits.logsumexp(0) - logits[c])
        assert LABELS[anchor] == LABELS[own] == c
    return mean(values)


def nt_xent(x, loss):
    mates, others = pairs()
    values = []
    for a, p in mates:
        logits = torch.stack([x[a] @ x[p], *(x[a] @ x[n] for b, n in others if b == a)]) / 0.07
        values.append(logits.logsumexp(0) - logits[0])
    return mean(values)


def lifted_structure(x, loss):
    mates, others = pairs()
    values = []
    for a, p in mates:
        rest = torch.stack([1 - (x[b] - x[n]).norm() for b, n in others if b in (a, p)])
        values.append((rest.logsumexp(0) + (x[a] - x[p]).norm()).clamp(min=0) ** 2 / 2)
    return mean(values)


def proxy_nca(x, loss):
    proxies = unit(loss.inner.proxies)
    values = []
    for i, c in enumerate(LABELS):
        squares = [(x[i] - proxy).square().sum() for proxy in proxies]
        others = torch.stack([-9 * squares[k] for k in range(C) if k != c])
        values.append(9 * squares[c] + others.logsumexp(0))
    return mean(values)


def proxy_nca_plus_plus(x, loss):
    proxies = unit(loss.inner.proxies)
    logits = torch.stack([torch.stack([-9 * (one - proxy).square().sum() for proxy in proxies]) for one in x])
    return mean([logits[i].logsumexp(0) - logits[i, c] for i, c in enumerate(LABELS)])


def normalized_softmax(x, loss):
    logits = x @ unit(loss.inner.W.T).T / 0.05
    return mean([logits[i].logsumexp(0) - logits[i, c] for i, c in enumerate(LABELS)])


def cosface(x, loss):
    weights = unit(loss.inner.W.T)
    values = []
    for i, c in enumerate(LABELS):
        logits = torch.stack([64 * (x[i] @ weights[k] - (0.35 if k == c else 0)) for k in range(C)])
        values.append(logits.logsumexp(0) - logits[c])
    return mean(values)


def arcface(x, loss):
    weights, margin = unit(loss.inner.W.T), math.radians(28.6)
    values = []
    for i, c in enumerate(LABELS):
        angles = [torch.acos(x[i] @ weights[k]) for k in range(C)]
        assert angles[c] + margin <= math.pi, "the oracle is for smaller angles"
        logits = torch.stack([64 * torch.cos(angles[k] + (margin if k == c else 0)) for k in range(C)])
        values.append(logits.logsumexp(0) - logits[c])
    return mean(values)


def soft_triple(x, loss):
    centers = unit(loss.inner.fc.T.reshape(C, 4, D))
    values = []
    for i, c in enumerate(LABELS):
        logits = []
        for k in range(C):
            cosines = centers[k] @ x[i]
            logits.append(20 * ((torch.softmax(cosines / 0.1, 0) * cosines).sum() - (0.01 if k == c else 0)))
        logits = torch.stack(logits)
        values.append(logits.logsumexp(0) - logits[c])
    distances = [(2 + 1e-5 - 2 * own[s] @ own[t]).sqrt() for own in centers for s in range(4) for t in range(s + 1, 4)]
    return mean(values) + 0.2 * sum(distances) / (C * 4 * 3)


def fast_ap(x, loss):
    bins, width = 10, 0.4
    values = []
    for i, c in enumerate(LABELS):
        rest = [k for k in range(len(LABELS)) if k != i]
        mates = sum(LABELS[k] == c for k in rest)
        mates_so_far, all_so_far, precision = 0.0, 0.0, 0.0
        for edge in range(bins + 1):
            pulses = {k: (1 - ((x[i] - x[k]).square().sum() - edge * width).abs() / width).clamp(min=0) for k in rest}
            own = sum(pulse for k, pulse in pulses.items() if LABELS[k] == c)
            mates_so_far, all_so_far = mates_so_far + own, all_so_far + sum(pulses.values())
            if own > 0:
                precision = precision + own * mates_so_far / all_so_far
        values.append(1 - precision / mates)
    return mean(values)


def snr(x, loss):
    mates, others = pairs()
    ratio = {(a, b): (x[a] - x[b]).var() / x[a].var() for a, b in mates + others}
    near, far = positive([ratio[pair] - 0.326 for pair in mates]), positive([0.845 - ratio[pair] for pair in others])
    return mean(near) + mean(far) + 0.138 * mean([one.sum().abs() for one in x])


def multi_similarity(x, loss, keep=lambda s, pair, *_: True):
    mates, others = pairs()
    s = {(a, b): x[a] @ x[b] for a, b in mates + others}
    values = []
    for i in range(len(LABELS)):
        mine, theirs = [p for p in mates if p[0] == i], [p for p in others if p[0] == i]
        near, far = [p for p in mine if keep(s, p, theirs, 1)], [p for p in theirs if keep(s, p, mine, -1)]
        pull = torch.log(1 + sum((torch.exp(-2 * (s[p] - 0.5)) for p in near), torch.zeros(()))) / 2
        push = torch.log(1 + sum((torch.exp(50 * (s[p] - 0.5)) for p in far), torch.zeros(()))) / 50
        values.append(pull + push)
    return mean(values)


def multi_similarity_miner(x, loss):
    def keep(s, pair, opposite, sign):
        worst = max(sign * s[other] for other in opposite)
        return sign * s[pair] - 0.1 < worst

    return multi_similarity(x, loss, keep)


def circle(x, loss):
    mates, others = pairs()
    values = []
    for i in range(len(LABELS)):
        near = [x[a] @ x[b] for a, b in mates if a == i]
        far = [x[a] @ x[b] for a, b in others if a == i]
        pull = torch.stack([-80 * (1.4 - s.detach()).clamp(min=0) * (s - 0.6) for s in near]).logsumexp(0)
        push = torch.stack([80 * (s.detach() + 0.4).clamp(min=0) * (s - 0.4) for s in far]).logsumexp(0)
        values.append(nn.functional.softplus(pull + push))
    return mean(positive(values))


def epshn(x, loss):
    mates, others = pairs()
    values = []
    for i in range(len(LABELS)):
        near = [s for a, b in mates if a == i and 0 <= (s := x[a] @ x[b]) <= 0.9999]
        far = [s for a, b in others if a == i and near and 0 <= (s := x[a] @ x[b]) < max(near)]
        if far:
            logits = torch.stack([max(near), max(far)]) / 0.1
            values.append(logits.logsumexp(0) - logits[0])
    return mean(values)


def margin(x, loss):
    torch.manual_seed(7)
    a, p, n = loss.miner(x.detach(), torch.tensor(LABELS))
    beta = loss.inner.beta
    values = []
    for i, j, k in zip(a.tolist(), p.tolist(), n.tolist(), strict=True):
        own = beta[LABELS[i] if len(beta) > 1 else 0]
        values += [(x[i] - x[j]).norm() - own + 0.2, own - (x[i] - x[k]).norm() + 0.2]
        assert LABELS[i] == LABELS[j] != LABELS[k]
    return mean(positive(values))


ORACLES = {
    "contrastive": (contrastive, {"pos_margin": 0.1, "neg_margin": 1.2}),
    "triplet": (triplet, {}),
    "semihard": (semihard, {"margin": 0.3}),
    "n_pair": (n_pair, {}),
    "nt_xent": (nt_xent, {}),
    "lifted_structure": (lifted_structure, {}),
    "proxy_nca": (proxy_nca, {}),
    "proxy_nca_plus_plus": (proxy_nca_plus_plus, {}),
    "normalized_softmax": (normalized_softmax, {}),
    "cosface": (cosface, {}),
    "arcface": (arcface, {}),
    "soft_triple": (soft_triple, {"centers_per_class": 4}),
    "fast_ap": (fast_ap, {}),
    "snr": (snr, {}),
    "multi_similarity": (multi_similarity, {}),
    "multi_similarity_miner": (multi_similarity_miner, {}),
    "circle": (circle, {}),
    "epshn": (epshn, {}),
    "margin": (margin, {}),
    "margin_per_class": (margin, {}),
}


def loss_of(name, num_classes=C, embedding_dim=D, **options):
    return getattr(baselines, name)(num_classes, embedding_dim, **options)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ORACLES)
def test_value_and_gradients_are_those_of_the_formula(name, seed):
    torch.manual_seed(seed)
    oracle, options = ORACLES[name]
    loss = loss_of(name, **options).double()
    x = torch.randn(len(LABELS), D, dtype=torch.float64, requires_grad=True)
    leaves = [x, *loss.parameters()]
    torch.manual_seed(7)
    value = loss(x, torch.tensor(LABELS))
    expected = oracle(unit(x), loss)
    assert expected > 0
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-9)
    for ours, theirs in zip(torch.autograd.grad(value, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


def test_every_baseline_has_an_oracle():
    assert set(baselines.__all__) == set(ORACLES)


def test_proxy_anchor_is_the_library_s():
    ours, theirs = ProxyAnchorLoss(C, D), baselines.library().losses.ProxyAnchorLoss(C, D, margin=0.1, alpha=32)
    theirs.proxies.data.copy_(ours.proxies.data[:, 0])
    x, labels = torch.randn(8, D), torch.tensor(LABELS)
    torch.testing.assert_close(ours(x, labels), theirs(x, labels))


def test_proxy_nca_plus_plus_is_the_library_s_where_nothing_underflows_and_counts_what_does():
    x, labels = torch.randn(8, D), torch.tensor(LABELS)
    for scale, agree in ((9.0, True), (500.0, False)):
        ours = loss_of("proxy_nca_plus_plus", scale=scale)
        theirs = baselines.library().losses.ProxyNCALoss(C, D, softmax_scale=scale)
        theirs.proxies.data.copy_(ours.inner.proxies.data)
        assert torch.isclose(ours(x, labels), theirs(x, labels), rtol=1e-4).item() is agree


def test_proxies_start_at_the_same_length_whatever_the_loss_and_the_number_of_classes():
    for name, classes in (("soft_triple", 3), ("soft_triple", 50), ("normalized_softmax", 7), ("proxy_nca", 7)):
        loss = loss_of(name, classes)
        proxies = loss._proxies_of(loss.inner)
        torch.testing.assert_close(proxies.norm(dim=2), torch.full(proxies.shape[:2], PROXY_LENGTH))


@pytest.mark.parametrize(
    ("name", "dim", "length"),
    [
        ("soft_triple", 512, math.sqrt(512 / (3 * 100 * 10))),
        ("normalized_softmax", 2048, math.sqrt(1 / 3)),
        ("proxy_nca", 64, 1.0),
        ("proxy_nca_plus_plus", 2048, math.sqrt(2048) / 8),
        ("cosface", 128, math.sqrt(128)),
    ],
)
def test_a_published_start_has_the_length_of_its_authors_and_changes_no_stored_loss(name, dim, length):
    loss = getattr(baselines, name)(100, dim, published_start=True)
    proxies = loss._proxies_of(loss.inner)
    assert proxies.norm(dim=2).mean().item() == pytest.approx(length, rel=0.02)
    plain = getattr(baselines, name)(100, dim)
    plain.load_state_dict(loss.state_dict())
    assert torch.equal(plain.proxy_points(), loss.proxy_points())


def test_coincident_centers_have_a_finite_gradient():
    loss = loss_of("soft_triple")
    with torch.no_grad():
        loss.inner.fc.copy_(torch.ones_like(loss.inner.fc))
    loss(torch.randn(8, D), torch.tensor(LABELS)).backward()
    assert torch.isfinite(loss.inner.fc.grad).all()


@pytest.mark.parametrize("name", ["triplet", "margin", "soft_triple", "multi_similarity_miner", "contrastive"])
def test_a_batch_with_nothing_to_learn_from_has_a_graph_and_zero_gradients(name):
    loss = loss_of(name, **({"tau": 0.0} if name == "soft_triple" else {}))
    x = torch.zeros(0 if name == "soft_triple" else 1, D, requires_grad=True)
    value = loss(x + 1, torch.zeros(len(x), dtype=torch.int64))
    value.backward()
    assert value.item() == 0
    for leaf in (x, *loss.parameters()):
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))


def test_the_centers_of_an_empty_batch_still_feel_each_other():
    loss = loss_of("soft_triple")
    loss(torch.empty(0, D), torch.empty(0, dtype=torch.int64)).backward()
    assert loss.inner.fc.grad.abs().sum() > 0


def test_a_state_loads_into_an_equal_loss():
    stored, fresh = loss_of("soft_triple"), loss_of("soft_triple")
    fresh.load_state_dict(stored.state_dict())
    assert torch.equal(stored.proxy_points(), fresh.proxy_points())
    assert all(isinstance(value, torch.Tensor) for value in stored.state_dict().values())


def test_a_state_of_another_loss_is_refused_before_anything_is_loaded():
    stored, other = loss_of("soft_triple", gamma=0.2), loss_of("soft_triple")
    before = other.proxy_points()
    with pytest.raises(ValueError, match="other hyper-parameters: gamma: stored 0.2, here 0.1"):
        other.load_state_dict(stored.state_dict())
    assert torch.equal(other.proxy_points(), before)
    with pytest.raises(ValueError, match="method: stored 'triplet', here 'semihard'"):
        loss_of("semihard").load_state_dict(loss_of("triplet").state_dict())
    with pytest.raises(ValueError, match="num_classes: stored 3, here 4"):
        loss_of("triplet", 4).load_state_dict(loss_of("triplet").state_dict())
    garbage = {**stored.state_dict(), "_extra_state": torch.zeros(3, dtype=torch.uint8)}
    with pytest.raises(ValueError, match="cannot be read"):
        other.load_state_dict(garbage)


def test_a_deferred_check_computes_something_and_explains_later():
    loss = loss_of("cosface")
    labels = torch.tensor(LABELS)
    labels[2] = 77
    with deferred_checks() as checks:
        loss(torch.randn(8, D), labels)
    with pytest.raises(ValueError, match="got 77 at index 2"):
        checks[0].explain()


def test_sizes_and_options_are_checked_on_construction():
    with pytest.raises(ValueError, match="num_classes must be an integer >= 1, got 0"):
        loss_of("triplet", 0)
    with pytest.raises(TypeError, match="triplet has no option 'marign', only margin"):
        loss_of("triplet", marign=0.1)
    with pytest.raises(ValueError, match="scale must be positive, got -1"):
        loss_of("cosface", scale=-1)
    with pytest.raises(TypeError, match="margin must be a finite number, got nan"):
        loss_of("cosface", margin=math.nan)


def test_a_loss_of_one_s_own_is_wrapped_in_a_few_lines():
    class Spread(nn.Module):
        def __init__(self):
            super().__init__()
            self.centers = nn.Parameter(torch.empty(C, D))

        def forward(self, points, labels):
            return (points - self.centers[labels]).square().sum(dim=1).mean()

    @wrapped
    def spread(num_classes: int, embedding_dim: int, *, weight: float = 1.0):
        return Parts(Spread(), proxies=lambda loss: loss.centers[:, None], regularizer=lambda points: weight * 2.0)

    loss = spread(C, D, weight=3)
    assert isinstance(loss, WrappedLoss)
    assert loss.hyperparameters() == {"method": "spread", "num_classes": C, "embedding_dim": D, "weight": 3.0}
    assert loss(torch.randn(8, D), torch.tensor(LABELS)) > 6
    assert len(loss.param_groups(lr=0.1)[0]["params"]) == 1
