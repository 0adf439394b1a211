"""A block of proxies that stands for all: right on average, exact where it promises to be, and small."""

import itertools
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch

from pfml import PotentialFieldLoss
from pfml.backends import BACKENDS
from pfml.losses.subsampling import subsample_anchors
from pfml.methods import LossConfig, create_loss
from pfml.superposition import Anchors, PairWeights
from states import EVERYWHERE, FIELDS, WEIGHTS, State, energy_and_gradients

#: Five classes of two proxies; classes 0 and 3 are in the batch, two of the other six proxies are drawn.
CLASSES, PER_CLASS, BATCH, BLOCK = 5, 2, (0, 3, 0), 2
OF_BATCH, OTHERS = (0, 1, 6, 7), (2, 3, 4, 5, 8, 9)
BLOCKS = list(itertools.combinations(OTHERS, BLOCK))


def tiny_state():
    state = State(num_samples=len(BATCH), num_classes=CLASSES, per_class=PER_CLASS, dim=4, spread=0.5)
    state.sample_labels = torch.tensor(BATCH)
    return state


def with_block(block):
    """The tiny state with the anchors that a draw of this block gives."""
    state = tiny_state()
    weights = [1.0] * len(OF_BATCH) + [len(OTHERS) / BLOCK] * BLOCK
    state.anchors = Anchors(torch.tensor(OF_BATCH + block), torch.tensor(weights, dtype=torch.float64))
    return state


def results(state, backend, field, weights):
    """Energy and gradients as one vector in float64."""
    values = energy_and_gradients(BACKENDS[backend], state, field, weights, dtype=torch.float64, on_sphere=True)
    return torch.cat([value.flatten() for value in values])


def make(num_classes=40, **options):
    torch.manual_seed(1)
    options = {"proxies_per_class": 2, "delta": 0.6, "delta_rep": 1.2, "proxy_sample": 15, **options}
    return PotentialFieldLoss(num_classes, 8, **options).double()


def batch():
    generator = torch.Generator().manual_seed(2)
    embeddings = torch.randn(6, 8, generator=generator, dtype=torch.float64).requires_grad_()
    return embeddings, torch.tensor([0, 0, 5, 5, 7, 39])


def value_and_gradients(loss, embeddings, labels, seed=3, forward=None):
    torch.manual_seed(seed)
    value = (loss if forward is None else forward)(embeddings, labels)
    return value, *torch.autograd.grad(value, (embeddings, loss.proxies))


@pytest.mark.parametrize("backend", EVERYWHERE)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("field", ["wide repulsion", "log"])
def test_the_mean_over_all_blocks_is_the_whole_energy_and_its_gradient(backend, field, weights):
    field, weights = FIELDS[field], WEIGHTS[weights]
    exact = results(tiny_state(), backend, field, weights)
    estimates = torch.stack([results(with_block(block), backend, field, weights) for block in BLOCKS])
    assert (estimates.mean(dim=0) - exact).norm() <= 1e-10 * exact.norm()
    if weights.proxy_repulsion:
        assert estimates[:, 0].std() > 1e-4 * exact[0].abs()  # no single block is the answer


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_in_eq_6_whatever_samples_have_to_do_with_is_exact(backend):
    field = FIELDS["wide repulsion"]
    without_proxy_pairs = WEIGHTS["no proxy pairs"]
    exact = results(tiny_state(), backend, field, without_proxy_pairs)
    only_proxy_pairs = PairWeights(sample_sample=0.0, sample_proxy=0.0)
    for block in BLOCKS[::4]:
        estimate = results(with_block(block), backend, field, without_proxy_pairs)
        assert (estimate - exact).norm() <= 1e-12 * exact.norm()
        error = results(with_block(block), backend, field, PairWeights()) - results(
            tiny_state(), backend, field, PairWeights()
        )
        of_proxy_pairs = results(with_block(block), backend, field, only_proxy_pairs) - results(
            tiny_state(), backend, field, only_proxy_pairs
        )
        assert (error - of_proxy_pairs).norm() <= 1e-10 * of_proxy_pairs.norm()
        assert of_proxy_pairs.norm() > 1e-3 * exact.norm()


def test_a_draw_holds_the_batch_once_and_distinct_others_that_stand_for_the_rest():
    for _ in range(20):
        rows, weights = subsample_anchors(torch.tensor(BATCH), CLASSES, PER_CLASS, BLOCK)
        assert rows.shape == weights.shape == (len(BATCH) * PER_CLASS + BLOCK,)
        counts = Counter()
        for row, weight in zip(rows.tolist(), weights.tolist(), strict=True):
            if weight > 0:
                assert row not in counts
                counts[row] = weight
        assert {row: counts[row] for row in OF_BATCH} == dict.fromkeys(OF_BATCH, 1.0)
        drawn = counts.keys() - set(OF_BATCH)
        assert len(drawn) == BLOCK
        assert drawn <= set(OTHERS)
        assert all(counts[row] == len(OTHERS) / BLOCK for row in drawn)


