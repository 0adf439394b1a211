from dataclasses import dataclass

import pytest
import torch

from oracle import anchor_energies as loop_anchor_energies
from oracle import class_potential as loop_class_potential
from oracle import forces as loop_forces
from oracle import potential_energy as loop_energy
from pfml import PotentialFieldLoss, PowerLaw, class_potential, class_potentials, forces, potential_energy
from pfml.backends import BACKENDS
from pfml.field import LogarithmicLaw
from pfml.superposition import Charges, Field, PairWeights
from states import EVERYWHERE, State, Yukawa, relative_error, tight_clusters

LAW = {"delta": 0.3, "alpha": 2.5, "delta_rep": 0.4}


def crowd(spread=0.3):
    state = State(num_samples=10, num_classes=3, per_class=3, dim=4, spread=spread)
    return torch.cat([state.samples, state.proxies]), torch.cat([state.sample_labels, state.proxy_labels])


@pytest.mark.parametrize("backend", EVERYWHERE)
@pytest.mark.parametrize("spread", [1.0, 0.3])
def test_the_literal_energy_is_eq_6_of_the_loops(backend, spread):
    points, labels = crowd(spread)
    got = potential_energy(points, labels, law=PowerLaw(**LAW), backend=backend)
    assert got.dtype == torch.float64
    assert got.item() == pytest.approx(loop_energy(points.tolist(), labels.tolist(), **LAW), rel=1e-12)


@pytest.mark.parametrize("backend", EVERYWHERE)
@pytest.mark.parametrize("r", [0.05, 0.01, 0.005, 1e-5, 1e-20])
def test_the_literal_energy_is_eq_6_at_every_distance(backend, r):
    points, labels = torch.tensor([[0.0, 0.0], [0.6 * r, 0.8 * r]], dtype=torch.float64), torch.tensor([0, 1])
    got = potential_energy(points, labels, backend=backend).item()
    assert got == pytest.approx(loop_energy(points.tolist(), [0, 1]), rel=1e-12)
    assert got == pytest.approx(2 * r**-3 - 2 * 0.2**-3, rel=1e-12)  # two pairs, and each point's own well


@pytest.mark.parametrize("backend", EVERYWHERE)
@pytest.mark.parametrize("radius", [1e-10, 1e-4])
def test_the_literal_energy_of_tight_clusters_is_that_of_the_loops(backend, radius):
    state = tight_clusters(radius, 3, torch.float64, num_samples=60, per_class=0, clusters=3)
    points, labels = state.samples.requires_grad_(), state.sample_labels
    energy = potential_energy(points, labels, law=PowerLaw(**LAW), backend=backend)
    assert energy.item() == pytest.approx(loop_energy(points.tolist(), labels.tolist(), **LAW), rel=1e-12)
    (gradient,) = torch.autograd.grad(energy, points)
    expected = loop_forces(points.tolist(), labels.tolist(), delta=0.3, alpha=2.5, core=0.0, delta_rep=0.4)
    assert relative_error(gradient, -torch.tensor(expected, dtype=torch.float64)) < 1e-12


@pytest.mark.parametrize("backend", EVERYWHERE)
@pytest.mark.parametrize("law", [PowerLaw(), PowerLaw(alpha=30.0), LogarithmicLaw()], ids=str)
def test_two_classes_in_one_place_have_the_infinite_energy_of_eq_2(backend, law):
    points = torch.tensor([[0.1, 0.2], [0.1, 0.2], [0.1, 0.2], [0.5, 0.1]], dtype=torch.float64, requires_grad=True)
    energy = potential_energy(points, torch.tensor([0, 0, 1, 0]), law=law, backend=backend)
    assert energy.item() == float("inf")
    (gradient,) = torch.autograd.grad(energy, points)
    assert torch.isfinite(gradient).all()  # without a direction, there is no force
    assert torch.isfinite(potential_energy(points, torch.tensor([0, 0, 0, 0]), law=law, backend=backend))
    assert torch.isfinite(potential_energy(points.float(), torch.tensor([0, 0, 1, 0]), form="shifted", backend=backend))


def test_a_law_that_attracts_a_point_to_itself_without_bound_has_no_literal_energy():
    @dataclass(frozen=True)
    class Coulomb(Yukawa):
        core: float = 0.1

        def attraction(self, r):
            return -1 / r

        def attraction_slope(self, r):
            return r**-2

    points, labels = crowd()
    with pytest.raises(ValueError, match="attraction must be finite at r = 0, which Coulomb is not"):
        potential_energy(points, labels, law=Coulomb())
    assert torch.isfinite(potential_energy(points, labels, law=Coulomb(), form="shifted"))


