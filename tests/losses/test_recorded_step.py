"""A step of the loss as one CUDA graph: the same values, gradients, errors and warnings as without it.

Graphs are stood in for on a CPU; the tests of real ones are at the end, and need a GPU.
"""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pfml.losses import CollapseWarning, PotentialFieldLoss
from pfml.losses import potential_field as module
from pfml.losses.checks import deferred_checks
from pfml.tracing import is_watched

C, D, CALLS = 3, 5, 6


@pytest.fixture
def recordable(monkeypatch, graphs_on_a_cpu):
    """Every step of a CPU may be recorded that a GPU may record, but for its device; the list of recordings."""
    wanted = lambda self, embeddings, labels: (  # noqa: E731
        isinstance(embeddings, torch.Tensor)
        and embeddings.requires_grad
        and torch.is_grad_enabled()
        and not is_watched()
    )
    monkeypatch.setattr(PotentialFieldLoss, "_is_recordable", wanted)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 0}))
    return graphs_on_a_cpu


def make(**options):
    torch.manual_seed(0)
    return PotentialFieldLoss(C, D, **({"proxies_per_class": 2, "delta": 0.6} | options))


def batch(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(C, (8,), generator=generator)
    return torch.randn(8, D, generator=generator).to(dtype).requires_grad_(), labels


def plain(loss, embeddings, labels, factor=1.0):
    """Value and gradients without a graph."""
    points = embeddings.detach().clone().requires_grad_()
    value = factor * loss._energy(points, labels, loss.proxies)
    return value.detach(), *torch.autograd.grad(value, (points, loss.proxies), materialize_grads=True)


@pytest.mark.parametrize(
    "options",
    [{}, {"normalization": "log"}, {"normalization": "anchor"}, {"reduction": "pairs"}, {"proxies_per_class": 0},
     {"proxy_space": "free", "normalize_embeddings": False}],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_step_has_the_value_and_the_gradients_of_its_own_batch(recordable, options, dtype):
    loss = make(**options)
    for seed in range(CALLS):
        embeddings, labels = batch(seed, dtype)
        with torch.no_grad():
            loss.proxies += 0.01  # as an optimizer would: in place
        expected = plain(loss, embeddings, labels, factor=3.0)
        loss.proxies.grad = None
        value = 3.0 * loss(embeddings, labels)
        value.backward()
        torch.testing.assert_close(value.detach(), expected[0])
        assert embeddings.grad.dtype == dtype
        torch.testing.assert_close(embeddings.grad, expected[1])
        torch.testing.assert_close(loss.proxies.grad, expected[2])
    assert len(recordable) == 1


def test_steps_leave_nothing_of_their_own_behind(recordable):
    """The memory that all steps pass through must not hold the autograd graphs of those that are over."""

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            kept.append(weakref.ref(ctx))
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    loss, kept = make(), []
    for seed in range(2 * CALLS):
        embeddings, labels = batch(seed)
        value = loss(Watched.apply(embeddings), labels)
        if seed % 2:
            value.backward()
        del value
    gc.collect()
    assert recordable
    assert not [node for node in kept if node() is not None]


@pytest.mark.parametrize("backend", ["dense", "tiled"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_has_the_same_gradients(recordable, reentrant, backend):
    loss = make(backend=backend)
    for seed in range(CALLS):
        embeddings, labels = batch(seed)
        expected = plain(loss, embeddings, labels)
        loss.proxies.grad = None
        checkpoint(lambda points, labels=labels: loss(points, labels), embeddings, use_reentrant=reentrant).backward()
        torch.testing.assert_close(embeddings.grad, expected[1])
        torch.testing.assert_close(loss.proxies.grad, expected[2])


def test_hooks_of_saved_tensors_and_anomaly_detection_watch_a_step():
    assert not is_watched()
    with torch.autograd.graph.save_on_cpu():
        assert is_watched()
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert is_watched()
    assert not is_watched()


def test_deterministic_algorithms_are_another_kind_of_step(recordable):
    loss = make()
    embeddings, labels = batch(0)
    for deterministic in (False, True, False):
        torch.use_deterministic_algorithms(deterministic)
        try:
            for _ in range(CALLS):
                loss(embeddings, labels)
        finally:
            torch.use_deterministic_algorithms(False)
    assert len(recordable) == 2


def test_a_graph_that_is_kept_gives_the_same_gradients_again(recordable):
    loss = make()
    for seed in range(CALLS):
        embeddings, labels = batch(seed)
        value = loss(embeddings, labels)
        first = torch.autograd.grad(value, embeddings, retain_graph=True)[0]
        loss(*batch(seed + 100)).backward()  # the memory of the graph is used again
        torch.testing.assert_close(torch.autograd.grad(value, embeddings)[0], first)
    assert recordable


def test_errors_name_what_is_wrong_in_a_replayed_step_too(recordable):
    loss = make()
    for seed in range(CALLS):
        loss(*batch(seed))
    assert recordable
    embeddings, labels = batch(0)
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 3\), got 7 at index 2"):
        loss(embeddings, labels.index_fill(0, torch.tensor(2), 7))
    with pytest.raises(ValueError, match="embeddings must be finite, got NaN or Inf in 1 rows: 4"):
        loss(embeddings.detach().index_fill(0, torch.tensor(4), torch.nan).requires_grad_(), labels)
    with pytest.raises(ValueError, match=r"embeddings must be \(batch, 5\)"):
        loss(torch.randn(8, 4, requires_grad=True), labels)
    with pytest.raises(TypeError, match="labels must be integers"):
        loss(embeddings, labels.float())
    for _ in range(CALLS):
        loss(embeddings, labels.to(torch.uint16))
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 3\), got 7 at index 2"):
        loss(embeddings, labels.index_fill(0, torch.tensor(2), 7).to(torch.uint16))
    with pytest.warns(CollapseWarning, match="all 8 embeddings"):
        loss(torch.ones(8, D, requires_grad=True), labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(embeddings, labels).backward()
    with torch.no_grad():
        loss.proxies[1, 0, 2] = torch.inf
    with pytest.raises(ValueError, match="proxies must be finite, got NaN or Inf in 1 classes: 1"):
        loss(embeddings, labels)


def test_a_check_can_be_deferred(recordable):
    loss = make()
    for seed in range(CALLS):
        loss(*batch(seed))
    embeddings, labels = batch(0)
    with deferred_checks() as checks:
        loss(embeddings, labels)
        loss(embeddings, labels + C)
    assert [bool(check.is_bad) for check in checks] == [False, True]
    with pytest.raises(ValueError, match="labels must lie in"):
        checks[1].explain()


def test_a_second_derivative_is_refused(recordable):
    loss = make()
    for seed in range(CALLS):
        embeddings, labels = batch(seed)
        (gradient,) = torch.autograd.grad(loss(embeddings, labels), embeddings, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once only"):
        gradient.sum().backward()


def test_an_option_that_changes_is_another_kind_of_step(recordable):
    loss = make()
    embeddings, labels = batch(0)
    for _ in range(CALLS):
        value = loss(embeddings, labels)
    loss.reduction = "points"
    for _ in range(CALLS):
        torch.testing.assert_close(loss(embeddings, labels), value / (8 + 2 * C))
    loss.proxies = torch.nn.Parameter(loss.proxies.detach() * 2 + 1)
    expected = plain(loss, embeddings, labels)
    for _ in range(CALLS):
        torch.testing.assert_close(loss(embeddings, labels).detach(), expected[0])
    assert len(recordable) == 3


def test_a_loss_with_graphs_is_copied_and_stored(recordable, tmp_path):
    loss = make()
    for seed in range(CALLS):
        loss(*batch(seed))
    assert loss in module._GRAPHS
    twin = copy.deepcopy(loss)
    torch.save(loss, tmp_path / "loss.pt")
    embeddings, labels = batch(0)
    torch.testing.assert_close(twin(embeddings, labels), loss(embeddings, labels))
    stored = torch.load(tmp_path / "loss.pt", weights_only=False)
    torch.testing.assert_close(stored(embeddings, labels), loss(embeddings, labels))


def test_the_environment_switches_graphs_off(recordable, monkeypatch):
    monkeypatch.setenv("PFML_CUDA_GRAPHS", "0")
    loss = make()
    for seed in range(CALLS):
        embeddings, labels = batch(seed)
        torch.testing.assert_close(loss(embeddings, labels).detach(), plain(loss, embeddings, labels)[0])
    assert not recordable


def test_steps_on_a_cpu_are_not_recorded(graphs_on_a_cpu):
    loss = make()
    for seed in range(CALLS):
        loss(*batch(seed)).backward()
    assert not graphs_on_a_cpu


# With a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("normalization", ["none", "log", "anchor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_steps_equal_launched_ones_on_a_gpu(normalization, dtype):
    torch.manual_seed(0)
    loss = PotentialFieldLoss(20, 64, proxies_per_class=5, delta=0.6, normalization=normalization).cuda()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.01)
    for seed in range(CALLS):
        generator = torch.Generator().manual_seed(seed)
        embeddings = torch.randn(40, 64, generator=generator).to("cuda", dtype).requires_grad_()
        labels = torch.randint(20, (40,), generator=generator).cuda()
        expected = plain(loss, embeddings, labels)
        optimizer.zero_grad()
        value = loss(embeddings, labels)
        value.backward()
        for got, wanted in zip((value.detach(), embeddings.grad, loss.proxies.grad), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)
        optimizer.step()
    assert len(module._GRAPHS[loss].recordings) == 1


@pytest.mark.gpu
def test_a_replayed_step_names_what_is_wrong_on_a_gpu():
    loss = PotentialFieldLoss(20, 64, proxies_per_class=5).cuda()
    embeddings = torch.randn(40, 64, device="cuda", requires_grad=True)
    labels = torch.arange(40, device="cuda") % 20
    for _ in range(CALLS):
        loss(embeddings, labels).backward()
    assert len(module._GRAPHS[loss].recordings) == 1
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 20\), got 20 at index 0"):
        loss(embeddings, labels + 20 * (labels == 0))
    with pytest.raises(ValueError, match="embeddings must be finite"):
        loss(embeddings.detach().index_fill(0, labels[:1], torch.nan).requires_grad_(), labels)
    with pytest.warns(CollapseWarning):
        loss(torch.ones_like(embeddings).requires_grad_(), labels)
    loss(embeddings, labels).backward()


@pytest.mark.gpu
def test_the_graphs_of_a_loss_end_with_it_on_a_gpu():
    loss = PotentialFieldLoss(20, 64, proxies_per_class=5).cuda()
    labels = torch.arange(40, device="cuda") % 20
    for _ in range(CALLS):
        loss(torch.randn(40, 64, device="cuda", requires_grad=True), labels).backward()
    before = len(module._GRAPHS)
    del loss
    gc.collect()
    assert len(module._GRAPHS) == before - 1
