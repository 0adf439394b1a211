"""The suite of `test_backends` for the triton backend: on a GPU, or in Triton's interpreter on a CPU."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_backends import check_backend

from pfml.backends import BACKENDS, choose_backend, fused, split_precision
from pfml.backends.fused import unavailable
from pfml.energy import potential_energy
from pfml.field import PowerLaw
from pfml.superposition import Charges, Field, PairWeights
from states import FIELDS, WEIGHTS, State, Yukawa, energy_and_gradients, relative_error, tight_clusters

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHIPPED = [name for name in FIELDS if "user" not in name]
#: Charges of three classes in more than one tile; the interpreter's tiles are small (`split_precision.BLOCK`).
SMALL = {"num_samples": 5, "num_classes": 3, "per_class": 2}

pytestmark = [
    pytest.mark.skipif(not fused.INSTALLED, reason="needs the package triton"),
    pytest.mark.skipif(
        DEVICE == "cpu" and not split_precision.INTERPRETED, reason="needs a CUDA device or TRITON_INTERPRET=1"
    ),
    pytest.mark.filterwarnings("ignore:.*:RuntimeWarning"),  # the interpreter's NumPy, in branches not taken
    pytest.mark.usefixtures("quick_interpreter"),
]


@pytest.mark.parametrize("field", SHIPPED)
@pytest.mark.parametrize("spread", [1.0, 0.05] if DEVICE == "cuda" else [0.05])
def test_every_field_that_ships(field, spread):
    state = State(**SMALL, dim=17, spread=spread)
    check_backend("triton", state, FIELDS[field], PairWeights(), device=DEVICE)


#: The interpreter is slow. There "all" is `test_every_field_that_ships`, "uneven" has every weight in it, and "anchor"
#: weights pairs as "log" does.
WEIGHTED = [
    (field, weights)
    for field in ("wide repulsion", "log", "anchor")
    for weights in WEIGHTS
    if DEVICE == "cuda"
    or weights == "uneven"
    or (field != "anchor" and weights in ("no proxy pairs", "no sample pairs"))
]


@pytest.mark.parametrize(("field", "weights"), WEIGHTED)
def test_every_kind_of_pair_counts_by_its_weight(weights, field):
    state = State(**SMALL, dim=6, spread=0.4)
    check_backend("triton", state, FIELDS[field], WEIGHTS[weights], device=DEVICE)


@settings(
    max_examples=500 if DEVICE == "cuda" else 6,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=DEVICE == "cpu",
)
@given(
    num_samples=st.sampled_from([0, 1, 2, 3, *([17, 41, 130] if DEVICE == "cuda" else [9])]),
    num_classes=st.sampled_from([1, 2, 3, *([7, 13] if DEVICE == "cuda" else [])]),
    per_class=st.sampled_from([0, 1, 2, *([5] if DEVICE == "cuda" else [])]),
    dim=st.sampled_from([2, 3, 17, *([40, 65, 300] if DEVICE == "cuda" else [])]),
    spread=st.sampled_from([1.0, 0.5, 0.2, 0.05, 1e-3]),
    seed=st.integers(0, 10**6),
    field=st.sampled_from(SHIPPED),
    weights=st.sampled_from(sorted(WEIGHTS)),
    on_sphere=st.booleans(),
)
def test_awkward_sizes_and_crowded_states(
    num_samples, num_classes, per_class, dim, spread, seed, field, weights, on_sphere
):
    state = State(num_samples, num_classes, per_class, dim, spread, seed)
    check_backend("triton", state, FIELDS[field], WEIGHTS[weights], device=DEVICE, on_sphere=on_sphere)


@pytest.mark.parametrize("field", ["pfml", "log", "anchor", "cpml"] if DEVICE == "cuda" else ["pfml", "log"])
def test_collapsed_and_coincident_points_are_finite(field):
    state = State(**SMALL, dim=12)
    state.samples[:] = state.samples[0]
    state.proxies[:] = state.samples[0]
    energy, *gradients = energy_and_gradients(BACKENDS["triton"], state, FIELDS[field], PairWeights(), device=DEVICE)
    assert torch.isfinite(energy)
    assert all(gradient.abs().max() == 0 for gradient in gradients)
    state.proxies[::2] += 0.3
    check_backend("triton", state, FIELDS[field], PairWeights(), device=DEVICE, on_sphere=False)


@pytest.mark.parametrize("field", ["pfml", "wide repulsion", "log", "anchor"] if DEVICE == "cuda" else ["pfml", "log"])
def test_sorting_by_pivots_changes_nothing(monkeypatch, field):
    monkeypatch.setattr(fused, "SORTED_FROM", 0)
    monkeypatch.setattr(split_precision, "PIVOTS", 3)
    state = State(**SMALL, dim=10, spread=0.3)
    check_backend("triton", state, FIELDS[field], PairWeights(), device=DEVICE)


@pytest.mark.parametrize("field", ["pfml", "wide repulsion"])
@pytest.mark.parametrize(
    ("dim", "spread"), [(2, 0.2), (3, 0.2), (300, 0.05), *([(17, 0.05), (40, 0.05)] if DEVICE == "cuda" else [])]
)
@pytest.mark.parametrize("seed", range(3 if DEVICE == "cuda" else 1))
def test_a_single_close_pair_keeps_its_digits(field, dim, spread, seed):
    """Nothing averages out: that all terms of r^2 are those of the same rounded points is what counts here."""
    state = State(num_samples=0, num_classes=2, per_class=1, dim=dim, spread=spread, seed=seed)
    energies = [
        energy_and_gradients(BACKENDS[name], state, FIELDS[field], PairWeights(), **kwargs)[0]
        for name, kwargs in (("triton", {"device": DEVICE}), ("dense", {"dtype": torch.float64}))
    ]
    assert relative_error(*energies) < 5e-6


@pytest.mark.parametrize("field", SHIPPED if DEVICE == "cuda" else ["pfml"])
@pytest.mark.parametrize("dim", [1, 2, 16])
@pytest.mark.parametrize("radius", [1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3] if DEVICE == "cuda" else [1e-8, 1e-5])
def test_forces_in_tight_clusters_hold_down_to_where_positions_differ(field, dim, radius):
    size = {"num_samples": 40, "num_classes": 4, "per_class": 10, "clusters": 5}
    state = tight_clusters(radius, dim, **(size if DEVICE == "cuda" else {**SMALL, "clusters": 2}))
    check_backend("triton", state, FIELDS[field], PairWeights(), device=DEVICE, on_sphere=dim > 1)


def test_more_charges_than_can_be_numbered_are_refused(monkeypatch):
    monkeypatch.setattr(fused, "MOST_TILES", 0)
    state = State(**SMALL, dim=5)
    with pytest.raises(ValueError, match=r"takes up to .* charges, got .*: draw some of the proxies"):
        energy_and_gradients(BACKENDS["triton"], state, FIELDS["pfml"], PairWeights(), device=DEVICE)


@pytest.mark.parametrize("law", [PowerLaw(), PowerLaw(alpha=12.0)], ids=str)
@pytest.mark.parametrize("apart", [1e-12, 1e-25, 1e-35])
def test_a_pair_feels_its_full_force_as_long_as_float32_tells_it_apart(law, apart):
    """Neither the square of its distance nor its force over its distance need be numbers that float32 has."""
    state = State(num_samples=0, num_classes=2, per_class=1, dim=3)
    state.proxies = torch.tensor([[0.0, apart, 0.0], [2 * apart, 0.0, -apart]])
    check_backend("triton", state, Field(law), PairWeights(), device=DEVICE, on_sphere=False)
    state.proxies[:, 0] += 1.0  # as far from the origin as on the sphere, one coordinate apart
    check_backend("triton", state, Field(law), PairWeights(), device=DEVICE, on_sphere=False)


@pytest.mark.parametrize("field", ["pfml", "wide repulsion", "log", "cpml"] if DEVICE == "cuda" else ["pfml", "log"])
@pytest.mark.parametrize("spread", [1.0, 0.2, 0.01] if DEVICE == "cuda" else [0.01])
def test_drawn_proxies_stand_for_all(field, spread):
    state = State(**SMALL, dim=11, spread=spread).drawn(4)
    check_backend("triton", state, FIELDS[field], PairWeights(), device=DEVICE)


@pytest.mark.parametrize("spread", [1.0, 0.3] if DEVICE == "cuda" else [0.3])
@pytest.mark.parametrize(
    "field", [Field(PowerLaw(alpha=16), "anchor"), Field(PowerLaw(alpha=6, delta=0.6, delta_rep=1.2), "log")], ids=str
)
def test_pulls_of_very_different_sizes(field, spread):
    state = State(**SMALL, dim=17, spread=spread)
    check_backend("triton", state, field, PairWeights(), device=DEVICE)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_points_of_any_length(scale):
    state = State(**SMALL, dim=17, spread=0.5)
    state.samples *= scale
    state.proxies *= scale
    state.proxies[0] *= 30
    field = Field(PowerLaw(delta=0.5 * scale))
    check_backend("triton", state, field, PairWeights(), device=DEVICE, on_sphere=False)


def test_equal_inputs_give_equal_bits():
    size = {"num_samples": 30, "num_classes": 6, "per_class": 4} if DEVICE == "cuda" else SMALL
    state = State(**size, dim=40, spread=0.3)
    first, second = (
        energy_and_gradients(BACKENDS["triton"], state, FIELDS["wide repulsion"], PairWeights(), device=DEVICE)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_labels_of_any_layout():
    points = torch.randn(8, 5, device=DEVICE)
    table = torch.tensor([[0, 9], [0, 9], [1, 9], [1, 8], [2, 8], [2, 8], [3, 7], [3, 7]], device=DEVICE)
    for labels in (table[:, 0], table[:, 1], table[:1, 0].expand(8), table[:, 0].to(torch.int16)):
        energies = [
            potential_energy(points, labels, law=PowerLaw(delta=2.0), form="shifted", backend=backend).item()
            for backend in ("triton", "tiled")
        ]
        assert energies[0] == pytest.approx(energies[1], rel=1e-4, abs=1e-4)


def test_the_literal_energy_is_there_for_its_users_too():
    points, labels = torch.randn(8, 5, device=DEVICE), torch.arange(8, device=DEVICE) % 3
    literal = potential_energy(points, labels, backend="triton")
    torch.testing.assert_close(literal, potential_energy(points, labels, backend="tiled"))


def test_what_it_does_not_know_is_refused_by_name():
    points = torch.randn(4, 8, device=DEVICE)
    labels = torch.tensor([0, 0, 1, 1], device=DEVICE)
    charges = Charges(points, labels), Charges(points[:0], labels[:0])
    with pytest.raises(ValueError, match="not Yukawa: use backend='tiled'"):
        BACKENDS["triton"](*charges, Field(Yukawa()), PairWeights())
    double = Charges(points.double(), labels), Charges(points[:0].double(), labels[:0])
    with pytest.raises(ValueError, match="computes in float32, got torch.float64"):
        BACKENDS["triton"](*double, Field(PowerLaw()), PairWeights())
    assert "up to 2048 dimensions" in unavailable(points.device, torch.float32, 4096, Field(PowerLaw()))


@pytest.mark.gpu
def test_auto_takes_it_on_a_gpu_where_it_can():
    points = torch.empty(0, 8, device="cuda")
    assert choose_backend(10, points, Field(PowerLaw())) == "triton"
    assert choose_backend(10, points.double(), Field(PowerLaw())) == "tiled"
    assert choose_backend(10, points, Field(Yukawa())) == "tiled"


@pytest.mark.gpu
@pytest.mark.parametrize("field", ["pfml", "log", "anchor"])
def test_a_replayed_step_is_the_same_step(field):
    state = State(num_samples=40, num_classes=8, per_class=6, dim=24, spread=0.3)
    proxies = state.proxies.cuda().requires_grad_()
    labels, proxy_labels = state.sample_labels.cuda(), state.proxy_labels.cuda()
    replayed = [each.graphs for each in (fused._operator.compute_energy, fused._operator.compute_gradient)]
    for graphs in replayed:
        graphs.recordings.clear()
    for step in range(8):
        samples = (state.samples + 0.01 * step).float().cuda().requires_grad_()
        with torch.no_grad():
            proxies.mul_(1.01)
        charges = Charges(samples, labels, True), Charges(proxies, proxy_labels, True)
        got = torch.autograd.grad(BACKENDS["triton"](*charges, FIELDS[field], PairWeights()), [samples, proxies])
        expected = torch.autograd.grad(BACKENDS["tiled"](*charges, FIELDS[field], PairWeights()), [samples, proxies])
        for mine, reference in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-3, atol=1e-4 * reference.norm().item())
    assert [len(graphs.recordings) for graphs in replayed] == ([1, 0] if field == "pfml" else [1, 1])


@pytest.mark.gpu
def test_a_step_can_be_captured_in_a_cuda_graph():
    points = torch.randn(64, 32, device="cuda", requires_grad=True)
    labels = torch.arange(64, device="cuda") % 8
    none = Charges(points[:0].detach(), labels[:0])
    field = Field(PowerLaw(delta=0.9))

    def step():
        energy = BACKENDS["triton"](Charges(points, labels), none, field, PairWeights())
        return energy, *torch.autograd.grad(energy, points)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    for mine, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-6)


def test_a_law_of_ones_own_is_one_row_of_a_table(monkeypatch):
    from yukawa_kernel import gpu_yukawa

    from pfml.backends.kernels.laws import GPU_LAWS

    state = State(**SMALL, dim=17, spread=0.4)
    assert "knows the laws that ship" in unavailable(torch.device(DEVICE), torch.float32, 17, Field(Yukawa()))
    monkeypatch.setitem(GPU_LAWS, Yukawa, gpu_yukawa)
    check_backend("triton", state, Field(Yukawa()), PairWeights(), device=DEVICE)
