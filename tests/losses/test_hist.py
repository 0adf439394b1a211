import io
import math

import pytest
import torch
from clusters import check_three_clusters

from pfml.losses import HISTLoss
from pfml.losses.hist import HypergraphNetwork

C, D, HIDDEN = 5, 6, 7


def literal(embeddings, labels, loss, *, training=True):
    """The published loss in loops over scalars; tensors only so that autograd can follow."""
    n, present = len(labels), sorted(set(labels.tolist()))
    labels = labels.tolist()
    points = [x / x.norm() for x in embeddings]
    means = [m / m.norm() for m in loss.proxies[:, 0]]
    variances = [[torch.exp(v.clamp(0, 6)) for v in row] for row in loss.log_variances]
    d2 = [
        [sum((x[k] - m[k]) ** 2 / v[k] for k in range(D)) for m, v in zip(means, variances, strict=True)]
        for x in points
    ]
    total = 0.0
    for i in range(n):
        total = total + loss.tau * d2[i][labels[i]] + torch.log(sum(torch.exp(-loss.tau * d) for d in d2[i]))

    one = embeddings.new_ones(())
    incidence = [[one if c == labels[i] else torch.exp(-loss.alpha * d2[i][c]) for c in present] for i in range(n)]
    of_node = [sum(row) for row in incidence]
    of_edge = [sum(incidence[i][e] for i in range(n)) for e in range(len(present))]
    spread = [
        [
            sum(incidence[i][e] * incidence[j][e] / of_edge[e] for e in range(len(present)))
            / torch.sqrt(of_node[i] * of_node[j])
            for j in range(n)
        ]
        for i in range(n)
    ]
    mixed = lambda rows: [sum(spread[i][j] * rows[j] for j in range(n)) for i in range(n)]  # noqa: E731

    net = loss.network
    hidden = mixed([net.linear1.weight @ (math.sqrt(D) * x) + net.linear1.bias for x in points])
    norm = net.batch_norm
    mean, variance = norm.running_mean, norm.running_var
    if training:
        mean = sum(hidden) / n
        variance = sum((h - mean) ** 2 for h in hidden) / n
    hidden = [(h - mean) / torch.sqrt(variance + 1e-5) * norm.weight + norm.bias for h in hidden]
    hidden = [torch.where(h > 0, h, 0.1 * h) for h in hidden]
    for i, scores in enumerate(mixed([net.linear2.weight @ h + net.linear2.bias for h in hidden])):
        cross_entropy = torch.log(torch.exp(scores).sum()) - scores[labels[i]]
        total = total + loss.hypergraph_weight * cross_entropy
    return total / n


def make(**options):
    """A loss away from its start: variances between the bounds and at both, a batch norm that does something."""
    torch.manual_seed(1)
    loss = HISTLoss(C, D, **{"hidden_dim": HIDDEN, "tau": 4.0, **options})
    with torch.no_grad():
        loss.log_variances.copy_(torch.randn(C, D) * 2 + 1)
        loss.log_variances[0, 0] = 7.0
        for one in (loss.network.batch_norm.weight, loss.network.batch_norm.bias):
            one.add_(0.3 * torch.randn(HIDDEN))
    return loss


