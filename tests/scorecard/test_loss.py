"""Reliability tests 1 to 22: the stated behavior, on every backend and dtype."""

import math
import os
import subprocess
import sys
import warnings

import pytest
import torch

from oracle import potential_energy as loop_energy
from pfml import CollapseWarning, PotentialFieldLoss, PowerLaw, potential_energy
from pfml.backends import BACKENDS
from pfml.field import power_law
from pfml.sphere import unit
from pfml.superposition import Charges, Field, PairWeights
from states import EVERYWHERE, FIELDS, State, energy_and_gradients, relative_error

C, M, D = 6, 3, 10
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

pytestmark = [pytest.mark.parametrize("backend", EVERYWHERE), pytest.mark.parametrize("device", DEVICES)]


@pytest.fixture
def make(backend, device):
    def make(num_classes=C, embedding_dim=D, **options):
        torch.manual_seed(0)
        options = {"proxies_per_class": M, "backend": backend, **options}
        return PotentialFieldLoss(num_classes, embedding_dim, **options).to(device)

    return make


def batch(device, n=12, num_classes=C, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    embeddings = torch.randn(n, D, generator=generator).to(device, dtype).requires_grad_()
    return embeddings, (torch.arange(n) % num_classes).to(device)


def literal(loss, embeddings, labels):
    """Eq. 6 by loops, for the loss's charges."""
    points = torch.cat([unit(embeddings.detach().double()), loss.proxy_points().double().flatten(0, 1)])
    return loop_energy(points.tolist(), torch.cat([labels, loss.proxy_labels]).tolist())


@pytest.mark.parametrize("normalization", ["none", "log", "anchor"])
def test_01_in_an_empty_batch_only_proxies_feel_a_force(make, device, normalization):
    loss = make(normalization=normalization)
    embeddings = torch.empty(0, D, device=device, requires_grad=True)
    value = loss(embeddings, torch.empty(0, dtype=torch.int64, device=device))
    assert torch.isfinite(value)
    value.backward()
    assert embeddings.grad.shape == (0, D)
    if normalization != "anchor":  # there, samples are the only anchors
        assert loss.proxies.grad.abs().max() > 0
    nothing = make(proxies_per_class=0)(embeddings, torch.empty(0, dtype=torch.int64, device=device))
    assert nothing.item() == 0
    nothing.backward()


@pytest.mark.parametrize("normalization", ["none", "log", "anchor"])
def test_02_a_single_sample_is_finite(make, device, normalization):
    for proxies_per_class in (M, 0):
        loss = make(normalization=normalization, proxies_per_class=proxies_per_class)
        embeddings, labels = batch(device, n=1)
        value = loss(embeddings, labels)
        value.backward()
        assert torch.isfinite(value)
        assert torch.isfinite(embeddings.grad).all()


@pytest.mark.parametrize("labels", [[2] * C, list(range(C))], ids=["single class", "all distinct"])
def test_03_single_class_and_all_distinct_batches_equal_the_oracle(make, device, labels):
    loss = make()
    embeddings, _ = batch(device, n=C)
    labels = torch.tensor(labels, device=device)
    got = loss.literal_energy(embeddings, labels).item()
    assert got == pytest.approx(literal(loss, embeddings, labels), rel=1e-6)
    shift = loss.literal_energy(embeddings, labels).item() - loss(embeddings.double(), labels).item()
    moved = embeddings.detach() + 0.1
    again = loss.literal_energy(moved, labels).item() - loss(moved.double(), labels).item()
    assert shift == pytest.approx(again, rel=1e-9)  # the training form differs by a constant


@pytest.mark.parametrize("bad", [-1, C, 10**9])
def test_04_labels_out_of_range_are_named_with_their_index(make, device, bad):
    embeddings, labels = batch(device)
    labels[7] = bad
    with pytest.raises(ValueError, match=rf"labels must lie in \[0, {C}\), got {bad} at index 7"):
        make()(embeddings, labels)


def test_05_labels_of_wrong_shape_or_length_or_none_are_refused(make, device):
    embeddings, labels = batch(device)
    for bad in (labels[:-1], labels[:, None], labels[0], None):
        with pytest.raises(ValueError, match="labels must be"):
            make()(embeddings, bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool])
