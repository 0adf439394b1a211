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


# The kernels, in Triton's interpreter or on a GPU.

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def verdicts(points, labels, proxies, num_classes=6):
    """Of the kernels: (is_bad, is_worth_a_look)."""
    arguments = [each.to(DEVICE) for each in (points, labels, proxies)]
    return tuple(one.item() for one in module._verdicts_of_kernels(*arguments, num_classes))


def with_value(points, at, value):
    points = points.clone()
    points.view(-1)[at] = value
    return points


GOOD, PROXIES = embeddings(), torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(2))
ROW = GOOD[:1].expand(12, 4)
SEEN = {
    "good": (GOOD, LABELS, PROXIES, (False, False)),
    "huge": (with_value(GOOD, 0, 3e38), LABELS, with_value(PROXIES, 0, -3e38), (False, False)),
    "nan": (with_value(GOOD, 47, torch.nan), LABELS, PROXIES, (True, True)),
    "inf": (with_value(GOOD, 0, torch.inf), LABELS, PROXIES, (True, True)),
    "proxy": (GOOD, LABELS, with_value(PROXIES, 47, -torch.inf), (True, True)),
    "proxy, nan": (GOOD, LABELS, with_value(PROXIES, 0, torch.nan), (True, True)),
    "too large": (GOOD, LABELS.index_fill(0, torch.tensor(11), 6), PROXIES, (True, True)),
    "negative": (GOOD, LABELS.index_fill(0, torch.tensor(0), -1), PROXIES, (True, True)),
    "collapsed": (ROW, LABELS, PROXIES, (False, True)),
    "nearly": (with_value(ROW.clone(), 47, 5.0), LABELS, PROXIES, (False, False)),
    "one": (GOOD[:1], LABELS[:1], PROXIES, (False, False)),
    "none": (GOOD[:0], LABELS[:0], PROXIES, (False, False)),
    "none, proxy": (GOOD[:0], LABELS[:0], with_value(PROXIES, 5, torch.nan), (True, True)),
    "no proxies": (GOOD, LABELS, PROXIES[:, :0], (False, False)),
    "strided": (torch.cat([GOOD, GOOD], dim=1)[:, ::2], LABELS, PROXIES, (False, False)),
}


@pytest.mark.skipif(not module.INSTALLED, reason="needs the package triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [4096, 16])
@pytest.mark.parametrize("case", SEEN)
def test_kernels_find_what_operations_find(case, size, dtype, monkeypatch):
    monkeypatch.setattr(module, "LOOKED_AT_ONCE", size)
    points, labels, proxies, expected = SEEN[case]
    assert verdicts(points.to(dtype), labels, proxies) == expected
    of_operations = tuple(one.item() for one in module._verdicts(points.to(dtype), labels, proxies, 6))
    if case not in ("huge", "one"):  # sums overflow, and a single row is looked into: both to no effect
        assert of_operations == expected


@pytest.mark.gpu
def test_a_gpu_has_the_checks_of_a_cpu():
    loss = PotentialFieldLoss(6, 4, proxies_per_class=2).cuda()
    points, labels = embeddings().cuda(), LABELS.cuda()
    loss(points, labels)
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 6\), got 6 at index 3"):
        loss(points, labels.index_fill(0, torch.tensor(3, device="cuda"), 6))
    with pytest.raises(ValueError, match="embeddings must be finite, got NaN or Inf in 12 rows"):
        loss(points * torch.nan, labels)
    with pytest.warns(CollapseWarning):
        loss(torch.ones_like(points), labels)