def test_the_literal_energy_of_the_loss_is_eq_6_where_the_loss_ends_at_the_core():
    loss = PotentialFieldLoss(2, 2, proxies_per_class=0)
    points, labels = torch.tensor([[1.0, 0.0], [1.0, 0.005]], dtype=torch.float64), torch.tensor([0, 1])
    on_sphere = (points / points.norm(dim=1, keepdim=True)).tolist()
    assert loss.literal_energy(points, labels).item() == pytest.approx(loop_energy(on_sphere, [0, 1]), rel=1e-9)
    assert loss.literal_energy(points, labels) > 3 * loss(points, labels)


def test_the_class_potential_is_eqs_3_to_5_of_the_loops():
    points, labels = crowd()
    locations = torch.randn(7, 4, dtype=torch.float64)
    got = class_potentials(locations, points, labels, 3, law=PowerLaw(**LAW))
    for i, location in enumerate(locations.tolist()):
        for j in range(3):
            expected = loop_class_potential(j, location, points.tolist(), labels.tolist(), **LAW)
            assert got[i, j].item() == pytest.approx(expected, rel=1e-12)
    one = class_potential(locations, 1, points, labels, law=PowerLaw(**LAW))
    torch.testing.assert_close(one, got[:, 1])
    each = class_potential(locations, torch.tensor([0, 1, 2, 0, 1, 2, 0]), points, labels, law=PowerLaw(**LAW))
    torch.testing.assert_close(each, got[range(7), [0, 1, 2, 0, 1, 2, 0]])


def test_class_potentials_do_not_depend_on_how_they_are_cut(monkeypatch):
    points, labels = crowd()
    whole = class_potentials(points, points, labels, 3)
    monkeypatch.setattr("pfml.energy.DISTANCES_AT_ONCE", 40)
    torch.testing.assert_close(class_potentials(points, points, labels, 3), whole)
    assert class_potentials(points[:0], points, labels, 3).shape == (0, 3)


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_both_forms_have_the_gradient_of_the_literal_energy(backend):
    points, labels = crowd()
    points = points.double().requires_grad_()
    law = PowerLaw(**LAW)
    step = 1e-6
    expected = torch.zeros_like(points)
    for i in range(len(points)):
        for d in range(points.shape[1]):
            moved = [row[:] for row in points.tolist()]
            moved[i][d] += step
            up = loop_energy(moved, labels.tolist(), **LAW)
            moved[i][d] -= 2 * step
            expected[i, d] = (up - loop_energy(moved, labels.tolist(), **LAW)) / (2 * step)
    for form in ("literal", "shifted"):
        energy = potential_energy(points, labels, law=law, form=form, backend=backend)
        (gradient,) = torch.autograd.grad(energy, points)
        assert relative_error(gradient, expected) < 1e-6
    assert relative_error(forces(points, labels, law=law, backend=backend), -expected) < 1e-6


def test_the_force_on_a_point_is_twice_the_class_field_there():
    points, labels = crowd()
    points = points.double()
    for i in (0, 12):
        others = torch.arange(len(points)) != i
        at = points[i : i + 1].clone().requires_grad_()
        potential = class_potential(at, labels[i : i + 1], points[others], labels[others])
        (gradient,) = torch.autograd.grad(potential.sum(), at)
        torch.testing.assert_close(forces(points, labels)[i], -2 * gradient[0])


@pytest.mark.parametrize("normalization", ["log", "anchor"])
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_normalized_energies_are_those_of_the_loops(normalization, backend):
    state = State(num_samples=8, num_classes=3, per_class=2, dim=4, spread=0.6)
    field = Field(PowerLaw(delta=0.6, delta_rep=1.2, alpha=3.0), normalization)
    samples, proxies = state.charges(dtype=torch.float64)
    points = torch.cat([samples.points, proxies.points]).tolist()
    labels = torch.cat([samples.labels, proxies.labels]).tolist()
    expected = sum(loop_anchor_energies(points, labels, 8, normalization, delta=0.6, delta_rep=1.2, alpha=3.0))
    got = BACKENDS[backend](samples, proxies, field, PairWeights())
    assert got.item() == pytest.approx(expected, rel=1e-10)
    alone = potential_energy(
        torch.tensor(points, dtype=torch.float64),
        torch.tensor(labels),
        law=field.law,
        form="shifted",
        normalization=normalization,
        backend=backend,
    )
    everyone = loop_anchor_energies(points, labels, 14, normalization, delta=0.6, delta_rep=1.2, alpha=3.0)
    assert alone.item() == pytest.approx(sum(everyone), rel=1e-10)


