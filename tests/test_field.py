import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle import psi_att, psi_rep
from pfml.field import (
    ContrastiveLaw,
    DecayLaw,
    LogarithmicLaw,
    PowerLaw,
    attraction,
    check_law,
    power_law,
    repulsion,
)
from states import FIELDS, Yukawa

LAWS = {name: field.law for name, field in FIELDS.items()}


@given(st.floats(0.01, 2.0), st.floats(0.1, 0.35), st.floats(0.25, 6.0))
def test_the_power_law_is_eqs_1_and_2_from_a_twentieth_of_delta_on(r, delta, alpha):
    r = max(r, delta / 20)
    law = PowerLaw(delta=delta, alpha=alpha)
    at = torch.tensor(r, dtype=torch.float64)
    assert attraction(law, shifted=False).potential(at).item() == pytest.approx(psi_att(r, delta, alpha), rel=1e-12)
    assert repulsion(law, shifted=False).potential(at).item() == pytest.approx(psi_rep(r, delta, alpha), rel=1e-12)


def test_delta_rep_moves_repulsion_only():
    r = torch.linspace(0.02, 2, 200, dtype=torch.float64)
    one, two = PowerLaw(delta=0.2), PowerLaw(delta=0.2, delta_rep=0.5)
    assert torch.equal(one.attraction(r), two.attraction(r))
    expected = torch.tensor([psi_rep(float(x), 0.5, 3.0) for x in r], dtype=torch.float64)
    torch.testing.assert_close(two.repulsion(r), expected)


@pytest.mark.parametrize("name", LAWS)
def test_slopes_are_the_derivatives_of_potentials_including_the_core(name):
    law = LAWS[name]
    r = torch.linspace(1e-4, 2, 3001, dtype=torch.float64)
    away = (r - law.contact).abs().minimum((r - law.reach).abs()).minimum((r - law.core).abs()) > 1e-3
    r = r[away].requires_grad_()
    for pair in (attraction(law, shifted=True), repulsion(law, shifted=True)):
        (slope,) = torch.autograd.grad(pair.potential(r).sum(), r)
        torch.testing.assert_close(pair.slope(r), slope, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LAWS)
def test_the_shifted_potentials_have_no_constants_and_the_same_slopes(name):
    law = LAWS[name]
    r = torch.linspace(max(law.core, 1e-3), 2, 500, dtype=torch.float64)
    for make, flat in ((attraction, r < law.contact), (repulsion, r >= law.reach)):
        literal, shifted = make(law, shifted=False), make(law, shifted=True)
        assert torch.equal(literal.slope(r), shifted.slope(r))
        assert shifted.potential(r)[flat].abs().max() < 1e-9 if flat.any() else True
        rounding = 1e-12 * (1 + abs(shifted.offset))
        torch.testing.assert_close(
            shifted.potential(r) + shifted.offset, literal.potential(r), rtol=1e-9, atol=rounding
        )


def test_below_the_core_repulsion_is_a_straight_line_of_finite_energy_and_force():
    law = PowerLaw(delta=0.2, alpha=3.0)
    pair = repulsion(law, shifted=False)
    r = torch.tensor([0.0, 1e-8, 1e-3, 0.0099], dtype=torch.float64)
    cap = 3 / 0.01**4
    torch.testing.assert_close(pair.slope(r), torch.full_like(r, -cap))
    torch.testing.assert_close(pair.potential(r), 0.01**-3 + cap * (0.01 - r))


def test_the_core_of_a_steep_law_ends_where_float32_has_room_for_its_force():
    assert PowerLaw(delta=0.2, alpha=18).core == pytest.approx(0.01)
    for alpha in (24, 32, 64):
        law = PowerLaw(delta=1.0, delta_rep=1.4, alpha=alpha)
        assert 0.05 < law.core < 0.5
        assert law.repulsion_slope(torch.tensor(law.core)).abs() < 1e30
        assert PowerLaw(delta=1.0, alpha=alpha - 1).core < law.core


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_ulp_around_delta_the_branches_agree_and_the_slope_is_one_sided(dtype):
    law = PowerLaw(delta=0.25)  # exact in binary, so that delta itself is a distance
    delta = torch.tensor(0.25, dtype=dtype)
    below, above = torch.nextafter(delta, torch.zeros_like(delta)), torch.nextafter(delta, 2 * delta)
    r = torch.stack([below, delta, above])
    for potential in (law.attraction(r), law.repulsion(r)):
        assert (potential - potential[1]).abs().max() < 10 * torch.finfo(dtype).eps * potential[1].abs()
    force = 3 / 0.25**4
    assert law.attraction_slope(r).tolist() == pytest.approx([0, force, force], rel=1e-5)  # r = delta attracts
    assert law.repulsion_slope(r).tolist() == pytest.approx([-force, 0, 0], rel=1e-5)  # and does not repel


