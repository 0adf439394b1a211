"""The suite of `test_backends` for the triton backend: on a GPU, or in Triton's interpreter on a CPU."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_backends import check_backend

from pfml.backends import BACKENDS, fused
from pfml.backends.fused import unavailable
from pfml.field import PowerLaw
from pfml.superposition import Charges, Field, PairWeights
from states import FIELDS, WEIGHTS, State, Yukawa, energy_and_gradients

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHIPPED = [name for name in FIELDS if "user" not in name]

pytestmark = [
    pytest.mark.skipif(not fused.INSTALLED, reason="needs the package triton"),
    pytest.mark.skipif(DEVICE == "cpu" and not fused.INTERPRETED, reason="needs a CUDA device or TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:.*:RuntimeWarning"),  # the interpreter's NumPy, in branches not taken
]


@pytest.mark.parametrize("field", SHIPPED)
@pytest.mark.parametrize("spread", [1.0, 0.05])
def test_every_field_that_ships(field, spread):
    state = State(num_samples=12, num_classes=4, per_class=2, dim=17, spread=spread)
    check_backend("triton", state, FIELDS[field], PairWeights(), device=DEVICE)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("field", ["wide repulsion", "log", "anchor"])
def test_every_kind_of_pair_counts_by_its_weight(weights, field):
    state = State(num_samples=10, num_classes=3, per_class=2, dim=6, spread=0.4)
    check_backend("triton", state, FIELDS[field], WEIGHTS[weights], device=DEVICE)


@settings(
    max_examples=500 if DEVICE == "cuda" else 10,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=DEVICE == "cpu",
)
@given(
    num_samples=st.sampled_from([0, 1, 2, 3, 17, *([41, 130] if DEVICE == "cuda" else [])]),
    num_classes=st.sampled_from([1, 2, 3, 7, 13]),
    per_class=st.sampled_from([0, 1, 2, 5]),
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


@pytest.mark.parametrize("field", ["pfml", "log", "anchor", "cpml"])
def test_collapsed_and_coincident_points_are_finite(field):
    state = State(num_samples=10, num_classes=5, per_class=2, dim=12)
    state.samples[:] = state.samples[0]
    state.proxies[:] = state.samples[0]
    energy, *gradients = energy_and_gradients(BACKENDS["triton"], state, FIELDS[field], PairWeights(), device=DEVICE)
    assert torch.isfinite(energy)
    assert all(gradient.abs().max() == 0 for gradient in gradients)
    state.proxies[::2] += 0.3
    check_backend("triton", state, FIELDS[field], PairWeights(), device=DEVICE, on_sphere=False)


@pytest.mark.parametrize("field", ["pfml", "wide repulsion", "log", "anchor"])
def test_sorting_by_pivots_changes_nothing(monkeypatch, field):
    monkeypatch.setattr(fused, "SORTED_FROM", 0)
    monkeypatch.setattr(fused, "PIVOTS", 3)
    state = State(num_samples=12, num_classes=4, per_class=3, dim=10, spread=0.3)
    check_backend("triton", state, FIELDS[field], PairWeights(), device=DEVICE)


def test_the_screen_bounds_what_rounding_to_bfloat16_can_do():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        a, b = torch.randn(2, 64, generator=generator, dtype=torch.float64)
        rounded = (a.bfloat16().double() * b.bfloat16().double()).sum()
        bound = fused.SCREEN_MARGIN * (a.square().sum() + b.square().sum())
        assert 2 * (rounded - a @ b).abs() < bound
    # the worst case: every component rounded the same way, by half a unit in the last place
    worst = torch.full((64,), 1 + 2**-8 - 2**-20, dtype=torch.float64)
    rounded = worst.bfloat16().double()
    assert 2 * (rounded.square().sum() - worst.square().sum()).abs() < fused.SCREEN_MARGIN * 2 * worst.square().sum()


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
