"""DRML with Proxy Anchor against its public definition in loops."""

import io

import pytest
import torch

from pfml.losses import RelationalProxyAnchorLoss

C, D, F, K = 5, 6, 9, 3


def proxy_anchor(points, labels, proxies, scale, margin):
    """Proxy Anchor of some samples; 0 of none."""
    points = [point / point.norm() for point in points]
    proxies = [proxy / proxy.norm() for proxy in proxies]
    pull, push = [], []
    for c, proxy in enumerate(proxies):
        near = sum(torch.exp(-scale * (x @ proxy - margin)) for x, y in zip(points, labels, strict=True) if y == c)
        far = sum(torch.exp(scale * (x @ proxy + margin)) for x, y in zip(points, labels, strict=True) if y != c)
        push.append(torch.log(1 + far + 0 * proxy.sum()))
        if c in labels:
            pull.append(torch.log(1 + near))
    return (sum(pull) / len(pull) if pull else 0) + sum(push) / len(push)


def literal(loss, embeddings, labels, features, nodes):
    labels, n = labels.tolist(), len(labels)
    errors = [
        [
            (
                (
                    loss.decoder_weights[k] @ nodes[i, k].detach()
                    + loss.decoder_biases[k]
                    - features[i, 3 * k : 3 * k + 3].detach()
                )
                ** 2
            ).mean()
            for k in range(K)
        ]
        for i in range(n)
    ]
    best = [min(range(K), key=lambda k: errors[i][k].item()) for i in range(n)]
    total = loss.whole_weight * proxy_anchor(embeddings, labels, loss.proxies[:, 0], loss.scale, loss.margin)
    for k in range(K):
        mine = [i for i in range(n) if best[i] == k]
        points, names = [nodes[i, k] for i in mine], [labels[i] for i in mine]
        total = total + proxy_anchor(points, names, loss.group_proxies[k], loss.scale, loss.margin)
    return total + loss.reconstruction_weight * sum(sum(row) for row in errors) / (n * K), best


def make(**options):
    torch.manual_seed(1)
    values = {"groups": K, "scale": 8.0, "whole_weight": 3.0, "reconstruction_weight": 0.7, **options}
    return RelationalProxyAnchorLoss(C, D, F, **values)


def batch(n=10, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)
    shapes = ((n, D), (n, F), (n, K, D // K))
    embeddings, features, nodes = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    others = {"features": features.requires_grad_(), "nodes": nodes.requires_grad_()}
    return (embeddings.requires_grad_(), torch.arange(n) % (C - 1)), others


def test_value_and_gradients_are_those_of_the_published_loss():
    loss, (inputs, others) = make().double(), batch()
    expected, best = literal(loss, *inputs, **others)
    assert set(best) == set(range(K))  # every group has samples
    value = loss(*inputs, **others)
    assert value.item() == pytest.approx(expected.item(), rel=1e-11)
    learned = [inputs[0], others["nodes"], *loss.parameters()]
    for mine, theirs in zip(torch.autograd.grad(value, learned), torch.autograd.grad(expected, learned), strict=True):
        assert mine.abs().max() > 0
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-11)


def test_reconstruction_trains_decoders_only():
    loss, (inputs, others) = make(whole_weight=0.0).double(), batch()
    loss(*inputs, **others).backward()
    assert others["features"].grad is None
    assert loss.decoder_weights.grad.abs().max() > 0
    gradient = others["nodes"].grad.clone()
    others["nodes"].grad = None
    loss.reconstruction_weight = 0.0
    loss(*inputs, **others).backward()
    assert torch.equal(others["nodes"].grad, gradient)


def test_terms_are_told_before_their_weights():
    loss, (inputs, others) = make(), batch(dtype=torch.float32)
    value = loss(*inputs, **others)
    assert not any(term.requires_grad for term in loss.terms.values())
    weighed = 3 * loss.terms["whole"] + loss.terms["groups"] + 0.7 * loss.terms["reconstruction"]
    torch.testing.assert_close(value, weighed)


def test_decoders_have_their_own_learning_rate():
    proxies, decoders = make(decoder_lr=0.02).param_groups(lr=0.5, weight_decay=0.1)
    assert (proxies["lr"], decoders["lr"]) == (0.5, 0.02)
    assert len(proxies["params"]) + len(decoders["params"]) == len(list(make().parameters()))


def test_an_empty_batch_has_loss_zero():
    loss = make()
    others = {"features": torch.empty(0, F), "nodes": torch.empty(0, K, D // K)}
    assert loss(torch.empty(0, D), torch.empty(0, dtype=torch.int64), **others).item() == 0


def test_a_state_dict_brings_everything_back():
    loss, stored = make(), io.BytesIO()
    torch.save(loss.state_dict(), stored)
    stored.seek(0)
    other = RelationalProxyAnchorLoss(C, D, F, groups=K, scale=8.0, whole_weight=3.0, reconstruction_weight=0.7)
    other.load_state_dict(torch.load(stored))
    inputs, others = batch(dtype=torch.float32)
    assert torch.equal(other(*inputs, **others), loss(*inputs, **others))


def test_autocast_changes_nothing():
    loss, (inputs, others) = make(), batch(dtype=torch.float32)
    plain = loss(*inputs, **others)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(loss(*inputs, **others), plain)


def test_groups_that_are_not_those_of_the_layer_are_named():
    (inputs, others) = batch(dtype=torch.float32)
    with pytest.raises(ValueError, match=r"nodes must be \(10, 1, 6\), got shape \(10, 3, 2\): .* must be equal"):
        RelationalProxyAnchorLoss(C, D, F, groups=1)(*inputs, **others)


@pytest.mark.parametrize("wrong", [{"groups": 4}, {"scale": 0.0}, {"whole_weight": -1.0}, {"decoder_lr": 0.0}])
def test_bad_options_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make(**wrong)