def batch(n=9, dtype=torch.float32):
    embeddings = torch.randn(n, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return embeddings.to(dtype).requires_grad_(), torch.arange(n) % (C - 1)  # the last class is absent


def parameters(loss):
    return [parameter for group in loss.param_groups(lr=1.0) for parameter in group["params"]]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("options", [{}, {"tau": 32.0, "alpha": 2.0, "hypergraph_weight": 0.5}], ids=["plain", "other"])
def test_value_and_gradients_are_those_of_the_published_loss(training, options):
    loss = make(**options).double().train(training)
    embeddings, labels = batch(dtype=torch.float64)
    expected = literal(embeddings, labels, loss, training=training)
    inputs = [embeddings, *parameters(loss)]
    theirs = torch.autograd.grad(expected, inputs)
    value = loss(embeddings, labels)
    assert value.item() == pytest.approx(expected.item(), rel=1e-11)
    for mine, reference in zip(torch.autograd.grad(value, inputs), theirs, strict=True):
        assert mine.abs().max() > 0
        torch.testing.assert_close(mine, reference, rtol=1e-8, atol=1e-11)


def test_gradcheck():
    loss = make().double()
    embeddings, labels = batch(n=5, dtype=torch.float64)
    names = ["proxies", "log_variances", "network.linear1.weight", "network.linear2.bias", "network.batch_norm.weight"]
    values = dict(loss.named_parameters())

    def value(points, *parts):
        return torch.func.functional_call(loss, dict(zip(names, parts, strict=True)), (points, labels))

    assert torch.autograd.gradcheck(value, (embeddings, *(values[name] for name in names)))


def test_the_network_is_the_published_one_with_batch_norm_of_torch():
    """The same layers, put together from torch's modules and a propagation matrix of diagonal matrices."""
    network = HypergraphNetwork(D, HIDDEN, C)
    nodes, incidence = torch.randn(8, D), torch.rand(8, 3)
    degrees = torch.diag(incidence.sum(dim=1) ** -0.5)
    spread = degrees @ incidence @ torch.diag(1 / incidence.sum(dim=0)) @ incidence.T @ degrees
    norm = torch.nn.BatchNorm1d(HIDDEN)
    expected = spread @ network.linear2(torch.nn.functional.leaky_relu(norm(spread @ network.linear1(nodes)), 0.1))
    torch.testing.assert_close(network(nodes, incidence), expected)
    torch.testing.assert_close(network.batch_norm.running_mean, norm.running_mean)
    torch.testing.assert_close(network.batch_norm.running_var, norm.running_var)


def test_statistics_follow_the_batches_in_training_mode_only():
    loss, (embeddings, labels) = make(), batch()
    norm = loss.network.batch_norm
    loss(embeddings, labels)
    mean, variance = norm.running_mean.clone(), norm.running_var.clone()
    assert mean.abs().max() > 0
    assert (variance - 1).abs().max() > 0
    loss.eval()
    value = loss(embeddings, labels)
    assert torch.equal(norm.running_mean, mean)
    assert torch.equal(norm.running_var, variance)
    assert torch.equal(loss(embeddings, labels), value)
    assert not torch.equal(loss.train()(embeddings, labels), value)


def test_statistics_follow_embeddings_of_a_wider_type_too():
    narrow, wide = make(), make()
    embeddings, labels = batch()
    narrow(embeddings, labels)
    wide(embeddings.double(), labels)
    assert wide.network.batch_norm.running_mean.dtype == torch.float32
    torch.testing.assert_close(wide.network.batch_norm.running_mean, narrow.network.batch_norm.running_mean)
    torch.testing.assert_close(wide.network.batch_norm.running_var, narrow.network.batch_norm.running_var)


@pytest.mark.parametrize("labels", [[0], [4]])
def test_a_single_sample_is_normalized_by_the_running_statistics_and_leaves_them(labels):
    loss = make()
    loss(*batch())
    norm = loss.network.batch_norm
    before = norm.running_mean.clone(), norm.running_var.clone()
    embeddings, _ = batch(n=1)
    value = loss(embeddings, torch.tensor(labels))
    value.backward()
    assert torch.equal(norm.running_mean, before[0])
    assert torch.equal(norm.running_var, before[1])
    assert torch.equal(value, loss.eval()(embeddings, torch.tensor(labels)))
    assert embeddings.grad.abs().max() > 0


@pytest.mark.parametrize("labels", [[2, 2, 2, 2], [4, 0, 0]])
def test_batches_of_one_class_are_finite_and_have_gradients(labels):
    loss = make()
    embeddings, _ = batch(n=len(labels))
    value = loss(embeddings, torch.tensor(labels))
    value.backward()
    assert torch.isfinite(value)
    for gradient in (embeddings.grad, loss.proxies.grad, loss.log_variances.grad):
        assert torch.isfinite(gradient).all()
        assert gradient.abs().max() > 0


def test_an_empty_batch_has_loss_zero():
    assert make()(torch.empty(0, D), torch.empty(0, dtype=torch.int64)).item() == 0


def test_a_single_class_in_all_has_nothing_to_tell_apart():
    value = HISTLoss(1, D)(torch.randn(3, D), torch.zeros(3, dtype=torch.int64))
    assert value.item() == pytest.approx(0, abs=1e-6)


def test_the_order_of_the_batch_changes_nothing():
    loss = make()
    embeddings, labels = batch()
    order = torch.randperm(len(labels))
    torch.testing.assert_close(loss(embeddings[order], labels[order]), loss(embeddings, labels))


def test_the_length_of_embeddings_and_of_means_changes_nothing():
    loss = make()
    embeddings, labels = batch()
    value = loss(embeddings, labels)
    with torch.no_grad():
        loss.proxies *= 7
    torch.testing.assert_close(loss(embeddings * 3, labels), value)


@pytest.mark.parametrize("option", [{"tau": 5.0}, {"alpha": 2.0}, {"hypergraph_weight": 0.5}, {"hidden_dim": 9}])
def test_every_option_changes_the_loss(option):
    changed = HISTLoss(C, D, **{"hidden_dim": HIDDEN, "tau": 4.0, **option})
    plain = HISTLoss(C, D, hidden_dim=HIDDEN, tau=4.0)
    with torch.no_grad():
        changed.proxies.copy_(plain.proxies)
        changed.log_variances.copy_(plain.log_variances)
    if "hidden_dim" not in option:
        changed.network.load_state_dict(plain.network.state_dict())
    assert changed(*batch()).item() != pytest.approx(plain(*batch()).item(), rel=1e-4)


def test_float32_is_as_good_as_float64_where_a_sample_lies_on_its_mean():
    loss = make(tau=32.0)
    points = loss.proxy_points()[:, 0]
    value = loss(points, torch.arange(C))
    torch.testing.assert_close(
        value.double(), make(tau=32.0).double()(points.double(), torch.arange(C)), rtol=1e-5, atol=0
    )


def test_it_does_not_overflow_in_half_precision():
    loss = make(tau=1000.0)
    embeddings, labels = batch(dtype=torch.float16)
    value = loss(embeddings * 100, labels)
    value.backward()
    assert value.dtype == torch.float32
    assert torch.isfinite(embeddings.grad).all()


def test_parameters_in_half_precision_are_computed_with_in_single_precision():
    loss, (embeddings, labels) = make().bfloat16(), batch()
    value = loss(embeddings, labels)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, make()(embeddings, labels), rtol=0.05, atol=0)
    assert {value.dtype for value in loss.state_dict().values()} == {torch.bfloat16, torch.int64}


