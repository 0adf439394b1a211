"""Reliability test 20: every backend against the dense reference; `tests/backends` has the whole suite."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_backends import DEVICES, check_backend

from states import EVERYWHERE, FIELDS, WEIGHTS, State


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", EVERYWHERE)
@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    num_samples=st.sampled_from([0, 1, 2, 3, 17, 41]),
    num_classes=st.sampled_from([1, 2, 3, 7, 13]),
    per_class=st.sampled_from([0, 1, 2, 5]),
    dim=st.sampled_from([1, 2, 3, 17, 40]),
    spread=st.sampled_from([1.0, 0.5, 0.2, 0.05, 1e-3]),
    seed=st.integers(0, 10**6),
    num_anchors=st.sampled_from([None, 0, 1, 3, 20]),
    field=st.sampled_from(sorted(FIELDS)),
    weights=st.sampled_from(sorted(WEIGHTS)),
    on_sphere=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_20_every_backend_equals_the_dense_reference_at_awkward_sizes(
    name, device, num_samples, num_classes, per_class, dim, spread, seed, num_anchors, field, weights, on_sphere, dtype
):
    state = State(num_samples, num_classes, per_class, dim, spread, seed)
    if num_anchors is not None:
        state = state.drawn(num_anchors)
    if dim == 1:
        on_sphere = False  # on the 0-sphere no point can move, and what is left is rounding
    check_backend(name, state, FIELDS[field], WEIGHTS[weights], dtype=dtype, device=device, on_sphere=on_sphere)
