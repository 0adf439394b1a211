"""Reliability items 1 to 22 as probes of a loss: the same code runs pfml's loss and those of pytorch-metric-learning.

A probe takes a subject, which makes a loss for C classes of dimension D, and gives an `Outcome`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from reliability_subjects import Outcome, Subject, every, is_finite, million_classes, relative, said

__all__ = ["PROBES"]

C, D = 6, 10
NOT_RAISED = (ValueError, TypeError, RuntimeError, IndexError, AssertionError, AttributeError, NotImplementedError)


Probe = Callable[[Subject], Outcome]


def batch(n: int = 12, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Seeded embeddings and labels."""
    points = torch.randn(n, D, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    return points, torch.arange(n) % C


def fresh(subject: Subject, classes: int = C) -> nn.Module:
    torch.manual_seed(0)
    return subject.make(classes, D)


def step(loss: nn.Module, points: Tensor, labels: Any) -> tuple[Tensor, Tensor]:
    """Value and gradient of the embeddings."""
    value = loss(points, labels)
    (gradient,) = torch.autograd.grad(value, points, allow_unused=True)
    return value.detach(), torch.zeros_like(points) if gradient is None else gradient


def forward(loss: nn.Module, points: Tensor, labels: Tensor) -> tuple[Tensor]:
    """The value alone, for embeddings that have no gradient."""
    return (loss(points, labels),)


def finite(make: Callable[[], tuple[Tensor, Tensor]]) -> Outcome:
    """Passes if value and gradient are finite."""
    try:
        value, gradient = make()
    except NOT_RAISED as error:
        return Outcome(False, said(error))
    return Outcome(is_finite(value, gradient), "finite" if is_finite(value, gradient) else "NaN or Inf")


def refused(call: Callable[[], Any], kind: type[Exception], *words: str) -> Outcome:
    """Passes if the call raises `kind` with all words in its message."""
    try:
        value = call()
    except NOT_RAISED as error:
        named = isinstance(error, kind) and all(word in str(error) for word in words)
        return Outcome(named, said(error))
    return Outcome(False, "accepted" + (", NaN" if not is_finite(value[0]) else ""))


def empty_batch(subject: Subject) -> Outcome:
    loss, points = fresh(subject), torch.empty(0, D, requires_grad=True)
    try:
        value = loss(points, torch.empty(0, dtype=torch.int64))
        value.backward()
    except NOT_RAISED as error:
        return Outcome(False, said(error))
    gradients = [torch.zeros(1) if one.grad is None else one.grad for one in loss.parameters()]
    if not is_finite(value, *gradients):
        return Outcome(False, "NaN or Inf")
    moved = all(bool(one.abs().max() > 0) for one in gradients)
    return Outcome(
        moved, "finite" + (", proxies move" if gradients and moved else "" if moved else ", no force at all")
    )


def single_sample(subject: Subject) -> Outcome:
    return finite(lambda: step(fresh(subject), *batch(1)))


def equals_float64(subject: Subject) -> Outcome:
    outcomes = []
    for labels in ([2] * C, list(range(C))):
        loss, (points, _), target = fresh(subject), batch(C), torch.tensor(labels)
        try:
            value = loss(points, target)
            exact = fresh(subject).double()(points.double(), target)
        except NOT_RAISED as error:
            return Outcome(False, said(error))
        error_size = relative(value.detach(), exact.detach())
        outcomes.append(Outcome(error_size < 1e-5, f"relative error {error_size:.0e}"))
    return every(*outcomes)


def labels_out_of_range(subject: Subject) -> Outcome:
    outcomes = []
    for bad in (-1, C):
        points, labels = batch()
        labels[7] = bad
        outcomes.append(refused(partial(step, fresh(subject), points, labels), ValueError, str(bad), "7"))
    return every(*outcomes)


def labels_of_wrong_shape(subject: Subject) -> Outcome:
    points, labels = batch()
    bad = (labels[:-1], labels[:, None], None)
    return every(*(refused(partial(step, fresh(subject), points, one), ValueError) for one in bad))


def labels_of_wrong_type(subject: Subject) -> Outcome:
    points, labels = batch()
    bad = (labels.float(), labels.bool())
    return every(*(refused(partial(step, fresh(subject), points, one), TypeError) for one in bad))


def not_finite(subject: Subject) -> Outcome:
    outcomes = []
    for bad in (math.nan, math.inf):
        points, labels = batch()
        with torch.no_grad():
            points[3, 4] = bad
        outcomes.append(refused(partial(step, fresh(subject), points, labels), ValueError, "3"))
    return every(*outcomes)


def zero_vector(subject: Subject) -> Outcome:
    points, labels = batch()
    with torch.no_grad():
        points[2] = 0
    return finite(lambda: step(fresh(subject), points, labels))


def coincident(subject: Subject) -> Outcome:
    """Two points of different classes, 1e-6 apart, and one gradient step along the sphere."""
    points, labels = torch.zeros(2, D), torch.tensor([0, 1])
    points[:, 0] = 1.0
    points[1, 1] = 1e-6
    points.requires_grad_()
    try:
        value, gradient = step(fresh(subject), points, labels)
    except NOT_RAISED as error:
        return Outcome(False, said(error))
    if not is_finite(value, gradient):
        return Outcome(False, "NaN or Inf")
    apart = bool((gradient[0] - gradient[1])[1] > 0)  # downhill leads the second one away from the first
    return Outcome(apart, "finite, separates" if apart else "finite, not separated")


def collapse(subject: Subject) -> Outcome:
    loss = fresh(subject)
    with torch.no_grad():
        for parameter in loss.parameters():
            parameter.fill_(1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = finite(lambda: step(loss, torch.ones(12, D, requires_grad=True), batch()[1]))
    said = f"{outcome.seen}, {len(caught)} warning{'' if len(caught) == 1 else 's'}"
    return Outcome(outcome.passed and len(caught) == 1, said)


def close_pairs(subject: Subject) -> Outcome:
    worst = 0.0
    for r in torch.logspace(-8, math.log10(1.99), 25, dtype=torch.float64).tolist():
        angle = 2 * math.asin(r / 2)
        points = torch.zeros(2, D, dtype=torch.float64)
        points[0, 0], points[1, 0], points[1, 1] = 1.0, math.cos(angle), math.sin(angle)
        single = points.float()
        exact = step(fresh(subject).double(), single.double().requires_grad_(), torch.tensor([0, 1]))[1]
        got = step(fresh(subject), single.requires_grad_(), torch.tensor([0, 1]))[1]
        worst = max(worst, relative(got, exact)) if is_finite(got, exact) else math.inf
    return Outcome(worst <= 1e-5, f"largest relative error {worst:.0e}")


def half_precision(subject: Subject) -> Outcome:
    outcomes = []
    for dtype, tolerance in ((torch.float16, 1e-2), (torch.bfloat16, 5e-2)):
        points, labels = batch()
        exact = step(fresh(subject).double(), points.detach().double().requires_grad_(), labels)
        try:
            got = step(fresh(subject), points.detach().to(dtype).requires_grad_(), labels)
        except NOT_RAISED as error:
            return Outcome(False, said(error))
        size = max(relative(mine, other) for mine, other in zip(got, exact, strict=True))
        name = str(dtype).removeprefix("torch.")
        outcomes.append(Outcome(size <= tolerance, f"{name}: relative error {size:.0e}"))
    return every(*outcomes)


def autocast(subject: Subject) -> Outcome:
    torch.manual_seed(0)
    model, loss = nn.Linear(D, D), fresh(subject)
    images, labels = torch.randn(24, D), torch.arange(24) % C
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(100):
        optimizer.zero_grad()
        try:
            with torch.autocast("cpu", dtype=torch.float16):
                value = loss(model(images), labels)
            scaler.scale(value).backward()
            scaler.step(optimizer)
        except NOT_RAISED as error:
            return Outcome(False, said(error))
        scaler.update()
        if not is_finite(value):
            return Outcome(False, "the loss is not finite")
    types = {str(parameter.dtype).removeprefix("torch.") for parameter in loss.parameters()}
    return Outcome(types <= {"float32"}, f"finite, parameters {', '.join(types) or 'none'}")


def huge_and_tiny(subject: Subject) -> Outcome:
    outcomes = []
    for size in (1e20, 1e-25):
        points, labels = batch()
        scaled = (points.detach() * size).requires_grad_()
        try:
            value, gradient = step(fresh(subject), scaled, labels)
        except ValueError as error:
            outcomes.append(Outcome(True, said(error)))
            continue
        good = is_finite(value, gradient) and bool(gradient.abs().max() > 0)
        seen = "finite" if good else "NaN or Inf" if not is_finite(value, gradient) else "a silent zero gradient"
        outcomes.append(Outcome(good, f"{size:.0e}: {seen}"))
    return every(*outcomes)


def few_classes(subject: Subject) -> Outcome:
    if not subject.has_classes:
        return Outcome(True, "is not told the number of classes")
    none = refused(lambda: (torch.zeros(1), subject.make(0, D)), ValueError)
    one = finite(lambda: step(fresh(subject, 1), batch()[0], torch.zeros(12, dtype=torch.int64)))
    return every(Outcome(none.passed, f"C = 0: {none.seen}"), Outcome(one.passed, f"C = 1: {one.seen}"))


def wrong_embeddings(subject: Subject) -> Outcome:
    points, labels = batch()
    cases = (
        (points[:, :-1], (str(D), str(D - 1))),
        (points[None], (str(D),)),
        (points.detach().long(), (str(D),)),
    )
    return every(*(refused(partial(forward, fresh(subject), p, labels), ValueError, *words) for p, words in cases))


def gradcheck(subject: Subject) -> Outcome:
    loss = fresh(subject).double()
    points, labels = batch(5, torch.float64)
    try:
        torch.autograd.gradcheck(lambda p: loss(p, labels), (points,), eps=1e-6, atol=1e-5)
    except NOT_RAISED as error:
        return Outcome(False, said(error))
    return Outcome(True, "gradcheck passes")


def invariance(subject: Subject) -> Outcome:
    points, labels = batch(24)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(5))
    value = fresh(subject)(points, labels).detach()
    size = relative(fresh(subject)(points[order], labels[order]).detach(), value)
    return Outcome(size <= 1e-6, f"permuted: relative change {size:.0e}")


def repeated(subject: Subject) -> Outcome:
    first, second = (step(fresh(subject), *batch()) for _ in range(2))
    same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    return Outcome(same, "bit-equal" if same else "differs")


#: Number of the item -> its probe.
PROBES: dict[int, Probe] = {
    1: empty_batch,
    2: single_sample,
    3: equals_float64,
    4: labels_out_of_range,
    5: labels_of_wrong_shape,
    6: labels_of_wrong_type,
    7: not_finite,
    8: zero_vector,
    9: coincident,
    10: collapse,
    11: close_pairs,
    13: half_precision,
    14: autocast,
    15: huge_and_tiny,
    16: few_classes,
    17: million_classes,
    18: wrong_embeddings,
    19: gradcheck,
    21: invariance,
    22: repeated,
}