def test_autocast_changes_neither_the_value_nor_the_parameters():
    loss, (embeddings, labels) = make(), batch()
    plain = loss(embeddings, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = loss(embeddings, labels)
    assert torch.equal(plain, cast)
    assert {parameter.dtype for parameter in loss.parameters()} == {torch.float32}


def test_a_label_out_of_range_is_named():
    embeddings, labels = batch()
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 5\), got 5 at index 3"):
        make()(embeddings, labels.index_fill(0, torch.tensor([3]), 5))


def test_embeddings_that_are_not_finite_are_named_and_leave_the_statistics():
    loss, (embeddings, labels) = make(), batch()
    with pytest.raises(ValueError, match="embeddings must be finite, got NaN or Inf in 1 rows: 2"):
        loss(embeddings.detach().index_fill(0, torch.tensor([2]), torch.nan), labels)
    assert torch.isfinite(loss.network.batch_norm.running_mean).all()


def test_a_state_dict_brings_everything_back_with_the_statistics():
    loss, stored = make(), io.BytesIO()
    loss(*batch())
    torch.save(loss.state_dict(), stored)
    stored.seek(0)
    torch.manual_seed(5)
    other = HISTLoss(C, D, hidden_dim=HIDDEN, tau=4.0)
    other.load_state_dict(torch.load(stored))
    assert torch.equal(other.eval()(*batch()), loss.eval()(*batch()))
    assert torch.equal(other.train()(*batch()), loss.train()(*batch()))
    for name, value in loss.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_the_network_has_its_own_learning_rate():
    loss = make(network_lr=0.05)
    for lr in (0.1, 7.0):  # ... which does not follow that of the Gaussians
        gaussians, network = loss.param_groups(lr=lr, weight_decay=0.25)
        assert (gaussians["lr"], network["lr"]) == (lr, 0.05)
    assert gaussians["params"] == [loss.proxies, loss.log_variances]
    assert gaussians["weight_decay"] == network["weight_decay"] == 0.25
    assert len(gaussians["params"]) + len(network["params"]) == len(list(loss.parameters()))