def test_06_float_and_bool_labels_are_type_errors(make, device, dtype):
    embeddings, labels = batch(device)
    with pytest.raises(TypeError, match="labels must be integers"):
        make()(embeddings, labels.to(dtype))
    with pytest.raises(TypeError, match="labels must be a tensor, got list; torch.as_tensor makes one of integers"):
        make()(embeddings, labels.tolist())


def test_06_embeddings_of_8_bits_are_type_errors(make, device):
    embeddings, labels = batch(device)
    with pytest.raises(TypeError, match="embeddings must be of 16 bits or more, got torch.float8_e4m3fn"):
        make()(embeddings.to(torch.float8_e4m3fn), labels)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8, torch.int64])
def test_06_integer_labels_of_every_width_work(make, device, dtype):
    embeddings, labels = batch(device)
    assert torch.equal(make()(embeddings, labels.to(dtype)), make()(embeddings, labels))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_07_nan_and_inf_are_named_by_row_before_any_update(make, device, bad, dtype):
    embeddings, labels = batch(device, dtype=dtype)
    with torch.no_grad():
        embeddings[3, 4] = embeddings[8, 0] = bad
    loss = make()
    with pytest.raises(ValueError, match="embeddings must be finite, got NaN or Inf in 2 rows: 3, 8"):
        loss(embeddings, labels)
    assert loss.proxies.grad is None
    with torch.no_grad():
        loss.proxies[2, 0, 0] = bad
    with pytest.raises(ValueError, match="proxies must be finite, got NaN or Inf in 1 classes: 2"):
        loss(batch(device)[0], labels)


@pytest.mark.parametrize("normalization", ["none", "log", "anchor"])
def test_08_a_zero_vector_is_defined_and_finite(make, device, normalization):
    embeddings, labels = batch(device)
    with torch.no_grad():
        embeddings[2] = 0
    loss = make(normalization=normalization)
    with torch.no_grad():
        loss.proxies[1, 1] = 0
    value = loss(embeddings, labels)
    value.backward()
    for tensor in (value, embeddings.grad, loss.proxies.grad):
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_09_coincident_points_of_different_classes_have_a_bounded_force_and_separate(backend, device, dtype):
    cap = 2 * 3 / (0.2 / 20) ** 4  # Eq. 6 counts the pair twice
    at = torch.zeros(2, 3, dtype=dtype, device=device)
    labels = torch.tensor([0, 1], device=device)

    def energy(points):
        return potential_energy(points, labels, form="shifted", backend=backend)

    assert torch.isfinite(energy(at))
    at[1, 0] = 1e-6
    at.requires_grad_()
    for _ in range(60):
        (gradient,) = torch.autograd.grad(energy(at), at)
        sizes = gradient.norm(dim=1, keepdim=True)
        assert sizes.max() <= cap * (1 + 1e-5)
        with torch.no_grad():
            at -= 0.005 * gradient / sizes.clamp_min(1e-9)
    assert (at[1] - at[0]).norm() >= 0.2  # out of each other's reach