def test_the_logarithmic_law_is_the_limit_of_small_alpha():
    r = torch.linspace(0.05, 2, 100, dtype=torch.float64)
    small, limit = PowerLaw(alpha=1e-6), LogarithmicLaw()
    torch.testing.assert_close(small.attraction_slope(r) / 1e-6, limit.attraction_slope(r), rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(small.repulsion_slope(r) / 1e-6, limit.repulsion_slope(r), rtol=1e-4, atol=1e-9)


def test_alpha_zero_gives_the_logarithmic_law_with_a_warning():
    with pytest.warns(UserWarning, match="logarithmic limit"):
        assert power_law(alpha=0.0, delta=0.3) == LogarithmicLaw(delta=0.3)
    assert power_law(alpha=2.0) == PowerLaw(alpha=2.0)


def test_cpml_attracts_with_a_force_that_grows_with_distance():
    law = ContrastiveLaw(delta=0.2)
    r = torch.tensor([0.1, 0.2, 1.0, 2.0])
    torch.testing.assert_close(law.attraction(r), torch.tensor([0.04, 0.04, 1.0, 4.0]))
    torch.testing.assert_close(law.attraction_slope(r), torch.tensor([0.0, 0.4, 2.0, 4.0]))
    torch.testing.assert_close(law.repulsion(r), torch.tensor([0.01, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(ContrastiveLaw(bounded=False).repulsion(r), torch.tensor([-0.01, -0.04, -0.04, -0.04]))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_radii_and_decay_rates_must_be_positive_and_finite(bad):
    for make in (PowerLaw, LogarithmicLaw, ContrastiveLaw):
        with pytest.raises(ValueError, match="delta must be a positive number"):
            make(delta=bad)
        with pytest.raises(ValueError, match="delta_rep must be a positive number"):
            make(delta_rep=bad)
    with pytest.raises(ValueError, match="alpha must be a positive number"):
        PowerLaw(alpha=bad)


@pytest.mark.parametrize("bad", ["0.2", True, torch.tensor(0.2), np.float32(0.2)], ids=str)
def test_radii_and_decay_rates_must_be_numbers_that_can_be_stored(bad):
    for law, name in ((PowerLaw, "delta"), (ContrastiveLaw, "delta_rep"), (PowerLaw, "alpha")):
        with pytest.raises(TypeError, match=f"{name} must be an int or a float, got "):
            law(**{name: bad})
    with pytest.raises(TypeError, match="delta must be an int or a float, got None"):
        PowerLaw(delta=None)


@pytest.mark.parametrize("name", LAWS)
def test_every_law_that_ships_passes_its_own_check(name):
    check_law(LAWS[name])


def test_a_law_with_a_wrong_slope_is_refused_with_the_place_and_both_values():
    class WrongSign(Yukawa):
        def repulsion_slope(self, r):
            return torch.exp(-r / self.length) / self.length

    with pytest.raises(ValueError, match=r"WrongSign.repulsion_slope must be the derivative of repulsion: at r = "):
        check_law(WrongSign())


def test_a_law_that_cannot_be_hashed_is_refused_with_advice():
    @dataclass
    class Thawed(Yukawa.__mro__[1]):
        def attraction(self, r):
            return -r

        attraction_slope = repulsion = repulsion_slope = attraction

    with pytest.raises(TypeError, match="frozen=True"):
        check_law(Thawed())
    with pytest.raises(TypeError, match="must be a DecayLaw"):
        check_law("pfml")
    assert issubclass(Thawed, DecayLaw)


def test_a_law_whose_radii_or_sign_do_not_fit_its_potentials_is_refused():
    @dataclass(frozen=True)
    class NotFlat(Yukawa):
        reach: float = 0.5

    @dataclass(frozen=True)
    class Positive(Yukawa):
        def attraction(self, r):
            return 2 - torch.exp(-r / self.length)

    @dataclass(frozen=True)
    class Endless(Yukawa):
        decays = False

        def repulsion(self, r):
            return -r.log()

        def repulsion_slope(self, r):
            return -1 / r

    for law, message in (
        (NotFlat(), "NotFlat.repulsion must be flat for r >= reach = 0.5"),
        (Positive(), "Positive.attraction must be negative everywhere"),
        (Endless(), "Endless.repulsion must be finite at reach = inf"),
    ):
        with pytest.raises(ValueError, match=message):
            check_law(law)