def test_both_terms_are_told_before_their_weight():
    loss = make(hypergraph_weight=0.5)
    value = loss(*batch())
    assert set(loss.terms) == {"gaussians", "hypergraph"}
    assert not any(term.requires_grad for term in loss.terms.values())
    torch.testing.assert_close(value, loss.terms["gaussians"] + 0.5 * loss.terms["hypergraph"])
    alone = make(hypergraph_weight=0.0)
    torch.testing.assert_close(alone(*batch()), alone.terms["gaussians"])


def cross_entropy_of_the_hypergraph(*, alpha, network_lr, gaussians_lr, steps=200):
    """Of 20 classes of points around a center each, behind a linear layer with LayerNorm, in batches of 8."""
    torch.manual_seed(0)
    classes, dim = 20, 16
    centers = torch.randn(classes, dim)
    layer = torch.nn.Linear(dim, dim)
    loss = HISTLoss(classes, dim, alpha=alpha, network_lr=network_lr)
    groups = [{"params": list(layer.parameters()), "lr": 1.2e-4}, *loss.param_groups(gaussians_lr, 5e-5)]
    optimizer = torch.optim.Adam(groups)
    last = []
    for step in range(steps):
        labels = torch.randint(classes, (8,))
        points = torch.nn.functional.layer_norm(layer(centers[labels] + 0.3 * torch.randn(8, dim)), (dim,))
        optimizer.zero_grad()
        loss(points, labels).backward()
        optimizer.step()
        if step >= steps - 20:
            last.append(loss.terms["hypergraph"].item())
    return sum(last) / len(last)


def test_the_hypergraph_learns_at_the_authors_rates_and_stays_near_chance_at_those_of_before():
    """Chance is log 20 = 3.0; 1.4 and 2.8. The second line is what CUB was trained with before rates were absolute."""
    assert cross_entropy_of_the_hypergraph(alpha=1.1, network_lr=6e-4, gaussians_lr=0.1) < 1.8
    assert cross_entropy_of_the_hypergraph(alpha=0.9, network_lr=1e-4, gaussians_lr=0.01) > 2.4


def test_without_the_hypergraph_the_network_is_left_alone():
    loss = make(hypergraph_weight=0.0)
    loss(*batch()).backward()
    assert all(parameter.grad is None for parameter in loss.network.parameters())
    assert loss.network.batch_norm.running_mean.abs().max() == 0
    (group,) = loss.param_groups(lr=0.1)
    assert all(parameter.grad.abs().max() > 0 for parameter in group["params"])


def test_proxy_points_are_the_means_on_the_sphere():
    points = make().proxy_points()
    assert points.shape == (C, 1, D)
    assert not points.requires_grad
    torch.testing.assert_close(points.norm(dim=-1), torch.ones(C, 1))


def test_its_description_names_the_options():
    options = "5, 6, tau=4.0, alpha=0.9, hypergraph_weight=1.0, hidden_dim=7, network_lr=0.001"
    assert options in repr(make())


def test_three_clusters_are_told_apart():
    check_three_clusters(HISTLoss(3, 32, hidden_dim=16), falls_to=0.1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_classes": 0},
        {"embedding_dim": True},
        {"hidden_dim": 0},
        {"tau": 0.0},
        {"alpha": -1.0},
        {"alpha": math.inf},
        {"hypergraph_weight": -0.1},
        {"network_lr": 0.0},
    ],
)
def test_bad_options_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HISTLoss(**{"num_classes": 3, "embedding_dim": 8, **wrong})
