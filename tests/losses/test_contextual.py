import pytest
import torch

from pfml.losses.contextual import ContextualLoss

C, D = 5, 6


class Step(torch.autograd.Function):
    """1 if x >= 0, with a constant slope."""

    @staticmethod
    def forward(ctx, x, slope):
        ctx.slope = slope
        return (x >= 0).to(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.slope, None


def literal(embeddings, labels, loss):
    """The published loss in loops over pairs."""
    n, labels = len(labels), labels.tolist()
    points = [x / x.norm() for x in embeddings]
    if loss.projection is not None:
        points = [loss.projection.weight @ x for x in points]
        points = [x / x.norm() for x in points]
    s = [[points[i] @ points[j] for j in range(n)] for i in range(n)]
    d = [[(2 - 2 * s[i][j]).clamp(min=0) for j in range(n)] for i in range(n)]

    def members(k):
        rows = []
        for i in range(n):
            limit = sorted(one.item() for one in d[i])[k - 1]
            rows.append([Step.apply(limit + loss.eps - d[i][j], loss.step_slope) for j in range(n)])
        return rows

    near, close = members(loss.neighbors), members(loss.neighbors // 2)
    m = [[0.0] * n for _ in range(n)]
    for i in range(n):
        inside = sum(one.item() for one in near[i])
        for j in range(n):
            both = sum(near[i][h] * near[j][h] for h in range(n)) / inside
            neither = sum((1 - near[i][h]) * (1 - near[j][h]) for h in range(n)) / max(n - inside, 1)
            m[i][j] = (both + neither) / 2 * near[i][j]
    q = [[0.0] * n for _ in range(n)]
    for i in range(n):
        mutual = [close[i][h] * close[h][i] for h in range(n)]
        for j in range(n):
            q[i][j] = sum(mutual[h] * m[h][j] for h in range(n)) / sum(mutual)
    context, pull, push = 0.0, [], []
    for i in range(n):
        for j in range(n):
            w = (q[i][j] + q[j][i]) / 2
            if i != j:
                context = context + ((1 - w) ** 2 if labels[i] == labels[j] else w**2)
            if labels[i] == labels[j] and s[i][j] < loss.positive_margin:
                pull.append(loss.positive_margin - s[i][j])
            if labels[i] != labels[j] and s[i][j] > loss.negative_margin:
                push.append(s[i][j] - loss.negative_margin)
    contrast = sum(pull) / max(len(pull), 1) + sum(push) / max(len(push), 1)
    mean = (sum(s[i][j] for i in range(n) for j in range(n)) / n**2 - loss.mean_cosine) ** 2
    return loss.context_weight * context / n**2 + loss.contrast_weight * contrast + loss.mean_weight * mean


def batch(n=10, seed=2):
    embeddings = torch.randn(n, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return embeddings.requires_grad_(), torch.arange(n) // 4


OPTIONS = {
    "plain": {"projection_dim": 0},
    "projected": {"projection_dim": 7},
    "other": {
        "projection_dim": 0, "context_weight": 0.4, "contrast_weight": 0.5, "mean_weight": 0.2, "neighbors": 6,
        "eps": 0.3, "step_slope": 3.0, "positive_margin": 0.9, "negative_margin": 0.1, "mean_cosine": -0.2,
    },
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_value_and_gradients_are_those_of_the_published_loss(options):
    torch.manual_seed(0)
    loss = ContextualLoss(C, D, **options).double()
    embeddings, labels = batch()
    inputs = [embeddings, *loss.parameters()]
    expected, value = literal(embeddings, labels, loss), loss(embeddings, labels)
    assert value.item() == pytest.approx(expected.item(), rel=1e-11)
    theirs = torch.autograd.grad(expected, inputs)
    for mine, reference in zip(torch.autograd.grad(value, inputs), theirs, strict=True):
        assert mine.abs().max() > 0
        torch.testing.assert_close(mine, reference, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("option", ["eps", "step_slope", "positive_margin", "negative_margin", "mean_cosine"])
def test_every_value_counts(option):
    embeddings, labels = batch()
    usual = ContextualLoss(C, D, projection_dim=0)
    changed = ContextualLoss(C, D, projection_dim=0, **{option: 0.5 * getattr(usual, option)})
    gradients = [torch.autograd.grad(loss(embeddings, labels), embeddings)[0] for loss in (usual, changed)]
    assert not torch.allclose(*gradients)


def test_two_tight_clusters_are_alike_within_and_not_between():
    loss = ContextualLoss(C, D, projection_dim=0)
    centers = torch.eye(D)[:2]
    points = torch.nn.functional.normalize(centers.repeat_interleave(4, 0) + 0.01 * torch.randn(8, D))
    similarities = loss.contextual_similarities(points @ points.T)
    expected = torch.block_diag(torch.ones(4, 4), torch.ones(4, 4))
    torch.testing.assert_close(similarities, expected)
    loss(points, torch.arange(8) // 4)
    assert loss.terms["context"] == 0
    assert loss.terms["contrast"] == 0
    loss(points, torch.arange(8) % 4)
    assert loss.terms["context"] > 0.1


def test_points_find_their_class():
    torch.manual_seed(0)
    loss = ContextualLoss(C, D, projection_dim=16)
    points, labels = torch.randn(20, D).requires_grad_(), torch.arange(20) % C
    optimizer = torch.optim.Adam([{"params": [points], "lr": 0.1}, *loss.param_groups(lr=0.001)])
    first = loss(points, labels).item()
    for _ in range(60):
        optimizer.zero_grad()
        loss(points, labels).backward()
        optimizer.step()
    assert loss(points, labels).item() < 0.3 * first
    directions = torch.nn.functional.normalize(points.detach())
    nearest = (directions @ directions.T).fill_diagonal_(-2).argmax(dim=1)
    assert (labels[nearest] == labels).float().mean() > 0.9


def test_small_batches_and_zero_vectors():
    loss = ContextualLoss(C, D, projection_dim=4)
    for labels in ([], [1], [1, 1], [0, 1, 2]):
        embeddings = torch.randn(len(labels), D, requires_grad=True)
        value = loss(embeddings, torch.tensor(labels, dtype=torch.int64))
        value.backward()
        assert torch.isfinite(value)
        assert torch.isfinite(embeddings.grad).all()
    assert loss(torch.empty(0, D), torch.empty(0, dtype=torch.int64)).item() == 0
    zeros = torch.randn(6, D)
    zeros[2] = 0
    assert torch.isfinite(loss(zeros, torch.arange(6) % 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"neighbors": 1}, "neighbors must be an integer >= 2"),
        ({"projection_dim": -1}, "projection_dim must be an integer >= 0"),
        ({"eps": -0.1}, "eps must be finite and not negative"),
        ({"context_weight": float("nan")}, "context_weight must be finite and not negative"),
        ({"positive_margin": 1.5}, r"positive_margin is a cosine and must lie in \[-1, 1\]"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        ContextualLoss(C, D, **options)


def test_the_projection_learns_in_a_group_of_its_own():
    loss = ContextualLoss(C, D, projection_dim=7)
    (group,) = loss.param_groups(lr=0.1, weight_decay=0.2)
    assert [one.shape for one in group["params"]] == [(7, D)]
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.2)
    assert ContextualLoss(C, D, projection_dim=0).param_groups(lr=0.1) == []
    assert "eps=0.04" in repr(loss)