@pytest.mark.parametrize("normalization", ["none", "log", "anchor"])
def test_10_total_collapse_is_finite_with_one_warning(make, device, normalization):
    loss = make(normalization=normalization)
    embeddings = torch.ones(12, D, device=device, requires_grad=True)
    with torch.no_grad():
        loss.proxies.fill_(1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = loss(embeddings, batch(device)[1])
        value.backward()
    assert [w.category for w in caught] == [CollapseWarning]
    assert "the model has collapsed" in str(caught[0].message)
    for tensor in (value, embeddings.grad, loss.proxies.grad):
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("same_class", [True, False])
def test_11_forces_are_right_at_every_distance_from_1e_8_to_2(backend, device, same_class):
    law = PowerLaw()
    labels = torch.tensor([0, 0 if same_class else 1], device=device)
    for r in torch.logspace(-8, math.log10(2), 40, dtype=torch.float64).tolist():
        points = torch.zeros(2, 16, device=device)
        points[0, 3] = r
        exact = (points[0] - points[1]).double().norm().item()
        moving = points.clone().requires_grad_()
        energy = potential_energy(moving, labels, form="shifted", backend=backend)
        (gradient,) = torch.autograd.grad(energy, moving)
        at = torch.tensor(exact, dtype=torch.float64)
        pair = Field(law).own_pair if same_class else Field(law).other_pair
        acts = pair.start <= exact < pair.stop
        force = 2 * pair.slope(at).item() * acts
        assert gradient[0, 3].item() == pytest.approx(force, rel=1e-5)
        assert energy.item() == pytest.approx(
            2 * pair.potential(at).item() * acts, rel=1e-5, abs=1e-5 * abs(pair.offset)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("relation", "labels"), [("same", [0, 0]), ("different", [0, 1])])
def test_12_around_delta_energies_agree_and_the_force_is_one_sided(backend, device, dtype, relation, labels):
    def energy_and_force(r):
        points = torch.zeros(2, 4, dtype=dtype, device=device)
        points[0, 0] = r
        points.requires_grad_()
        energy = potential_energy(
            points, torch.tensor(labels, device=device), law=PowerLaw(delta=0.25), form="shifted", backend=backend
        )
        return energy.item(), torch.autograd.grad(energy, points)[0][0, 0].item()

    delta, ulp = 0.25, 0.25 * torch.finfo(dtype).eps
    force = 2 * 3 / delta**4 * (1 if relation == "same" else -1)
    inside, outside = (0.0, force) if relation == "same" else (force, 0.0)
    for steps in (-4, -1, 0, 1, 4):
        energy, got = energy_and_force(delta + steps * ulp)
        assert abs(energy) < 100 * torch.finfo(dtype).eps * delta**-3  # no jump in the energy
        if abs(steps) == 1:  # the square root in r may round to delta
            assert min(abs(got - inside), abs(got - outside)) < 1e-4 * abs(force)
        else:  # delta itself counts as outside, as in Eqs. 1 and 2
            assert got == pytest.approx(inside if steps < 0 else outside, rel=1e-4)


@pytest.mark.filterwarnings("ignore:alpha=0")
@pytest.mark.parametrize(("alpha", "delta"), [(0.0, 0.2), (3.0, 0.2), (6.0, 0.1), (6.0, 0.35)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-2), (torch.bfloat16, 5e-2)])
def test_13_half_precision_inputs_do_not_overflow(make, device, alpha, delta, dtype, tolerance):
    loss = make(alpha=alpha, delta=delta)
    embeddings, labels = batch(device)
    exact = make(alpha=alpha, delta=delta).double()(embeddings.double(), labels)
    rounded = embeddings.detach().to(dtype).requires_grad_()
    value = loss(rounded, labels)
    value.backward()
    assert relative_error(value.detach().double(), exact.detach()) < tolerance
    expected = torch.autograd.grad(exact, embeddings)[0]
    assert torch.isfinite(rounded.grad).all()
    assert relative_error(rounded.grad.float(), expected) < tolerance
    assert torch.isfinite(loss.proxies.grad).all()
    crowded = make(alpha=alpha, delta=delta)
    with torch.no_grad():  # samples on proxies of another class: the strongest repulsion there is
        crowded.proxies[0, 0] = crowded.proxies[1, 0]
    assert torch.isfinite(crowded(rounded, labels))


def test_14_a_hundred_steps_of_autocast_and_grad_scaler_keep_proxies_in_float32(make, device):
    torch.manual_seed(0)
    model = torch.nn.Linear(D, D).to(device)
    loss = make()
    images, labels = torch.randn(24, D, device=device), (torch.arange(24) % C).to(device)
    optimizer = torch.optim.AdamW([{"params": model.parameters(), "lr": 1e-3}, *loss.param_groups(lr=1e-2)])
    scaler = torch.amp.GradScaler(device)
    before, first = loss.proxies.detach().clone(), loss(model(images), labels).item()
    for _ in range(100):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            value = loss(model(images), labels)
        assert torch.isfinite(value)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
    assert loss.proxies.dtype == torch.float32
    assert torch.isfinite(loss.proxies).all()
    assert not torch.equal(before, loss.proxies)
    assert loss(model(images), labels).item() < first


