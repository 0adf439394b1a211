"""Checks of a batch: what they cost, and those that nobody waits for."""

import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pfml.losses import CollapseWarning, PotentialFieldLoss, ProxyAnchorLoss
from pfml.losses import checks as module
from pfml.losses.checks import check_batch, deferred_checks

LOSSES = {
    "pfml": lambda: PotentialFieldLoss(6, 4, proxies_per_class=2),
    "proxy anchor": lambda: ProxyAnchorLoss(6, 4),
}


@pytest.fixture(params=LOSSES)
def loss(request):
    torch.manual_seed(0)
    return LOSSES[request.param]()


def embeddings():
    return torch.randn(12, 4, generator=torch.Generator().manual_seed(1))


LABELS = torch.arange(12) % 6


def test_a_deferred_check_of_a_good_batch_has_nothing_to_tell(loss):
    with deferred_checks() as checks:
        value = loss(embeddings(), LABELS)
    assert value == loss(embeddings(), LABELS)
    assert [bool(check.is_worth_a_look) for check in checks] == [False]
    checks[0].explain()


@pytest.mark.parametrize(("row", "value"), [(3, torch.nan), (0, torch.inf), (11, -torch.inf)])
def test_a_deferred_check_tells_later_what_it_would_have_told_at_once(loss, row, value):
    points = embeddings()
    points[row, 1] = value
    with pytest.raises(ValueError, match=f"embeddings must be finite, got NaN or Inf in 1 rows: {row}") as at_once:
        loss(points, LABELS)
    with deferred_checks() as checks:
        loss(points, LABELS)
    assert checks[0].is_bad
    with pytest.raises(ValueError, match="embeddings must be finite") as later:
        checks[0].explain()
    assert str(later.value) == str(at_once.value)


def test_proxies_that_are_not_finite_are_seen_by_a_deferred_check(loss):
    with torch.no_grad():
        loss.proxies[2, 0, 0] = torch.nan
    with deferred_checks() as checks:
        loss(embeddings(), LABELS)
    assert checks[0].is_bad
    with pytest.raises(ValueError, match="proxies must be finite, got NaN or Inf in 1 classes: 2"):
        checks[0].explain()


def test_a_collapse_is_worth_a_look_and_not_bad(loss):
    with warnings.catch_warnings(), deferred_checks() as checks:
        warnings.simplefilter("error")
        loss(torch.ones(12, 4), LABELS)
    assert checks[0].is_worth_a_look
    assert not checks[0].is_bad
    with pytest.warns(CollapseWarning, match="all 12 embeddings"):
        checks[0].explain()


def test_finite_numbers_whose_sum_overflows_are_not_bad(loss):
    points = embeddings()
    points[0], points[1] = 3e38, -3e38
    with torch.no_grad():
        loss.proxies[:2] = 3e38
    with deferred_checks() as checks:
        loss(points, LABELS)
    assert not checks[0].is_worth_a_look
    loss(points, LABELS)


def test_shapes_are_checked_at_once_and_values_again_after_the_block(loss):
    with deferred_checks(), pytest.raises(ValueError, match="labels must be"):
        loss(embeddings(), LABELS[:3])
    with pytest.raises(ValueError, match="embeddings must be finite"):
        loss(embeddings() * torch.nan, LABELS)


class ValuesTouched(TorchDispatchMode):
    """Counts the values that operations read and write; views take nothing."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if not operation.is_view:
            tensors = [each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)]
            self.count += sum(each.numel() for each in tensors)
        return result


def test_checks_read_every_value_once_and_copy_none(monkeypatch):
    """A step compares each of 1,600 charges with all others; checks that look at each once take nothing beside it."""
    monkeypatch.setattr(module, "is_traced", lambda: False)  # as in a step: operations, not one operator
    points, labels, proxies = torch.randn(100, 64), torch.arange(100), torch.randn(100, 15, 64)
    with ValuesTouched() as touched:
        check_batch(points, labels, proxies)
    assert touched.count < 1.1 * (points.numel() + proxies.numel())
