import io
import math

import pytest
import torch
from clusters import check_three_clusters

from pfml.losses import ProxyGMLLoss

C, M, D = 5, 3, 8


def literal(embeddings, labels, proxies, *, kept_share, proxy_weight, scale):
    """The published loss in loops; tensors only so that autograd can follow."""
    unit = lambda v: v / v.norm()  # noqa: E731
    points = [(unit(proxies[c, m]), c) for c in range(len(proxies)) for m in range(proxies.shape[1])]
    num_kept = math.ceil(kept_share * len(points) - 1e-9)
    total = 0.0
    for x, label in zip(embeddings, labels.tolist(), strict=True):
        cosines = [(unit(x) @ p, c) for p, c in points]
        mine = [(s, c) for s, c in cosines if c == label]
        others = sorted(((s, c) for s, c in cosines if c != label), key=lambda one: -one[0].item())
        sums = {}
        for s, c in mine + others[: num_kept - len(mine)]:
            sums[c] = sums.get(c, 0.0) + s
        total = total + torch.log(sum(torch.exp(scale * s) for s in sums.values())) - scale * sums[label]
    among = 0.0
    for q, label in points:
        sums = [sum(q @ p for p, of in points if of == c) for c in range(len(proxies))]
        among = among + torch.log(sum(torch.exp(s) for s in sums)) - sums[label]
    return total / len(labels) + proxy_weight * among / len(points)


def make(**options):
    torch.manual_seed(1)
    return ProxyGMLLoss(C, D, **{"proxies_per_class": M, "kept_share": 0.4, **options})


def batch(n=12, dtype=torch.float32):
    embeddings = torch.randn(n, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return embeddings.to(dtype).requires_grad_(), torch.arange(n) % (C - 1)  # the last class is absent


@pytest.mark.parametrize("kept_share", [0.28, 0.4, 0.7, 1.0])
@pytest.mark.parametrize("other", [{"proxy_weight": 0.3}, {"proxy_weight": 0.0, "scale": 4.0}])
def test_value_and_gradients_are_those_of_the_published_loss(kept_share, other):
    loss = make(kept_share=kept_share, **other).double()
    embeddings, labels = batch(dtype=torch.float64)
    options = {"kept_share": kept_share, "scale": 1.0, **other}
    expected = literal(embeddings, labels, loss.proxies, **options)
    value = loss(embeddings, labels)
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(value, (embeddings, loss.proxies)),
        torch.autograd.grad(expected, (embeddings, loss.proxies)),
        strict=True,
    ):
        assert mine.abs().max() > 0
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13)


def test_gradcheck():
    loss = make().double()
    embeddings, labels = batch(n=4, dtype=torch.float64)

    def value(points, proxies):
        return torch.func.functional_call(loss, {"proxies": proxies}, (points, labels))

    assert torch.autograd.gradcheck(value, (embeddings, loss.proxies))


@pytest.mark.parametrize(
    ("num_classes", "per_class", "share", "kept"),
    [
        (100, 12, 0.05, 60),  # CUB
        (98, 12, 0.05, 59),  # Cars
        (11318, 1, 0.05, 566),  # SOP
        (21, 12, 0.05, 13),
        (20, 12, 0.05, 24),  # 12 would be the sample's own alone
        (3, 4, 0.05, 8),
        (1, 4, 0.05, 4),
        (100, 1, 0.07, 7),
        (5, 3, 1.0, 15),
    ],
)
def test_how_many_proxies_a_sample_keeps(num_classes, per_class, share, kept):
    loss = ProxyGMLLoss(num_classes, 2, proxies_per_class=per_class, kept_share=share)
    assert loss.num_kept == kept


def test_proxies_that_a_sample_does_not_keep_feel_nothing_of_it():
    loss = make(kept_share=0.28, proxy_weight=0.0)  # 5 of 15: 3 own and 2 others
    embeddings, labels = batch(n=1)
    loss(embeddings, labels).backward()
    moved = loss.proxies.grad.abs().amax(dim=2) > 0
    assert moved[0].all()
    assert moved[1:].sum() == 2


def test_classes_without_a_kept_proxy_are_not_in_the_softmax():
    loss = ProxyGMLLoss(4, 4, proxies_per_class=1, kept_share=0.5, proxy_weight=0.0)
    with torch.no_grad():
        loss.proxies.copy_(torch.eye(4)[:, None])
    embeddings = torch.tensor([[0.8, 0.6, 0.0, 0.0]])
    value = loss(embeddings, torch.tensor([0]))
    assert value.item() == pytest.approx(math.log(math.exp(0.8) + math.exp(0.6)) - 0.8)


def test_a_kept_class_counts_even_if_its_cosines_sum_to_zero():
    loss = ProxyGMLLoss(2, 2, proxies_per_class=1, kept_share=1.0, proxy_weight=0.0)
    with torch.no_grad():
        loss.proxies.copy_(torch.eye(2)[:, None])
    assert loss(torch.tensor([[1.0, 0.0]]), torch.tensor([1])).item() == pytest.approx(math.log(math.e + 1))