@pytest.mark.parametrize("size", [1e20, 1e-25])
def test_15_huge_and_tiny_inputs_keep_their_gradient(make, device, size):
    embeddings, labels = batch(device)
    scaled = (embeddings.detach() * size).requires_grad_()
    loss = make()
    value = loss(scaled, labels)
    value.backward()
    torch.testing.assert_close(value, loss(embeddings, labels))
    assert torch.isfinite(scaled.grad).all()
    (expected,) = torch.autograd.grad(loss(embeddings, labels), embeddings)
    assert relative_error(scaled.grad.double() * size, expected.double()) < 1e-4


def test_16_no_classes_is_an_error_and_one_class_works(make, device):
    with pytest.raises(ValueError, match="num_classes must be an integer >= 1, got 0"):
        make(num_classes=0)
    loss = make(num_classes=1)
    embeddings, _ = batch(device)
    value = loss(embeddings, torch.zeros(12, dtype=torch.int64, device=device))
    value.backward()
    assert torch.isfinite(value)
    assert embeddings.grad.abs().max() > 0


MILLION = """
import torch, pfml
from pfml.backends import operator, sweep, tile_groups
torch.manual_seed(0)
rows, dim = {rows}, 64
sweep.TILE_PAIRS["cpu"] = sweep.TILE_PAIRS["cpu"] * rows // 1_000_000
operator.KEPT_GRADIENT_BYTES["cpu"] = operator.KEPT_GRADIENT_BYTES["cpu"] * rows // 1_000_000
tile_groups.PREPARED_BYTES = tile_groups.PREPARED_BYTES * rows // 1_000_000
loss = pfml.PotentialFieldLoss(rows, dim, proxies_per_class=1, proxy_repulsion=False, backend="tiled",
                               normalization="{normalization}", alpha=3.0)
embeddings = torch.randn(64, dim, requires_grad=True)
labels = torch.randint(0, rows, (64,))
pfml.PotentialFieldLoss(10, dim)(embeddings, labels % 10).backward()  # load everything that is loaded lazily
loss.proxies.grad = torch.zeros_like(loss.proxies); loss.proxies.grad = None
with open("/proc/self/clear_refs", "w") as f: f.write("5")
status = lambda key: next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) * 1024
before = status("VmRSS")
loss(embeddings, labels).backward()
print((status("VmHWM") - before) / loss.proxies.nbytes)
assert loss.proxies.grad.abs().max() > 0
"""


#: A fifth of the classes, with a fifth of every bound on memory, shows the same in a fifth of the time.
@pytest.mark.parametrize(
    ("rows", "normalization"),
    [
        (200_000, "none"),
        pytest.param(1_000_000, "none", marks=pytest.mark.slow),
        pytest.param(1_000_000, "log", marks=pytest.mark.slow),
    ],
)
def test_17_a_million_classes_need_little_more_than_the_gradient(backend, device, rows, normalization):
    if backend == "dense" or device == "cuda":
        pytest.skip("bounded memory is what the tiled backend is for; measured by the CPU's resident set")
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak of the resident set cannot be reset here")
    code = MILLION.format(rows=rows, normalization=normalization)
    returning = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}  # what is freed goes back, so that the peak is ours
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=returning)
    assert result.returncode == 0, result.stderr
    tiles = 64 * 2**20 / (1_000_000 * 64 * 4)
    assert float(result.stdout) < 1.2 + tiles


def test_18_embeddings_of_wrong_shape_or_type_are_refused_with_both_sizes(make, device):
    embeddings, labels = batch(device)
    for bad, got in (
        (embeddings[:, :-1], rf"\(12, {D - 1}\)"),
        (embeddings[None], rf"\(1, 12, {D}\)"),
        (embeddings[0], rf"\({D},\)"),
    ):
        with pytest.raises(ValueError, match=rf"embeddings must be \(batch, {D}\), got shape {got}"):
            make()(bad, labels)
    with pytest.raises(ValueError, match=f"embeddings must be floating-point of width {D}, got torch.int64"):
        make()(embeddings.long(), labels)


