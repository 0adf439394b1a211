import math

import pytest
import torch
from clusters import check_three_clusters

from pfml.hyperbolic import ball_distance, clip_lengths, exponential_map
from pfml.losses import HIERLoss, ProxyAnchorLoss

C, D, H = 4, 5, 12


class MetricGradient(torch.autograd.Function):
    """A point of the ball, whose gradient is divided by the metric there."""

    @staticmethod
    def forward(ctx, x, c):
        ctx.save_for_backward(x)
        ctx.c = c
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (1 - ctx.c * x.square().sum()) ** 2 / 4, None


def in_ball(vectors, loss):
    points = []
    for v in vectors:
        clipped = v if v.norm() < loss.clip_radius else loss.clip_radius * v / v.norm()
        points.append(MetricGradient.apply(exponential_map(clipped, curvature=loss.curvature), loss.curvature))
    return points


def chosen(exponents, noise):
    """One of H by the largest sum, as a one-hot vector with the gradient of the softmax."""
    soft = torch.softmax(exponents + noise, dim=0)
    hard = torch.zeros_like(soft)
    hard[soft.argmax()] = 1
    return hard - soft.detach() + soft


def literal(embeddings, labels, loss, draws):
    """The published loss for given draws: of the samples and of the proxies, each (j, k, noise, noise)."""
    samples, proxies = in_ball(embeddings, loss), in_ball(loss.hierarchical_proxies, loss)
    anchor = 0.0
    cosines = lambda p: [x @ p / (x.norm() * p.norm()) for x in samples]  # noqa: E731
    classes = set(labels.tolist())
    for c, p in enumerate(loss.proxies[:, 0]):
        pulls = [torch.exp(-loss.scale * (s - loss.margin)) for s, y in zip(cosines(p), labels, strict=True) if y == c]
        pushes = [torch.exp(loss.scale * (s + loss.margin)) for s, y in zip(cosines(p), labels, strict=True) if y != c]
        anchor = anchor + torch.log(1 + sum(pulls)) / len(classes) if pulls else anchor
        anchor = anchor + torch.log(1 + sum(pushes)) / C
    distance = lambda a, b: ball_distance(a, b, curvature=loss.curvature)  # noqa: E731
    total = anchor
    for nodes, own, (positives, negatives, noise_two, noise_three) in zip(
        (samples, proxies), (labels, None), draws, strict=True
    ):
        to = torch.stack([torch.stack([distance(a, p) for p in proxies]) for a in nodes])
        near = neighbors(nodes, own, loss, distance)
        hinges = []
        for i in range(len(nodes)):
            mutual = {j for j in range(len(nodes)) if j != i and j in near[i] and i in near[j]}
            if len(mutual) < 2 or len(mutual) == len(nodes) - 1:
                continue
            for t in range(loss.triplets):
                j, k = int(positives[i, t]), int(negatives[i, t])
                assert j in mutual
                assert k not in mutual | {i}
                p = chosen(-torch.maximum(to[i], to[j]) / loss.temperature, noise_two[i, t])
                q = chosen(-torch.stack([to[i], to[j], to[k]]).amax(dim=0) / loss.temperature, noise_three[i, t])
                hinge = torch.relu(to[i] @ p - to[i] @ q + loss.hierarchy_margin)
                hinge = hinge + torch.relu(to[j] @ p - to[j] @ q + loss.hierarchy_margin)
                hinge = hinge + torch.relu(to[k] @ q - to[k] @ p + loss.hierarchy_margin)
                hinges.append(hinge if p.argmax() != q.argmax() else 0 * hinge)
        assert hinges
        total = total + loss.hierarchy_weight * sum(hinges) / len(hinges)
    return total


def neighbors(nodes, labels, loss, distance):
    """The sets of nearest nodes: those of the same class first, then by distance."""
    near = []
    for i, a in enumerate(nodes):
        order = lambda j: (0 if labels is not None and labels[i] == labels[j] else 1, distance(a, nodes[j]).item())  # noqa: B023, E731
        near.append(set(sorted(range(len(nodes)), key=order)[: loss.neighbors]))
    return near


def make(**options):
    torch.manual_seed(1)
    loss = HIERLoss(C, D, num_hierarchical_proxies=H, **{"neighbors": 4, "triplets": 4, **options}).double()
    with torch.no_grad():
        loss.hierarchical_proxies.mul_(torch.linspace(0.4, 2.0, H)[:, None])  # some are clipped
    return loss