def test_every_block_is_drawn_equally_often():
    draws = 1500
    seen = Counter()
    for _ in range(draws):
        rows, _ = subsample_anchors(torch.tensor(BATCH), CLASSES, PER_CLASS, BLOCK)
        seen[tuple(sorted(rows[-BLOCK:].tolist()))] += 1
    assert set(seen) == set(BLOCKS)
    expected = draws / len(BLOCKS)
    assert all(abs(count - expected) < 5 * expected**0.5 for count in seen.values())


@pytest.mark.parametrize("labels", [[], [0, 1, 2, 3], [0, 1, 2, 3, 4], [4] * 7])
@pytest.mark.parametrize("block", [1, 5, 9])
def test_a_draw_of_any_batch_stands_for_all_proxies(labels, block):
    labels = torch.tensor(labels, dtype=torch.int64)
    rows, weights = subsample_anchors(labels, CLASSES, PER_CLASS, block)
    assert len(rows) == len(labels) * PER_CLASS + block
    others = (CLASSES - len(labels.unique())) * PER_CLASS
    counted = rows[weights > 0]
    assert len(counted) == len(counted.unique()) == CLASSES * PER_CLASS - others + min(others, block)
    assert weights.sum().item() == pytest.approx(CLASSES * PER_CLASS)


@pytest.mark.parametrize("backend", EVERYWHERE)
@pytest.mark.parametrize("normalization", ["none", "log"])
def test_the_loss_is_the_energy_of_its_draw(backend, normalization):
    loss = make(backend=backend, normalization=normalization)
    embeddings, labels = batch()
    got = value_and_gradients(loss, embeddings, labels)
    torch.manual_seed(3)
    drawn = subsample_anchors(labels, 40, 2, 15)
    samples, proxies = loss._charges(embeddings, labels, loss.proxies)
    energy = BACKENDS["dense"](samples, proxies._replace(anchors=drawn), loss.field, loss.weights)
    expected = energy, *torch.autograd.grad(energy, (embeddings, loss.proxies))
    for mine, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("normalization", ["none", "log"])
def test_the_mean_over_many_steps_approaches_the_exact_loss(normalization):
    loss = make(normalization=normalization, backend="dense")
    embeddings, labels = batch()
    exact = value_and_gradients(loss.eval(), embeddings, labels)
    loss.train()
    steps = [value_and_gradients(loss, embeddings, labels, seed) for seed in range(50)]
    for estimates, expected in zip(zip(*steps, strict=True), exact, strict=True):
        estimates = torch.stack([estimate.detach() for estimate in estimates])
        error = (estimates.mean(dim=0) - expected).norm()
        one_step = (estimates - expected).view(len(steps), -1).norm(dim=1).mean()
        assert error <= 3 * one_step / len(steps) ** 0.5 + 1e-12 * expected.norm()
    values = torch.stack([value.detach() for value, *_ in steps])
    assert values.std() > 1e-3 * exact[0].abs()


def test_seeds_reproduce_the_draw_and_evaluation_is_exact_and_draws_nothing():
    loss, exact = make(), make(proxy_sample=None)
    embeddings, labels = batch()
    first, again, other = (value_and_gradients(loss, embeddings, labels, seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    with torch.no_grad():
        torch.manual_seed(3)
        assert torch.equal(loss(embeddings, labels), first[0])  # training mode, whether there are gradients or not
    before = torch.get_rng_state()
    assert torch.equal(loss.eval()(embeddings, labels), exact(embeddings, labels))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("proxy_sample", [80, 81, 10**9])
def test_a_block_of_all_proxies_is_no_sampling(proxy_sample):
    embeddings, labels = batch()
    before = torch.get_rng_state()
    expected, value = make(proxy_sample=None), make(proxy_sample=proxy_sample)
    torch.set_rng_state(before)
    assert torch.equal(value(embeddings, labels), expected(embeddings, labels))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("backend", "option"),
    [("dense", {}), ("tiled", {"normalization": "log", "proxy_space": "projected"})],
    ids=str,
)
def test_torch_compile_keeps_one_graph_and_the_same_draws(backend, option):
    torch._dynamo.reset()
    loss = make(backend=backend, **option)
    embeddings, labels = batch()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for seed in (3, 4):
        expected = value_and_gradients(loss, embeddings, labels, seed)
        got = value_and_gradients(loss, embeddings, labels, seed, forward=compiled)
        for mine, reference in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, reference)


