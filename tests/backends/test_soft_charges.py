"""Soft charges: pairs that belong together by a share, in every backend that has them, against Python loops."""

import pytest
import torch

from pfml.backends import BACKENDS, choose_backend
from pfml.field import ContrastiveLaw, EquilibriumLaw, LogarithmicLaw, PowerLaw
from pfml.superposition import Charges, Field, PairWeights

LAWS = (
    PowerLaw(delta=0.5, alpha=3.0),
    PowerLaw(delta=0.6, delta_rep=1.2, alpha=6.0),
    LogarithmicLaw(delta=0.5),
    ContrastiveLaw(delta=0.4, delta_rep=1.0),
    EquilibriumLaw(),
    EquilibriumLaw(alpha=2.0, beta=5.0),
)
FIELDS = [
    Field(law, normalization)
    for law in LAWS
    for normalization in (("none", "log", "anchor") if law.decays else ("none",))
]
WEIGHTS = PairWeights(sample_sample=0.5)


def oracle(points, shares, field):
    """The energy of soft charges, pair by pair, from the words of `Charges`."""
    energy = points.new_zeros(())
    for i in range(len(points)):
        own, other = points.new_zeros(()), points.new_zeros(())
        for j in range(len(points)):
            if i == j:
                continue
            r = (points[i] - points[j]).square().sum().sqrt()
            if field.own_pair.start <= r < field.own_pair.stop:
                own = own + 0.5 * shares[i, j] * field.own_pair.potential(r)
            if field.other_pair.start <= r < field.other_pair.stop:
                other = other + 0.5 * (1 - shares[i, j]) * field.other_pair.potential(r)
        energy = energy + field.anchor_energies(own, other)
    return energy


def some(n=8, dims=4, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    points = torch.nn.functional.normalize(torch.randn(n, dims, generator=generator, dtype=torch.float64))
    points[4] = points[5] + 1e-3  # a close pair
    shares = torch.rand(n, n, generator=generator, dtype=torch.float64)
    shares[0, 1] = shares[1, 0] = 1.0
    shares[2, 3] = shares[3, 2] = 0.0
    return points.requires_grad_(), (shares + shares.T) / 2


def charges(points, shares, **more):
    labels = torch.zeros(len(points), dtype=torch.int64)
    return Charges(points, labels, shares=shares, **more), Charges(points[:0].detach(), labels[:0])


def value_and_gradient(backend, points, shares, field, weights=WEIGHTS, **more):
    points = points.detach().requires_grad_()
    energy = BACKENDS[backend](*charges(points, shares, **more), field, weights)
    return energy.detach(), torch.autograd.grad(energy, points)[0]


@pytest.mark.parametrize("backend", ["dense", "tiled"])
@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_the_energy_of_soft_charges_is_the_sum_over_their_pairs(backend, field):
    points, shares = some()
    wanted = oracle(points, shares, field)
    (gradient,) = torch.autograd.grad(wanted, points)
    energy, forces = value_and_gradient(backend, points, shares, field)
    torch.testing.assert_close(energy, wanted.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(forces, gradient, rtol=1e-8, atol=1e-8 * gradient.abs().max().item())


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_in_float32_tiled_is_within_1e_4_of_dense_and_on_the_sphere_too(field):
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(150, 16, generator=generator)
    points[:40] = points[40:80] + 1e-3 * torch.randn(40, 16, generator=generator)
    shares = torch.rand(150, 150, generator=generator)
    shares = (shares + shares.T) / 2
    wide = value_and_gradient("dense", points.double(), shares.double(), field, on_sphere=True)
    energy, forces = value_and_gradient("tiled", points, shares, field, on_sphere=True)
    torch.testing.assert_close(energy.double(), wide[0], rtol=1e-5, atol=1e-5)
    assert (forces - wide[1]).norm() <= 1e-4 * wide[1].norm()


@pytest.mark.parametrize("backend", ["dense", "tiled"])
@pytest.mark.parametrize("normalization", ["none", "log", "anchor"])
def test_shares_of_zero_and_one_are_eq_6(backend, normalization):
    points, _ = some()
    labels = torch.tensor([0, 0, 1, 1, 2, 0, 1, 2])
    field = Field(PowerLaw(delta=0.6, delta_rep=1.2), normalization)
    proxies = Charges(torch.eye(4, dtype=torch.float64)[:2], torch.tensor([0, 1]))
    together = (labels[:, None] == labels[None, :]).double()
    by_label = BACKENDS[backend](Charges(points, labels), proxies, field, PairWeights())
    by_share = BACKENDS[backend](Charges(points, labels, shares=together), proxies, field, PairWeights())
    torch.testing.assert_close(by_share, by_label)
    gradients = [torch.autograd.grad(each, points)[0] for each in (by_share, by_label)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("backend", ["dense", "tiled"])
def test_an_anchor_goes_by_its_own_row_where_shares_are_not_symmetric(backend):
    points, _ = some()
    shares = torch.rand(8, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    field = FIELDS[1]
    wanted = oracle(points, shares, field)
    energy, forces = value_and_gradient(backend, points, shares, field)
    torch.testing.assert_close(energy, wanted.detach())
    torch.testing.assert_close(forces, torch.autograd.grad(wanted, points)[0])


def test_rows_in_many_pieces_are_one_sum(monkeypatch):
    points, shares = some()
    whole = value_and_gradient("tiled", points, shares, FIELDS[0])
    monkeypatch.setitem(__import__("pfml.backends.tiled", fromlist=["CHUNK"]).CHUNK, "cpu", 20)
    pieces = value_and_gradient("tiled", points, shares, FIELDS[0])
    torch.testing.assert_close(pieces, whole)


def test_a_compiled_step_keeps_its_shares():
    points, shares = some()
    field = Field(PowerLaw(delta=0.6, delta_rep=1.2), "log")

    def energy(points, shares):
        return BACKENDS["tiled"](*charges(points, shares), field, WEIGHTS)

    compiled = torch.compile(energy, backend="aot_eager", fullgraph=True)
    wanted, got = energy(points, shares), compiled(points, shares)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(each, points)[0] for each in (got, wanted)))


def test_a_pair_comes_to_rest_where_its_share_says():
    law = EquilibriumLaw(alpha=1.5, beta=4.0)
    r = torch.linspace(0.1, 1.8, 50, dtype=torch.float64)
    share = law.share_at(r)
    force = share * law.attraction_slope(r) + (1 - share) * law.repulsion_slope(r)
    assert force.abs().max() < 1e-9 * law.repulsion_slope(r).abs().max()
    assert share[0] > share[-1]
    assert law.share_at(torch.zeros(1)) == 1
    nearer = share * law.attraction_slope(r / 1.1) + (1 - share) * law.repulsion_slope(r / 1.1)
    assert (nearer < 0).all(), "a pair that is too close is pushed apart"


@pytest.mark.parametrize("values", [{"alpha": 2.0, "beta": 2.0}, {"alpha": 0.0}, {"core": 0.0}, {"beta": float("inf")}])
def test_a_law_that_has_no_equilibrium_is_refused(values):
    with pytest.raises(ValueError, match="must be"):
        EquilibriumLaw(**values)


def test_triton_refuses_soft_charges_by_name():
    points, shares = some()
    with pytest.raises(ValueError, match=r"triton backend"):
        BACKENDS["triton"](*charges(points.float(), shares), FIELDS[0], WEIGHTS)


def test_auto_takes_dense_for_a_batch_of_soft_charges_and_tiled_for_more():
    assert choose_backend(100, soft=True) == "dense"
    assert choose_backend(5_000, soft=True) == "tiled"
