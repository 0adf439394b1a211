"""One adapter for the losses of other libraries.

Whatever the loss inside, a batch is checked as ours are, embeddings are put on the unit sphere in float32 at least,
autocast is off, and the parameters of the loss keep their dtype and device: it is called with copies in the dtype of
the computation. Proxies are treated alike: drawn at the same length (see `PROXY_LENGTH`), or as their authors draw them
(`published_start`), in the state with the hyper-parameters, in a parameter group of their own, and readable as points
on the sphere.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pfml.losses.checks import check_batch, checked_sum
from pfml.sphere import unit

__all__ = ["PROXY_LENGTH", "Parts", "WrappedLoss", "wrapped"]

#: Length of a proxy at the start, as in `PotentialFieldLoss`. Only directions matter to these losses, so that the
#: length sets how far a step turns a proxy; published initializations make it depend on the number of classes. It is
#: made for Adam, whose steps have the size of the learning rate: where they follow the gradient (SGD, Adam with a large
#: eps), a proxy of length L turns 1 / L^2 as far, and a published recipe needs the length that it was made for.
PROXY_LENGTH = 3.0

#: The option that says where proxies start: it changes no value of the loss, and is no part of a stored one.
PUBLISHED_START = "published_start"

#: Options that must be positive, whatever the method.
POSITIVE = ("temperature", "scale", "gamma", "alpha", "beta", "num_bins", "centers_per_class", "cutoff")


@dataclass(frozen=True, eq=False)
class Parts:
    """What a method is made of.

    Attributes:
        loss: Called with embeddings (batch, D) on the unit sphere, labels (batch,) and, if there is a miner, what it
            chose; gives a scalar.
        miner: Called with embeddings and labels, without gradients; gives the indices of pairs or triplets.
        proxies: The proxies of `loss`, (C, M, D), as a view of its parameters.
        regularizer: Of the proxies on the unit sphere (C, M, D), a scalar that is added.
        published_start: Draws proxies (C, M, D) as the authors' code does; None for any directions at `PROXY_LENGTH`.
    """

    loss: nn.Module
    miner: nn.Module | None = None
    proxies: Callable[[nn.Module], Tensor] | None = None
    regularizer: Callable[[Tensor], Tensor] | None = None
    published_start: Callable[[Tensor], Tensor] | None = None


class WrappedLoss(nn.Module):
    """A loss of another library, with the manners of ours.

    Args:
        num_classes: C; labels must lie in [0, C).
        embedding_dim: D.
        parts: The loss, its miner and its regularizer.
        name: Of the method, for messages and the stored state.
        options: Its hyper-parameters; a stored loss with other ones is refused.

    Attributes:
        terms: The loss and its regularizer as they were last, detached, if it has one: "classes" and "regularizer".
    """

    def __init__(
        self, num_classes: int, embedding_dim: int, parts: Parts, *, name: str, options: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.embedding_dim = embedding_dim
        self.name = name
        self.options = dict(options)
        self.inner = parts.loss
        self.miner = parts.miner
        self._proxies_of = parts.proxies
        self._regularizer = parts.regularizer
        if parts.proxies is not None:
            with torch.no_grad():
                proxies = parts.proxies(self.inner)
                draw = parts.published_start or (lambda like: PROXY_LENGTH * unit(torch.randn(like.shape)))
                proxies.copy_(draw(proxies))
        self.terms: dict[str, Tensor] = {}
        self.register_load_state_dict_pre_hook(_check_hyperparameters)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch: embeddings (batch, D) of any floating-point type, labels (batch,) in [0, C).

        A batch with nothing to learn from (empty, without pairs, or nothing violates a margin) gives a zero whose
        gradients are zeros.
        """
        labels = check_batch(embeddings, labels, self._learned(embeddings))
        labels = labels.clamp(0, self.num_classes - 1)  # where the check is deferred, a wrong index would kill the GPU
        types = [embeddings.dtype, *(one.dtype for one in self.inner.parameters())]
        wide = functools.reduce(torch.promote_types, types, torch.float32)
        learned = {name: value.to(wide) for name, value in self.inner.named_parameters()}
        with torch.autocast(embeddings.device.type, enabled=False):
            points = _on_sphere(embeddings.to(wide))
            value = (points * 0).sum() + sum((one * 0).sum() for one in learned.values())
            if len(points):
                chosen = () if self.miner is None else (self.miner(points.detach(), labels),)
                value = value + functional_call(self.inner, learned, (points, labels, *chosen)).sum()
            if self._regularizer is not None and self._proxies_of is not None:
                alone = value.detach()
                value = value + self._regularizer(unit(self._proxies_of(self.inner).to(wide)))
                self.terms = {"classes": alone, "regularizer": value.detach() - alone}
        return value

    def param_groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Everything that the loss learns as an optimizer's parameter group; an empty list if that is nothing."""
        parameters = list(self.inner.parameters())
        return [{"params": parameters, "lr": lr, "weight_decay": weight_decay}] if parameters else []

    def proxy_points(self) -> Tensor:
        """Where the proxies are on the unit sphere, (C, M, D), detached; M = 0 for a loss without proxies."""
        if self._proxies_of is None:
            return torch.empty(self.num_classes, 0, self.embedding_dim)
        return unit(self._proxies_of(self.inner).detach())

    @property
    def proxies(self) -> Tensor | None:
        """The proxies as the loss has them as parameters, (C, M, D), a view; None for a loss without proxies."""
        return None if self._proxies_of is None else self._proxies_of(self.inner)

    def hyperparameters(self) -> dict[str, Any]:
        """Everything that a stored loss must have in common with the one that loads it."""
        sizes = {"num_classes": self.num_classes, "embedding_dim": self.embedding_dim}
        options = {name: value for name, value in self.options.items() if name != PUBLISHED_START}
        return {"method": self.name, **sizes, **options}

    def get_extra_state(self) -> Tensor:
        """The hyper-parameters as JSON in a byte tensor, so that a state_dict holds tensors only."""
        text = json.dumps(self.hyperparameters(), sort_keys=True)
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Nothing: the hyper-parameters were compared before."""

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.hyperparameters().items())

    def _learned(self, embeddings: Tensor) -> Tensor:
        """What `check_batch` looks at, (C, M, D): the proxies, or else the sum of what is learned, repeated."""
        if self._proxies_of is not None:
            return self._proxies_of(self.inner)
        return checked_sum(self, embeddings)


def wrapped(build: Callable[..., Parts]) -> Callable[..., WrappedLoss]:
    """A function that creates a `WrappedLoss` out of one that gives its parts.

    `build(num_classes, embedding_dim, *, option=default, ...)`: the name of the method is its name, and a value of
    another kind than the option's default is refused.
    """
    signature = inspect.signature(build)
    options = {one.name: one.default for one in signature.parameters.values() if one.kind is one.KEYWORD_ONLY}

    @functools.wraps(build)
    def create(num_classes: int, embedding_dim: int, **given: Any) -> WrappedLoss:
        for name, size in (("num_classes", num_classes), ("embedding_dim", embedding_dim)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {size!r}")
        for name in given:
            if name not in options:
                raise TypeError(f"{build.__name__} has no option {name!r}, only {', '.join(options)}")
        values = {name: _checked(name, given.get(name, default), default) for name, default in options.items()}
        parts = build(num_classes, embedding_dim, **values)
        return WrappedLoss(num_classes, embedding_dim, parts, name=build.__name__, options=values)

    return create


def _checked(name: str, value: Any, default: Any) -> Any:
    """The value of an option, which must be of the kind of its default."""
    kinds = {bool: "True or False", int: "an integer", float: "a finite number"}
    kind = type(default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    fits = is_number if kind is float else type(value) is kind
    if not fits:
        raise TypeError(f"{name} must be {kinds[kind]}, got {value!r}")
    if name in POSITIVE and not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")
    return kind(value)


def _on_sphere(embeddings: Tensor) -> Tensor:
    """`unit`; a zero vector, which has no direction, feels no force: libraries divide its gradient by 1e-12."""
    points = unit(embeddings)
    is_zero = (points == 0).all(dim=1, keepdim=True)
    return torch.where(is_zero, points.detach(), points)


def _check_hyperparameters(loss: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Refuse a state_dict of a different loss before anything of it is loaded."""
    assert isinstance(loss, WrappedLoss)
    state = state_dict.get(prefix + "_extra_state")
    if state is None:
        return  # torch reports the missing key itself
    try:
        stored = json.loads(bytes(state.cpu().numpy().tobytes()))
    except (AttributeError, ValueError):
        raise ValueError(f"the stored hyper-parameters of {loss.name} cannot be read") from None
    mine = loss.hyperparameters()
    differing = [
        f"{name}: stored {stored.get(name)!r}, here {mine.get(name)!r}"
        for name in sorted(stored.keys() | mine.keys())
        if stored.get(name) != mine.get(name)
    ]
    if differing:
        raise ValueError("the stored loss has other hyper-parameters: " + "; ".join(differing))
