import copy
import pickle

import pytest
import torch

from pfml.field import ContrastiveLaw, LogarithmicLaw, PowerLaw
from pfml.superposition import NORMALIZATIONS, Field, field_of
from states import FIELDS, Yukawa


@pytest.mark.parametrize("name", NORMALIZATIONS)
def test_anchor_slopes_are_the_derivatives_of_anchor_energies(name):
    field = Field(PowerLaw(delta=0.6, alpha=3.0), name)
    own = -torch.rand(50, dtype=torch.float64) * 10 - 0.1
    other = torch.rand(50, dtype=torch.float64) * 10 * (-1 if name == "anchor" else 1)
    own.requires_grad_()
    other.requires_grad_()
    expected = torch.autograd.grad(field.anchor_energies(own, other).sum(), (own, other))
    for got, want in zip(field.anchor_slopes(own, other), expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["log", "anchor"])
def test_an_anchor_without_a_positive_has_finite_energy_and_no_attraction(name):
    field = Field(PowerLaw(), name)
    own, other = torch.zeros(1), torch.tensor([-2.0 if name == "anchor" else 2.0])
    assert torch.isfinite(field.anchor_energies(own, other)).all()
    own_slope, other_slope = field.anchor_slopes(own, other)
    assert own_slope.item() == 0
    assert torch.isfinite(other_slope).all()


def test_a_law_is_checked_on_the_cpu_whatever_the_default_device_is():
    with torch.device("meta"):
        offset = Field(Yukawa(length=0.771)).own_pair.offset
    assert offset == Field(Yukawa(length=0.771)).own_pair.offset


def test_a_field_is_found_by_its_handle_and_equal_fields_share_one():
    field = Field(Yukawa(length=0.123))
    assert field_of(field.handle) == field
    assert Field(Yukawa(length=0.123)).handle == field.handle
    assert Field(Yukawa(length=0.124)).handle != field.handle


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda field: pickle.loads(pickle.dumps(field))])
def test_copies_of_a_field_are_equal_and_work(clone):
    for field in FIELDS.values():
        twin = clone(field)
        assert twin == field
        assert field_of(twin.handle) == field


@pytest.mark.parametrize("law", [ContrastiveLaw(), LogarithmicLaw()])
@pytest.mark.parametrize("name", ["log", "anchor"])
def test_normalizations_refuse_laws_whose_attraction_does_not_decay(law, name):
    with pytest.raises(ValueError, match=f"normalization='{name}' needs an attraction"):
        Field(law, name)


def test_unknown_normalizations_and_laws_beyond_float32_are_refused():
    with pytest.raises(ValueError, match=r"normalization must be one of \['anchor', 'log', 'none'\], got 'Log'"):
        Field(PowerLaw(), "Log")
    with pytest.raises(ValueError, match="beyond float32"):
        Field(PowerLaw(alpha=16.0))
    with pytest.raises(ValueError, match="vanishes in float32"):
        Field(PowerLaw(delta=1.0, alpha=105.0), "anchor")


def test_an_unknown_handle_is_refused_and_handles_are_the_same_in_every_process():
    with pytest.raises(RuntimeError, match="a field that this process does not know"):
        field_of(12345)
    assert (Field(PowerLaw(alpha=1.0)).handle, Field(PowerLaw()).handle) == (68594970095704302, 2629630588326683)
