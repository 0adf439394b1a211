"""Blocks of pairs: a sweep of all charges, put together from blocks of left against right."""

from itertools import pairwise

import pytest
import torch

from pfml.backends import BACKENDS
from pfml.backends.sweep import Counts, sweep_block
from pfml.backends.tiled import centered_groups, group_of, pair_sums
from pfml.superposition import Charges, Field, PairWeights
from states import FIELDS, State, relative_error

ONCE = Counts(1.0, 1.0)


def blocks_of(groups):
    """Every group against itself and against each one after it."""
    return [(left, right) for i, left in enumerate(groups) for right in groups[i:]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cuts", [(0,), (10,), (1, 2, 40), (24, 24, 53)])
@pytest.mark.parametrize("field", ["wide repulsion", "cpml", "user's law"])
def test_the_parts_of_a_group_add_up_to_the_group(field, cuts, dtype):
    field, state = FIELDS[field], State(spread=0.3)
    points = torch.cat([state.samples, state.proxies]).to(dtype)
    labels = torch.cat([state.sample_labels, state.proxy_labels])
    nothing = Charges(points[:0], labels[:0])
    expected = reference_gradient(points, labels, field)

    group, _ = centered_groups(Charges(points, labels), nothing, gradients=True)
    edges = (0, *cuts, len(points))
    parts = [group.part(slice(start, stop)) for start, stop in pairwise(edges)]
    for left, right in blocks_of(parts):
        sweep_block(left, right, field, ONCE, ONCE)
    sums = pair_sums(Charges(points, labels), nothing, field, PairWeights())
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    assert relative_error(group.sums, sums) < tolerance
    assert relative_error(group.gradient.double(), expected) < tolerance


def reference_gradient(points: torch.Tensor, labels: torch.Tensor, field: Field) -> torch.Tensor:
    """The gradient of the dense reference at all points."""
    leaf = points.to(torch.float64, copy=True).requires_grad_()
    nothing = Charges(leaf[:0], labels[:0])
    (gradient,) = torch.autograd.grad(BACKENDS["dense"](Charges(leaf, labels), nothing, field, PairWeights()), leaf)
    return gradient


def test_a_group_made_elsewhere_with_the_same_center_fits():
    field, state = FIELDS["wide repulsion"], State(spread=0.3)
    samples, proxies = state.charges(dtype=torch.float64, on_sphere=True)
    samples, proxies = (each._replace(points=each.points.detach()) for each in (samples, proxies))
    left, _ = centered_groups(samples, proxies, gradients=True)
    right = group_of(proxies, gradient=True)
    right.center = left.center
    right.prepare()
    sweep_block(left, right, field, ONCE, ONCE)
    only_mixed = PairWeights(sample_sample=0.0, proxy_attraction=0.0, proxy_repulsion=0.0)
    assert (
        relative_error(torch.cat([left.sums, right.sums], dim=1), pair_sums(samples, proxies, field, only_mixed))
        < 1e-12
    )


def test_each_end_counts_as_it_is_told():
    field, state = FIELDS["wide repulsion"], State(spread=0.3)
    samples, proxies = state.charges(dtype=torch.float64)
    samples, proxies = (each._replace(points=each.points.detach()) for each in (samples, proxies))

    def sums(own, other):
        groups = centered_groups(samples, proxies, gradients=False)
        sweep_block(*groups, field, own, other)
        return [group.sums for group in groups]

    left, right = sums(ONCE, ONCE)
    weighted = sums(Counts(2.0, 0.5), Counts(3.0, 0.0))
    torch.testing.assert_close(weighted[0], left * torch.tensor([[2.0], [3.0]], dtype=torch.float64))
    torch.testing.assert_close(weighted[1], right * torch.tensor([[0.5], [0.0]], dtype=torch.float64))
    assert not torch.cat(sums(Counts(0.0, 0.0), Counts(0.0, 0.0)), dim=1).any()