def test_the_order_of_the_batch_changes_nothing():
    loss = make()
    embeddings, labels = batch()
    order = torch.randperm(len(labels))
    torch.testing.assert_close(loss(embeddings[order], labels[order]), loss(embeddings, labels))


def test_the_length_of_embeddings_and_of_proxies_changes_nothing():
    loss = make()
    embeddings, labels = batch()
    value = loss(embeddings, labels)
    with torch.no_grad():
        loss.proxies *= 7
    torch.testing.assert_close(loss(embeddings * 3, labels), value)


@pytest.mark.parametrize(
    "option", [{"proxies_per_class": 2}, {"kept_share": 0.9}, {"proxy_weight": 0.5}, {"scale": 2.0}]
)
def test_every_option_changes_the_loss(option):
    assert make(**option)(*batch()).item() != pytest.approx(make()(*batch()).item(), rel=1e-4)


@pytest.mark.parametrize("labels", [[0], [2, 2, 2, 2], [4, 0, 0]])
def test_batches_of_one_sample_or_of_one_class_are_finite_and_have_gradients(labels):
    loss = make()
    embeddings, _ = batch(n=len(labels))
    value = loss(embeddings, torch.tensor(labels))
    value.backward()
    assert torch.isfinite(value)
    for gradient in (embeddings.grad, loss.proxies.grad):
        assert torch.isfinite(gradient).all()
        assert gradient.abs().max() > 0


def test_an_empty_batch_has_the_loss_of_the_proxies_alone():
    empty = torch.empty(0, D), torch.empty(0, dtype=torch.int64)
    assert make(proxy_weight=0.0)(*empty).item() == 0
    assert make()(*empty).item() > 0


def test_a_loss_made_on_the_meta_device_knows_the_classes_of_its_proxies():
    with torch.device("meta"):
        loss = make()
    loss.to_empty(device="cpu").load_state_dict(make().state_dict())
    assert loss(*batch()) == make()(*batch())


def test_a_single_class_in_all_has_nothing_to_tell_apart():
    assert ProxyGMLLoss(1, D)(torch.randn(3, D), torch.zeros(3, dtype=torch.int64)).item() == 0


def test_it_does_not_overflow_in_half_precision():
    loss = make(scale=100.0)
    embeddings, labels = batch(dtype=torch.float16)
    value = loss(embeddings * 100, labels)
    value.backward()
    assert value.dtype == torch.float32
    assert torch.isfinite(embeddings.grad).all()


def test_autocast_changes_neither_the_value_nor_the_proxies():
    loss, (embeddings, labels) = make(), batch()
    plain = loss(embeddings, labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = loss(embeddings, labels)
    assert torch.equal(plain, cast)
    assert loss.proxies.dtype == torch.float32


def test_a_label_out_of_range_is_named():
    embeddings, labels = batch()
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 5\), got 5 at index 3"):
        make()(embeddings, labels.index_fill(0, torch.tensor([3]), 5))


def test_embeddings_that_are_not_finite_are_named():
    embeddings, labels = batch()
    with pytest.raises(ValueError, match="embeddings must be finite, got NaN or Inf in 1 rows: 2"):
        make()(embeddings.detach().index_fill(0, torch.tensor([2]), torch.nan), labels)


def test_a_state_dict_brings_the_proxies_back():
    loss, stored = make(), io.BytesIO()
    torch.save(loss.state_dict(), stored)
    stored.seek(0)
    torch.manual_seed(5)
    other = ProxyGMLLoss(C, D, proxies_per_class=M, kept_share=0.4)
    assert not torch.equal(other(*batch()), loss(*batch()))
    other.load_state_dict(torch.load(stored))
    assert torch.equal(other(*batch()), loss(*batch()))


def test_the_proxies_have_their_own_group():
    loss = make()
    (group,) = loss.param_groups(lr=0.5, weight_decay=0.25)
    assert group["params"][0] is loss.proxies
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)


def test_proxy_points_lie_on_the_sphere():
    points = make().proxy_points()
    assert points.shape == (C, M, D)
    assert not points.requires_grad
    torch.testing.assert_close(points.norm(dim=-1), torch.ones(C, M))


def test_its_description_names_the_options():
    assert "5, 8, proxies_per_class=3, kept_share=0.4, proxy_weight=0.3, scale=1.0" in repr(make())


@pytest.mark.parametrize("per_class", [1, 4])
def test_three_clusters_are_told_apart(per_class):
    check_three_clusters(ProxyGMLLoss(3, 8, proxies_per_class=per_class), falls_to=0.7)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_classes": 0},
        {"embedding_dim": True},
        {"proxies_per_class": 0},
        {"kept_share": 0.0},
        {"kept_share": 1.5},
        {"proxy_weight": -0.1},
        {"scale": 0.0},
        {"scale": math.nan},
    ],
)
def test_bad_options_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ProxyGMLLoss(**{"num_classes": 3, "embedding_dim": 8, **wrong})