def batch(n=9):
    embeddings = torch.randn(n, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return embeddings.requires_grad_(), torch.arange(n) % (C - 1)


@pytest.fixture
def recorded(monkeypatch):
    """Everything that the loss draws, in its order."""
    seen = []
    for name in ("multinomial", "rand_like"):
        original = getattr(torch, name)

        def record(*args, original=original, name=name, **kwargs):
            result = original(*args, **kwargs)
            seen.append((name, result.clone()))
            return result

        monkeypatch.setattr(torch, name, record)
    return seen


OPTIONS = {
    "plain": {},
    "other": {
        "scale": 8.0, "margin": 0.3, "hierarchy_weight": 2.0, "hierarchy_margin": 0.4, "temperature": 0.5,
        "curvature": 0.8, "clip_radius": 1.1, "neighbors": 5,
    },
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_value_and_gradients_are_those_of_the_published_loss(options, recorded):
    loss = make(**options)
    embeddings, labels = batch()
    value = loss(embeddings, labels)
    assert min(loss.terms.values()) > 0
    drawn = [result for _, result in recorded]
    gumbel = lambda uniform: -torch.log(-torch.log(uniform))  # noqa: E731
    draws = [(j, k, gumbel(two), gumbel(three)) for j, k, two, three in (drawn[:4], drawn[4:])]
    expected = literal(embeddings, labels, loss, draws)
    assert value.item() == pytest.approx(expected.item(), rel=1e-9)
    inputs = [embeddings, loss.proxies, loss.hierarchical_proxies]
    theirs = torch.autograd.grad(expected, inputs)
    for mine, reference in zip(torch.autograd.grad(value, inputs), theirs, strict=True):
        assert mine.abs().max() > 0
        torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-9)


def test_without_a_hierarchy_it_is_proxy_anchor_with_gradients_of_the_metric():
    loss, anchor = make(hierarchy_weight=0.0), ProxyAnchorLoss(C, D).double()
    anchor.load_state_dict({"proxies": loss.proxies})
    embeddings, labels = batch()
    value, expected = loss(embeddings, labels), anchor(embeddings, labels)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    (mine,), (theirs,) = (torch.autograd.grad(one, embeddings) for one in (value, expected))
    points = exponential_map(clip_lengths(embeddings.detach(), 2.3), curvature=0.1)
    scale = (1 - 0.1 * points.square().sum(dim=1, keepdim=True)) ** 2 / 4
    torch.testing.assert_close(mine, theirs * scale)
    assert len(loss.param_groups(lr=0.1)) == 1


def test_draws_are_those_of_torch_s_gumbel_softmax():
    """Frequencies of the chosen one are its softmax."""
    torch.manual_seed(0)
    from pfml.losses.hier import _drawn_ancestors

    logits = torch.tensor([0.0, 1.0, 2.0]).expand(20000, 3)
    hard, index = _drawn_ancestors(logits)
    assert torch.equal(hard.argmax(dim=1), index)
    torch.testing.assert_close(hard.mean(dim=0), logits[0].softmax(dim=0), rtol=0.05, atol=0.01)


def test_draws_follow_the_global_generator():
    loss, (embeddings, labels) = make(), batch()
    values = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        values.append(loss(embeddings, labels).item())
    assert values[0] == values[1] != values[2]


def test_three_clusters_are_told_apart():
    torch.manual_seed(0)
    loss = HIERLoss(3, 4, num_hierarchical_proxies=16, neighbors=8, triplets=4, hierarchy_lr=0.05)
    check_three_clusters(loss, falls_to=0.5)


def test_terms_are_the_parts_of_the_value():
    loss, (embeddings, labels) = make(), batch()
    value, terms = loss(embeddings, labels).item(), loss.terms
    total = terms["pull"] + terms["push"] + 0.5 * (terms["sample_hierarchy"] + terms["proxy_hierarchy"])
    assert value == pytest.approx(total.item())
    assert terms["sample_hierarchy"] > 0
    assert terms["proxy_hierarchy"] > 0


def test_a_batch_without_triplets_has_no_hierarchy_of_samples():
    loss = make()
    for labels in ([], [1], [1, 1], [0, 1, 2]):
        embeddings = torch.randn(len(labels), D, requires_grad=True)
        loss(embeddings, torch.tensor(labels, dtype=torch.int64)).backward()
        assert loss.terms["sample_hierarchy"] == 0
        assert torch.isfinite(embeddings.grad).all()


def test_two_groups_and_the_rate_of_the_hierarchy():
    loss = make(hierarchy_lr=0.02)
    classes, hierarchy = loss.param_groups(lr=0.1, weight_decay=0.3)
    assert (classes["params"], classes["lr"]) == ([loss.proxies], 0.1)
    assert (hierarchy["params"], hierarchy["lr"], hierarchy["weight_decay"]) == ([loss.hierarchical_proxies], 0.02, 0.3)


def test_hierarchical_proxies_start_inside_the_clip_radius_and_lie_in_the_ball():
    torch.manual_seed(0)
    loss = HIERLoss(C, 256)
    assert loss.hierarchical_proxies.norm(dim=1).mean().item() == pytest.approx(0.9 * 2.3, rel=0.02)
    points = loss.ball_points()
    assert points.shape == (512, 256)
    assert (points.norm(dim=1) < math.tanh(math.sqrt(0.1) * 2.3) / math.sqrt(0.1) + 1e-6).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_hierarchical_proxies": 0}, "num_hierarchical_proxies must be an integer >= 1"),
        ({"triplets": 2.5}, "triplets must be an integer >= 1"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"hierarchy_weight": -1.0}, "hierarchy_weight must be finite and not negative"),
        ({"clip_radius": 0.0}, "clip_radius must be positive"),
        ({"scale": 0.0}, "scale must be positive"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        HIERLoss(C, D, **options)