def test_the_operator_of_the_draw_keeps_torch_s_contract():
    utilities = ("test_schema", "test_faketensor")  # a draw has no gradient, and differs from one call to the next
    for labels in (torch.tensor(BATCH), torch.empty(0, dtype=torch.int64)):
        arguments = (labels, CLASSES, PER_CLASS, 3)
        outcome = torch.library.opcheck(torch.ops.pfml.subsample_anchors, arguments, test_utils=utilities)
        assert outcome == dict.fromkeys(utilities, "SUCCESS")


@pytest.mark.parametrize("normalization", ["none", "log"])
def test_training_with_a_block_reaches_the_energy_of_training_with_all(normalization):
    def train(proxy_sample):
        loss = make(20, normalization=normalization, proxy_sample=proxy_sample, proxy_attraction=False, alpha=2.0)
        torch.manual_seed(0)
        points, labels = torch.randn(40, 8, dtype=torch.float64, requires_grad=True), torch.arange(40) % 20
        optimizer = torch.optim.Adam([{"params": [points], "lr": 0.02}, *loss.param_groups(lr=0.05)])
        start = loss.eval()(points, labels).item()
        loss.train()
        for step in range(60):
            rows = torch.randperm(40, generator=torch.Generator().manual_seed(step))[:16]
            optimizer.zero_grad()
            loss(points[rows], labels[rows]).backward()
            optimizer.step()
        return start, loss.eval()(points, labels).item()

    start, exact = train(None)
    _, sampled = train(12)
    assert exact < start
    assert start - sampled > 0.9 * (start - exact)


def test_a_stored_loss_may_have_another_block_and_the_block_is_printed():
    loss = make()
    loss.load_state_dict(make(proxy_sample=None).state_dict())
    make(proxy_sample=None).load_state_dict(loss.state_dict())
    old = make(proxy_sample=None)
    old.hyperparameters = lambda: {k: v for k, v in make().hyperparameters().items() if k != "proxy_sample"}
    loss.load_state_dict(old.state_dict())  # of a time when there was no such option
    assert loss.proxy_sample == 15
    assert "proxy_sample=15" in repr(loss)


def test_the_block_is_an_option_of_every_method_of_ours():
    for name in ("pfml", "pfml-log", "cpml"):
        assert create_loss(LossConfig(name, {"proxy_sample": 4}), 3, 8).proxy_sample == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"proxy_sample": 0}, "proxy_sample must be None or an integer >= 1, got 0"),
        ({"proxy_sample": 2.5}, "proxy_sample must be None or an integer >= 1, got 2.5"),
        ({"proxy_sample": True}, "proxy_sample must be None or an integer >= 1, got True"),
        ({"proxies_per_class": 0}, "proxy_sample needs proxies, and this loss has proxies_per_class=0"),
        ({"proxy_attraction": False, "proxy_repulsion": False}, "switch proxy_attraction or proxy_repulsion on"),
        ({"normalization": "anchor"}, "in normalization='anchor' only samples are"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_blocks_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_a_wrong_label_is_named_before_anything_is_drawn():
    embeddings, labels = batch()
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 40\), got 40 at index 2"):
        make()(embeddings, labels.index_fill(0, torch.tensor(2), 40))


MANY = """
import torch, pfml
torch.manual_seed(0)
rows, dim = 100_000, 64
loss = pfml.PotentialFieldLoss(rows, dim, proxies_per_class=1, backend="tiled", normalization="{normalization}",
                               proxy_sample=1024)
embeddings = torch.randn(64, dim, requires_grad=True)
labels = torch.randint(0, rows, (64,))
pfml.PotentialFieldLoss(10, dim, proxy_sample=20)(embeddings, labels % 10).backward()  # load what is loaded lazily
with open("/proc/self/clear_refs", "w") as f: f.write("5")
status = lambda key: next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) * 1024
before = status("VmRSS")
loss(embeddings, labels).backward()
print((status("VmHWM") - before) / loss.proxies.nbytes)
assert loss.proxies.grad.abs().max() > 0
"""


@pytest.mark.slow
@pytest.mark.parametrize("normalization", ["none", "log"])
def test_memory_is_three_gradients_and_a_tile_whatever_the_block(normalization):
    """All pairs of a block of 1,024 and 100,000 proxies would be 16 gradients."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak of the resident set cannot be reset here")
    returning = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}  # what is freed goes back, so that the peak is ours
    code = MANY.format(normalization=normalization)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=returning)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 3.3  # the gradient, a working copy of the proxies, and a tile