def test_half_precision_points_are_computed_in_float32():
    points, labels = crowd()
    energy = potential_energy(points.half(), labels, form="shifted")
    assert energy.dtype == torch.float32
    torch.testing.assert_close(energy, potential_energy(points.half().float(), labels, form="shifted"))


def test_bad_arguments_are_named():
    points, labels = crowd()
    with pytest.raises(ValueError, match="form must be 'literal' or 'shifted', got 'raw'"):
        potential_energy(points, labels, form="raw")
    with pytest.raises(ValueError, match="takes no normalization, got 'log'"):
        potential_energy(points, labels, normalization="log")
    with pytest.raises(ValueError, match=r"backend must be 'auto' or one of .*, got 'cuda'"):
        potential_energy(points, labels, backend="cuda")
    with pytest.raises(ValueError, match=r"points must be \(n, D\), got shape \(4,\)"):
        potential_energy(points[0], labels)
    with pytest.raises(ValueError, match=r"labels must be \(19,\) like the points, got shape \(18,\)"):
        potential_energy(points, labels[1:])
    with pytest.raises(TypeError, match="labels must be integers"):
        class_potential(points, 0, points, labels.float())
    for call in (potential_energy, forces):
        with pytest.raises(TypeError, match="points must be a tensor, got ndarray"):
            call(points.numpy(), labels)
        with pytest.raises(TypeError, match="labels must be a tensor, got list"):
            call(points, labels.tolist())
    with pytest.raises(TypeError, match=r"classes must be integers, got torch\.float32"):
        class_potential(points, 0.5, points, labels)
    with pytest.raises(ValueError, match=r"classes must be one, or \(19,\) like the locations, got shape \(18,\)"):
        class_potential(points, labels[1:], points, labels)


def test_points_of_integers_have_the_forces_of_the_same_floats():
    points, labels = torch.tensor([[0, 0], [0, 1], [1, 1]]), torch.tensor([0, 0, 1])
    assert torch.equal(forces(points, labels), forces(points.float(), labels))


def test_no_points_have_no_energy():
    nothing = Charges(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64))
    for backend in (BACKENDS[name] for name in EVERYWHERE):
        assert backend(nothing, nothing, Field(PowerLaw()), PairWeights()).item() == 0


def test_points_that_are_not_finite_and_locations_that_do_not_fit_are_named():
    points, labels = crowd()
    points[3, 1] = float("nan")
    for call in (potential_energy, forces):
        with pytest.raises(ValueError, match="points must be finite, got NaN or Inf in 1 rows, the first is 3"):
            call(points, labels)
    good, _ = crowd()
    with pytest.raises(ValueError, match="points must be finite, got NaN or Inf in 1 rows, the first is 3"):
        class_potentials(good, points, labels, 3)
    with pytest.raises(ValueError, match="locations must be finite, got NaN or Inf in 1 rows, the first is 3"):
        class_potentials(points, good, labels, 3)
    points, labels = crowd()
    with pytest.raises(ValueError, match=r"locations must be \(n, 4\) like the points, got \(19, 3\)"):
        class_potentials(points[:, :3], points, labels, 3)
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 2\), got 2 at index"):
        class_potentials(points, points, labels, 2)
    narrow = class_potentials(points, points, labels.to(torch.int16), 3)
    torch.testing.assert_close(narrow, class_potentials(points, points, labels, 3))
    assert torch.isfinite(class_potential(points.half(), 0, points, labels)).all()


def test_the_literal_energy_is_the_sum_of_class_potentials_without_a_core():
    @dataclass(frozen=True)
    class Cored(Yukawa):
        core: float = 0.1

    points, labels = crowd()
    points = points.double()
    expected = class_potential(points, labels, points, labels, law=Yukawa()).sum()
    torch.testing.assert_close(potential_energy(points, labels, law=Cored()), expected)
    cored = class_potential(points, labels, points, labels, law=Cored()).sum()
    assert cored != expected  # class potentials end at the core