@pytest.mark.parametrize("normalization", ["none", "log", "anchor"])
def test_19_gradcheck_in_float64_passes_and_second_order_works_or_says_that_it_does_not(
    make, device, backend, normalization
):
    loss = make(3, 4, normalization=normalization, proxies_per_class=1).double()
    embeddings, labels = batch(device, n=5, num_classes=3, dtype=torch.float64)
    embeddings = embeddings.detach()[:, :4].requires_grad_()

    def energy(points, proxies):
        return torch.func.functional_call(loss, {"proxies": proxies}, (points, labels))

    assert torch.autograd.gradcheck(energy, (embeddings, loss.proxies), eps=1e-6, atol=1e-5, nondet_tol=1e-8)
    (gradient,) = torch.autograd.grad(loss(embeddings, labels), embeddings, create_graph=True)
    try:
        (second,) = torch.autograd.grad(gradient.square().sum(), embeddings)
        assert backend == "dense"
        assert torch.isfinite(second).all()
    except RuntimeError as error:  # of the tiled backend, and of torch's cdist before 2.15 or so
        expected = "'_cdist_backward' is not implemented" if backend == "dense" else "can be differentiated once only"
        assert expected in str(error)


# 20, every backend against the dense reference, is test_agreement.py


def rotation(dim, device):
    matrix = torch.randn(dim, dim, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return torch.linalg.qr(matrix)[0].to(device)


@pytest.mark.parametrize("change", ["permutation", "rotation", "translation", "renaming"])
def test_21_the_field_does_not_change_under(backend, device, change):
    state = State(num_samples=30, num_classes=C, per_class=5, dim=D, spread=0.5)
    points = torch.cat([state.samples, state.proxies]).to(device).double()
    labels = torch.cat([state.sample_labels, state.proxy_labels]).to(device)
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(5)).to(device)
    names = torch.randperm(C, generator=torch.Generator().manual_seed(6)).to(device)
    changed, new_labels = {
        "permutation": (points[order], labels[order]),
        "rotation": (points @ rotation(D, device), labels),
        "translation": (points + 0.1, labels),
        "renaming": (points, names[labels]),
    }[change]

    def energy_and_forces(at, classes):
        at = at.float().requires_grad_()
        law = PowerLaw(delta=0.5, delta_rep=0.7)
        energy = potential_energy(at, classes, law=law, form="shifted", backend=backend)
        return energy.detach(), torch.autograd.grad(energy, at)[0]

    energy, gradient = energy_and_forces(points, labels)
    new_energy, new_gradient = energy_and_forces(changed, new_labels)
    expected = {"permutation": lambda g: g[order], "rotation": lambda g: g @ rotation(D, device).float()}
    assert relative_error(new_energy, energy) < 1e-6
    assert relative_error(new_gradient, expected.get(change, lambda g: g)(gradient)) < 1e-5


def test_22_the_same_seed_twice_is_bit_equal(make, device):
    def train():
        loss = make()
        torch.manual_seed(3)
        model = torch.nn.Linear(D, D).to(device)
        optimizer = torch.optim.AdamW([{"params": model.parameters()}, *loss.param_groups(lr=1e-2)])
        images, labels = torch.randn(24, D, device=device), (torch.arange(24) % C).to(device)
        for _ in range(5):
            optimizer.zero_grad()
            loss(model(images), labels).backward()
            optimizer.step()
        return loss.proxies.detach(), model.weight.detach()

    torch.use_deterministic_algorithms(device == "cuda")
    try:
        first, second = train(), train()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_every_field_of_the_suite_is_finite_in_every_scorecard_state(backend, device):
    """Crowded, coincident and antipodal charges under every law that ships."""
    for field in FIELDS.values():
        for spread in (1.0, 1e-3):
            state = State(num_samples=8, num_classes=3, per_class=2, dim=5, spread=spread)
            state.proxies[0] = state.samples[0]
            state.proxies[1] = -state.samples[0]
            results = energy_and_gradients(BACKENDS[backend], state, field, PairWeights(), device=device)
            assert all(torch.isfinite(result).all() for result in results)
    assert power_law() == PowerLaw()
    assert Charges(state.samples, state.sample_labels).on_sphere is False
