import math

import pytest
import torch
from clusters import check_three_clusters
from loops import proxy_anchor

from pfml.losses.nir import ConditionalFlow, ProxyAnchorNIRLoss

C, D = 4, 5


def flowed(flow, point, condition):
    """What the flow makes of one point, in loops over scalars, and the logarithm of its volume."""
    values, log_volume, first = list(point), 0.0, len(point) // 2
    for permutation, of_second, of_first in zip(flow.permutations, flow.of_second, flow.of_first, strict=True):
        values = [values[k] for k in permutation.tolist()]
        for network, mine, other in ((of_second, slice(0, first), slice(first, None)),
                                     (of_first, slice(first, None), slice(0, first))):  # fmt: skip
            said = network(torch.stack([*values[other], *condition]))
            changed = values[mine]
            for k in range(len(changed)):
                logarithm = flow.clamp * 0.636 * torch.atan(said[k])
                changed[k] = changed[k] * torch.exp(logarithm) + said[len(changed) + k]
                log_volume = log_volume + logarithm
            values[mine] = changed
    return values, log_volume


def literal(embeddings, labels, loss):
    """The published loss in loops over scalars."""
    total = 0.0
    for x, c in zip(embeddings, labels.tolist(), strict=True):
        proxy = loss.proxies[c, 0] / loss.proxies[c, 0].norm()
        latent, log_volume = flowed(loss.flow, x / x.norm(), proxy)
        cost = sum(z**2 for z in latent) / 2 - log_volume
        total = total + (torch.exp(cost) if loss.exponential else cost)
    anchor = proxy_anchor(embeddings, labels, loss.proxies[:, 0], scale=loss.scale, margin=loss.margin)
    return total / len(labels) + loss.alignment * anchor


def make(**options):
    torch.manual_seed(1)
    loss = ProxyAnchorNIRLoss(C, D, **{"width": 6, "depth": 3, "num_blocks": 2, **options}).double()
    with torch.no_grad():
        for parameter in loss.flow.parameters():
            parameter.mul_(1.5)  # away from a flow that does nothing
    return loss


def batch():
    embeddings = torch.randn(7, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return embeddings.requires_grad_(), torch.tensor([0, 0, 1, 1, 1, 3, 3])


@pytest.mark.parametrize(
    "options", [{}, {"alignment": 0.3, "clamp": 0.7, "scale": 8.0, "margin": 0.2}, {"exponential": False}]
)
def test_value_and_gradients_are_those_of_the_published_loss(options):
    loss, (embeddings, labels) = make(**options), batch()
    expected = literal(embeddings, labels, loss)
    learned = [embeddings, *loss.parameters()]
    wanted = torch.autograd.grad(expected, learned)
    value = loss(embeddings, labels)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(torch.autograd.grad(value, learned), wanted)
    assert loss.terms.keys() == {"pull", "push", "flow"}
    parts = loss.terms["flow"] + loss.alignment * (loss.terms["pull"] + loss.terms["push"])
    torch.testing.assert_close(parts, value.detach())


def test_the_log_determinant_is_that_of_the_jacobian():
    flow = make().flow
    point, condition = torch.randn(2, D, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: flow(x[None], condition[None])[0][0], point)
    _, log_determinant = flow(point[None], condition[None])
    torch.testing.assert_close(log_determinant[0], torch.linalg.slogdet(jacobian).logabsdet)


def test_the_flow_has_a_rate_of_its_own():
    loss = make(flow_lr=2e-3)
    proxies, flow = loss.param_groups(lr=0.04, weight_decay=0.1)
    assert (proxies["lr"], flow["lr"]) == (0.04, 2e-3)
    assert proxies["params"] == [loss.proxies]
    assert len(flow["params"]) == len(list(loss.flow.parameters()))


def test_proxies_start_as_published():
    torch.manual_seed(0)
    assert ProxyAnchorNIRLoss(1000, 64).proxies.std().item() == pytest.approx(1 / 8, rel=0.02)


def test_permutations_are_stored():
    first, other = make(), make()
    other.flow.permutations.copy_(other.flow.permutations.flip(1))
    other.load_state_dict(first.state_dict())
    embeddings, labels = batch()
    assert torch.equal(first(embeddings, labels), other(embeddings, labels))


def test_a_flow_that_is_far_off_stays_finite():
    loss, (embeddings, labels) = make(), batch()
    with torch.no_grad():
        for parameter in loss.flow.parameters():
            parameter.mul_(20)
    value = loss(embeddings, labels)
    value.backward()
    assert math.isfinite(value.item())
    assert value.item() > 1e8
    assert torch.isfinite(embeddings.grad).all()


def test_three_clusters_are_told_apart():
    torch.manual_seed(0)
    check_three_clusters(ProxyAnchorNIRLoss(3, 8, alignment=0.1, width=8, depth=2, num_blocks=2), falls_to=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alignment": 0.0}, "alignment must be positive"),
        ({"flow_lr": -1.0}, "flow_lr must be positive"),
        ({"depth": 1}, "depth must be an integer >= 2"),
        ({"num_blocks": 0}, "num_blocks must be an integer >= 1"),
        ({"width": 1.5}, "width must be an integer >= 1"),
        ({"clamp": math.inf}, "clamp must be positive and finite"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ProxyAnchorNIRLoss(C, D, **options)
    with pytest.raises(ValueError, match="embedding_dim must be an integer >= 2"):
        ConditionalFlow(1)
