import math

import pytest
import torch

from pfml.hyperbolic import ball_distance, exponential_map
from pfml.losses.hyp import HypLoss

C, D = 6, 5


def clipped(x, radius):
    return x * min(1.0, radius / x.norm().item()) if x.norm() < radius else radius * x / x.norm()


def literal(embeddings, labels, loss):
    """The published loss: for each pair of places, a cross entropy of each class that has a sample at both."""
    points = embeddings if loss.head is None else embeddings @ loss.head.weight.T + loss.head.bias
    ball = [exponential_map(clipped(x, loss.clip_radius), curvature=loss.curvature) for x in points]
    if loss.riemannian:
        for x in ball:  # the hook sees the gradient at the point of the ball
            factor = (1 - loss.curvature * float(x.detach() @ x.detach())) ** 2 / 4
            x.register_hook(lambda gradient, factor=factor: factor * gradient)
    classes = {}
    for index, label in enumerate(labels.tolist()):
        classes.setdefault(label, []).append(index)
    at = lambda place: {label: own[place] for label, own in classes.items() if len(own) > place}  # noqa: E731
    similarity = lambda a, b: torch.exp(-ball_distance(ball[a], ball[b], curvature=loss.curvature) / loss.temperature)  # noqa: E731
    total, places = 0.0, max(len(own) for own in classes.values())
    for i in range(places):
        for j in range(places):
            if i == j:
                continue
            first, second = at(i), at(j)
            both, losses = [label for label in first if label in second], []
            for label in both:
                anchor = first[label]
                own = similarity(anchor, second[label])
                rest = [index for at_place in (first, second) for other, index in at_place.items() if other != label]
                losses.append(-torch.log(own / (own + sum(similarity(anchor, index) for index in rest))))
            if losses:
                total = total + sum(losses) / len(losses)
    return total / places**2 if loss.reduction == "mean" else total


def batch(labels, scale=2.0):
    embeddings = scale * torch.randn(len(labels), D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return embeddings.requires_grad_(), torch.tensor(labels)


BATCHES = {
    "pairs": [0, 0, 1, 1, 2, 2, 3, 3],
    "three of each, mixed": [0, 1, 2, 2, 1, 0, 0, 2, 1],
    "different numbers": [0, 1, 1, 2, 2, 2, 4, 4, 4, 5],
}


@pytest.mark.parametrize("labels", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"curvature": 1.0, "clip_radius": 1.5, "temperature": 0.5},
        {"head_dim": 3},
        {"reduction": "mean", "riemannian": True},
        {"curvature": 1.0, "head_dim": 3, "riemannian": True},
    ],
    ids=["plain", "other", "head", "as HIER's code", "riemannian head"],
)
def test_value_and_gradients_are_those_of_the_published_loss(labels, options):
    torch.manual_seed(0)
    loss = HypLoss(C, D, **options).double()
    embeddings, labels = batch(labels)
    inputs = [embeddings, *loss.parameters()]
    expected, value = literal(embeddings, labels, loss), loss(embeddings, labels)
    assert value.item() == pytest.approx(expected.item(), rel=1e-10)
    theirs = torch.autograd.grad(expected, inputs)
    for mine, reference in zip(torch.autograd.grad(value, inputs), theirs, strict=True):
        assert mine.abs().max() > 0
        torch.testing.assert_close(mine, reference, rtol=1e-7, atol=1e-10)


def test_a_batch_of_p_classes_with_k_samples_is_the_published_code():
    """z (P, K, D); for each pair of columns a cross entropy of the rows of [d01, d00 without itself]."""
    p, k, loss = 4, 3, HypLoss(C, D)
    embeddings, labels = batch([c for c in range(p) for _ in range(k)])
    z = torch.stack([exponential_map(clipped(x, 2.3), curvature=0.1) for x in embeddings]).reshape(p, k, D)
    distances = lambda a, b: ball_distance(a[:, None], b[None], curvature=0.1)  # noqa: E731
    total = 0.0
    for i in range(k):
        for j in range(k):
            if i != j:
                own = -distances(z[:, i], z[:, i]).masked_fill(torch.eye(p).bool(), math.inf) / 0.2
                logits = torch.cat([-distances(z[:, i], z[:, j]) / 0.2, own], dim=1)
                total = total + torch.nn.functional.cross_entropy(logits, torch.arange(p))
    assert loss(embeddings, labels).item() == pytest.approx(total.item(), rel=1e-10)


def test_positives_come_together_and_lengths_below_the_clip_radius_matter():
    torch.manual_seed(0)
    loss = HypLoss(C, D)
    points, labels = (0.5 * torch.randn(24, D)).requires_grad_(), torch.arange(24) % C
    optimizer = torch.optim.Adam([points], lr=0.1)
    first = loss(points, labels).item()
    assert loss(1.5 * points, labels).item() != pytest.approx(first, rel=1e-3)
    for _ in range(50):
        optimizer.zero_grad()
        loss(points, labels).backward()
        optimizer.step()
    assert loss(points, labels).item() < 0.1 * first
    directions = torch.nn.functional.normalize(points.detach())
    nearest = (directions @ directions.T).fill_diagonal_(-2).argmax(dim=1)
    assert torch.equal(labels[nearest], labels)


def test_nothing_to_learn_is_0_with_gradients_of_0():
    loss = HypLoss(C, D, head_dim=3)
    for labels in ([], [2], [2, 2, 2], [0, 1, 2, 3]):
        embeddings, labels = torch.randn(len(labels), D, requires_grad=True), torch.tensor(labels, dtype=torch.int64)
        value = loss(embeddings, labels)
        value.backward()
        assert value.item() == 0
        assert embeddings.grad.abs().sum() == 0
        assert loss.head.weight.grad.abs().sum() == 0


def test_a_small_temperature_does_not_overflow_or_underflow():
    embeddings, labels = batch(BATCHES["pairs"], scale=10.0)
    loss = HypLoss(C, D, temperature=1e-3)
    value = loss(embeddings.float(), labels)
    assert math.isfinite(value.item())
    assert value.item() > 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"curvature": 0.0}, "curvature must be positive"),
        ({"clip_radius": math.inf}, "clip_radius must be positive and finite"),
        ({"clip_radius": 100.0}, r"clip_radius \* sqrt\(curvature\) must be 20 at most"),
        ({"temperature": -1.0}, "temperature must be positive"),
        ({"head_dim": -1}, "head_dim must be an integer >= 0"),
        ({"head_dim": 1.5}, "head_dim must be an integer >= 0"),
        ({"reduction": "none"}, "reduction must be 'sum' or 'mean', got 'none'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        HypLoss(C, D, **options)


def test_bad_sizes_and_a_damaged_head_are_named():
    with pytest.raises(ValueError, match="num_classes must be an integer >= 1, got 0"):
        HypLoss(0, D)
    loss = HypLoss(C, D, head_dim=3)
    with torch.no_grad():
        loss.head.bias[0] = torch.nan
    with pytest.raises(ValueError, match="proxies must be finite"):
        loss(torch.randn(4, D), torch.arange(4))


def test_the_head_is_orthogonal_and_learns_in_a_group_of_its_own():
    loss = HypLoss(C, D, head_dim=3)
    torch.testing.assert_close(loss.head.weight @ loss.head.weight.T, torch.eye(3))
    (group,) = loss.param_groups(lr=0.1, weight_decay=0.2)
    assert [len(one.shape) for one in group["params"]] == [2, 1]
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.2)
    assert HypLoss(C, D).param_groups(lr=0.1) == []
    assert "head_dim=3" in repr(loss)
